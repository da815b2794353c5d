"""Cells against NumPy's rendering of their formulas and torch's own cells; windows against their
steps.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import Recur, cells, native_kernels
from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell, MGUCell, SGRUCell, SMGUCell
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.states import states

S, B, F, H = 7, 4, 3, 5
CELLS = {
    "FLSTM": FLSTMCell,
    "SGRU": SGRUCell,
    "MGU": MGUCell,
    "SMGU": SMGUCell,
    "HFGRU": HFGRUCell,
    "slow HFGRU": lambda i, o: HFGRUCell(i, o, 0.3),
    "frozen HFGRU": lambda i, o: HFGRUCell(i, o, 0.0),
}
every_cell = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)


def psigmoid(x):
    u = np.clip(x / 4.1, -1, 1)
    return 0.5 + u - u * abs(u) / 2


def ptanh(x):
    return np.where(x > 0, 1, -1) * (
        0.96016 - 0.26037 * (np.minimum(abs(x), 1.92033) - 1.92033) ** 2
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_formula(cell, x, h, c=None):
    """One step in NumPy: the new state."""
    Wi, Wh, b = (p.detach().numpy() for p in (cell.weight_ih, cell.weight_hh, cell.bias))
    s, t = (sigmoid, np.tanh) if isinstance(cell, HFGRUCell) else (psigmoid, ptanh)
    xs, hs, bs = (
        np.split(x @ Wi.T, len(Wi) // H, 1),
        np.split(h @ Wh.T, len(Wh) // H, 1),
        np.split(b, len(b) // H),
    )
    if isinstance(cell, FLSTMCell):
        i, f, g, o = (a + d + e for a, d, e in zip(xs, hs, bs, strict=True))
        c = s(f) * c + s(i) * t(g)
        return s(o) * t(c), c
    if isinstance(cell, SGRUCell):
        r, z = s(hs[0] + bs[0]), s(hs[1] + bs[1])
        n = t(xs[0] + r * hs[2] + bs[2])
    elif isinstance(cell, MGUCell):
        r = z = s(xs[0] + hs[0] + bs[0])
        n = t(xs[1] + r * hs[1] + bs[1])
    elif isinstance(cell, SMGUCell):
        r = z = s(hs[0] + bs[0])
        n = t(xs[0] + r * hs[1] + bs[1])
    else:
        r, z = s(xs[0] + hs[0] + bs[0]), cell.alpha * s(xs[1] + hs[1] + bs[1])
        n = t(xs[2] + r * hs[2] + bs[2])
        return (z * n + (1 - z) * h,)
    return ((1 - z) * n + z * h,)


def built(make, dtype=torch.float64, spread=2.0):
    """A cell with biases, whose gates also reach the flat ends of their activations."""
    cell = make(F, H).to(dtype)
    with torch.no_grad():
        for p in cell.parameters():
            p.mul_(spread).add_(0.3 * torch.randn_like(p))
    return cell


def inputs(cell, dtype=torch.float64, requires_grad=False):
    x = 2 * torch.randn(S, B, F, dtype=dtype)
    state = tuple(torch.randn(B, H, dtype=dtype) for _ in range(cell.n_states))
    for t in (x, *state):
        t.requires_grad_(requires_grad)
    return x, state


def packed(state):
    return state if len(state) > 1 else state[0]


def tensors(result):
    y, state = result
    return (y, *state) if isinstance(state, tuple) else (y, state)


def stepwise(cell, x, state):
    ys = []
    for step in x:
        y, state = cell(step, state)
        ys.append(y)
    return torch.stack(ys), state


@every_cell
def test_a_step_is_the_formula(make):
    cell = built(make)
    x, state = inputs(cell)
    y, after = cell(x[0], packed(state))
    expected = by_formula(cell, x[0].numpy(), *(s.numpy() for s in state))
    after = after if isinstance(after, tuple) else (after,)
    for ours, theirs in zip(after, expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=0, atol=1e-14)
    assert torch.equal(y, after[0])


@every_cell
def test_a_window_is_its_steps_by_the_formula(make):
    cell = built(make)
    x, state = inputs(cell)
    y, after = cell.window(x, packed(state))
    expected = tuple(s.numpy() for s in state)
    for t in range(S):
        expected = by_formula(cell, x[t].numpy(), *expected)
        np.testing.assert_allclose(y[t].detach().numpy(), expected[0], rtol=0, atol=1e-13)
    for ours, theirs in zip(after if isinstance(after, tuple) else (after,), expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=0, atol=1e-13)


@every_cell
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("used", ["all", "outputs", "last state"])
def test_gradients_of_a_window_are_those_of_autograd_over_its_steps(make, dtype, bound, used):
    cell = built(make, dtype)
    x, state = inputs(cell, dtype, requires_grad=True)
    weights = [torch.randn(S, B, H, dtype=dtype)] + [torch.randn(B, H, dtype=dtype) for _ in state]
    found = []
    for run in (cell.window, lambda x, s: stepwise(cell, x, s)):
        outs = list(zip(tensors(run(x, packed(state))), weights, strict=True))
        outs = {"all": outs, "outputs": outs[:1], "last state": outs[-1:]}[used]
        loss = sum((o * w).sum() for o, w in outs)
        found.append(
            torch.autograd.grad(loss, [x, *state, *cell.parameters()], materialize_grads=True)
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * 10)


@pytest.mark.slow
@every_cell
def test_gradcheck(make):
    cell = built(make)
    x, state = inputs(cell, requires_grad=True)
    given = (x[:3].detach().requires_grad_(), *state, *cell.parameters())
    n = cell.n_states
    assert torch.autograd.gradcheck(lambda x, *r: tensors(cell.window(x, packed(r[:n]))), given)
    given = (x[0].detach().requires_grad_(), *state, *cell.parameters())
    assert torch.autograd.gradcheck(lambda x, *r: tensors(cell(x, packed(r[:n]))), given)


@every_cell
def test_zero_input_and_zero_parameters_are_where_ptanh_jumps(make):
    cell = make(F, H).double()
    nn.init.zeros_(cell.weight_ih)
    nn.init.zeros_(cell.weight_hh)
    nn.init.zeros_(cell.bias)
    x = torch.zeros(2, B, F, dtype=torch.float64)
    for ours, theirs in zip(tensors(cell.window(x)), tensors(stepwise(cell, x, None)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)


def test_part_of_the_gradient_may_be_asked_for():
    cell = built(MGUCell)
    x, _ = inputs(cell)
    cell.weight_ih.requires_grad_(False)
    whole = torch.autograd.grad(cell.window(x)[0].sum(), cell.weight_hh)[0]
    torch.testing.assert_close(
        whole, torch.autograd.grad(stepwise(cell, x, None)[0].sum(), cell.weight_hh)[0]
    )


def test_flstm_with_exact_activations_is_torchs_lstm_cell(monkeypatch):
    monkeypatch.setattr(cells, "psigmoid", torch.sigmoid)
    monkeypatch.setattr(cells, "ptanh", torch.tanh)
    cell, theirs = built(FLSTMCell), nn.LSTMCell(F, H).double()
    theirs.load_state_dict({**torchs(cell), "bias_hh": torch.zeros_like(cell.bias)})
    x, state = inputs(cell)
    other = state
    for step in x:
        with native_kernels(False):
            _, state = cell(step, state)
        other = theirs(step, other)
        for ours, expected in zip(state, other, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-15)


def test_hfgru_is_torchs_gru_cell_with_negated_update_rows():
    cell, theirs = built(HFGRUCell), nn.GRUCell(F, H).double()
    parameters = {k: p.detach().clone() for k, p in torchs(cell).items()}
    for p in parameters.values():
        p[H : 2 * H] *= -1
    theirs.load_state_dict({**parameters, "bias_hh": torch.zeros_like(cell.bias)})
    x, (state,) = inputs(cell)
    other = state
    for step in x:
        _, state = cell(step, state)
        other = theirs(step, other)
        torch.testing.assert_close(state, other, rtol=0, atol=1e-15)


def torchs(cell):
    return {"weight_ih": cell.weight_ih, "weight_hh": cell.weight_hh, "bias_ih": cell.bias}


def test_hfgru_with_alpha_0_keeps_its_state_exactly():
    cell = built(lambda i, o: HFGRUCell(i, o, 0.0), torch.float32)
    x, (h,) = inputs(cell, torch.float32)
    assert torch.equal(cell(x[0], h)[1], h)
    assert torch.equal(cell.window(x, h)[1], h)


@pytest.mark.parametrize("make", [SGRUCell, SMGUCell])
def test_gates_of_the_small_cells_do_not_see_the_input(make):
    cell = built(make)
    with torch.no_grad():
        cell.weight_ih.zero_()
    x, state = inputs(cell)
    assert torch.equal(cell(x[0], packed(state))[0], cell(x[1], packed(state))[0])


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (FLSTMCell, 4 * H * F + 4 * H * H + 4 * H),
        (SGRUCell, H * F + 3 * H * H + 3 * H),
        (MGUCell, 2 * H * F + 2 * H * H + 2 * H),
        (SMGUCell, H * F + 2 * H * H + 2 * H),
        (HFGRUCell, 3 * H * F + 3 * H * H + 3 * H),
    ],
)
def test_numbers_of_parameters_and_all_are_trained(make, count):
    cell = make(F, H)
    assert sum(p.numel() for p in cell.parameters() if p.requires_grad) == count
    for p in cell.parameters():
        p.grad = None
    cell.window(torch.randn(S, B, F))[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in cell.parameters())


@every_cell
def test_blocks_of_the_recurrent_weight_are_orthogonal_at_first(make):
    for block in make(F, H).weight_hh.split(H):
        torch.testing.assert_close(block @ block.T, torch.eye(H), rtol=0, atol=1e-5)


def test_first_biases():
    assert FLSTMCell(F, H).bias[H : 2 * H].tolist() == [1.0] * H
    assert 0 < FLSTMCell(F, H).bias[:H].abs().max() <= (6 / (4 * H)) ** 0.5
    assert 0 < HFGRUCell(F, H).bias.abs().max() <= (6 / (3 * H)) ** 0.5
    assert not any(make(F, H).bias.any() for make in (SGRUCell, MGUCell, SMGUCell))


@every_cell
def test_in_a_recur_it_carries_its_state(make):
    cell = built(make)
    x, _ = inputs(cell)
    rnn = Recur(cell)
    assert [tuple(s.shape) for s in states(rnn)] == [(0, H)] * cell.n_states
    y = torch.cat([rnn(x[:3]), rnn(x[3])[None], rnn(x[4:])])
    torch.testing.assert_close(y, cell.window(x)[0], rtol=0, atol=1e-13)


@every_cell
def test_second_derivatives_are_refused_by_the_kernels_and_given_by_torch(make):
    cell = built(make)
    x, state = inputs(cell, requires_grad=True)
    n = cell.n_states
    if kernels.library_in_use() is not None:
        with pytest.raises(RuntimeError, match=r"create_graph=True.*native_kernels\(False\)"):
            torch.autograd.grad(cell.window(x)[0].sum(), x, create_graph=True)
    given = (x[:2].detach().requires_grad_(), *state, *cell.parameters())
    with native_kernels(False):  # along a random direction, not along each of hundreds
        assert torch.autograd.gradgradcheck(
            lambda x, *r: tensors(cell.window(x, packed(r[:n]))), given, fast_mode=True
        )


@pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())
def test_writing_into_the_output_is_noticed():
    cell = built(MGUCell)
    y, _ = cell.window(inputs(cell)[0])
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_a_cell_shows():
    assert [repr(make(F, H)) for make in CELLS.values()] == [
        "FLSTMCell(3, 5)",
        "SGRUCell(3, 5)",
        "MGUCell(3, 5)",
        "SMGUCell(3, 5)",
        "HFGRUCell(3, 5)",
        "HFGRUCell(3, 5, alpha=0.3)",
        "HFGRUCell(3, 5, alpha=0.0)",
    ]
