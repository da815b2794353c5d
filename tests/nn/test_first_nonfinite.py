"""The module that first gave NaN (first_nonfinite) is named in the error of a step."""

import pytest
import torch
from torch import nn

from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.first_nonfinite import first_nonfinite


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()


class LogarithmThenLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        return self.inner(x.log())


def error_of(model, x, **options):
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD, **options)
    before = [b.clone() for b in [*model.parameters(), *model.buffers()]]
    with pytest.raises(FloatingPointError) as caught:
        trainer.train_step((x, torch.zeros(len(x), 1)))
    return str(caught.value), before


def test_the_module_that_first_gave_nan_is_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Tanh(), Logarithm()), nn.Linear(2, 1))
    nn.init.constant_(model[0].weight, -1.0)
    message, before = error_of(model, torch.ones(4, 3))
    assert "loss is nan, first given by module '1.1' (Logarithm)" in message
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_nan_in_the_data_and_in_parameters_is_told_apart():
    message, _ = error_of(nn.Sequential(nn.Linear(3, 1)), torch.full((4, 3), torch.nan))
    assert message.startswith("loss is nan; ")  # no module gave it
    message, _ = error_of(LogarithmThenLinear(), -torch.ones(4, 3))
    assert "already in the input of module 'inner' (Linear)" in message
    model = nn.Sequential(nn.Linear(3, 1))
    nn.init.constant_(model[0].bias, torch.inf)
    message, _ = error_of(model, torch.ones(4, 3))
    assert "parameter '0.bias' is not finite" in message


def test_looking_leaves_random_numbers_buffers_and_state_alone():
    model = nn.Sequential(LSTM(3, 2), nn.BatchNorm1d(2), nn.Dropout(), Logarithm())
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    model(x)
    buffers, state = [b.clone() for b in model.buffers()], model[0].state[0].clone()
    generator = torch.get_rng_state()
    assert first_nonfinite(model, lambda: model(x)) == ", first given by module '3' (Logarithm)"
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(model[0].state[0], state)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert not any(m._forward_hooks for m in model.modules())
