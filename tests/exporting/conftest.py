"""Models of every kind."""

from functools import partial

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
    CausalKernels,
    ExponentialMeans,
    Lags,
    MinGRU,
    MinLSTM,
    Recur,
    RollingStatistics,
    RunningStatistics,
    SequenceStack,
    SlidingWindowAttention,
    WinsorNorm,
)
from fluxutils_py.nn.cells import FLSTMCell


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
        "torch": nn.Sequential(
            LSTM(3, 5, 2),
            GRU(5, 4),
            RNN(4, 5, trainable_init=True),
            Recur(nn.LSTMCell(5, 4)),
            Recur(nn.GRUCell(4, 3)),
            Recur(nn.RNNCell(3, 2)),
        ),
        "own_cells": nn.Sequential(
            FLSTM(3, 4), SGRU(4, 3), MGU(3, 3, 2), SMGU(3, 4), HFGRU(4, 3, alpha=0.3)
        ),
        "own_modules": nn.Sequential(Recur(FLSTMCell(3, 4)), Recur(Leaky(4))),
        "scans": nn.Sequential(
            WinsorNorm().fit(torch.randn(3, 40, 20)),
            BatchNorm(3),
            MinGRU(3, 5),
            nn.Dropout(0.2),
            MinLSTM(5, 4, trainable_init=True),
            LRU(4, 6),
        ),
        "windows": nn.Sequential(
            CausalConv1d(3, 4, 2, 3, weight_norm=True),
            TCN(4, 4, 1),
            SequenceStack(attention, 4, 8, 1),
        ),
        "statistics": nn.Sequential(
            Lags(3, [0, 2]),
            nn.Linear(6, 2),
            ExponentialMeans(2, [2, 5]),
            RollingStatistics(4, [4]),
            nn.Linear(12, 2),
            RunningStatistics(2),
            nn.Linear(15, 2),
        ),
        "kernels": nn.Sequential(
            CausalKernels(3, 20, 168).fit_biases(torch.randn(3, 40, 20)), nn.Linear(168, 2)
        ),
        "no_state": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        "several": TwoInTwoOut(),
        "classifier": nn.Sequential(GRU(3, 4), nn.Linear(4, 3)),
        "float64": nn.Sequential(LSTM(3, 4), GRU(4, 3)),
    }


@pytest.fixture(scope="session", autouse=True)
def operators(onnx_operators_once):
    """Each export finds them."""


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
