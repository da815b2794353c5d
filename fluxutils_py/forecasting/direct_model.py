"""Forecast all steps of the horizon directly, with recurrent layers and a linear bypass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fluxutils_py.errors import SpecError
from fluxutils_py.forecasting.panel_windows import Channels
from fluxutils_py.nn.losses import unreduced
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.nn.states import recurrent_layers

LOSSES = ("smape", "mae", "mse", "mase")


@dataclass(frozen=True)
class ForecastLoss:
    """Loss of a :class:`DirectModel` over a window; for an :class:`Ensemble`, the sum over its
    members.

    Targets may be followed by as many weights of them.

    Parameters
    ----------
    loss : "smape", "mae", "mse", "mase" or callable
        Error of the point forecast, from outputs and targets in units of each series' scale. A
        callable is a criterion of torch.
    h : int
    quantiles : tuple of float
        The mean of their pinball losses is added.
    log : bool
        Whether the network models logarithms.
    """

    loss: Any
    h: int
    quantiles: tuple[float, ...] = ()
    log: bool = False

    def __call__(
        self,
        model: nn.Module,
        xs: Tensor,
        ys: Tensor,
        ws: Tensor | None = None,
    ) -> Tensor:
        out = run_window(model, xs)
        assert isinstance(out, Tensor)
        # split once, since the gradient of each slice would be a tensor of all outputs
        rows = out.split(self.h, -1)
        n = 1 + len(self.quantiles)
        parts = [rows[i : i + n] for i in range(0, len(rows), n)]
        losses = [self._weighted_mean(part, xs, ys, ws) for part in parts]
        return torch.stack(losses).sum()

    def _weighted_mean(
        self,
        out: Sequence[Tensor],
        xs: Tensor,
        ys: Tensor,
        ws: Tensor | None,
    ) -> Tensor:
        """Return the loss of one network: point forecasts and quantiles, each (S, B, h)."""
        h = self.h
        weights = ys[..., h:]
        ys = ys[..., :h]
        point, *levels = out
        each = self._point_loss(point, ys, xs)
        for q, level in zip(self.quantiles, levels, strict=True):
            # the pinball loss, without the costly gradient of a maximum
            error = ys - level
            pinball = 0.5 * error.abs() + (q - 0.5) * error
            each = each + pinball / len(self.quantiles)
        if weights.shape[-1]:
            each = each * weights
        if ws is None:
            return each.mean()
        # one column for the step, or one for each number of y
        ws = ws[..., :h].expand_as(each)
        # a window without targets has a loss of 0, not NaN
        count = (ws != 0).sum()
        total = (each * ws).sum()
        return total / count.clamp(min=1)

    def _point_loss(
        self,
        out: Tensor,
        ys: Tensor,
        xs: Tensor,
    ) -> Tensor:
        """Return the loss of each output, (S, B, h)."""
        if not isinstance(self.loss, str):
            criterion: Callable[..., Tensor] = unreduced(self.loss)
            return criterion(out, ys)
        error = (out - ys).abs()
        # without logarithms, the targets are in units of the scale already
        if self.loss == "mae" or (self.loss == "mase" and not self.log):
            return error
        if self.loss == "mse":
            return error.square()
        # the scale is 0 after the end of a series
        scale = xs[..., -1:].clamp(min=1e-12)
        # the seasonal naive forecast, in units of the scale
        base = xs[..., -1 - self.h : -1]
        if self.loss == "mase":
            forecast = scale * (base + out)
            truth = scale * (base + ys)
            difference = forecast.exp() - truth.exp()
            return difference.abs() / scale
        if self.log:
            share = 20.0 * torch.tanh(0.5 * scale * error)
        else:
            forecast = base + out
            truth = base + ys
            size = forecast.abs() + truth.abs()
            share = 20.0 * error / size.clamp(min=1e-6)
        # the share alone is flat where the forecast is far off
        return share + 0.5 * error


class DirectModel(nn.Module):
    """Network that forecasts the next ``h`` steps and their quantiles at every step.

    Parameters
    ----------
    body : callable
        ``body(n_in, n_out)`` returns a module that maps windows ``(S, B, n_in)`` or steps ``(B,
        n_in)`` to ``n_out`` outputs. Its state lives in :class:`fluxutils_py.nn.Recur` layers.
    channels : Channels
    quantiles : tuple of float
        In increasing order.
    hidden_size : int
        Number of outputs of the body.
    dropout : float
        Dropout of these outputs.

    Raises
    ------
    SpecError
        If the body takes whole windows and carries no state.

    Notes
    -----
    Outputs are ``(S, B, h * (1 + Q))``: the point forecasts, then each quantile, as differences
    from the seasonal naive forecast in units of the scale. The quantile heads return the lowest
    quantile and non-negative steps between neighbours, so that quantiles never cross.
    """

    def __init__(
        self,
        body: Callable[[int, int], nn.Module],
        channels: Channels,
        quantiles: tuple[float, ...] = (),
        hidden_size: int = 96,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.n_quantiles = len(quantiles)
        tables = map(category_embedding, channels.categories)
        self.embeddings = nn.ModuleList(tables)
        n_in = channels.numeric + sum(map(embedding_size, channels.categories))
        h = channels.h
        self.body = body(n_in, hidden_size)
        takes_windows = getattr(self.body, "takes_windows", False)
        if takes_windows and not recurrent_layers(self.body):
            raise SpecError(
                f"model {type(self.body).__name__} takes whole windows and has no state: each "
                "window would begin anew. Use layers that carry their last inputs, such as "
                "CausalConv1d or TCN of fluxutils_py.nn"
            )
        # of the body's outputs alone: the bypass must see all inputs
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, h)
        self.skip = nn.Linear(n_in, h)
        # the network begins as one without the bypass
        nn.init.zeros_(self.skip.weight)
        nn.init.zeros_(self.skip.bias)
        if self.n_quantiles:
            self.quantile_head = nn.Linear(hidden_size, h * self.n_quantiles)
            self.quantile_skip = nn.Linear(n_in, h * self.n_quantiles)
            nn.init.zeros_(self.quantile_skip.weight)
            with torch.no_grad():
                # the lowest one begins below the point forecast
                self.quantile_skip.bias[:h] = -1.0
        if channels.n_ahead:
            sizes = map(embedding_size, channels.futr_categories)
            # at the step ahead, and at its counterpart of the season before
            n_known = 2 * (channels.futr + sum(sizes))
            self.ahead = nn.Sequential(
                nn.Linear(n_known + 8, 32),
                nn.ReLU(),
                nn.Linear(32, 1),
            )
            self.context = nn.Linear(hidden_size, 8)
            self.ahead_skip = nn.Linear(n_known, 1, bias=False)
            nn.init.zeros_(self.ahead_skip.weight)

    def forget_steps(self, first: int) -> None:
        """Make the point forecasts from step ``first`` of the horizon the seasonal naive ones."""
        with torch.no_grad():
            for layer in (self.head, self.skip):
                layer.weight[first:] = 0.0
                layer.bias[first:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        c = self.channels
        inputs = x[..., : c.numeric]
        if c.categories:
            stop = c.numeric + len(c.categories)
            codes = x[..., c.numeric : stop]
            embedded = _embed(self.embeddings, codes.unbind(-1))
            inputs = torch.cat([inputs, *embedded], -1)
        hidden = self.dropout(self.body(inputs))
        point = self.head(hidden) + self.skip(inputs)
        if c.n_ahead:
            point = point + self._of_known_ahead(x, hidden)
        if not self.n_quantiles:
            return point
        raw = self.quantile_head(hidden) + self.quantile_skip(inputs)
        n_steps = self.n_quantiles - 1
        lowest, others = raw.split([c.h, n_steps * c.h], -1)
        # at once: softplus is slow on narrow parts
        steps = softplus(others).unflatten(-1, (n_steps, c.h))
        return with_levels(point, lowest, steps.unbind(-2))

    def _of_known_ahead(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return what covariates known ahead add to each step, from their values there and at its
        past counterpart.
        """
        c = self.channels
        first = c.numeric + len(c.categories)
        channels = x[..., first : first + c.ahead]
        sizes = (c.n_ahead, 2, c.h)
        channels = channels.unflatten(-1, sizes)
        channels = channels.transpose(-1, -2)  # (.., n, h, 2)
        numbers = channels[..., : c.futr, :, :]
        numbers = numbers.transpose(-3, -2)
        numbers = numbers.flatten(-2)  # (.., h, 2 futr)
        codes = channels[..., c.futr :, :, :]
        codes = codes.unbind(-3)
        # those known ahead are the last of all categories
        tables = self.embeddings[-len(codes) :] if codes else ()
        embedded = [part.flatten(-2) for part in _embed(tables, codes)]
        known = torch.cat([numbers, *embedded], -1)
        context = self.context(hidden).unsqueeze(-2)
        steps = known.shape[:-1]
        context = context.expand(*steps, -1)
        both = torch.cat([known, context], -1)
        added = self.ahead(both) + self.ahead_skip(known)
        return added.squeeze(-1)


def with_levels(point: Tensor, lowest: Tensor, steps: Iterable[Tensor]) -> Tensor:
    """Append quantiles (..., h) to point forecasts: the lowest one, as a difference from these,
    and non-negative steps from each to the next.
    """
    # detached: the quantiles must not move the point forecast
    levels = [point.detach() + lowest]
    for step in steps:
        levels.append(levels[-1] + step)
    return torch.cat([point, *levels], -1)


def embedding_size(n: int) -> int:
    """Return the size of the embedding of a covariate with ``n`` codes."""
    return min(16, 1 + n // 2)


def category_embedding(n: int) -> nn.Embedding:
    """Return an embedding of ``n`` codes; code 0, for categories not seen in training, stays at
    zero.
    """
    embedding = nn.Embedding(n, embedding_size(n), padding_idx=0)
    nn.init.normal_(embedding.weight, std=0.1)
    with torch.no_grad():
        embedding.weight[0] = 0.0
    return embedding


def _embed(
    tables: Iterable[nn.Module],
    codes: Sequence[Tensor],
) -> list[Tensor]:
    """Return the embeddings (..., size) of codes that are stored as floating-point numbers."""
    embedded = []
    for table, code in zip(tables, codes, strict=True):
        assert isinstance(table, nn.Embedding)
        # an export tries the network out with random numbers, which are no codes
        code = code.long().clamp(0, table.num_embeddings - 1)
        embedded.append(table(code))
    return embedded


class Ensemble(nn.Module):
    """Run several networks on the same input and concatenate their outputs.

    Parameters
    ----------
    network : callable
        Returns a new network.
    n_models : int
    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        n_models: int,
    ) -> None:
        super().__init__()
        members = [network() for _ in range(n_models)]
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [member(x) for member in self.members]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def recurrent_body(
    cell: Callable[..., nn.Module], num_layers: int
) -> Callable[[int, int], nn.Module]:
    """Return the ``body`` of a :class:`DirectModel` with recurrent layers; ``cell`` as in
    ``SequenceRegressor``.
    """
    return lambda n_in, n_out: cell(n_in, n_out, num_layers, 0.0)
