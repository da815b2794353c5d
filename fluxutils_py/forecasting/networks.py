"""The networks of a forecaster, their ensemble, and their loss.

A :class:`DirectModel` and a :class:`SegmentModel` have one interface: from the channels of a window
to the point forecasts of all steps of the horizon and their quantiles, and ``forget_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from fluxutils_py.errors import SpecError
from fluxutils_py.forecasting.channels import Channels
from fluxutils_py.forecasting.features import Features
from fluxutils_py.nn.cells import gru_step
from fluxutils_py.nn.kernels.modules import run_module
from fluxutils_py.nn.losses import unreduced
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.nn.states import recurrent_layers

LOSSES = ("smape", "mae", "mse")
SHORTEST, LONGEST = 12, 48  # steps per segment
MOST_SEGMENTS = 14  # of the past: two weeks of days


@dataclass(frozen=True)
class ForecastLoss:
    """Loss of a :class:`DirectModel` over a window; for an :class:`Ensemble`, the sum over its
    members.

    Targets may be followed by as many weights of them.

    Parameters
    ----------
    loss : "smape", "mae", "mse" or callable
        Error of the point forecast, from outputs and targets in units of each series' scale;
        "smape" is of logarithms. A callable is a criterion of torch.
    h : int
    quantiles : tuple of float
        The mean of their pinball losses is added.
    """

    loss: Any
    h: int
    quantiles: tuple[float, ...] = ()

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
        if self.loss == "mae":
            return error
        if self.loss == "mse":
            return error.square()
        # the scale is 0 after the end of a series
        scale = xs[..., -1:].clamp(min=1e-12)
        share = 20.0 * torch.tanh(0.5 * scale * error)
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
        n_codes = channels.n_codes
        self.embeddings = nn.ModuleList(map(category_embedding, n_codes))
        n_in = channels.numeric + sum(map(embedding_size, n_codes))
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
        if channels.futr:
            sizes = [embedding_size(c.n_codes) if c.is_category else 1 for c in channels.futr]
            # at the step ahead, and at its counterpart of the season before
            n_known = 2 * sum(sizes)
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
        if c.current > c.numeric:
            codes = x[..., c.numeric : c.current]
            embedded = _embed(self.embeddings, codes.unbind(-1))
            inputs = torch.cat([inputs, *embedded], -1)
        hidden = self.dropout(self.body(inputs))
        point = self.head(hidden) + self.skip(inputs)
        if c.futr:
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
        channels = x[..., c.current : c.current + c.ahead]
        channels = channels.unflatten(-1, (len(c.futr), 2, c.h))
        channels = channels.transpose(-1, -2)  # (.., n, h, 2)
        n_numbers = sum(not covariate.is_category for covariate in c.futr)
        numbers = channels[..., :n_numbers, :, :]
        numbers = numbers.transpose(-3, -2)
        numbers = numbers.flatten(-2)  # (.., h, 2 futr)
        codes = channels[..., n_numbers:, :, :].unbind(-3)
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


class SegmentModel(nn.Module):
    """Network that forecasts the next ``h`` steps and their quantiles from the last values alone.

    It has no state: each step's forecasts depend on its inputs, which hold all values that it
    reads.

    Parameters
    ----------
    features : Features
        Their ``input_size`` is a multiple of the steps per segment, see :func:`segment_length`.
    quantiles : tuple of float
        In increasing order.
    hidden_size : int
    dropout : float
        Dropout of the recurrent layer's outputs.

    Notes
    -----
    Inputs and outputs are those of :class:`DirectModel`, of which it reads the last values only.
    Each series is normalised by its last value and its scale; a linear layer from the inputs is
    added. Lin et al. (2023), SegRNN, arXiv:2308.11200; Zeng et al. (2023), Are transformers
    effective for time series forecasting?, AAAI 37(9), 11121-11128.
    """

    counterparts: Tensor
    learnt: Tensor

    def __init__(
        self,
        features: Features,
        quantiles: tuple[float, ...] = (),
        hidden_size: int = 96,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.h = features.h
        self.n_values = features.input_size
        self.segment = segment = segment_length(features.season)
        self.n_quantiles = len(quantiles)
        n_ahead = -(-self.h // segment)
        self.embedding = nn.Linear(segment, hidden_size)
        self.recurrent = nn.GRU(hidden_size, hidden_size)
        # what tells the segments of the horizon apart
        self.places = nn.Parameter(0.1 * torch.randn(n_ahead, hidden_size))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, segment * (1 + self.n_quantiles))
        self.skip = nn.Linear(self.n_values, self.h)
        # the network begins as one without the bypass
        nn.init.zeros_(self.skip.weight)
        nn.init.zeros_(self.skip.bias)
        if self.n_quantiles:
            with torch.no_grad():
                # the lowest one begins below the point forecast
                self.head.bias[segment : 2 * segment] = -1.0
        at = torch.from_numpy(self.n_values - 1 + features.counterparts())
        self.register_buffer("counterparts", at, persistent=False)
        self.register_buffer("learnt", torch.ones(self.h))

    def forget_steps(self, first: int) -> None:
        """Make the point forecasts from step ``first`` of the horizon the seasonal naive ones."""
        self.learnt[first:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        values = x[..., : self.n_values]
        rows = values.reshape(-1, self.n_values)
        centred = rows - rows[:, -1:]
        ahead = self.dropout(self._segments_ahead(centred))  # (segments, B, hidden)
        out = self.head(ahead)
        out = out.unflatten(-1, (1 + self.n_quantiles, self.segment))
        out = out.permute(1, 2, 0, 3).flatten(2)
        out = out[..., : self.h]  # (B, 1 + quantiles, h)
        naive = centred.index_select(1, self.counterparts)
        point = self.learnt * (out[:, 0] + self.skip(centred) - naive)
        if self.n_quantiles:
            point = with_levels(point, out[:, 1], softplus(out[:, 2:]).unbind(1))
        return point.reshape(*values.shape[:-1], -1)

    def _segments_ahead(self, centred: Tensor) -> Tensor:
        """Return a vector for each segment of the horizon: (segments, B, hidden)."""
        n_series = centred.shape[0]  # a graph is of any number, and len would fix it
        segments = centred.unflatten(1, (-1, self.segment)).transpose(0, 1)
        inputs = torch.relu(self.embedding(segments))
        last = self._run_recurrent(inputs, None)[-1]
        n_ahead = len(self.places)
        # one step from the same state for each segment, as of so many series
        # not repeat_interleave, which would fix an ONNX file to a number of series
        places = self.places[:, None].expand(-1, n_series, -1).flatten(0, 1)
        state = last.repeat(n_ahead, 1)
        after = self._run_recurrent(places[None], state[None])
        return after[0].unflatten(0, (n_ahead, n_series))

    def _run_recurrent(self, x: Tensor, state: Tensor | None) -> Tensor:
        if torch.compiler.is_exporting():
            return self._run_by_formula(x, state)
        by_kernel = run_module(self.recurrent, x, state)
        y, _ = self.recurrent(x, state) if by_kernel is None else by_kernel
        return y

    def _run_by_formula(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Do the same step by step: an exported graph has no layer for any number of series."""
        w_x, w_h, b_x, b_h = self.recurrent.all_weights[0]
        h = x.new_zeros(x.shape[1], self.recurrent.hidden_size) if state is None else state[0]
        outputs = []
        for of_x in linear(x, w_x, b_x).unbind(0):
            h = gru_step(of_x, linear(h, w_h, b_h), h)
            outputs.append(h)
        return torch.stack(outputs)


def segment_length(season: int) -> int:
    """Return the season, or a multiple or the largest divisor of it of SHORTEST to LONGEST steps.

    Examples
    --------
    >>> [segment_length(season) for season in (1, 7, 12, 24, 96, 53)]
    [12, 14, 12, 24, 48, 24]
    """
    if season <= LONGEST:
        return season * -(-SHORTEST // season)
    divisors = [n for n in range(SHORTEST, LONGEST + 1) if season % n == 0]
    return max(divisors, default=24)


def segments_of_past(season: int, n_steps: int, h: int) -> int:
    """Return of how many segments the inputs of a :class:`SegmentModel` are, for series of about
    ``n_steps``, half of which are inputs at most.
    """
    length = segment_length(season)
    # the inputs hold the season that the seasonal naive forecast repeats
    return max(min(MOST_SEGMENTS, (n_steps - h) // (2 * length)), -(-season // length))


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
