"""The gradient of a window in several threads, against one call of the loss."""

import pytest
import torch
from torch import nn

from fluxutils_py.nn import LSTM
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.nn.states import reset, states, truncate
from fluxutils_py.parallel import Threads
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.threaded_loss import WindowReplicas


@pytest.mark.parametrize("weighted", [False, True])
def test_three_threads_equal_one(weighted):
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 2)).double()
    loss = seqloss(nn.MSELoss())
    xs, ys = (torch.randn(2, 5, 7, n, dtype=torch.float64) for n in (3, 2))  # two windows
    ws = (torch.rand(5, 7, 1, dtype=torch.float64) > 0.3).double() if weighted else None
    expected = []
    for x, y in zip(xs, ys, strict=True):
        value = loss(model, x, y) if ws is None else loss(model, x, y, ws)
        expected.append((value.item(), torch.autograd.grad(value, list(model.parameters()))))
        truncate(model)
    last = states(model)
    reset(model)
    with Threads(3) as threads:
        replicas = WindowReplicas(model, loss, threads)
        for (x, y), (value, gradients) in zip(zip(xs, ys, strict=True), expected, strict=True):
            got, found = replicas.gradient(Minibatch((x,), (y,)), ws)
            assert got == pytest.approx(value, abs=1e-12)
            for g, e in zip(found, gradients, strict=True):
                torch.testing.assert_close(g, e, rtol=0, atol=1e-12)
    for s, t in zip(states(model), last, strict=True):
        torch.testing.assert_close(s, t, rtol=0, atol=1e-12)
