"""fluxutils_py.training.excluded_parts."""

import torch
from torch import nn

from fluxutils_py.training.excluded_parts import ExcludedParts


def test_tied_weights_are_left_out_by_either_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    parts = ExcludedParts(["model.1.weight"], {"model": model, "optimizer": optimizer})
    assert list(parts.remove("model", model.state_dict())) == ["0.weight", "0.bias", "1.bias"]
    assert list(parts.remove("optimizer", optimizer.state_dict())["state"]) == [1, 2]


def test_other_objects_and_states_stay_as_they_are():
    model = nn.Linear(1, 1)
    parts = ExcludedParts(["model.*"], {"model": model, "loop": object()})
    state = {"step": 3}
    assert parts.remove("loop", state) is state
    assert parts.keep("loop", state, {"step": 4}) is state
    before = dict(model.state_dict())
    assert parts.remove("model", before) == {}
    assert list(before) == ["weight", "bias"]
