"""How a trainer calls its model for each kind of batch."""

import pytest
import torch
from torch import nn

from fluxutils_py.training.executors import Executors, Mode


def test_one_function_for_each_kind_and_mode():
    made = []
    executors = Executors(nn.Identity(), 3, False, False)
    executors.handlers.append(lambda executor, mode: made.append(mode))
    first = executors("a", Mode.TRAIN)
    assert executors("a", Mode.TRAIN) is first
    assert executors("a", Mode.EVAL) is not first
    assert executors(["unhashable"], Mode.EVAL) is executors(["unhashable"], Mode.EVAL)
    assert made == [Mode.TRAIN, Mode.EVAL, Mode.EVAL]
    x = torch.ones(2)
    assert first((x,)) is x


def test_one_kind_too_many_is_an_error():
    executors = Executors(nn.Identity(), 1, False, False)
    executors("a", Mode.TRAIN)
    with pytest.raises(RuntimeError, match=r"^kind 'b' in mode 'train' is one more than max_kinds=1: "):
        executors("b", Mode.TRAIN)


def test_the_kind_comes_first_and_calls_may_be_compiled():
    class Kinds(nn.Module):
        def forward(self, kind, x):
            return kind, x

    executors = Executors(Kinds(), 2, True, lambda run: lambda inputs: ("compiled", run(inputs)))
    assert executors("a", Mode.EVAL)((3,)) == ("compiled", ("a", 3))
