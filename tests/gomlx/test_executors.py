"""Calls of a model by kind."""

import pytest
import torch
from torch import nn

from fluxutils_py.gomlx.executors import Executors, Mode, kind_key


def test_there_is_one_call_for_each_kind_and_mode():
    made, model = [], nn.Linear(3, 1)
    executors = Executors(model, 3, False, False)
    executors.handlers.append(lambda executor, mode: made.append(mode))
    x = torch.ones(2, 3)
    for kind in (None, ["unhashable"], ["unhashable"]):
        assert torch.equal(executors(kind, Mode.TRAIN)((x,)), model(x))
    executors(None, Mode.EVAL)
    assert made == [Mode.TRAIN, Mode.TRAIN, Mode.EVAL]
    with pytest.raises(RuntimeError, match=r"one more than max_kinds=3"):
        executors("another", Mode.EVAL)
    assert kind_key({"a": 1}) == "{'a': 1}"


def test_the_number_of_kinds_is_checked():
    with pytest.raises(ValueError, match=r"^max_kinds must be a positive integer, got 0$"):
        Executors(nn.Identity(), 0, False, False)
