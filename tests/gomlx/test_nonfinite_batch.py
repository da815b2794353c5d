"""A batch that gave NaN is run again as the trainer ran it (nonfinite_batch)."""

import contextlib

import torch
from torch import nn

from fluxutils_py.gomlx.nonfinite_batch import find_nonfinite
from fluxutils_py.nn import LSTM
from fluxutils_py.training.minibatch import Minibatch


class ByKind(nn.Module):
    """Divides by zero for one kind of batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, kind, x):
        return self.inner(x) / (0.0 if kind == "bad" else 1.0)


class Root(nn.Module):
    def forward(self, x):
        return (-1 - x.square()).sqrt()


def test_the_kind_of_the_batch_is_that_of_the_step():
    model, x = ByKind(), torch.ones(3, 2)
    found = [find_nonfinite(model, Minibatch((x,), kind=kind), False, True, contextlib.nullcontext()) for kind in "ab"]
    assert found == ["", ""]
    bad = find_nonfinite(model, Minibatch((x,), kind="bad"), False, True, contextlib.nullcontext())
    assert bad == ", first given by the model (ByKind)"


def test_the_state_of_another_number_of_series_does_not_hinder():
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    model(torch.ones(4, 2))
    model.append(Root())
    found = find_nonfinite(model, Minibatch((torch.ones(5, 2),)), False, False, contextlib.nullcontext())
    assert found == ", first given by module '2' (Root)"
    assert model[0].state[0].shape[1] == 4
