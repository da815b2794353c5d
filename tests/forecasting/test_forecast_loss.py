"""Errors of point forecasts and quantiles: against the formulas, in the units of the series."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.forecasting.networks import ForecastLoss

S, B, H = 5, 3, 4


class Fixed(nn.Module):
    takes_windows = True

    def __init__(self, out):
        super().__init__()
        self.out = nn.Parameter(out)

    def forward(self, x):
        return self.out[: len(x)] if x.dim() == 3 else self.out[0]


@pytest.fixture
def data():
    out, y = torch.randn(S, B, H, dtype=torch.float64), torch.randn(S, B, H, dtype=torch.float64)
    scale = torch.rand(S, B, 1, dtype=torch.float64) + 0.1
    return out, y, torch.cat([torch.zeros(S, B, 2), scale], -1)


@pytest.mark.parametrize("name", ["smape", "mae", "mse", "torch"])
def test_losses_are_their_formulas(data, name):
    out, y, x = (t.numpy() for t in data)
    scale = x[..., -1:]
    forecast, truth = np.exp(scale * (3 + out)), np.exp(scale * (3 + y))
    expected = {
        "mae": np.abs(out - y),
        "mse": (out - y) ** 2,
        "smape": 20 * np.abs(forecast - truth) / (forecast + truth) + 0.5 * np.abs(out - y),
        "torch": np.where(np.abs(out - y) < 1, 0.5 * (out - y) ** 2, np.abs(out - y) - 0.5),
    }[name]
    criterion = nn.SmoothL1Loss() if name == "torch" else name
    loss = ForecastLoss(criterion, H)
    model = Fixed(data[0])
    np.testing.assert_allclose(loss(model, data[2], data[1]).item(), expected.mean(), rtol=1e-9)
    weight = (np.random.default_rng(0).random((S, B, H)) < 0.6) * 1.0
    found = loss(model, data[2], data[1], torch.from_numpy(weight)).item()
    np.testing.assert_allclose(found, (weight * expected).sum() / weight.sum(), rtol=1e-9)
    alike = torch.full((S, B, 1), 0.5, dtype=torch.float64)
    np.testing.assert_allclose(
        loss(model, data[2], data[1], alike).item(), 0.5 * expected.mean(), rtol=1e-9
    )


def test_quantiles_add_the_mean_pinball_loss(data):
    out, y, x = data
    levels = torch.stack([out - 1, out + 1], -2).flatten(-2)
    loss = ForecastLoss("mae", H, (0.1, 0.9))
    found = loss(Fixed(torch.cat([out, levels], -1)), x, y).item()
    pinball = [
        torch.where(y > level, q * (y - level), (1 - q) * (level - y))
        for q, level in ((0.1, out - 1), (0.9, out + 1))
    ]
    expected = (out - y).abs().mean() + torch.stack(pinball).mean()
    np.testing.assert_allclose(found, expected.item(), rtol=1e-9)


@pytest.mark.parametrize("name", ["smape", "mae", "mse"])
def test_steps_behind_the_end_of_a_series_give_zero_gradient(name):
    model = Fixed(torch.randn(S, B, H))
    x, y, w = torch.zeros(S, B, 7), torch.zeros(S, B, H), torch.zeros(S, B, H)
    loss = ForecastLoss(name, H)(model, x, y, w)
    loss.backward()
    assert loss.item() == 0
    assert not model.out.grad.any()


def test_the_loss_of_several_networks_is_the_sum(data):
    out, y, x = data
    parts = [out, out + 1, out - 2]
    one = [ForecastLoss("mae", H)(Fixed(part), x, y).item() for part in parts]
    assert ForecastLoss("mae", H)(Fixed(torch.cat(parts, -1)), x, y).item() == pytest.approx(
        sum(one)
    )
