"""Compute the losses of point forecasts and quantiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.losses import unreduced
from fluxutils_py.nn.model_windows import run_window

LOSSES = ("smape", "mae", "mse", "mase")


@dataclass(frozen=True)
class ForecastLoss:
    """Loss of a :class:`DirectModel` over a window; for an :class:`Ensemble`, the sum over its members.

    Parameters
    ----------
    loss : "smape", "mae", "mse", "mase" or callable
        Error of the point forecast, from outputs and targets in units of each series' scale. A callable is a criterion
        of torch.
    h : int
    quantiles : tuple of float
        The mean of their pinball losses is added.
    log : bool
        Whether the network models logarithms.
    n_models : int
    """

    loss: Any
    h: int
    quantiles: tuple[float, ...] = ()
    log: bool = False
    n_models: int = 1

    def __call__(self, model: nn.Module, xs: Tensor, ys: Tensor, ws: Tensor | None = None) -> Tensor:
        out = run_window(model, xs)
        assert isinstance(out, Tensor)
        return torch.stack([self._weighted_mean(part, xs, ys, ws) for part in out.chunk(self.n_models, -1)]).sum()

    def _weighted_mean(self, out: Tensor, xs: Tensor, ys: Tensor, ws: Tensor | None) -> Tensor:
        h = self.h
        each = self._point_loss(out[..., :h], ys, xs)
        if self.quantiles:
            levels = out[..., h:].unflatten(-1, (len(self.quantiles), h))
            error = ys.unsqueeze(-2) - levels
            q = error.new_tensor(self.quantiles)[:, None]
            each = each + torch.maximum(q * error, (q - 1) * error).mean(-2)
        if ws is None:
            return each.mean()
        ws = ws.expand_as(each)
        return (each * ws).sum() / (ws != 0).sum().clamp(min=1)

    def _point_loss(self, out: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
        """Return the loss of each output, (S, B, h)."""
        error, scale = (out - ys).abs(), xs[..., -1:].clamp(min=1e-12)  # the scale is 0 after the end of a series
        if self.loss == "mae":
            return error
        if self.loss == "mse":
            return error.square()
        if self.loss == "mase":
            if not self.log:
                return error
            base = xs[..., -1 - self.h : -1]  # seasonal naive forecast, in units of the scale
            return ((scale * (base + out)).exp() - (scale * (base + ys)).exp()).abs() / scale
        if self.loss == "smape":
            if self.log:
                share = 20.0 * torch.tanh(0.5 * scale * error)
            else:
                base = xs[..., -1 - self.h : -1]
                share = 20.0 * error / ((base + out).abs() + (base + ys).abs()).clamp(min=1e-6)
            return share + 0.5 * error
        criterion: Callable[..., Tensor] = unreduced(self.loss)
        return criterion(out, ys)
