"""The awkward shape of the laws, on which nothing divides, and a plain PyTorch loop to compare
with.
"""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

N, T, B, S = 37, 43, 8, 10  # series, steps, batchsize, seqsize
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@dataclass
class Task:
    """Data, and the same initial weights for our model and the plain one."""

    x: np.ndarray  # (F, N, T)
    y: np.ndarray  # (G, N, T)
    lstm: nn.LSTM
    head: nn.Linear

    def plain(self):
        return copy.deepcopy(self.lstm), copy.deepcopy(self.head)

    def ours(self):
        return nn.Sequential(*self.plain())  # the bare LSTM is wrapped by the estimator

    @property
    def dtype(self):
        return self.head.weight.dtype


def make_task(dtype="float64", n_features=3, n_hidden=7, n_outputs=2, n_series=N, n_steps=T):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(n_features, n_series, n_steps)).astype(dtype)
    y = np.stack([np.cumsum(x[0], 1) * 0.3, x.mean(0)])[:n_outputs].astype(dtype)
    torch.manual_seed(1)
    lstm, head = nn.LSTM(n_features, n_hidden), nn.Linear(n_hidden, n_outputs)
    return Task(x, y, lstm.to(getattr(torch, dtype)), head.to(getattr(torch, dtype)))


@pytest.fixture
def task():
    return make_task()


def window(a, series, start, stop):
    """``(S, B, F)`` tensor of some series and steps, cut with nothing but NumPy."""
    return torch.tensor(np.ascontiguousarray(a[:, series, start:stop].transpose(2, 1, 0)))


def plain_loop(
    task,
    optimizer,
    epochs=1,
    batchsize=B,
    seqsize=S,
    criterion=None,
    after_backward=lambda params: None,
):
    """The loop a careful person writes by hand. Returns parameters (flat), losses per step,
    gradients per step.
    """
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = optimizer(params)
    criterion = criterion or nn.MSELoss()
    losses, grads = [], []
    for _ in range(epochs):
        for g in range(0, task.x.shape[1], batchsize):
            series, state = slice(g, g + batchsize), None
            for t in range(0, task.x.shape[2], seqsize):
                h, state = lstm(window(task.x, series, t, t + seqsize), state)
                loss = criterion(head(h), window(task.y, series, t, t + seqsize))
                opt.zero_grad()
                loss.backward()
                losses.append(loss.item())
                grads.append(torch.cat([p.grad.reshape(-1) for p in params]))
                after_backward(params)
                opt.step()
                state = tuple(s.detach() for s in state)
    return flat(params), losses, grads


def flat(params):
    return torch.cat([p.detach().reshape(-1) for p in params])


def difference(a, b):
    return float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max())
