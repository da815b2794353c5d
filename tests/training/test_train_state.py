"""The state of a task's training."""

import copy

import torch
from torch import nn

from fluxutils_py.nn import LSTM
from fluxutils_py.training.train_state import TrainState


def make():
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    return TrainState(0, model, torch.optim.Adam(model.parameters()))


def step(state):
    state.model(torch.randn(5, 3)).square().mean().backward()
    state.opt.step()
    state.opt.zero_grad()
    state.step += 1


def test_views_are_the_models_own():
    state = make()
    assert state.params["1.weight"] is state.model[1].weight
    assert set(state.extra_vars) == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert set(state.model_vars) == set(state.params) | set(state.extra_vars)
    assert set(state.opt_state) == {"state", "param_groups"}


def test_other_parameters_leave_the_model_as_it_is():
    state, x = make(), torch.randn(5, 3)
    state.model.eval()
    before = {name: v.clone() for name, v in state.model_vars.items()}
    out = state.apply_fn({**state.model_vars, "1.bias": state.params["1.bias"] + 3}, x)
    assert all(v.equal(before[name]) for name, v in state.model_vars.items())
    assert state.model[0].state is None
    reference = make()
    reference.model.load_state_dict(state.model.state_dict())
    with torch.no_grad():
        reference.model[1].bias += 3
    torch.testing.assert_close(out, reference.model.eval()(x))


def test_another_process_continues_with_the_same_bits():
    state, other = make(), make()
    step(state)
    other.load_state_dict(copy.deepcopy(state.state_dict()))  # as through a file
    for s in (state, other):
        torch.manual_seed(3)
        s.model[0].reset()
        step(s)
    assert other.step == 2
    assert all(other.params[name].equal(p) for name, p in state.params.items())
