"""The network: what it begins with, and that its quantiles cannot cross."""

import torch
from torch import nn

from fluxutils_py import reset
from fluxutils_py.forecasting.direct_model import DirectModel, recurrent_body
from fluxutils_py.forecasting.panel_windows import Channels
from fluxutils_py.nn import LSTM

CHANNELS = Channels(4, 6, hist=1, stat=1, futr=2, categories=(3, 5), base=True)


def network(quantiles=()):
    return DirectModel(recurrent_body(LSTM, 1), CHANNELS, quantiles, hidden_size=7, dropout=0.3)


def sample(n_steps=5, n=3):
    x = torch.randn(n_steps, n, CHANNELS.total)
    x[..., CHANNELS.numeric : CHANNELS.numeric + 2] = torch.randint(0, 3, (n_steps, n, 2)).float()
    return x


def test_quantiles_are_in_order_for_any_weights():
    model = network((0.1, 0.4, 0.5, 0.9)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=3)
    out = model(sample()).unflatten(-1, (5, 4))
    assert (out[..., 1:, :].diff(dim=-2) >= 0).all()


def test_the_linear_way_begins_at_zero_and_windows_equal_steps():
    model = network().eval()
    assert not model.skip.weight.any()
    x = sample()
    whole = model(x)
    reset(model)
    steps = torch.stack([model(step) for step in x])
    torch.testing.assert_close(whole, steps)


def test_the_quantiles_do_not_move_the_point_forecast():
    model = network((0.1, 0.9))
    model(sample()).unflatten(-1, (3, 4))[..., 1:, :].sum().backward()
    assert not model.head.weight.grad.any()
    assert model.quantile_head.weight.grad.any()


def test_each_known_step_ahead_moves_its_own_forecast_alone():
    model = network().eval()
    for p in model.parameters():
        nn.init.normal_(p)
    x = sample()
    at = CHANNELS.numeric + 2  # the first covariate, one step ahead
    changed = x.clone()
    changed[..., at + 2] += 1
    a = model(x)
    reset(model)
    moved = (model(changed) - a).abs().amax((0, 1)) > 0
    assert moved.tolist() == [False, False, True, False]
