"""Hold what a forecaster has learnt and the end of each series, its last values and the networks'
state; forecast from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.filling import forward_fill
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import warn
from fluxutils_py.forecasting.channels import Channels, filled_forward
from fluxutils_py.forecasting.features import Correction, Features, Past
from fluxutils_py.forecasting.forecaster_settings import RECURRENT, output_columns
from fluxutils_py.forecasting.panel_windows import PackedSeries, PanelWindows, WindowArray
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Columns, Panel
from fluxutils_py.nn.states import batch_dims, recurrent_layers
from fluxutils_py.steps.session import InferenceSession
from fluxutils_py.training.predictor import Predictor

BLOCK = 1024  # number of series to forecast at a time


@dataclass(frozen=True)
class FittedState:
    """What a forecaster has learnt; a file holds it, with the ends of the series.

    Attributes
    ----------
    features : Features
    channels : Channels
    columns : Columns
        Of the frames that it reads.
    quantiles : tuple of float
        In the order of the networks' outputs.
    frequency : Frequency
    loss_name : str or callable
        The loss of the point forecast, chosen if it was "auto".
    network : str
        The kind of the networks, "recurrent" or "segments".
    models : tuple of nn.Module
        Empty before they are trained.
    correction : Correction or None
        Of their outputs; None before it is learnt, and where nothing is corrected.
    loss_curve, validation_loss_curve : tuple of float
        Loss per epoch, averaged over the networks.
    network_errors : dict of str to float
        Error of each kind of network on the end of the training part, relative to that of the
        seasonal naive forecast; empty if there was no choice.
    """

    features: Features
    channels: Channels
    columns: Columns
    quantiles: tuple[float, ...]
    frequency: Frequency
    loss_name: Any
    network: str = RECURRENT
    models: tuple[nn.Module, ...] = ()
    correction: Correction | None = None
    loss_curve: tuple[float, ...] = ()
    network_errors: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Columns with forecasts: of the point forecast, then each quantile."""
        return [*output_columns(self.quantiles)]

    @property
    def h(self) -> int:
        """Number of steps to forecast."""
        return self.features.h

    def windows(self, panel: Panel) -> PanelWindows:
        """Return the windows of a panel, from its first step."""
        values = self.channels.values(panel, self.columns.target)
        # not the target: the features tell given values from those that they fill in
        values[1:] = filled_forward(values[1:], panel.lengths)
        return self.packed_windows(values, panel.lengths, self.channels.static(panel))

    def tail_windows(self, tail: np.ndarray, static: np.ndarray) -> PanelWindows:
        """Return the windows of tails (C, N, K). Where only covariates are known ahead, other
        channels are NaN.
        """
        lengths = np.full(tail.shape[1], tail.shape[2])
        return self.packed_windows(tail.reshape(len(tail), -1), lengths, static)

    def packed_windows(
        self, values: np.ndarray, lengths: np.ndarray, static: np.ndarray
    ) -> PanelWindows:
        """Return the windows of series of these lengths, one after the other in ``values``, (C,
        total).
        """
        # those known ahead apart: windows read them beyond the end of the others
        n_ahead = len(self.channels.futr)
        n_source = len(values) - n_ahead
        source = PackedSeries(values[:n_source], lengths)
        ahead = PackedSeries(values[n_source:], lengths) if n_ahead else None
        return PanelWindows(source, self.features, self.channels, static, ahead)


@dataclass
class History:
    """Last values of N series, and the state of each network after all steps but the last.

    Each forecast runs the last step again, because its input includes the covariates known ahead.

    Attributes
    ----------
    tail : ndarray of shape (C, N, K)
        Last K values of each channel (target, past covariates, covariates known ahead), NaN before
        the first step.
    lengths : ndarray of int, shape (N,)
        Number of steps of each series so far.
    static : ndarray of shape (N, ...)
    states : list of list of Tensor
        State of each network for N series, as from :func:`fluxutils_py.states`.
    panel : Panel
        Ids and times of the series, without values.
    """

    tail: np.ndarray
    lengths: np.ndarray
    static: np.ndarray
    states: list[list[Tensor]]
    panel: Panel

    @property
    def n_series(self) -> int:
        return self.tail.shape[1]

    @property
    def n_kept(self) -> int:
        """Number of last steps in ``tail``, K."""
        return self.tail.shape[2]

    def extended(
        self,
        fitted: FittedState,
        panel: Panel,
        series: np.ndarray,
        more: PackedSeries,
        static: np.ndarray,
    ) -> History:
        """Return a new history with more steps of some series, and with new series.

        The networks read only these steps.

        Parameters
        ----------
        fitted : FittedState
        panel : Panel
            That of the new history.
        series : ndarray of int, shape (n,)
            Numbers of the series; new series are numbered from N.
        more : PackedSeries
            The new steps of these series.
        static : ndarray of shape (n, ...)
            Their static covariates.
        """
        n_kept = self.n_kept
        n_series = max(self.n_series, int(series.max()) + 1)
        n_new = n_series - self.n_series
        is_new = series >= self.n_series
        # copies: after an error, this history stays as it is
        more_series = (0, n_new)
        same = (0, 0)
        tail = np.pad(self.tail, (same, more_series, same), constant_values=np.nan)
        of_all = np.pad(self.static, (more_series, same))
        lengths = np.pad(self.lengths, more_series)
        of_all[series[is_new]] = static[is_new]
        # the stored steps and then the new ones, which all begin in the same column
        stop = n_kept + more.lengths
        n = len(series)
        values = more.cut(np.arange(n), np.full(n, -n_kept), stop.max())
        values[:, :, :n_kept] = tail[:, series]
        # not the target: the features tell given values from those that they fill in
        covariates = values[1:]
        nothing_before = np.full(covariates.shape[:2], np.nan)
        forward_fill(covariates, nothing_before, start=np.zeros(len(covariates)))
        windows = fitted.tail_windows(values, of_all[series])
        # the state is that before the last step, which is read again; new series have none
        start = n_kept - 1 + is_new
        count = more.lengths - is_new
        states = []
        for model, old in zip(fitted.models, self.states, strict=True):
            dims = batch_dims(model) or [1] * len(old)
            wide = _pad_states(old, dims, len(lengths))
            part = _select_series(wide, dims, series)
            moved = run_steps(model, windows, start, count, part)
            states.append(_replace_series(wide, dims, series, moved))
        tail[:, series] = _last_values(windows, stop, n_kept)
        lengths[series] += more.lengths
        return History(tail, lengths, of_all, states, panel)


def start_history(
    models: Sequence[nn.Module],
    windows: PanelWindows,
    panel: Panel,
) -> History:
    """Run the networks through all series from the first step; return the history at the end."""
    lengths = windows.source.lengths
    n = windows.n_series
    first = np.zeros(n, int)
    states = [run_steps(model, windows, first, lengths - 1, None) for model in models]
    # without the values, the end of which is in the tail
    ids_and_times = replace(panel, values={}, static={})
    tail = _last_values(windows, lengths, windows.features.lookback + 1)
    return History(tail, lengths, windows.static, states, ids_and_times)


def _last_values(
    windows: PanelWindows,
    stop: np.ndarray,
    n: int,
) -> np.ndarray:
    """Return the ``n`` values of each channel before the step ``stop`` of each series: (C, N,
    n).
    """
    # in this order, by which tail_windows tells them apart
    sources = [windows.source]
    if windows.ahead is not None:
        sources.append(windows.ahead)
    series = np.arange(windows.n_series)
    parts = [source.cut(series, stop - n, n) for source in sources]
    return np.concatenate(parts)


def _pad_states(
    states: Sequence[Tensor],
    dims: Sequence[int],
    n: int,
) -> list[Tensor]:
    """Add series with a state of zeros, up to ``n``; ``dims`` are the axes of the series."""
    # zeros are the state of a series before its first step
    padded = []
    for state, dim in zip(states, dims, strict=True):
        shape = list(state.shape)
        shape[dim] = n - state.shape[dim]
        zeros = state.new_zeros(shape)
        padded.append(torch.cat([state, zeros], dim))
    return padded


def _select_series(
    states: Sequence[Tensor],
    dims: Sequence[int],
    series: np.ndarray,
) -> list[Tensor]:
    at = torch.from_numpy(series)
    pairs = zip(states, dims, strict=True)
    return [t.index_select(dim, at.to(t.device)) for t, dim in pairs]


def _replace_series(
    states: Sequence[Tensor],
    dims: Sequence[int],
    series: np.ndarray,
    new: Sequence[Tensor],
) -> list[Tensor]:
    at = torch.from_numpy(series)
    triples = zip(states, dims, new, strict=True)
    return [t.index_copy(dim, at.to(t.device), part) for t, dim, part in triples]


def run_steps(
    model: nn.Module,
    windows: PanelWindows,
    start: np.ndarray,
    count: np.ndarray,
    state: list[Tensor] | None,
) -> list[Tensor]:
    """Run a network for ``count[n]`` steps of each series from step ``start[n]``, and return its
    state.
    """
    if not recurrent_layers(model):
        return []
    inputs = _one_batch(windows, start, count, np.arange(len(start)))
    # a separate copy runs: the state of the user's network does not change
    predictor = Predictor(model, inputs, state, keep_state=True)
    dims = predictor.session.batch_dims
    before = state
    if before is None:
        before = _pad_states(predictor.session.state, dims, windows.n_series)
    if not count.any():
        return before
    for _ in predictor:
        pass
    # a batch runs as long as its longest series, and changes the states of those without a step
    still = np.flatnonzero(count == 0)
    unchanged = _select_series(before, dims, still)
    return _replace_series(predictor.state(), dims, still, unchanged)


def _one_batch(
    windows: PanelWindows,
    start: np.ndarray,
    count: np.ndarray,
    series: np.ndarray,
) -> SequenceWindows:
    """Return one batch of ``count[n]`` inputs from step ``start[n]`` of some series."""
    n_steps = max(1, int(count.max()))
    # in one batch: a window is cut for all of them at once
    inputs = SeriesArray(WindowArray(windows, "inputs", n_steps=n_steps), "x")
    rows = Segments(series, start, count)
    return SequenceWindows((inputs,), batchsize=len(rows), seqsize=n_steps, segments=rows)


def last_outputs(
    model: nn.Module,
    windows: PanelWindows,
    steps: Segments,
    state: list[Tensor],
) -> np.ndarray:
    """Return a network's outputs (B, outputs) at single steps, from the states before them."""
    n = len(steps)
    parameter = next(model.parameters())

    def read_inputs(series: slice) -> Tensor:
        x = windows.inputs(steps[series], 0, 1)
        x = x.transpose(1, 0, 2)
        x = np.ascontiguousarray(x)
        return torch.from_numpy(x).to(parameter.device, parameter.dtype)

    def sample() -> list[Tensor]:
        # several steps, which show whether the model takes windows
        step = read_inputs(slice(0, 4))
        return [step.repeat(3, 1, 1)]

    session = InferenceSession(model, sample)
    outputs: list[np.ndarray] = []
    for begin in range(0, n, BLOCK):
        series = slice(begin, min(begin + BLOCK, n))
        # in blocks: the inputs of all series may be larger than memory
        session.load(state, n, series)
        with torch.no_grad():
            (out,) = session.run((read_inputs(series),))
        last = out[0].cpu().numpy()
        outputs.append(last.astype(np.float64))
    return np.concatenate(outputs)


def outputs_along(
    model: nn.Module,
    windows: PanelWindows,
    origins: np.ndarray,
    series: np.ndarray | None = None,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Return a network's outputs (N, W, outputs) at steps ``origins[n, w]``, in one pass; NaN where
    it is -1.

    ``series`` and ``start`` are the series that these are of, and the steps from which the network
    reads them, from a state of zeros. None: all series, from their first steps.
    """
    if series is None:
        series = np.arange(len(origins))
    if not recurrent_layers(model):  # which reads no other steps
        row, column = np.nonzero(origins >= 0)
        steps = Segments.single_steps(series[row], origins[row, column])
        outputs = last_outputs(model, windows, steps, [])
        out = np.full((*origins.shape, outputs.shape[1]), np.nan)
        out[row, column] = outputs
        return out
    out = np.empty(0)
    if start is None:
        start = np.zeros(len(origins), int)
    # a series that has not begun is read too, since a batch has no rows without steps
    count = np.maximum(origins.max(1) + 1 - start, 1)
    batch = _one_batch(windows, start, count, series)
    for block in Predictor(model, batch, part=slice(0, len(origins))):
        (y,) = block.y  # (S, B, outputs)
        if not out.size:
            shape = (*origins.shape, y.shape[2])
            out = np.full(shape, np.nan)
        first = start[block.series, None] + block.steps.start
        at = origins[block.series] - first
        inside = (at >= 0) & (at < len(y))
        row, column = np.nonzero(inside)
        values = y[at[row, column], row]
        out[block.series.start + row, column] = values
    return out


def forecasts_along(
    fitted: FittedState, windows: PanelWindows, origins: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield forecasts (N, 1 + quantiles, h) from the steps in each column of ``origins`` (N, W);
    NaN for -1.
    """
    by_model = [outputs_along(model, windows, origins) for model in fitted.models]
    for i, at in enumerate(origins.T):
        past = windows.past(Segments.single_steps(np.arange(len(at)), np.maximum(at, 0)), 0, 1)
        yield _denormalised(fitted, past, [outputs[:, i] for outputs in by_model])


def _denormalised(fitted: FittedState, past: Past, by_model: Sequence[np.ndarray]) -> np.ndarray:
    """Average the outputs (N, outputs) of networks, and convert them to the units of the series,
    (N, 1 + quantiles, h).
    """
    # before the transform is undone, which keeps quantiles in order
    out = np.mean(by_model, 0)
    out = out.reshape(len(out), len(fitted.names), -1)
    return fitted.features.denormalised(out, past, fitted.quantiles, fitted.correction)


def forecasts(
    fitted: FittedState, windows: PanelWindows, at: np.ndarray, states: list[list[Tensor]]
) -> np.ndarray:
    """Forecast from the step ``at[n]`` of each series, in its units: (N, 1 + quantiles, h).

    NaN for series without known values.
    """
    steps = Segments.single_steps(np.arange(len(at)), at)
    past = windows.past(steps, 0, 1)
    pairs = zip(fitted.models, states, strict=True)
    by_model = [last_outputs(model, windows, steps, state) for model, state in pairs]
    return _denormalised(fitted, past, by_model)


def warn_short_series(season: int, lengths: np.ndarray, ids: np.ndarray) -> None:
    """Warn of series that are not longer than a season."""
    # not an error: such series profit from the others
    short = np.flatnonzero(lengths <= season)
    if len(short):
        first = short[0]
        warn(
            f"{len(short)} of {len(lengths)} series have no more steps than a season of {season} "
            f"(series {ids[first]!r} has {lengths[first]}): where the season before "
            "is not known, they are forecast from their last value"
        )
