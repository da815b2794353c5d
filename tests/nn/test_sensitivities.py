"""Diagonal layers carry how their state depends on their parameters: against automatic
differentiation of the whole past.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fluxutils_py import reset, truncate
from fluxutils_py.nn import GRU, LRU, LSTM, MinGRU, MinLSTM, native_kernels
from fluxutils_py.nn.states import (
    carrying_sensitivities,
    evaluating,
    restore,
    sensitivities,
    snapshot,
    truncated_layers,
)

LAYERS = pytest.mark.parametrize("layer", [MinGRU, MinLSTM, LRU])
S, F, H = 31, 3, 5
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(params=[True, False], ids=["kernels", "torch"], autouse=True)
def path(request):
    with native_kernels(request.param):
        yield


def made(layer, trainable_init=False, dtype=torch.float64):
    torch.manual_seed(3)
    m = layer(F, H, trainable_init=trainable_init)
    for p in m.initial_state if trainable_init else ():
        nn.init.normal_(p)
    return m.to(dtype)


def data(n_series, dtype=torch.float64):
    g = torch.Generator().manual_seed(5)
    shapes = (S, n_series, F), (S, n_series, H)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(m, x, w):
    """The gradient of the whole past, by torch alone."""
    reset(m)
    found = torch.autograd.grad((m(x) * w).sum(), list(m.parameters()))
    reset(m)
    return found


def by_windows(m, x, w, size, exact=True, stepwise=False, autocast=False):
    """The sum over windows of the gradients of each."""
    reset(m)
    total = [torch.zeros_like(p) for p in m.parameters()]
    for start in range(0, S, size):
        truncate(m)
        window = x[start : start + size]
        low = torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False)
        with low, carrying_sensitivities(m) if exact else contextlib.nullcontext():
            y = torch.stack([m(step) for step in window]) if stepwise else m(window)
        loss = (y * w[start : start + size]).sum()
        found = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
        total = [a if b is None else a + b for a, b in zip(total, found, strict=True)]
    return total


def apart(found, expected):
    """The largest difference, of the largest entry of the gradient."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(
        float(b.abs().max()) for b in expected
    )


@pytest.mark.few
@LAYERS
@pytest.mark.parametrize("trainable_init", [False, True])
@pytest.mark.parametrize("n_series", [2, 9])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_windows_have_the_gradient_of_the_whole_past(layer, trainable_init, n_series, dtype):
    m = made(layer, trainable_init, dtype)
    x, w = data(n_series, dtype)
    exact = whole(m.double(), x.double(), w.double())
    m.to(dtype)
    # float32 rounds the eigenvalues of an LRU, whose powers then turn by other angles
    tolerance = max(TOLERANCE[dtype], 3 * apart(whole(m, x, w), exact))
    for size in (1, 7, 10, S, S + 4):
        found = by_windows(m, x, w, size)
        assert apart(found, exact) < tolerance, size
    assert apart(by_windows(m, x, w, 7, stepwise=True), exact) < tolerance
    assert apart(by_windows(m, x, w, 7, exact=False), exact) > 1e-2


@LAYERS
def test_each_parameter_by_itself(layer):
    """No parameter hides behind one with a larger gradient."""
    m = made(layer, True)
    x, w = data(4)
    expected = whole(m, x, w)
    names = [name for name, _ in m.named_parameters()]
    assert len(names) == {MinGRU: 3, MinLSTM: 3, LRU: 7}[layer]
    for name, a, b in zip(names, by_windows(m, x, w, 6), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("layer", [MinGRU, MinLSTM])
def test_the_sensitivities_of_gated_layers_are_the_jacobian_of_the_state(layer):
    m = made(layer, True)
    x, _ = data(2)
    with carrying_sensitivities(m):
        for window in x.split(8):
            m(window)
            truncate(m)
    of_weight, of_bias, of_initial = m.sensitivity
    n_blocks = m.module.n_blocks
    reset(m)
    m(x)
    weight, bias = m.module.linear.weight, m.module.linear.bias
    for series in range(2):
        for unit in range(H):
            wanted = torch.autograd.grad(
                m.state[series, unit], [weight, bias, m.initial_state[0]], retain_graph=True
            )
            rows = [unit + H * block for block in range(n_blocks)]
            torch.testing.assert_close(of_weight[series][:, rows], wanted[0][rows].T)
            torch.testing.assert_close(of_bias[series, rows], wanted[1][rows])
            torch.testing.assert_close(of_initial[series, unit], wanted[2][0, unit])
            wanted[0][rows] = 0
            assert not wanted[0].any()  # of no other unit


@pytest.mark.few
def test_the_sensitivities_of_an_lru_are_the_jacobian_of_the_state():
    m = made(LRU, True)
    x, _ = data(2)
    with carrying_sensitivities(m):
        for window in x.split(8):
            m(window)
            truncate(m)
    of_units, of_weight, of_initial = m.sensitivity
    reset(m)
    m(x)
    inner = m.module
    own = [inner.nu_log, inner.theta_log, inner.gamma_log, inner.weight_in, m.initial_state[0]]
    for series in range(2):
        for unit in range(inner.n_states):
            for part in range(2):
                *of_log, weight, initial = torch.autograd.grad(
                    m.state[series, unit, part], own, retain_graph=True
                )
                for k, wanted in enumerate(of_log):
                    torch.testing.assert_close(of_units[series, k, unit, part], wanted[unit])
                torch.testing.assert_close(of_weight[series, unit, part], weight[2 * unit])
                torch.testing.assert_close(of_initial[series, unit, part], initial[0, unit, 0])


@LAYERS
def test_windows_without_a_loss_are_learnt_from_later(layer):
    m = made(layer)
    x, w = data(3)
    w[:20] = 0
    expected = whole(m, x, w)
    with carrying_sensitivities(m), torch.no_grad():
        m(x[:8])
        m(x[8:20])
    truncate(m)
    with carrying_sensitivities(m):
        loss = (m(x[20:]) * w[20:]).sum()
    assert apart(torch.autograd.grad(loss, list(m.parameters())), expected) < 1e-12


@LAYERS
def test_steps_that_are_run_without_it_give_nothing(layer):
    """As in a burn-in: what a trained initial state does is then lost, too."""
    m = made(layer, True)
    x, w = data(3)
    m(x[:10])
    truncate(m)
    start = snapshot(m)
    total = [torch.zeros_like(p) for p in m.parameters()]
    for a, b in ((10, 17), (17, S)):
        truncate(m)
        with carrying_sensitivities(m):
            loss = (m(x[a:b]) * w[a:b]).sum()
        found = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
        total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
    restore(m, start)
    loss = (m(x[10:]) * w[10:]).sum()
    expected = torch.autograd.grad(loss, list(m.parameters()), materialize_grads=True)
    assert apart(total, expected) < 1e-12
    assert not total[-1 if layer is not LRU else 0].isnan().any()


@LAYERS
def test_some_parameters_may_be_frozen(layer):
    m = made(layer)
    x, w = data(3)
    frozen = next(m.parameters())
    expected = whole(m, x, w)[1:]
    frozen.requires_grad_(False)
    trained = [p for p in m.parameters() if p.requires_grad]
    with carrying_sensitivities(m):
        m(x[:20])
        truncate(m)
        later = (m(x[20:]) * w[20:]).sum()
    first = torch.autograd.grad(later, trained)
    truncate(reset(m))
    early = (m(x[:20]) * w[:20]).sum()
    total = [a + b for a, b in zip(first, torch.autograd.grad(early, trained), strict=True)]
    assert apart(total, expected) < 1e-12


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_weight_that_is_computed_from_others():
    m = made(MinGRU)
    parametrize.register_parametrization(m.module.linear, "weight", Doubled())
    x, w = data(3)
    assert apart(by_windows(m, x, w, 7), whole(m, x, w)) < 1e-12


@LAYERS
def test_an_evaluation_in_between_changes_nothing(layer):
    m = made(layer)
    x, _ = data(3)
    with carrying_sensitivities(m):
        m(x[:9])
        truncate(m)
    before = m.sensitivity
    with evaluating(m):
        reset(m)
        m(x)
        assert m.sensitivity is None
    assert m.sensitivity is before
    reset(m)
    assert sensitivities(m) == [None]


@LAYERS
def test_series_that_restart_begin_anew(layer):
    m = made(layer, True)
    x, _ = data(4)
    with carrying_sensitivities(m):
        m(x[:9])
        truncate(m)
        m.reset_series(torch.tensor([1, 3]))
        m(x[9:])
        found = m.sensitivity
        reset(m)
        m(x[9:, [1, 3]])
    for a, b in zip(found, m.sensitivity, strict=True):
        torch.testing.assert_close(a[[1, 3]], b)


@LAYERS
def test_sensitivities_are_no_larger_for_a_longer_past(layer):
    m = made(layer)
    x, _ = data(3)
    sizes = set()
    for _ in range(3):
        with carrying_sensitivities(m):
            m(x)
        truncate(m)
        sizes.add(tuple(t.shape for t in m.sensitivity))
        assert not any(t.requires_grad for t in m.sensitivity)
    assert len(sizes) == 1


def test_in_bfloat16_the_layer_computes_in_float32():
    m = made(MinGRU, dtype=torch.float32)
    x, w = data(9, torch.float32)
    expected = by_windows(m, x, w, 7)
    assert apart(by_windows(m, x, w, 7, autocast=True), expected) < 1e-6


def test_which_layers_stay_truncated():
    hooked = MinGRU(3, 3)
    hooked.module.register_forward_hook(lambda *_: None)
    frozen = GRU(3, 3).requires_grad_(False)
    model = nn.Sequential(LRU(3, 3), LSTM(3, 3), hooked, frozen)
    assert truncated_layers(model) == ["1 (LSTM)", "2 (MinGRU)"]
    with carrying_sensitivities(model):
        model(torch.zeros(4, 2, 3))
    assert [s is not None for s in sensitivities(model)] == [True, False, False, False]
