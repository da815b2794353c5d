"""The loss over a window with steps before it."""

import torch
from torch import nn

from fluxutils_py import reset, seqloss
from fluxutils_py.nn import LSTM
from fluxutils_py.training.window_step import window_loss


def test_gradients_flow_through_the_steps_before_the_window():
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    x, y = torch.randn(7, 2, 3, requires_grad=True), torch.randn(5, 2, 1)
    loss = window_loss(seqloss(nn.functional.mse_loss), model, x, y, None, n_overlap=2)
    reset(model)
    expected = (model(x)[2:] - y).square().mean()
    assert torch.allclose(loss, expected, rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, x)
    (whole,) = torch.autograd.grad(expected, x)
    assert torch.allclose(gradient, whole, atol=1e-7)
    assert gradient[0].abs().max() > 0
