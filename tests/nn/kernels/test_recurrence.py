"""The native kernels against formulas in NumPy and torch, and against themselves: bit for bit,
however work is cut.
"""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import GRU, LSTM, RNN, Recur, native_kernels
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as native

pytestmark = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())

LAYERS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN, relu": lambda *sizes, **more: nn.RNN(*sizes, nonlinearity="relu", **more),
}
CELLS = {
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell": nn.RNNCell,
    "RNNCell, relu": lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu"),
}
# steps, series, features, units: ones, less than a vector and more, no group filled, more than one
# block of units
SHAPES = [
    (1, 1, 1, 1),
    (7, 3, 2, 5),
    (5, 37, 3, 2),
    (3, 16, 1, 3),
    (4, 33, 5, 13),
    (9, 70, 4, 7),
    (43, 2, 9, 30),
    (1, 15, 2, 33),  # few steps, whose gradients of weights outweigh their products
]
ISAS = [name for name in kernels.ISAS if kernels.library_in_use() and kernels.supports(name)]


@pytest.fixture
def isa(request, monkeypatch):
    """The kernels of one instruction set."""
    monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, request.param))
    return request.param


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and of ours."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numpy_layer(module, x, states):
    """Outputs and last state of one layer, from the formulas in torch's documentation; float64."""

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    w, u = (p.detach().double().numpy().T for p in (module.weight_ih_l0, module.weight_hh_l0))
    n = w.shape[1]
    b, d = (
        getattr(module, name).detach().double().numpy() if module.bias else np.zeros(n)
        for name in ("bias_ih_l0", "bias_hh_l0")
    )
    h, *c = (s[0].detach().double().numpy() for s in states)
    ys = []
    for x_t in x.detach().double().numpy():
        if isinstance(module, nn.LSTM):
            i, f, g, o = np.split(x_t @ w + b + h @ u + d, 4, 1)
            c = [sigmoid(f) * c[0] + sigmoid(i) * np.tanh(g)]
            h = sigmoid(o) * np.tanh(c[0])
        elif isinstance(module, nn.GRU):
            (xr, xz, xn), (hr, hz, hn) = np.split(x_t @ w + b, 3, 1), np.split(h @ u + d, 3, 1)
            z = sigmoid(xz + hz)
            h = (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * h
        else:
            a = x_t @ w + b + h @ u + d
            h = np.tanh(a) if module.nonlinearity == "tanh" else np.maximum(a, 0)
        ys.append(h)
    return [torch.from_numpy(a) for a in (np.stack(ys), h[None], *(s[None] for s in c))]


def start(module, n_series, dtype=torch.float32):
    """A random state."""
    n = 2 if isinstance(module, nn.LSTM | nn.LSTMCell) else 1
    layers = (module.num_layers,) if isinstance(module, nn.RNNBase) else ()
    return [torch.randn(*layers, n_series, module.hidden_size, dtype=dtype) for _ in range(n)]


def run(module, x, states=None):
    """Outputs and state as one list, from the kernels through Recur; it fails if torch's layer was
    used.
    """
    layer = Recur(module)
    if states is not None:
        layer.state = states[0] if len(states) == 1 else tuple(states)
    y = layer(x)
    assert y.grad_fn is None or not torch.is_grad_enabled() or "_Recurrence" in names_of(y)
    return [y, *([layer.state] if isinstance(layer.state, torch.Tensor) else layer.state)]


def names_of(y):
    return {type(y.grad_fn).__name__.replace("Backward", "")}


def learn(forward, module, x, states, weights):
    """Outputs, and all gradients of their sum with these weights."""
    leaves = [x, *states, *module.parameters()]
    for leaf in leaves:
        leaf.requires_grad_(True)
        leaf.grad = None
    outputs = forward(module, x, states)
    torch.autograd.backward([(o * w).sum() for o, w in zip(outputs, weights, strict=True)])
    return [o.detach() for o in outputs], [leaf.grad for leaf in leaves]


def by_torch(module, x, states):
    """The same from torch's own layer."""
    if isinstance(module, nn.RNNBase):
        y, after = module(x, states[0] if len(states) == 1 else tuple(states))
    else:
        ys, after = [], states[0] if len(states) == 1 else tuple(states)
        for step in x:
            after = module(step, after)
            ys.append(after if len(states) == 1 else after[0])
        y = torch.stack(ys)
    return [y, *([after] if len(states) == 1 else after)]


def apart(a, b):
    """The largest difference, relative to the largest number."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / (b.abs().max() + 1e-300))


# -- values and gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_are_as_near_to_the_formula_as_torchs(kind, dtype, isa):
    eps = torch.finfo(dtype).eps
    for n_steps, n_series, n_in, n_out in SHAPES:
        module = LAYERS[kind](n_in, n_out, bias=n_series != 3).to(dtype)
        x, states = (
            torch.randn(n_steps, n_series, n_in, dtype=dtype),
            start(module, n_series, dtype),
        )
        expected = numpy_layer(module, x, states)
        with torch.no_grad():
            for ours, theirs, exact in zip(
                run(module, x, states), by_torch(module, x, states), expected, strict=True
            ):
                assert apart(ours, exact) <= max(5 * apart(theirs, exact), 8 * eps)


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_gradients_are_torchs(kind, dtype, isa):
    for n_steps, n_series, n_in, n_out in SHAPES:
        module = (LAYERS | CELLS)[kind](n_in, n_out).to(dtype)
        x, states = (
            torch.randn(n_steps, n_series, n_in, dtype=dtype),
            start(module, n_series, dtype),
        )
        weights = [torch.randn_like(o) for o in run(module, x, states)]
        values, ours = learn(run, module, x, states, weights)
        others, theirs = learn(by_torch, module, x, states, weights)
        for a, b in zip(values + ours, others + theirs, strict=True):
            assert a.shape == b.shape
            assert apart(a, b) < (5e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_above_one_another_are_torchs(kind, bias):
    module = LAYERS[kind](3, 5, num_layers=3, bias=bias).double()
    x, states = torch.randn(11, 7, 3, dtype=torch.float64), start(module, 7, torch.float64)
    weights = [torch.randn_like(o) for o in run(module, x, states)]
    values, ours = learn(run, module, x, states, weights)
    others, theirs = learn(by_torch, module, x, states, weights)
    for a, b in zip(values + ours, others + theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
def test_small_numbers_keep_their_digits(kind):
    # tanh of a small number by an exponential loses them unless it is written with care
    module = LAYERS[kind](4, 5)
    for p in module.parameters():
        p.data *= 1e-4
    x, states = 1e-2 * torch.randn(5, 20, 4), [1e-4 * s for s in start(module, 20)]
    expected = numpy_layer(module, x, states)
    with torch.no_grad():
        for ours, exact in zip(run(module, x, states), expected, strict=True):
            assert apart(ours, exact) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_gradients_are_those_of_finite_differences(kind):
    module = (LAYERS | CELLS)[kind](2, 3).double()
    x, states = torch.randn(3, 2, 2, dtype=torch.float64), start(module, 2, torch.float64)
    names = [name for name, _ in module.named_parameters()]
    inputs = [
        t.requires_grad_(True)
        for t in (x, *states, *(p.detach().clone() for p in module.parameters()))
    ]

    def function(x, *more):
        for name, p in zip(names, more[len(states) :], strict=True):
            module._parameters[name] = p
        if isinstance(module, nn.RNNBase):
            module._flat_weights = list(more[len(states) :])
        return tuple(run(module, x, list(more[: len(states)])))

    assert torch.autograd.gradcheck(function, inputs)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*native_kernels\(False\)"):
        torch.autograd.grad(function(*inputs)[0].sum(), inputs[0], create_graph=True)


def test_gradients_of_outputs_that_are_not_used_are_zero():
    module = nn.LSTM(3, 5).double()
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    for which in range(3):  # y, h, c
        found = torch.autograd.grad(run(module, x)[which].sum(), [x, *module.parameters()])
        y, (h, c) = module(x)
        expected = torch.autograd.grad((y, h, c)[which].sum(), [x, *module.parameters()])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
def test_only_gradients_that_are_asked_for_are_given(kind):
    module = LAYERS[kind](3, 5)
    x = torch.randn(4, 6, 3, requires_grad=True)
    module.requires_grad_(False)
    run(module, x)[0].sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in module.parameters())
    module.bias_hh_l0.requires_grad_(True)
    run(module, x.detach())[0].sum().backward()
    assert [n for n, p in module.named_parameters() if p.grad is not None] == ["bias_hh_l0"]
    found = module.bias_hh_l0.grad.clone()
    module.bias_hh_l0.grad = None
    module(x.detach())[0].sum().backward()
    torch.testing.assert_close(found, module.bias_hh_l0.grad, rtol=1e-5, atol=1e-5)


def test_views_of_any_strides_are_taken():
    module = nn.GRU(3, 5).double()
    x = torch.randn(3, 6, 4, dtype=torch.float64).permute(2, 1, 0)
    state = torch.randn(1, 12, 5, dtype=torch.float64)[:, ::2]
    y, _ = module(x, state)
    ours = run(module, x, [state])
    torch.testing.assert_close(ours[0], y, rtol=0, atol=1e-13)
    given = torch.randn(()).double().expand_as(y)
    found = torch.autograd.grad(ours[0], module.parameters(), given)
    for a, b in zip(found, torch.autograd.grad(y, module.parameters(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# -- numbers that are none -----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LAYERS)
def test_nan_and_infinity_stay_in_their_series_and_give_what_torch_gives(kind, dtype, isa):
    module = LAYERS[kind](3, 5).to(dtype)
    x = torch.randn(7, 20, 3, dtype=dtype)
    clean = run(module, x)[0].detach()
    x[2, 3, 0] = torch.nan
    x[2, 4, 1] = torch.inf
    x[2, 5] = torch.tensor([1e30, -1e30, 1e30])
    x[2, 19, 2] = -torch.inf
    with torch.no_grad():
        y, expected = run(module, x)[0], module(x)[0]
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    others = [b for b in range(20) if b not in (3, 4, 5, 19)]
    assert torch.equal(y[:, others], clean[:, others])


# -- bit for bit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_series_is_computed_alike_whatever_is_beside_it_and_however_time_is_cut(kind, dtype):
    module = LAYERS[kind](3, 13).to(dtype)
    x, states = torch.randn(11, 53, 3, dtype=dtype), start(module, 53, dtype)
    weight = torch.randn(11, 53, 13, dtype=dtype)

    def outputs_and_gradient(chunks, series):
        """Of the inputs and states of these series, with time cut into chunks."""
        own = x[:, series].clone().requires_grad_(True)
        begin = [s[:, series].clone().requires_grad_(True) for s in states]
        after, ys = begin, []
        for chunk in own.split(chunks):
            y, *after = run(module, chunk, after)
            ys.append(y)
        y = torch.cat(ys)
        gradients = torch.autograd.grad((y * weight[:, series]).sum(), [own, *begin])
        return [y.detach(), *(s.detach() for s in after), *gradients]

    whole = outputs_and_gradient(11, list(range(53)))
    order = torch.randperm(53).tolist()
    for chunks, series in (
        (11, [5]),
        (11, [52]),
        (4, order),
        (1, list(range(40))),
        (3, order[:17]),
    ):
        for a, b in zip(outputs_and_gradient(chunks, series), whole, strict=True):
            assert torch.equal(a, b[:, series])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("n_series", [37, 600])  # 600: more groups than sums are kept for
def test_threads_and_instruction_sets_give_the_same_bits(kind, n_series, threads, monkeypatch):
    module = LAYERS[kind](3, 14)
    x, states = torch.randn(23, n_series, 3), start(module, n_series)
    weights = [torch.randn_like(o) for o in run(module, x, states)]
    found = []
    for isa in ISAS:
        monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
        for n in (1, 2, 3):
            threads(n)
            values, gradients = learn(run, module, x, states, weights)
            found.append(values + gradients)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# -- graphs, threads, memory ---------------------------------------------------------------------------


def test_a_graph_that_is_retained_gives_the_same_gradient_again():
    module = nn.LSTM(3, 5)
    x = torch.randn(4, 6, 3)
    loss = run(module, x)[0].square().sum()
    first = torch.autograd.grad(loss, module.parameters(), retain_graph=True)
    second = torch.autograd.grad(loss, module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, module.parameters())


def test_weights_changed_before_the_backward_pass_are_an_error_as_in_torch():
    module = nn.GRU(3, 5)
    loss = run(module, torch.randn(4, 6, 3))[0].sum()
    with torch.no_grad():
        module.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_callers_at_the_same_time_do_not_disturb_each_other(threads):
    threads(2)
    work = []
    for k in range(4):
        module = LSTM(3 + k, 9)
        work.append((module.module, torch.randn(40, 50 + k, 3 + k)))

    def gradient(module, x):
        return torch.autograd.grad(run(module, x)[0].square().sum(), list(module.parameters()))

    expected = [gradient(*w) for w in work]
    wrong = []

    def repeat(k):
        torch.set_num_threads(2)
        for _ in range(20):
            if not all(map(torch.equal, gradient(*work[k]), expected[k])):
                wrong.append(k)

    callers = [threading.Thread(target=repeat, args=(k,)) for k in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def kept_bytes(forward):
    """Of all tensors that a forward pass keeps for the backward one, each storage once."""
    found = {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = forward()
    del kept
    return sum(found.values())


@pytest.mark.parametrize(
    "sizes", [(100, 100, 10, 10), (64, 64, 32, 64), (50, 1, 3, 16), (30, 37, 5, 7)]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_no_more_is_kept_for_the_backward_pass_than_a_fifth_beyond_torchs(kind, sizes):
    n_steps, n_series, n_in, n_out = sizes
    module = LAYERS[kind](n_in, n_out)
    x = torch.randn(n_steps, n_series, n_in)
    assert kept_bytes(lambda: run(module, x)) <= 1.2 * kept_bytes(lambda: module(x))


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cell", [native.LSTM, native.GRU, native.TANH_RNN, native.RELU_RNN])
def test_nothing_is_written_beside_the_buffers(cell, dtype, isa):
    library = kernels.library_in_use()
    guard, mark = 64, 12345.0
    for S, B, F, H in SHAPES:
        k = cell.h_blocks
        inputs = [(S, B, F), (B, H), (B, H), (k * H, F), (k * H, H), (k * H,), (k * H,)]
        forward = [(S, B, H), (B, H), (B, H), (S * B * H * library.kept_per_output(cell.number),)]
        shapes = [*inputs, *forward, (S, B, H), (B, H), (B, H), *inputs]
        buffers = []
        for shape in shapes:
            buffer = torch.full((int(np.prod(shape)) + 2 * guard,), mark, dtype=dtype)
            buffer[guard:-guard] = torch.randn(len(buffer) - 2 * guard)
            buffers.append(buffer)
        before = [b.clone() for b in buffers]
        pointers = [b[guard:].data_ptr() for b in buffers]
        head = (kernels.VERSION, cell.number, native.TYPES[dtype], library.isa, 1, S, B, F, H, 0.0)
        described = native._CALL.pack(*head, *pointers)
        assert library.forward(described) == 0
        assert library.backward(described) == 0
        n_in, n_out = len(inputs), len(inputs) + len(forward)
        for i, (now, then) in enumerate(zip(buffers, before, strict=True)):
            assert (now[:guard] == mark).all()
            assert (now[-guard:] == mark).all()
            if i < n_in or n_out <= i < n_out + 3:
                assert torch.equal(now, then), "an input was changed"


# -- through Recur -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [LSTM(3, 5), GRU(3, 5), RNN(3, 5, 2), Recur(nn.LSTMCell(3, 5)), Recur(nn.GRUCell(3, 5))],
    ids=repr,
)
def test_windows_and_steps_of_a_layer_are_the_same_to_the_last_bit_and_torchs_to_rounding(layer):
    x = torch.randn(9, 4, 3)
    other = copy.deepcopy(layer)
    window = layer(x)
    assert "_Recurrence" in names_of(window)
    steps = torch.stack([other(step) for step in x])
    assert torch.equal(window, steps)
    mine, theirs = (s if isinstance(s, tuple) else (s,) for s in (layer.state, other.state))
    assert all(map(torch.equal, mine, theirs))
    layer.reset()
    with native_kernels(False):
        torch.testing.assert_close(layer(x), window, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("n_units", "dtype"), [(7, "float32"), (24, "float64"), (64, "float32")])
def test_a_series_alone_equals_itself_in_any_minibatch(name, n_units, dtype):
    # with few series units fill the lanes of vectors, with many series do
    layer = Recur(LAYERS[name](3, n_units)).to(getattr(torch, dtype))
    x = torch.randn(11, 41, 3, dtype=getattr(torch, dtype))
    weight = torch.randn(11, 41, n_units, dtype=x.dtype)

    def outputs_and_input_gradients(first, stop):
        part = x[:, first:stop].clone().requires_grad_()
        layer.reset()
        y = layer(part)
        (gradient,) = torch.autograd.grad((y * weight[:, first:stop]).sum(), part)
        return y.detach(), gradient

    whole = outputs_and_input_gradients(0, 41)
    for first, stop in ((0, 1), (5, 7), (3, 8), (20, 28), (1, 18), (0, 33)):
        for part, of_all in zip(outputs_and_input_gradients(first, stop), whole, strict=True):
            assert torch.equal(part, of_all[:, first:stop]), (first, stop)


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_training_and_prediction_give_the_same_bits(name, dtype, isa):
    # shapes of which one puts units into the lanes, and the other series
    shapes = [(1, 16, 64), (1, 48, 80), (2, 24, 16), (4, 32, 64), (1, 13, 17), (8, 32, 64)]
    for n_steps, n_series, n_units in shapes:
        layer = Recur(LAYERS[name](3, n_units)).to(dtype)
        x = torch.randn(n_steps, n_series, 3, dtype=dtype)
        with torch.no_grad():
            predicted = layer(x)
        of_prediction = layer.state
        layer.reset()
        trained = layer(x)
        assert trained.requires_grad
        assert not predicted.requires_grad
        assert torch.equal(trained, predicted), (n_steps, n_series, n_units)
        states = (s if isinstance(s, tuple) else (s,) for s in (layer.state, of_prediction))
        assert all(map(torch.equal, *states))
