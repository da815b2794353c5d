"""The loss of a window after earlier steps, against the whole in one call."""

import pytest
import torch
from torch import nn

from fluxutils_py.nn import GRU
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.training.window_loss import window_loss


def own_loss(model, xs, ys):
    return nn.functional.mse_loss(torch.stack([model(x) for x in xs]), ys)


@pytest.mark.parametrize("loss", [seqloss(nn.MSELoss()), own_loss], ids=["seqloss", "own"])
def test_earlier_steps_carry_no_loss_but_gradients(loss):
    model = nn.Sequential(GRU(3, 4), nn.Linear(4, 1)).double()
    x, y = torch.randn(7, 2, 3, dtype=torch.float64), torch.randn(5, 2, 1, dtype=torch.float64)
    got = window_loss(loss, model, x, y, None, n_overlap=2)
    got_gradient = torch.autograd.grad(got, list(model.parameters()))
    model[0].reset()
    expected = (model(x)[2:] - y).square().mean()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for g, e in zip(got_gradient, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-12)


def test_factors_multiply_the_loss():
    model, x, y = nn.Linear(3, 1), torch.randn(5, 2, 3), torch.randn(5, 2, 1)
    for loss in (seqloss(nn.MSELoss()), own_loss):
        plain = window_loss(loss, model, x, y, None)
        torch.testing.assert_close(window_loss(loss, model, x, y, None, factors=[0.25]), 0.25 * plain)
