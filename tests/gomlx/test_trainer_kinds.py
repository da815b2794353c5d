"""Calls of a model by kind."""

import pytest
import torch
from torch import nn

from fluxutils_py.gomlx import Trainer
from fluxutils_py.gomlx.trainer import kind_key
from fluxutils_py.training.minibatch import Minibatch


def test_there_is_one_call_for_each_kind_and_mode():
    made, model = [], nn.Linear(3, 1)

    trainer = Trainer(
        model, nn.MSELoss(), torch.optim.Adam, max_kinds=3, comm=None
    ).on_exec_creation(lambda executor, mode: made.append(mode.value))
    x, y = torch.ones(2, 3), torch.ones(2, 1)
    for kind in (None, ["unhashable"], ["unhashable"]):
        trainer.train_step(Minibatch((x,), (y,), kind))
    trainer.eval_step(Minibatch((x,), (y,)))
    assert made == ["train", "train", "eval"]
    with pytest.raises(RuntimeError, match=r"one more than max_kinds=3"):
        trainer.eval_step(Minibatch((x,), (y,), "another"))
    assert kind_key({"a": 1}) == "{'a': 1}"
