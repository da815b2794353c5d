"""MinGRU, MinLSTM and LRU against their formulas in the papers."""

import pytest
import torch

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import LRU, MinGRU, MinLSTM, linear_rnn, native_kernels
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as native
from fluxutils_py.nn.states import states

from .stepwise import B, F, S, assert_follows

GATED = pytest.mark.parametrize("layer", [MinGRU, MinLSTM])


@pytest.fixture(params=[True, False], ids=["kernels", "torch"], autouse=True)
def path(request):
    with native_kernels(request.param):
        yield


def min_gru(layer):
    weight, bias = layer.module.linear.weight, layer.module.linear.bias
    H = layer.n_out

    def step(x, h):
        z = torch.sigmoid(x @ weight[:H].T + bias[:H])
        h = (1 - z) * h + z * (x @ weight[H:].T + bias[H:])
        return h, h

    return step


def min_lstm(layer):
    weight, bias = layer.module.linear.weight, layer.module.linear.bias
    H = layer.n_out

    def step(x, h):
        f, i, candidate = (x @ w.T + b for w, b in zip(weight.split(H), bias.split(H), strict=True))
        f, i = torch.sigmoid(f), torch.sigmoid(i)
        h = f / (f + i) * h + i / (f + i) * candidate
        return h, h

    return step


def lru(layer):
    m = layer.module
    eigenvalues = torch.exp(torch.complex(-torch.exp(m.nu_log), torch.exp(m.theta_log)))
    into = torch.complex(m.weight_in[0::2], m.weight_in[1::2])
    out_of = torch.complex(m.weight_out[:, 0::2], -m.weight_out[:, 1::2])

    def step(x, h):
        h = eigenvalues * h + torch.exp(m.gamma_log) * (x.to(into) @ into.T)
        return (h @ out_of.T).real + x @ m.weight_skip.T, h

    return step


@pytest.mark.few
@pytest.mark.parametrize(("layer", "formula"), [(MinGRU, min_gru), (MinLSTM, min_lstm)])
def test_the_gated_layers_are_the_formula_of_the_paper(layer, formula):
    made = layer(F, 5).double()
    assert_follows(made, formula(made), torch.zeros(B, 5, dtype=torch.float64))


@pytest.mark.few
@pytest.mark.parametrize(("n_out", "n_states"), [(5, None), (5, 11), (17, 3)])
def test_the_lru_is_the_formula_of_the_paper(n_out, n_states):
    layer = LRU(F, n_out, n_states).double()
    zero = torch.zeros(B, n_states or 3, dtype=torch.complex128)
    assert_follows(layer, lru(layer), zero)


@pytest.mark.parametrize(("layer", "formula"), [(MinGRU, min_gru), (MinLSTM, min_lstm)])
def test_a_trained_initial_state_is_where_the_formula_starts(layer, formula):
    made = layer(F, 5, trainable_init=True).double()
    torch.nn.init.normal_(made.initial_state[0])
    step = formula(made)
    assert_follows(
        made, lambda x, h: step(x, made.initial_state[0].expand(B, 5) if h is None else h)
    )


@GATED
@pytest.mark.parametrize("by_kernels", [True, False], ids=["long", "short"])
def test_few_series_are_those_of_many(layer, by_kernels, monkeypatch):
    layer, x = layer(F, 5).double(), torch.randn(S, B, F, dtype=torch.float64)
    weight = torch.randn(S, 3, 5, dtype=torch.float64)
    outcomes = []
    monkeypatch.setattr(linear_rnn, "LONG_WINDOW", S * 5 * 5 + (not by_kernels))
    x_of_few = x[:, :5]
    assert (layer.module.by_kernel(x_of_few) is not None) == (
        by_kernels and kernels.library_in_use() is not None
    )
    for given in (x, x_of_few, x[:, :3]):
        layer.reset()
        y = layer(given)[:, :3]
        outcomes.append([y, *torch.autograd.grad((y * weight).sum(), list(layer.parameters()))])
    for many, five, three in zip(*outcomes, strict=True):
        torch.testing.assert_close(five, many, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(three, many, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@GATED
def test_gradients_are_differentiable(layer):
    made = layer(2, 3).double()

    def outputs(x, h, *parameters):
        made.state = h
        return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (x,))

    names, parameters = zip(*made.named_parameters(), strict=True)
    given = [torch.randn(3, 8, 2, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)]
    given = [t.requires_grad_() for t in given]
    assert torch.autograd.gradcheck(outputs, (*given, *parameters))
    with native_kernels(False):  # along a random direction, not along each
        assert torch.autograd.gradgradcheck(outputs, (*given, *parameters), fast_mode=True)


@pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())
@GATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernels_give_the_same_bits_on_any_instruction_set_with_any_threads_and_cuts(
    layer, dtype, monkeypatch
):
    monkeypatch.setattr(kernels._use, "enabled", True)
    layer, x = layer(F, 13).to(dtype), torch.randn(50, 70, F, dtype=dtype, requires_grad=True)
    weight, outcomes = torch.randn(50, 70, 13, dtype=dtype), []
    for isa in [name for name in kernels.ISAS if kernels.supports(name)]:
        for threads, cuts in ((1, [50]), (2, [50]), (3, [9, 1, 40])):
            monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
            monkeypatch.setattr(native, "n_threads", lambda n=threads: n)
            layer.reset()
            y = torch.cat([layer(part) for part in x.split(cuts)])
            assert "_RecurrenceBackward" in str(layer.state.grad_fn)
            # cut sums over time are rounded otherwise
            wanted = [x, *layer.parameters()] if len(cuts) == 1 else [x]
            outcomes.append([y, *torch.autograd.grad((y * weight).sum(), wanted)])
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=False))
    layer.reset()
    assert torch.equal(layer(x[:, 30:45]), outcomes[0][0][:, 30:45])


def test_layers_that_may_compute_something_else_are_left_to_torch():
    x = torch.randn(4, 9, F)
    hooked, parametrized = MinGRU(F, 5), MinLSTM(F, 5)
    hooked.module.linear.register_forward_hook(lambda module, inputs, output: output)
    torch.nn.utils.parametrizations.weight_norm(parametrized.module.linear)
    assert not any(
        type(layer(x).grad_fn).__name__ == "_RecurrenceBackward" for layer in (hooked, parametrized)
    )
    parametrized(x).sum().backward()
    assert parametrized.module.linear.parametrizations.weight.original0.grad is not None


def test_closed_gates_give_numbers():
    layer, x = MinLSTM(F, 5), torch.ones(4, 9, F)
    with torch.no_grad():
        layer.module.linear.weight.zero_()
        layer.module.linear.bias[
            :10
        ] = -200  # sigmoid is 0 in float32: the paper's f / (f + i) would be 0 / 0
        layer.module.linear.bias[10:] = 1
    y = layer(x)
    torch.testing.assert_close(y[0], torch.full((9, 5), 0.5))
    y.sum().backward()
    assert layer.module.linear.weight.grad.isfinite().all()


@GATED
def test_states_near_the_largest_number_are_right(layer):
    layer = layer(1, 5)
    with torch.no_grad():
        layer.module.linear.weight.zero_()[-5:] = 1  # the candidate is the input
        layer.module.linear.bias.zero_()
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None, None].expand(-1, 9, 1)
    y = layer(3e38 * signs)  # whose differences are infinite in float32
    expected = layer.double().module(3e38 * signs.double())[0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0)


def test_eigenvalues_are_drawn_from_the_ring_and_normalise_the_input():
    layer = LRU(F, 5, n_states=2000, r_min=0.4, r_max=0.8, max_phase=0.5)
    found = layer.module.eigenvalues().detach()
    modulus, angle = found.abs(), found.angle()
    assert 0.4 <= float(modulus.min()) < 0.43
    assert 0.79 < float(modulus.max()) <= 0.8
    assert float(angle.min()) > 0
    assert 0.49 < float(angle.max()) <= 0.5
    square = modulus**2  # uniform on the ring: so are the squares of the moduli
    assert abs(float(square.mean()) - (0.16 + 0.64) / 2) < 0.01
    torch.testing.assert_close(
        torch.exp(layer.module.gamma_log.detach()), torch.sqrt(1 - square), rtol=1e-4, atol=1e-6
    )


def test_the_widest_ring_stays_finite_and_stable():
    layer = LRU(F, 5, n_states=5000, r_min=0, r_max=1)
    assert all(p.isfinite().all() for p in layer.parameters())
    assert float(layer.module.eigenvalues().detach().abs().max()) < 1


def test_the_state_is_real_and_has_the_numbers_of_the_last_step():
    layer = LRU(F, 5, n_states=4)
    layer(torch.randn(6, 2, F))
    (state,) = states(layer)
    assert state.shape == (2, 4, 2)
    assert state.dtype == torch.float32
    h = MinGRU(F, 5)
    y = h(torch.randn(6, 2, F))
    assert torch.equal(states(h)[0], y[-1])


@pytest.mark.parametrize("layer", [MinGRU, MinLSTM, LRU])
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 5), ValueError, r"n_in .*positive integer, got 0"),
        ((3, -1), ValueError, r"n_out .*positive integer, got -1"),
        ((3, 2.5), TypeError, r"n_out .*positive integer, got 2\.5"),
        ((True, 5), TypeError, r"n_in .*positive integer, got True"),
    ],
)
def test_bad_sizes_are_named(layer, sizes, error, message):
    with pytest.raises(error, match=f"^{layer.__name__}: {message}$"):
        layer(*sizes)


@pytest.mark.parametrize("layer", [MinGRU, MinLSTM, LRU])
def test_another_number_of_features_is_named(layer):
    message = rf"^{layer.__name__} .*3 .*n_in.*\(6, 2, 4\)$"
    with pytest.raises(ShapeError, match=message):
        layer(3, 5)(torch.zeros(6, 2, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_states": 0}, r"LRU: n_states .*positive integer, got 0"),
        (
            {"r_min": 0.9, "r_max": 0.9},
            r"LRU: .* got r_min=0\.9, r_max=0\.9",
        ),
        ({"r_max": 1.1}, r"LRU: .* got r_min=0\.9, r_max=1\.1"),
        ({"max_phase": 7}, r"LRU: max_phase .*2 pi, got 7"),
    ],
)
def test_bad_rings_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        LRU(3, 5, **arguments)
