"""The loss over a window with steps before it."""

import copy

import torch
from torch import nn

from fluxutils_py import reset, seqloss
from fluxutils_py.nn import LSTM, BatchNorm
from fluxutils_py.training.window_step import WindowStep, window_loss


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


def test_a_state_brings_the_buffers_of_the_model_back():
    model = nn.Sequential(LSTM(3, 4), BatchNorm(4), nn.Linear(4, 1))
    step = WindowStep(model, seqloss(nn.MSELoss()), torch.optim.SGD(model.parameters(), 0.1))
    mean = model[1].running_mean
    mean.fill_(3.0)
    state = copy.deepcopy(step.state_dict())  # it has views of what it saves
    mean.fill_(5.0)
    step.load_state_dict(state)
    assert mean.tolist() == [3.0] * 4
