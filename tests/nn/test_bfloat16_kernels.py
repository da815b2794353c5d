"""The native kernels with products of bfloat16: against formulas in float64 whose operands are
rounded, and against themselves, bit for bit.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import GRU, LSTM, MGU, RNN, native_kernels
from fluxutils_py.nn import precision as precisions
from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell, MGUCell, SGRUCell, SMGUCell
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as native
from fluxutils_py.nn.precision import autocast

able = kernels.library_in_use() is not None and kernels.library_in_use().multiplies_bfloat16
pytestmark = pytest.mark.skipif(not able, reason="the processor lacks AVX512-BF16, or no kernels")

CPU = torch.device("cpu")
# steps, series, features, units: ones, odd numbers, whole vectors and one more, more than a group
# of series, more than one block of rows
SHAPES = [
    (1, 1, 1, 1),
    (3, 1, 3, 5),
    (2, 3, 4, 7),
    (3, 9, 2, 16),
    (1, 8, 17, 32),
    (2, 17, 5, 33),
    (5, 2, 33, 47),
]


def rounded(t):
    """To the nearest bfloat16, of two the even one."""
    return t.float().bfloat16().double()


class Product(torch.autograd.Function):
    """x @ w.T of rounded operands, also in its gradients."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(rounded(x), rounded(w))
        return rounded(x) @ rounded(w).T

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return rounded(d) @ w, rounded(d).T @ x


def lstm(x, state, w_x, w_h, b_x, b_h, form):
    i, f, g, o = (F.linear(x, w_x, b_x) + F.linear(state[0], w_h, b_h)).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x, state, w_x, w_h, b_x, b_h, form):
    (xr, xz, xn), (hr, hz, hn) = (
        F.linear(x, w_x, b_x).chunk(3, 1),
        F.linear(state[0], w_h, b_h).chunk(3, 1),
    )
    z = (xz + hz).sigmoid()
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((1 - z) * n + z * state[0],)


def rnn(activation):
    return lambda x, state, w_x, w_h, b_x, b_h, form: (
        activation(F.linear(x, w_x, b_x) + F.linear(state[0], w_h, b_h)),
    )


def min_gru(x, state, w_x, w_h, b_x, b_h, form):
    z, candidate = F.linear(x, w_x, b_x).chunk(2, 1)
    return (torch.lerp(state[0], candidate, z.sigmoid()),)


def min_lstm(x, state, w_x, w_h, b_x, b_h, form):
    f, i, candidate = F.linear(x, w_x, b_x).chunk(3, 1)
    return (torch.lerp(candidate, state[0], f.sigmoid() / (f.sigmoid() + i.sigmoid())),)


def approximate_lstm(x, state, w_x, w_h, b_x, b_h, form):
    i, f, g, o = (F.linear(x, w_x) + F.linear(state[0], w_h, b_h)).chunk(4, 1)
    c = psigmoid(f) * state[1] + psigmoid(i) * ptanh(g)
    return psigmoid(o) * ptanh(c), c


def gated(sigmoid, tanh, n_gates, sees_x, reverse=False):
    """A relative of the GRU: of its gates, which see the input or not, the last is the update."""

    def step(x, state, w_x, w_h, b_x, b_h, form):
        (h,) = state
        *of_x, xn = F.linear(x, w_x).chunk(n_gates + 1 if sees_x else 1, 1)
        *of_h, hn = F.linear(h, w_h).chunk(n_gates + 1, 1)
        *biases, bn = b_h.chunk(n_gates + 1)
        sums = [a + b for a, b in zip(of_h, biases, strict=True)]
        if sees_x:
            sums = [a + b for a, b in zip(sums, of_x, strict=True)]
        gates = list(map(sigmoid, sums))
        n = tanh(xn + bn + gates[0] * hn)
        z = form * gates[-1] if reverse else gates[-1]
        return (z * n + (1 - z) * h if reverse else (1 - z) * n + z * h,)

    return step


def own(cls, formula):
    return native.Cell(cls.kernel, cls.n_states, cls.x_blocks, cls.h_blocks), False, formula


# the cell, whether it has two biases, and the formula of a step
CELLS = {
    "LSTM": (native.LSTM, True, lstm),
    "GRU": (native.GRU, True, gru),
    "RNN": (native.TANH_RNN, True, rnn(torch.tanh)),
    "RNN, relu": (native.RELU_RNN, True, rnn(torch.relu)),
    "FLSTM": own(FLSTMCell, approximate_lstm),
    "SGRU": own(SGRUCell, gated(psigmoid, ptanh, 2, False)),
    "MGU": own(MGUCell, gated(psigmoid, ptanh, 1, True)),
    "SMGU": own(SMGUCell, gated(psigmoid, ptanh, 1, False)),
    "HFGRU": own(HFGRUCell, gated(torch.sigmoid, torch.tanh, 2, True, reverse=True)),
    "MinGRU": (native.Cell(9, 1, 2, 0), True, min_gru),
    "MinLSTM": (native.Cell(10, 1, 3, 0), True, min_lstm),
}
every_cell = pytest.mark.parametrize(
    ("cell", "two_biases"), [case[:2] for case in CELLS.values()], ids=CELLS
)


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and of ours."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def call_of(cell, bfloat16=True):
    form = 0.7 if cell.number == 8 else 0.0  # the share of HFGRU
    return native.Call(kernels.library_in_use(), cell, form, True, bfloat16)


def draw(cell, two_biases, S, B, n_in, H):
    """Inputs, states or None, and weights."""

    def some(*shape):
        return torch.rand(shape) * 2 - 1

    w = H**-0.5
    return [
        some(S, B, n_in),
        some(B, H),
        some(B, H) if cell.n_states == 2 else None,
        w * some(cell.x_blocks * H, n_in),
        w * some(cell.h_blocks * H, H) if cell.h_blocks else None,
        w * some(cell.x_blocks * H) if two_biases else None,
        w * some(cell.h_blocks * H) if cell.h_blocks else None,
    ]


def learn(compute, tensors, dtype=torch.float32):
    """Outputs, states, and all gradients of their sum with fixed weights."""
    leaves = [
        None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors
    ]
    outputs = list(compute(*leaves))
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in outputs)
    outputs = [o.detach() for o in outputs]
    return [*outputs, *torch.autograd.grad(loss, [t for t in leaves if t is not None])]


def by_kernel(cell, bfloat16=True):
    def compute(x, h, c, *weights):
        return native.recurrence(call_of(cell, bfloat16), tuple(h.shape), x, h, c, weights)

    return compute


def by_formula(cell, formula):
    def compute(x, h, c, *weights):
        state, ys = (h,) if c is None else (h, c), []
        for step in x:
            state = formula(step, state, *weights, call_of(cell).alpha)
            ys.append(state[0])
        return [torch.stack(ys), *state]

    return compute


def apart(found, exact):
    """The largest difference, relative to the largest number of its tensor."""
    return max(
        float((a - b).abs().max() / (b.abs().max() + 1e-30))
        for a, b in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize(("cell", "two_biases", "formula"), CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_of_rounded_numbers_and_all_else_is_float32(
    cell, two_biases, formula, shape, monkeypatch
):
    def linear(x, w, bias=None):
        product = Product.apply(x, w)
        return product if bias is None else product + bias

    errors, without = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = draw(cell, two_biases, *shape)
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", linear)
            exact = learn(by_formula(cell, formula), tensors, torch.float64)
        errors.append(apart(learn(by_kernel(cell), tensors), exact))
        without.append(apart(learn(by_kernel(cell, bfloat16=False), tensors), exact))
    # a number at the edge of two may be rounded otherwise, which moves the rest by a little
    assert sorted(errors)[1] < 5e-6
    assert max(errors) < 5e-3
    assert max(without) > 2e-4


@every_cell
@pytest.mark.parametrize(("F_", "H"), [(3, 5), (4, 32), (17, 37)])
def test_a_series_alone_equals_itself_in_every_batch_and_in_chunks_of_time(
    cell, two_biases, F_, H, threads
):
    torch.manual_seed(0)
    S, B = 11, 35
    x, h, c, *weights = draw(cell, two_biases, S, B, F_, H)

    def window(x, h, c):
        """Outputs, states, and gradients of inputs and states."""
        return learn(lambda *given: by_kernel(cell)(*given, *weights), [x, h, c])

    threads(2)
    together = window(x, h, c)
    for b in (0, 7, 8, 17, 34):
        for end in (b + 1, b + 2, b + 9):
            part = slice(b, min(end, B))
            y, *states = native.recurrence(
                call_of(cell),
                (x[:, part].shape[1], H),
                x[:, part],
                h[part],
                None if c is None else c[part],
                weights,
            )
            assert torch.equal(y, together[0][:, part])
            for s, all_series in zip(states, together[1:], strict=False):
                assert torch.equal(s, all_series[part])
    ys, state = [], (h,) if c is None else (h, c)
    for chunk in x.split([1, 1, 4, 5]):
        y, *state = native.recurrence(
            call_of(cell), (B, H), chunk, state[0], None if c is None else state[1], weights
        )
        ys.append(y)
    assert torch.equal(torch.cat(ys), together[0])


@every_cell
def test_gradients_of_a_series_and_of_weights_do_not_depend_on_threads_or_the_batch(
    cell, two_biases, threads
):
    torch.manual_seed(0)
    S, B, n_in, H = 9, 67, 3, 65
    tensors = draw(cell, two_biases, S, B, n_in, H)
    found = []
    for n in (1, 2, 3):
        threads(n)
        found.append(learn(by_kernel(cell), tensors))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)

    x, h, c, *weights = tensors
    dy = torch.randn(S, B, H)
    of_states = [t for t in (x, h, c) if t is not None]

    def gradients(part):
        leaves = [t[..., part, :].detach().clone().requires_grad_() for t in of_states]
        y = by_kernel(cell)(leaves[0], leaves[1], leaves[2] if c is not None else None, *weights)
        return torch.autograd.grad(y[0], leaves, dy[:, part])

    together = gradients(slice(None))
    for part in (slice(0, 1), slice(5, 7), slice(8, 67), slice(66, 67)):
        for a, b in zip(gradients(part), together, strict=True):
            assert torch.equal(a, b[..., part, :])


def test_nan_stays_in_its_series_and_infinity_saturates_gates():
    torch.manual_seed(0)
    S, B, n_in, H = 6, 11, 3, 33  # units that fill no vector, an odd number of them
    cell, two_biases, _ = CELLS["LSTM"]
    x, h, c, *weights = draw(cell, two_biases, S, B, n_in, H)
    clean = by_kernel(cell)(x, h, c, *weights)[0]
    ill = x.clone()
    ill[3, 4, 1] = math.nan
    y = by_kernel(cell)(ill, h, c, *weights)[0]
    others = [b for b in range(B) if b != 4]
    assert torch.equal(y[:, others], clean[:, others])
    assert torch.equal(y[:3, 4], clean[:3, 4])
    assert y[3:, 4].isnan().all()

    ill[3, 4, 1] = 3.4e38  # rounded up, to infinity
    y = by_kernel(cell)(ill, h, c, *weights)[0]
    assert y.isfinite().all()
    ill[3, 4, 1] = math.inf
    assert torch.equal(by_kernel(cell)(ill, h, c, *weights)[0], y)


@every_cell
def test_what_one_call_leaves_in_memory_is_nothing_to_the_next(cell, two_biases):
    torch.manual_seed(0)
    tensors = draw(cell, two_biases, 3, 3, 3, 37)  # an odd number of rows, and of units
    clean = learn(by_kernel(cell), tensors)
    ill = draw(cell, two_biases, 9, 11, 3, 37)
    ill[0].fill_(math.nan)
    learn(by_kernel(cell), ill)
    for a, b in zip(learn(by_kernel(cell), tensors), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [LSTM, GRU, RNN, MGU])
def test_wide_layers_compute_in_bfloat16_under_autocast_and_others_in_float32(make):
    torch.manual_seed(0)
    x = torch.randn(7, 5, 3)
    for H, low in ((precisions.KERNEL_WIDE, True), (precisions.KERNEL_WIDE - 1, False)):
        layer = make(3, H)
        y = layer(x)
        assert "_Recurrence" in type(y.grad_fn).__name__
        layer.reset()
        with autocast("bfloat16", CPU):
            again = layer(x)
        assert again.dtype == torch.float32
        assert "_Recurrence" in type(again.grad_fn).__name__
        assert torch.equal(again, y) != low
        assert (again - y).abs().max() < 0.02
    layer = make(3, precisions.KERNEL_WIDE).double()
    y = layer(x.double())
    layer.reset()
    with autocast("bfloat16", CPU):
        assert torch.equal(layer(x.double()), y)


def test_other_instruction_sets_have_no_such_products(monkeypatch):
    library = kernels.Library(kernels.PATH, "avx2")
    assert not library.multiplies_bfloat16
    monkeypatch.setattr(kernels._use, "library", library)
    layer, x = GRU(3, 64), torch.randn(7, 5, 3)
    y = layer(x)
    layer.reset()
    with autocast("bfloat16", CPU):
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_errors_are_no_larger_than_those_of_torchs_autocast(make):
    torch.manual_seed(0)
    module, x = make(8, 64, 2), torch.randn(20, 16, 8)
    given = torch.randn(20, 16, 64)
    layer = {nn.LSTM: LSTM, nn.GRU: GRU}[make](8, 64, num_layers=2)
    layer.module.load_state_dict(module.state_dict())

    def outcome(model, dtype, native):
        with native_kernels(native), autocast(dtype, CPU):
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
        return [y.float(), *torch.autograd.grad(y.float(), list(model.parameters()), given)]

    exact = outcome(module, "float32", False)
    try:
        theirs = outcome(module, "bfloat16", False)
    except RuntimeError:
        pytest.skip("torch has no LSTM of bfloat16 here")
    ours = outcome(layer, "bfloat16", True)
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert (a - e).norm() < 1.2 * (b - e).norm()


def test_training_in_bfloat16_learns_what_float32_learns():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 200, generator=generator)
    y = torch.roll(x[:1], 2, -1) * x[1:]  # a product with what came two steps before
    scores = {}
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = nn.Sequential(LSTM(2, 64), nn.Linear(64, 1))
        spec = Spec(epochs=30, batchsize=8, seqsize=50, precision=precision)
        est = Estimator(
            model,
            F.mse_loss,
            lambda p: torch.optim.Adam(p, lr=1e-2),
            spec,
            random_state=0,
            verbose=False,
        )
        est.fit(x.numpy(), y.numpy())
        scores[precision] = float(((torch.as_tensor(est.predict(x.numpy())) - y) ** 2).mean())
    assert scores["float32"] < 0.3 * float(y.var())
    assert scores["bfloat16"] < 1.3 * scores["float32"]
