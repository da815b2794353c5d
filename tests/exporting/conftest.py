"""Models of every kind, and what tells whether a file computes what they do."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    SMGU,
    TCN,
    BatchNorm,
    CausalConv1d,
    MinGRU,
    MinLSTM,
    Recur,
    SequenceStack,
    SlidingWindowAttention,
    WinsorNorm,
)
from fluxutils_py.nn.cells import FLSTMCell, SGRUCell
from fluxutils_py.nn.session import InferenceSession

WINDOWS = (1, 1, 2, 7, 1, 4)


class Leaky(nn.Module):
    """A recurrent module of one's own, which does not tell its state."""

    def __init__(self, n):
        super().__init__()
        self.linear, self.keep = nn.Linear(n, 4), nn.Parameter(torch.rand(4))

    def forward(self, x, state):
        h = x.new_zeros(x.shape[0], 4) if state is None else state
        h = torch.tanh(self.linear(x) + self.keep * h)
        return h, h


class TwoInTwoOut(nn.Module):
    """Class indices and numbers in, two outputs."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(7, 6), GRU(9, 5)
        self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, codes, x):
        h = self.rnn(torch.cat([self.table(codes[..., 0]), x], -1))
        return self.a(h), self.b(h)


def models():
    """One model for several kinds of layers, to trace few."""
    attention = partial(SlidingWindowAttention, n_heads=2, window=4)
    return {
        "torch": nn.Sequential(LSTM(3, 5, 2), GRU(5, 4), RNN(4, 5, trainable_init=True), nn.Linear(5, 2)),
        "torch_cells": nn.Sequential(Recur(nn.LSTMCell(3, 5)), Recur(nn.GRUCell(5, 5)), Recur(nn.RNNCell(5, 4))),
        "own_cells": nn.Sequential(FLSTM(3, 5, 2), SGRU(5, 5), MGU(5, 4), SMGU(4, 5), HFGRU(5, 5, alpha=0.5)),
        "own_cells_in_recur": nn.Sequential(Recur(FLSTMCell(3, 5)), Recur(SGRUCell(5, 4)), Recur(Leaky(4))),
        "scans": nn.Sequential(MinGRU(3, 5), MinLSTM(5, 4, trainable_init=True), LRU(4, 6)),
        "convolutions": nn.Sequential(CausalConv1d(3, 5, 2, 3, weight_norm=True), TCN(5, 4, 1)),
        "stacks": nn.Sequential(SequenceStack(LRU, 3, 8, 1), SequenceStack(attention, 8, 8, 1), nn.Linear(8, 1)),
        "norms": nn.Sequential(
            WinsorNorm().fit(torch.randn(3, 40, 20)), BatchNorm(3), LSTM(3, 5), nn.Dropout(0.2), nn.Linear(5, 1)
        ),
        "no_state": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        "several": TwoInTwoOut(),
    }


@pytest.fixture
def model_names():
    return list(models())


@pytest.fixture
def make_model():
    def make(name, dtype=torch.float32):
        model = models()[name].to(dtype).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        return model

    return make


def inputs(name, n_steps, n_series, dtype=torch.float32):
    x = torch.randn(n_steps, n_series, 3, dtype=dtype)
    return (torch.randint(0, 7, (n_steps, n_series, 1)), x) if name == "several" else (x,)


@pytest.fixture
def worst_difference():
    """The largest difference of outputs and states between a session of the model and ``run(*arrays)``.

    ``start(n_series)`` returns ``run``, which takes windows and moves its state on, and ``state()``.
    """

    def measure(name, model, start, dtype=torch.float32, overlap=0):
        worst = 0.0
        for n_series in (4, 1):
            session = InferenceSession(model, lambda: inputs(name, 4, 2, dtype), overlap)
            session.load(None, n_series)
            run, state = start(n_series)
            for n_steps in WINDOWS:
                xs = inputs(name, n_steps, n_series, dtype)
                with torch.no_grad():
                    wanted = [*session.run(xs), *session.state]
                found = [*run(*(x.numpy() for x in xs)), *state()]
                for a, b in zip(found, wanted, strict=True):
                    assert a.shape == tuple(b.shape)
                    assert a.dtype == b.numpy().dtype
                    worst = max(worst, float(np.abs(a - b.numpy()).max(initial=0)))
        return worst

    return measure


@pytest.fixture
def example_inputs():
    return inputs
