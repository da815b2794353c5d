"""Saving and loading the state of a whole model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM, RNN, Recur
from fluxutils_py.nn.model_windows import prediction_copy
from fluxutils_py.nn.states import (
    batch_dims,
    loadstates,
    mark,
    marked,
    recurrent_layers,
    reset,
    restore,
    snapshot,
    states,
    truncate,
)

# torch says so once in a process, for whichever test is first to run such a layer in float32
pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
)

F, H = 3, 5


class Leaky(nn.Module):
    """An own module whose state is what ``form`` makes of a tensor."""

    def __init__(self, n_in, n_out, form=lambda h: h, unform=lambda s: s):
        super().__init__()
        self.inner, self.form, self.unform = nn.Linear(n_in, n_out), form, unform

    def forward(self, x, state):
        h = self.inner(x)
        h = torch.tanh(h if state is None else h + 0.5 * self.unform(state))
        return h, self.form(h)


class Counting(nn.Module):
    """An own module with an integer in its state: how many steps each series has seen."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, state):
        h, n = (
            (torch.zeros_like(x), torch.zeros(len(x), 1, dtype=torch.int64))
            if state is None
            else state
        )
        h = h + self.scale * x
        return h / (n + 1), (h, n + 1)


MODELS = {
    "LSTM": lambda: nn.Sequential(LSTM(F, H, 2), nn.Linear(H, 1)),
    "three kinds": lambda: nn.Sequential(
        GRU(F, H), nn.Sequential(nn.Linear(H, H), LSTM(H, 4)), RNN(4, 2, 2)
    ),
    "projection": lambda: nn.Sequential(Recur(nn.LSTM(F, H, 2, proj_size=2)), nn.Linear(2, 1)),
    "cells": lambda: nn.Sequential(
        Recur(nn.LSTMCell(F, H)), Recur(nn.GRUCell(H, 4)), Recur(nn.RNNCell(4, 2))
    ),
    "own": lambda: nn.Sequential(LSTM(F, H), Recur(Leaky(H, 4)), nn.Linear(4, 1)),
    "own, a tuple of one": lambda: Recur(Leaky(F, H, lambda h: (h,), lambda s: s[0])),
    "own, a tuple of two": lambda: nn.Sequential(
        Recur(Leaky(F, H, lambda h: (h, 2 * h), lambda s: s[1])), GRU(H, 2)
    ),
    "own with an integer": lambda: Recur(Counting()),
    "two own": lambda: nn.Sequential(
        Recur(Leaky(F, H, lambda h: (h, -h), lambda s: s[0])), Recur(Leaky(H, 4)), nn.Linear(4, 1)
    ),
    "none": lambda: nn.Linear(F, 1),
}


def same(a, b):
    return len(a) == len(b) and all(
        s.dtype == t.dtype and s.equal(t) for s, t in zip(a, b, strict=True)
    )


def test_states_are_a_flat_list_in_module_order():
    model = MODELS["three kinds"]()
    assert recurrent_layers(model) == [model[0], model[1][1], model[2]]
    model(torch.randn(6, 4, F))
    gru, lstm, rnn = recurrent_layers(model)
    assert same(states(model), [gru.state, *lstm.state, rnn.state])
    assert [tuple(s.shape) for s in states(model)] == [(1, 4, 5), (1, 4, 4), (1, 4, 4), (2, 4, 2)]
    assert batch_dims(model) == [1, 1, 1, 1]
    cells = MODELS["cells"]()
    cells(torch.randn(4, F))
    assert [tuple(s.shape) for s in states(cells)] == [(4, 5), (4, 5), (4, 4), (4, 2)]
    assert batch_dims(cells) == [0, 0, 0, 0]


def test_states_are_detached_copies():
    model = MODELS["LSTM"]()
    model(torch.randn(2, 4, F))
    kept = states(model)
    assert not any(s.requires_grad for s in kept)
    for s in kept:
        s.fill_(7)
    assert not any((s == 7).any() for s in states(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_of_a_fresh_model_have_a_batch_of_none_and_its_type(dtype):
    model = MODELS["three kinds"]().to(dtype)
    assert [tuple(s.shape) for s in states(model)] == [(1, 0, 5), (1, 0, 4), (1, 0, 4), (2, 0, 2)]
    assert {s.dtype for s in states(model)} == {dtype}
    assert [tuple(s.shape) for s in states(MODELS["projection"]())] == [(2, 0, 2), (2, 0, 5)]
    assert [tuple(s.shape) for s in states(MODELS["cells"]())] == [(0, 5), (0, 5), (0, 4), (0, 2)]
    assert states(MODELS["none"]()) == []


@pytest.mark.parametrize("kind", MODELS)
def test_saved_states_give_the_same_outputs_again_bit_for_bit(kind):
    model = MODELS[kind]()
    xs = torch.randn(9, 4, F)
    model(xs[:4])
    kept = states(model)
    first = model(xs[4:])
    later = states(model)
    assert loadstates(model, kept) is model
    assert same(states(model), kept)
    assert model(xs[4:]).equal(first)
    assert same(states(model), later)


@pytest.mark.parametrize("kind", MODELS)
def test_saved_states_load_into_a_model_that_was_reset(kind):
    model = MODELS[kind]()
    xs = torch.randn(9, 4, F)
    model(xs[:4])
    kept = states(model)
    first = model(xs[4:])
    reset(model)
    assert loadstates(model, kept)(xs[4:]).equal(first)
    twin = prediction_copy(model)
    assert loadstates(twin, kept)(xs[4:]).equal(first)


@pytest.mark.parametrize("kind", [k for k in MODELS if "own" not in k])
def test_saved_states_load_into_a_model_that_never_ran(kind):
    model, other = MODELS[kind](), MODELS[kind]()
    other.load_state_dict(model.state_dict())
    xs = torch.randn(9, 4, F)
    model(xs[:4])
    assert loadstates(other, states(model))(xs[4:]).equal(model(xs[4:]))


@pytest.mark.parametrize("kind", ["own", "two own"])
def test_own_modules_that_never_ran_say_what_to_do(kind):
    model = MODELS[kind]()
    model(torch.randn(4, F))
    fresh = MODELS[kind]()
    with pytest.raises(ShapeError, match=r"^state has [23] .* has [02]; .*on one step"):
        loadstates(fresh, states(model))
    fresh(torch.randn(1, F))
    assert same(states(loadstates(fresh, states(model))), states(model))


@pytest.mark.parametrize("kind", MODELS)
def test_the_states_of_a_fresh_model_load_back_as_forgetting(kind):
    model = MODELS[kind]()
    xs = torch.randn(5, 4, F)
    fresh = states(model)
    first = model(xs)
    assert model(xs).equal(first) == (kind == "none")
    loadstates(model, fresh)
    assert all(r.state is None for r in recurrent_layers(model))
    assert model(xs).equal(first)
    reset(model)
    assert model(xs).equal(first)


@pytest.mark.parametrize("kind", MODELS)
def test_states_of_another_batch_size_can_be_loaded(kind):
    model = MODELS[kind]()
    model(torch.randn(3, 2, F))
    small = states(model)
    reset(model)(torch.randn(3, 6, F))
    loadstates(model, small)
    assert same(states(model), small)
    model(torch.randn(3, 2, F))


def test_loaded_states_are_copies_in_the_type_of_the_layer():
    model = MODELS["LSTM"]()
    model(torch.randn(2, 4, F))
    kept = states(model)
    loadstates(model, kept)
    for s in kept:
        s.fill_(7)
    assert not any((s == 7).any() for s in states(model))
    model.double()
    loadstates(model, kept)
    assert {s.dtype for s in states(model)} == {torch.float64}
    loadstates(model, [s.numpy() for s in kept])
    assert all((s == 7).all() for s in states(model))


def test_a_module_without_parameters_keeps_the_type_of_its_state():
    class Mean(nn.Module):
        def forward(self, x, state):
            state = x if state is None else 0.5 * (state + x)
            return state, state

    model = Recur(Mean())
    model(torch.randn(3, 2, F, dtype=torch.float64))
    assert same(states(loadstates(model, states(model))), [model.state])
    assert model.state.dtype == torch.float64


def test_a_state_with_a_graph_is_loaded_without_it():
    model = MODELS["LSTM"]()
    model(torch.randn(2, 4, F))
    loadstates(model, list(model[0].state))
    assert not any(s.requires_grad for s in model[0].state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:-1], r"^state has 3 tensors, .* 4;"),
        (lambda s: [*s, s[0]], r"^state has 5 tensors, .* 4;"),
        (lambda s: [], r"^state has 0 tensors, .* 4;"),
        (
            lambda s: [*s[:3], torch.zeros(2, 4, 3)],
            r"^state\[3\].*'2'.*\(2, 4, 3\).*2, B, 2",
        ),
        (
            lambda s: [*s[:3], torch.zeros(1, 4, 2)],
            r"^state\[3\].*'2'.*\(1, 4, 2\).*2, B, 2",
        ),
        (
            lambda s: [*s[:3], torch.zeros(4, 2)],
            r"^state\[3\].*'2'.*\(4, 2\).*2, B, 2",
        ),
        (
            lambda s: [*s[:2], torch.zeros(1, 3, 4), s[3]],
            r"'1\.1' differ in their number of series",
        ),
        (
            lambda s: [s[1], s[0], *s[2:]],
            r"^state\[0\].*'0'.*\(1, 4, 4\).*1, B, 5",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(change, message):
    model = MODELS["three kinds"]()
    model(torch.randn(3, 4, F))
    before = states(model)
    with pytest.raises(ShapeError, match=message):
        loadstates(model, change([7 * torch.ones_like(s) for s in before]))
    assert same(states(model), before)


def test_a_state_of_the_wrong_shape_names_a_cell_and_an_own_module():
    cell = Recur(nn.LSTMCell(F, H))
    with pytest.raises(ShapeError, match=r"^state\[1\].*'Recur'.*\(4, 3\).*\(B, 5\)"):
        loadstates(cell, [torch.zeros(4, 5), torch.zeros(4, 3)])
    own = MODELS["own, a tuple of two"]()
    own(torch.randn(4, F))
    before = states(own)
    with pytest.raises(ShapeError, match="'0' differ in their number of series"):
        loadstates(own, [torch.zeros(4, 5), torch.zeros(3, 5), torch.zeros(1, 4, 2)])
    with pytest.raises(ShapeError, match=r"^state has 2 tensors, .* 3;"):
        loadstates(own, before[:2])
    assert same(states(own), before)


def test_an_estimators_model_is_found():
    model = MODELS["LSTM"]()
    model(torch.randn(2, 4, F))
    estimator = SimpleNamespace(model=MODELS["LSTM"](), model_=model)
    assert same(states(estimator), states(model))
    assert truncate(estimator) is estimator
    assert loadstates(estimator, states(model)) is estimator
    assert reset(estimator) is estimator
    assert model[0].state is None


def test_a_snapshot_can_be_restored_and_shares_the_values():
    model = MODELS["three kinds"]()
    xs = torch.randn(9, 4, F)
    empty = snapshot(model)
    assert empty == [None, None, None]
    model(xs[:4])
    kept = snapshot(model)
    first = model(xs[4:])
    restore(model, kept)
    assert model(xs[4:]).equal(first)
    restore(model, kept)  # not used up
    assert not any(s.requires_grad for s in [model[0].state, *model[1][1].state])
    assert model(xs[4:]).equal(first)
    restore(model, empty)
    assert model(xs[:4]).shape == (4, 4, 2)
    with pytest.raises(ValueError, match="zip"):
        restore(model, kept[:2])


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_model_can_be_restored_to_a_mark(steps):
    model = MODELS["three kinds"]().double()
    xs = torch.randn(9, 4, F, dtype=torch.float64)
    model(xs[:4])
    mark(model, steps)
    outputs = model(xs[4:])
    restore(model, marked(model))
    if steps < 5:
        torch.testing.assert_close(model(xs[4 + steps :]), outputs[steps:], rtol=0, atol=1e-12)
    after = states(model)
    reset(model)(xs)
    for a, b in zip(after, states(model), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
