"""The state of a task's training."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import LSTM
from fluxutils_py.nn.states import reset
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


@pytest.mark.few
@pytest.mark.parametrize("opt", [torch.optim.Adam, functools.partial(torch.optim.SGD, lr=0.1)])
def test_replace_gives_a_state_of_its_own_that_trains_on_as_it_would(opt):
    state = make()
    state.opt = opt(state.model.parameters())
    torch.manual_seed(1)
    step(state)
    reset(state.model)
    before = copy.deepcopy(state.state_dict())
    bias, mean = torch.tensor([3.0, 4.0]), np.array([5.0, 6.0], dtype="float32")
    new = state.replace(step=7, params={"1.bias": bias}, extra_vars={"2.running_mean": mean})
    assert new.step == 7
    changed = {k for k, v in new.model_vars.items() if not torch.equal(v, state.model_vars[k])}
    assert changed == {"1.bias", "2.running_mean"}
    assert torch.equal(new.params["1.bias"], bias)
    assert new.extra_vars["2.running_mean"].tolist() == [5, 6]
    # the same step from the same values, by a state that was loaded
    expected = make()
    expected.opt = opt(expected.model.parameters())
    expected.load_state_dict(copy.deepcopy(new.state_dict()))
    for each in new, expected:
        torch.manual_seed(2)
        step(each)
    assert not torch.equal(new.params["1.bias"], bias)
    assert all(torch.equal(v, expected.model_vars[k]) for k, v in new.model_vars.items())
    after = state.state_dict()
    assert after["step"] == before["step"]
    assert all(torch.equal(v, before["model"][k]) for k, v in after["model"].items())
    assert str(after["opt"]) == str(before["opt"])
    again = new.replace(opt_state=state.opt_state)
    assert str(again.opt_state) == str(before["opt"])
    step(again)
    assert str(state.opt_state) == str(before["opt"])


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"tx": None}, TypeError, "keyword argument 'tx'"),
        (
            {"params": {"1.bias": torch.ones(1)}},
            ValueError,
            r"\(1,\), the model has of shape \(2,\)",
        ),
        ({"params": {"bias": torch.ones(2)}}, ValueError, r"'bias' .*only 0\."),
    ],
)
def test_replace_names_what_a_state_has(changes, error, told):
    with pytest.raises(error, match=told):
        make().replace(**changes)
