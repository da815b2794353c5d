"""A step as a list of operations computes what the model does, here by formulas of NumPy."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fluxutils_py.nn import (
    FLSTM,
    GRU,
    LRU,
    LSTM,
    MGU,
    MinGRU,
    Recur,
    SlidingWindowAttention,
)
from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.layers import Elementwise, GaussianNoise, ffnn
from fluxutils_py.steps.operations import (
    FUNCTIONS,
    Activation,
    CellStep,
    Dense,
    Diagonal,
    Gated,
    LayerNormalization,
    ScaleShift,
    Sum,
)
from fluxutils_py.steps.step_program import UnsupportedStep, program_of, step_program
from tests.nn import every_layer
from tests.nn.every_layer import disturbed, hooked, with_head


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def parabolic_sigmoid(a):
    return psigmoid(torch.from_numpy(a)).numpy()


def parabolic_tanh(a):
    return ptanh(torch.from_numpy(a)).numpy()


def gates_of(alpha):
    return (sigmoid, np.tanh) if alpha else (parabolic_sigmoid, parabolic_tanh)


def lstm(a, h, c, alpha, s=sigmoid, t=np.tanh):
    c = s(a[1]) * c + s(a[0]) * t(a[2])
    return s(a[3]) * t(c), c


def gru(a, h, c, alpha, s=sigmoid, t=np.tanh):
    z = s(a[2])
    return (1 - z) * t(a[0] + s(a[1]) * a[3]) + z * h, c


def mgu(a, h, c, alpha):
    s, t = gates_of(alpha)
    z = s(a[1])
    return (1 - z) * t(a[0] + z * a[2]) + z * h, c


def hfgru(a, h, c, alpha):
    z = alpha * sigmoid(a[2])
    return (1 - z) * h + z * np.tanh(a[0] + sigmoid(a[1]) * a[3]), c


def min_gru(a, h, c, alpha):
    z = sigmoid(a[0])
    return (1 - z) * h + z * a[1], c


def min_lstm(a, h, c, alpha):
    f, i = sigmoid(a[0]), sigmoid(a[1])
    return (f * h + i * a[2]) / (f + i), c


# from the sums (rows, H) to h and c, by the number of the kernel
CELLS = {
    0: lstm,
    1: gru,
    2: lambda a, h, c, alpha: (np.tanh(a[0]), c),
    3: lambda a, h, c, alpha: (np.maximum(a[0], 0), c),
    4: lambda a, h, c, alpha: lstm(a, h, c, alpha, parabolic_sigmoid, parabolic_tanh),
    5: lambda a, h, c, alpha: gru(a, h, c, alpha, *gates_of(alpha)),
    6: mgu,
    7: mgu,
    8: hfgru,
    9: min_gru,
    10: min_lstm,
}
ACTIVATIONS = {
    "relu": lambda x, alpha: np.maximum(x, 0),
    "tanh": lambda x, alpha: np.tanh(x),
    "sigmoid": lambda x, alpha: sigmoid(x),
    "silu": lambda x, alpha: x * sigmoid(x),
    "leaky_relu": lambda x, alpha: np.where(x > 0, x, alpha * x),
    "elu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
    "softplus": lambda x, alpha: np.log1p(np.exp(x)),
    "gelu": lambda x, alpha: nn.functional.gelu(torch.from_numpy(x)).numpy(),
    "parabolic_sigmoid": lambda x, alpha: parabolic_sigmoid(x),
    "parabolic_tanh": lambda x, alpha: parabolic_tanh(x),
}


def compute(op, x, values, states):
    match op:
        case Dense():
            return x @ op.w + op.bias
        case CellStep():
            H = op.n_out
            parts = [states[s].reshape(-1, H)[op.place] for s in op.states]
            h, c = (*parts, None)[:2]
            sums = op.bias.copy()
            sums[: op.w.shape[1]] += x @ op.w
            sums[len(sums) - op.w_h.shape[1] :] += h @ op.w_h
            new = CELLS[op.cell](sums.reshape(op.rows, H), h, c, op.alpha)
            for part, value in zip(parts, new, strict=False):
                part[:] = value
            return new[0]
        case Diagonal():
            h = states[op.states[0]].reshape(-1)
            turned = op.w.view(complex) * h.view(complex)
            h[:] = turned.view(float) + x
            return h.copy()
        case Activation():
            return ACTIVATIONS[FUNCTIONS[op.cell]](x, op.alpha)
        case Gated():
            return x[: op.n_out] * sigmoid(x[: op.n_out]) * x[op.n_out :]
        case Sum():
            return x + values[op.other]
        case LayerNormalization():
            return (x - x.mean()) / np.sqrt(x.var() + op.alpha) * op.w + op.bias
        case ScaleShift():
            return x * op.w + op.bias
    raise AssertionError(op)


def run(program, xs):
    """What a program of float64 gives for steps (S, F) of one series, and its states after them."""
    states = [s.initial.copy() for s in program.states]
    ys = []
    for x in xs:
        values = [x]
        for op in program.operations:
            values.append(compute(op, values[op.source], values, states))
            assert values[-1].shape == (op.n_out,)
        ys.append(values[-1])
    return np.stack(ys), states


class Built(nn.Sequential):
    """A container that only builds what it holds."""

    def __init__(self):
        super().__init__(GRU(3, 4), nn.Linear(4, 2))


MODELS = {
    **{name: partial(with_head, name) for name in every_layer.MODELS},
    "layers": lambda: nn.Sequential(LSTM(3, 5, 2, dropout=0.3), FLSTM(5, 4), nn.Tanh(), LRU(4, 2)),
    "without bias": lambda: nn.Sequential(GRU(3, 5), nn.Linear(5, 2, bias=False)),
    "dropout": lambda: ffnn(3, 5, 3, nn.ReLU, dropout=0.2, last_linear=True),
    "normalised": lambda: nn.Sequential(ffnn(3, 5, 2, torch.tanh, nn.Identity), nn.LayerNorm(5)),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(3, bias=False), nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)
    ),
    "built": Built,
    "noise": lambda: nn.Sequential(GaussianNoise(0.5), nn.Identity(), MinGRU(3, 4)),
    **{
        f"{f}": lambda f=f: nn.Sequential(LSTM(3, 5), f, nn.Linear(5, 2))
        for f in (
            nn.Sigmoid(),
            nn.SiLU(),
            nn.LeakyReLU(0.2),
            nn.ELU(0.7),
            nn.Softplus(),
            nn.GELU(),
            Elementwise(psigmoid),
            Elementwise(ptanh),
            Elementwise(torch.relu),
        )
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_all_numbers_have_the_type_of_the_model_and_stay(name, dtype):
    """The kernels read them by address, as if all were of one type."""
    program = program_of(MODELS[name]().to(dtype).eval(), 3)
    assert program.dtype == str(dtype).removeprefix("torch.")
    for part in (*map(vars, program.operations), *(s._asdict() for s in program.states)):
        arrays = [v for v in part.values() if isinstance(v, np.ndarray) and v.size]
        assert {a.dtype for a in arrays} <= {program.dtype}, part


@pytest.mark.parametrize("name", MODELS)
def test_operations_compute_the_model(name):
    model = disturbed(MODELS[name]().double())
    program = program_of(model, 3)
    xs = torch.randn(11, 1, 3, dtype=torch.float64)
    with torch.no_grad():
        y = model(xs)
    ys, after = run(program, xs[:, 0].numpy())
    assert program.dtype == np.float64
    assert ys.shape == (11, program.n_out)
    np.testing.assert_allclose(ys, y[:, 0].numpy(), rtol=1e-12, atol=1e-12)
    layers = [r for r in model.modules() if isinstance(r, Recur)]
    for state, value in zip(program.states, after, strict=True):
        layer = layers[state.layer]
        tensors = (layer.state,) if isinstance(layer.state, torch.Tensor) else layer.state
        shapes = [t.select(state.batch_axis, 0).shape for t in tensors]
        assert state.initial.shape in shapes
        of_layer = [s for s in program.states if s.layer == state.layer]
        t = tensors[[s is state for s in of_layer].index(True)].select(state.batch_axis, 0)
        np.testing.assert_allclose(value, t.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_a_program_names_all_that_it_was_made_of():
    model = disturbed(nn.Sequential(ffnn(3, 5, 2, nn.Tanh, nn.Identity), LSTM(5, 4, 2)))
    tensors = program_of(model, 3).tensors
    expected = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert {id(t) for t in tensors} == {id(t) for t in expected}


def test_a_program_does_not_share_memory_with_the_model():
    model = disturbed(nn.Sequential(LSTM(3, 5, trainable_init=True), nn.Linear(5, 2)))
    xs = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    program = program_of(model, 3)
    before, _ = run(program, xs)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3)
    np.testing.assert_array_equal(run(program, xs)[0], before)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(LSTM):
    def forward(self, x):
        return super().forward(x) / 2


def used_twice():
    layer = GRU(3, 3)
    return nn.Sequential(layer, layer)


REFUSED = {
    "subclass": lambda: nn.Sequential(LSTM(3, 5), Doubled(5, 2)),
    "subclass of a layer": lambda: nn.Sequential(Halved(3, 5)),
    "hook": lambda: nn.Sequential(LSTM(3, 5), hooked(nn.Linear(5, 2))),
    "hook inside": lambda: nn.Sequential(Recur(hooked(nn.LSTM(3, 5)))),
    "projections": lambda: nn.Sequential(Recur(nn.LSTM(3, 5, proj_size=2))),
    "attention": lambda: nn.Sequential(SlidingWindowAttention(3, 4, 2)),
    "embedding": lambda: nn.Sequential(nn.Embedding(4, 3), LSTM(3, 5)),
    "computed weights": lambda: nn.Sequential(
        LSTM(3, 5), parametrizations.weight_norm(nn.Linear(5, 2))
    ),
    "two types": lambda: nn.Sequential(LSTM(3, 5), nn.Linear(5, 2).double()),
    "halves": lambda: nn.Sequential(LSTM(3, 5), nn.Linear(5, 2)).bfloat16(),
    "softplus": lambda: nn.Sequential(LSTM(3, 5), nn.Softplus(2.0)),
    "gelu": lambda: nn.Sequential(LSTM(3, 5), nn.GELU("tanh")),
    "function": lambda: nn.Sequential(LSTM(3, 5), Elementwise(torch.sin)),
    "used twice": used_twice,
    "features": lambda: nn.Sequential(LSTM(3, 5), nn.Linear(4, 2)),
    "nothing": lambda: nn.Sequential(nn.Identity()),
    "norm of two axes": lambda: nn.Sequential(LSTM(3, 5), nn.LayerNorm((2, 5))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_operation_computes_is_refused(name):
    model = REFUSED[name]().eval()
    with pytest.raises(UnsupportedStep):
        program_of(model, 3)
    assert step_program(model, 3) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(LSTM(3, 5), nn.Dropout(0.2)),
        lambda: nn.Sequential(LSTM(3, 5, 2, dropout=0.2)),
        lambda: nn.Sequential(MGU(3, 5, 2, dropout=0.2)),
        lambda: ffnn(3, 5, 2, nn.Tanh, nn.Identity),
        lambda: nn.Sequential(GaussianNoise(0.1), GRU(3, 2)),
    ],
)
def test_training_mode_is_refused_where_it_matters(make):
    model = make()
    assert step_program(model.train(), 3) is None
    assert step_program(model.eval(), 3) is not None


def test_a_message_names_the_module():
    with pytest.raises(UnsupportedStep, match="SlidingWindowAttention"):
        program_of(nn.Sequential(LSTM(3, 4), SlidingWindowAttention(4, 4, 2)).eval(), 3)
