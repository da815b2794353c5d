"""Layers of cells: the state of a Recur, several layers, dropout; compared with the cells, step by
step.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import FLSTM, HFGRU, MGU, SGRU, SMGU, Recur
from fluxutils_py.nn.model_windows import takes_windows
from fluxutils_py.nn.parameters import namedparams
from fluxutils_py.nn.states import (
    batch_dims,
    loadstates,
    mark,
    marked,
    reset,
    restore,
    states,
    truncate,
)

S, B, F, H = 7, 4, 3, 5
LAYERS = [FLSTM, SGRU, MGU, SMGU, HFGRU]
every_layer = pytest.mark.parametrize("layer", LAYERS)


def x_of(s=S, b=B, dtype=torch.float64):
    return 2 * torch.randn(s, b, F, dtype=dtype)


def by_cells(rnn, x):
    """Outputs of all layers, one step after another, by the cells' own formulas."""
    cells = [copy.deepcopy(c) for c in rnn.module.cells]
    before = [None] * len(cells)
    ys = []
    for h in x:
        for k, cell in enumerate(cells):
            h, before[k] = cell(h, before[k])
        ys.append(h)
    return torch.stack(ys)


@every_layer
@pytest.mark.parametrize("num_layers", [1, 3])
def test_windows_steps_and_parts_are_the_cells_in_a_row(layer, num_layers):
    rnn = layer(F, H, num_layers).double()
    x = x_of()
    expected = by_cells(rnn, x)
    torch.testing.assert_close(rnn(x), expected, rtol=0, atol=1e-13)
    rnn.reset()
    parts = torch.cat([rnn(x[:3]), rnn(x[3])[None], rnn(x[4:])])
    torch.testing.assert_close(parts, expected, rtol=0, atol=1e-13)


@every_layer
def test_a_layer_shows_its_sizes(layer):
    rnn = layer(np.int64(F), np.int64(H), 2, dropout=0.25)
    assert (rnn.n_in, rnn.n_out, rnn.num_layers, rnn.dropout) == (F, H, 2, 0.25)
    assert type(rnn.n_in) is type(rnn.n_out) is int  # torch refuses NumPy's


@every_layer
@pytest.mark.parametrize("num_layers", [1, 2])
def test_gradients_flow_through_the_state_until_it_is_truncated(layer, num_layers):
    rnn = layer(F, H, num_layers).double()
    x = x_of().requires_grad_()
    loss = by_cells(rnn, x)[-1].sum()
    (whole,) = torch.autograd.grad(loss, x)
    rnn(x[:3])
    (carried,) = torch.autograd.grad(rnn(x[3:])[-1].sum(), x)
    torch.testing.assert_close(carried, whole, rtol=0, atol=1e-13)
    rnn.reset()
    rnn(x[:3])
    truncate(rnn)
    (cut,) = torch.autograd.grad(rnn(x[3:])[-1].sum(), x)
    torch.testing.assert_close(cut[3:], whole[3:], rtol=0, atol=1e-13)
    assert not cut[:3].any()


@every_layer
def test_states_are_saved_restored_marked_and_known_before_the_first_step(layer):
    rnn = layer(F, H, 2).double()
    model = nn.Sequential(rnn, nn.Linear(H, 1).double())
    n = 2 if layer is FLSTM else 1
    assert [tuple(s.shape) for s in states(model)] == [(2, 0, H)] * n
    assert batch_dims(model) == [1] * n
    assert all(s.dtype == torch.float64 for s in states(model))
    x = x_of()
    model(x[:3])
    kept = states(model)
    assert [tuple(s.shape) for s in kept] == [(2, B, H)] * n
    rest = model(x[3:])
    for fresh in (reset(model), copy.deepcopy(model)):
        assert torch.equal(loadstates(fresh, kept)(x[3:]), rest)
    loadstates(model, states(reset(copy.deepcopy(model))))
    assert rnn.state is None
    mark(model, 3)
    model(x)
    restore(model, marked(model))
    torch.testing.assert_close(model(x[3:]), rest, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"state of 4 series .*batch of 2"):
        model(x_of(b=2))
    reset(model)(x_of(b=2))


@every_layer
def test_whole_windows_are_found_to_be_safe(layer):
    assert takes_windows(
        nn.Sequential(layer(F, H, 2), nn.Linear(H, 1)), [x_of(dtype=torch.float32)]
    )


def test_dropout_is_between_layers_and_in_training_only():
    rnn = SMGU(F, H, 2, dropout=0.5).double()
    x = x_of()
    plain = by_cells(rnn, x)
    torch.testing.assert_close(rnn.eval()(x), plain, rtol=0, atol=1e-13)
    rnn.reset()
    torch.manual_seed(3)
    first, second = rnn.train().module.cells
    found = rnn(x)
    torch.manual_seed(3)
    expected = second.window(nn.functional.dropout(first.window(x)[0], 0.5))[0]
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain)
    one = SMGU(F, H, 1, dropout=0.5).double()  # nothing between, nothing after
    torch.testing.assert_close(one(x), by_cells(one, x), rtol=0, atol=1e-13)


def test_hfgru_has_its_alpha_in_every_layer():
    rnn = HFGRU(F, H, 2, alpha=0.25).double()
    assert [c.alpha for c in rnn.module.cells] == [0.25, 0.25]
    x = x_of()
    torch.testing.assert_close(rnn(x), by_cells(rnn, x), rtol=0, atol=1e-13)
    assert not torch.allclose(rnn.module.cells[0].window(x)[0], by_cells(_with_alpha(rnn, 1.0), x))


def _with_alpha(rnn, alpha):
    other = copy.deepcopy(rnn)
    for cell in other.module.cells:
        cell.alpha = alpha
    return other


def test_names_and_integers_and_bad_settings():
    rnn = MGU(F, H, 2)
    names = ("weight_ih", "weight_hh", "bias")
    assert [n for n, _ in namedparams(rnn)] == [
        f"module.cells.{k}.{name}" for k in (0, 1) for name in names
    ]
    assert isinstance(rnn, Recur)
    assert rnn(torch.zeros(S, B, F, dtype=torch.int64)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"num_layers must be .*, got 0"):
        MGU(F, H, 0)
    with pytest.raises(ValueError, match=r"dropout .*0 to 1, got 1\.5$"):
        MGU(F, H, 2, 1.5)
