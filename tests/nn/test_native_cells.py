"""The cells of FluxUtils.jl by the native kernels: who computes what, to the last bit, and with
NaN.
"""

import pytest
import torch

from fluxutils_py.nn import FLSTM, HFGRU, MGU, SGRU, SMGU, Recur, native_kernels
from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell, MGUCell, SGRUCell, SMGUCell
from fluxutils_py.nn.kernels import library as kernels
from fluxutils_py.nn.kernels import recurrence as native

pytestmark = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())

S, B, F, H = 9, 37, 3, 13
ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
CELLS = {
    "FLSTM": FLSTMCell,
    "SGRU": SGRUCell,
    "MGU": MGUCell,
    "SMGU": SMGUCell,
    "HFGRU": lambda i, o: HFGRUCell(i, o, 0.3),
}
every_cell = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)


def by_kernels(y):
    return type(y.grad_fn).__name__ == "_RecurrenceBackward"


def results(cell, x, state=None):
    """Outputs and last state of a window, and the gradients of their sum, of inputs and parameters."""
    x = x.detach().requires_grad_()
    y, after = cell.window(x, state)
    after = after if isinstance(after, tuple) else (after,)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum() + sum(
        s.sum() for s in after
    )
    return [y, *after, *torch.autograd.grad(loss, [x, *cell.parameters()])]


@every_cell
def test_windows_and_steps_are_by_the_kernels_without_being_asked(make):
    cell, x = make(F, H), torch.randn(S, B, F)
    assert by_kernels(cell(x[0])[0])
    assert by_kernels(cell.window(x)[0])
    assert by_kernels(Recur(cell)(x))  # the whole window in one call
    with native_kernels(False):
        assert not by_kernels(cell(x[0])[0])
        assert not by_kernels(cell.window(x)[0])


@pytest.mark.parametrize("layer", [FLSTM, SGRU, MGU, SMGU, HFGRU])
def test_layers_are_by_the_kernels_and_equal_torchs_operations(layer):
    model, x = layer(F, H, num_layers=2).double(), torch.randn(S, B, F, dtype=torch.float64)
    ours = model(x)
    model.reset()
    with native_kernels(False):
        theirs = model(x)
    assert by_kernels(ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_cells_that_may_compute_something_else_are_left_to_torch():
    class Own(MGUCell):
        def forward(self, x, state=None):
            y, state = super().forward(x, state)
            return 2 * y, state

    x = torch.randn(S, B, F)
    hooked, half = SGRUCell(F, H), SMGUCell(F, H).bfloat16()
    hooked.register_forward_hook(lambda module, inputs, output: (output[0] + 1, output[1]))
    parametrized = MGUCell(F, H)
    torch.nn.utils.parametrizations.spectral_norm(parametrized, "weight_hh")
    for cell in (Own(F, H), hooked, half, parametrized):
        assert not by_kernels(Recur(cell)(x.to(cell.weight_ih.dtype)))
    trained = HFGRUCell(F, H)
    trained.alpha = torch.tensor(0.5, requires_grad=True)
    trained(x[0])[0].sum().backward()
    assert trained.alpha.grad.abs() > 0


@every_cell
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_series_is_computed_alike_whatever_is_beside_it_and_however_time_is_cut(make, dtype):
    cell, x = make(F, H).to(dtype), torch.randn(S, B, F, dtype=dtype)
    with torch.no_grad():
        y, last = cell.window(x)
        some = torch.tensor([36, 4, 17])
        assert torch.equal(cell.window(x[:, some])[0], y[:, some])
        state, ys = None, []
        for piece in (x[:4], x[4:5], x[5:]):
            part, state = cell.window(piece, state)
            ys.append(part)
        assert torch.equal(torch.cat(ys), y)
        state, ys = None, []
        for step in x:
            part, state = cell(step, state)
            ys.append(part)
        assert torch.equal(torch.stack(ys), y)
        for a, b in zip(
            *((s if isinstance(s, tuple) else (s,)) for s in (state, last)), strict=True
        ):
            assert torch.equal(a, b)


@every_cell
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_and_instruction_sets_give_the_same_bits(make, dtype, monkeypatch):
    cell, x = make(F, H).to(dtype), torch.randn(4 * S, 70, F, dtype=dtype)
    found = []
    for isa in ISAS:
        for n in (1, 2, 5):
            monkeypatch.setattr(kernels._use, "library", kernels.Library(kernels.PATH, isa))
            monkeypatch.setattr(native, "n_threads", lambda n=n: n)
            found.append(results(cell, x))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@every_cell
def test_nan_and_infinity_stay_in_their_series_and_give_what_torch_gives(make):
    cell, x = make(F, H).double(), torch.randn(S, B, F, dtype=torch.float64)
    clean = cell.window(x)[0]
    x[2, 5, 1], x[3, 6, 0], x[4, 20, 2] = float("nan"), float("inf"), -float("inf")
    y = cell.window(x)[0]
    others = [b for b in range(B) if b not in (5, 6, 20)]
    assert torch.equal(y[:, others], clean[:, others])
    with native_kernels(False):
        expected = torch.stack(list(stepwise(cell, x)))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13, equal_nan=True)
    assert y[2:, 5].isnan().any()


def stepwise(cell, x):
    state = None
    for step in x:
        y, state = cell(step, state)
        yield y


@every_cell
def test_a_graph_that_is_retained_gives_the_same_gradient_and_changed_weights_are_an_error(make):
    cell = make(F, H)
    loss = cell.window(torch.randn(S, B, F))[0].square().sum()
    first = torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        cell.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
