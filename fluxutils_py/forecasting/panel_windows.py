"""Compute inputs and targets of a forecasting network, window by window."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fluxutils_py.data.arrays import DuckArray
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.channels import Channels
from fluxutils_py.forecasting.features import Features, Past


class PackedSeries:
    """Series of different lengths, one after the other in one array.

    Parameters
    ----------
    values : ndarray of shape (C, total)
        C channels, one column per step; series ``n`` begins at column ``offsets[n]``. NaN where
        missing. Not copied.
    lengths : ndarray of int, shape (N,)

    Attributes
    ----------
    n_series : int
    offsets : ndarray of int, shape (N,)
    is_complete : bool
        Whether the first channel has a value at every step.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values = values
        self.lengths = np.asarray(lengths)
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.n_series = len(self.lengths)
        self.is_complete = not np.isnan(values[0]).any()

    def until(self, lengths: np.ndarray) -> PackedSeries:
        """Return the first ``lengths[n]`` steps of each series, on the same memory."""
        part = copy(self)
        part.lengths = lengths
        return part

    def cut(
        self,
        series: np.ndarray,
        start: np.ndarray,
        n_steps: int,
    ) -> np.ndarray:
        """Return the steps ``start[b]`` to ``start[b] + n_steps`` of the series ``series[b]``.

        Returns
        -------
        ndarray of shape (C, B, n_steps), float64
            A copy. NaN before the first step of a series and after the last.
        """
        steps = start[:, None] + np.arange(n_steps)  # (B, K)
        lengths = self.lengths[series]
        offsets = self.offsets[series]
        outside = (steps < 0) | (steps >= lengths[:, None])
        at = offsets[:, None] + np.where(outside, 0, steps)
        # a series without steps, at the end, begins after the last column
        at = np.minimum(at, self.values.shape[1] - 1)
        out = self.values.take(at, axis=1)
        out = out.astype(np.float64, copy=False)
        if outside.any():
            out[:, outside] = np.nan
        return out


@dataclass
class PanelWindows:
    """Cut windows of inputs and targets out of a panel.

    Parameters
    ----------
    source : PackedSeries
        The series: channel 0 is the target in its original units, the others are the past
        covariates.
    features : Features
    channels : Channels
    static : ndarray of shape (N, C)
        Static covariates.
    ahead : PackedSeries, optional
        Covariates known ahead, as long as the series or longer.

    Covariates are scaled numbers, followed by codes of categories.
    """

    source: PackedSeries
    features: Features
    channels: Channels
    static: np.ndarray
    ahead: PackedSeries | None = None
    # the last window that was cut: its rows and steps, channels and past
    _cached: tuple[Segments, int, int, np.ndarray, Past] | None = field(default=None, repr=False)

    @property
    def n_series(self) -> int:
        return self.source.n_series

    @property
    def lookback(self) -> int:
        """Number of earlier steps to read with a window."""
        # without missing values, none needs steps to be filled in from
        return self.features.reach if self.source.is_complete else self.features.lookback

    def until(self, lengths: np.ndarray) -> PanelWindows:
        """Return the windows of the first ``lengths[n]`` steps of each series, which see no value
        of the steps after them but those of covariates known ahead.
        """
        return replace(self, source=self.source.until(lengths), _cached=None)

    def inputs(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Return inputs (B, S, channels), float32, at steps ``start`` to ``stop`` of each row, from
        the row's start.
        """
        values, past = self._cut(rows, start, stop)
        c = self.channels
        n_steps = stop - start
        here = slice(self.lookback, self.lookback + n_steps)
        out = np.empty((len(rows), n_steps, c.total), np.float32)
        self.features.inputs(past, out[:, :, : c.history])
        current = [*values[1:, :, here], *self.static[rows.series].T[:, :, None]]
        if self.ahead is not None:
            first = rows.start + start - self.lookback
            known = self.ahead.cut(rows.series, first, here.stop + c.h)
            current += [*known[:, :, here]]
            # views of the channels, each copied once: these are the largest part of the input
            later = np.arange(1, c.h + 1)
            offsets = np.concatenate([later, self.features.counterparts()])
            for at, (channel, offset) in enumerate(
                product(known, here.start + offsets), start=c.current
            ):
                out[:, :, at] = channel[:, offset : offset + n_steps]
        for at, channel in enumerate(c.in_order(current), start=c.history):
            out[:, :, at] = channel
        out[:, :, -1] = past.scale
        # the features have no NaN left, and covariates may be missing
        np.nan_to_num(out[:, :, c.history :], copy=False)
        return out

    def targets(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Return the targets (B, S, h), float32, of these steps; NaN where a value is not known."""
        _, past = self._cut(rows, start, stop)
        h = self.features.h
        n_steps = stop - start
        out = np.full((len(rows), n_steps, h), np.nan, np.float32)
        later = self.source.cut(rows.series, rows.start + stop, h)[0]
        z = past.z[:, self.lookback :]
        z = np.concatenate([z, self.features.forward(later)], axis=1)  # (B, S + h)
        for k in range(h):
            change = z[:, k + 1 : k + 1 + n_steps] - past.naive[:, :, k]
            out[:, :, k] = change / past.scale
        # the naive forecast is 0 there, in place of a value
        out[~past.known] = np.nan
        return out

    def past(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> Past:
        """Return the statistics at these steps of each row."""
        return self._cut(rows, start, stop)[1]

    def _cut(self, rows: Segments, start: int, stop: int) -> tuple[np.ndarray, Past]:
        """Return the channels (C, B, K) of the source at these steps and ``lookback`` steps before,
        on which features depend, and the past of these steps.
        """
        # the last one is kept: training reads the targets of a window after its inputs
        last = self._cached
        if last is not None and last[1:3] == (start, stop) and _are_same(last[0], rows):
            return last[3:]
        lookback = self.lookback
        first = rows.start + start - lookback
        values = self.source.cut(rows.series, first, stop - start + lookback)
        past = self.features.past(self.features.forward(values[0]), stop - start)
        self._cached = (rows, start, stop, values, past)
        return values, past


def _are_same(a: Segments, b: Segments) -> bool:
    return a is b or (np.array_equal(a.series, b.series) and np.array_equal(a.start, b.start))


class WindowArray(DuckArray):
    """Inputs or targets of a panel as an (F, N, T) array, computed on access.

    Parameters
    ----------
    panel : PanelWindows
    content : "inputs" or "targets"
    warmup : ndarray of int, shape (N,), optional
        First step of each series with targets; earlier targets are NaN.
    n_steps : int, optional
        T. By default the length of the longest series.
    weights : PackedSeries, optional
        Weight of each value as a target. The h weights of the targets follow them; both are NaN
        where a weight is 0, so that such values have no part in the loss.
    """

    def __init__(
        self,
        panel: PanelWindows,
        content: str,
        warmup: np.ndarray | None = None,
        n_steps: int | None = None,
        weights: PackedSeries | None = None,
    ) -> None:
        self.panel = panel
        self.weights = weights
        self.content = content
        self.warmup = warmup
        size = panel.channels.total
        if content == "targets":
            size = panel.features.h if weights is None else 2 * panel.features.h
        longest = int(panel.source.lengths.max())
        if n_steps is None:
            n_steps = longest
        self.shape = (size, panel.n_series, n_steps)
        self.dtype = np.dtype(np.float32)
        self.nonblocking = True

    def read_segments(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Return the steps ``start`` to ``stop`` of the given rows: (S, B, F)."""
        if self.content == "inputs":
            return self.panel.inputs(rows, start, stop).transpose(1, 0, 2)
        out = self.panel.targets(rows, start, stop)
        if self.warmup is not None:
            steps = rows.start[:, None] + np.arange(start, stop)
            warmup = self.warmup[rows.series]
            out[steps < warmup[:, None]] = np.nan
        if self.weights is not None:
            # of the values that are 1 to h steps later
            first = rows.start + start + 1
            later = self.weights.cut(rows.series, first, sum(out.shape[1:]) - 1)
            weights = sliding_window_view(later[0], out.shape[2], axis=1)
            dead = np.isnan(out) | (weights == 0)
            out = np.concatenate([out, weights.astype(out.dtype)], axis=2)
            out[np.concatenate([dead, dead], axis=2)] = np.nan
        return out.transpose(1, 0, 2)

    def read(self, *index: Index) -> np.ndarray:
        features, series, steps = map(np.asarray, index)
        _, n_series, n_steps = self.shape
        # any index is a window of whole steps, of which the asked for ones are returned
        rows = Segments.from_lengths(n_series, n_steps)[series]
        first = int(steps.min())
        block = self.read_segments(rows, first, int(steps.max()) + 1)
        block = block.transpose(2, 1, 0)
        return block[:, :, steps - first][features]


class OriginArray(WindowArray):
    """Inputs or targets at origins as an (F, N, 1) array, computed on access: N origins of one step
    each, evenly spaced among steps of all series.

    Parameters
    ----------
    panel, content, weights : as of :class:`WindowArray`
    first, stop : ndarray of int, shape (N,)
        Each series has the steps ``first[n]`` to ``stop[n]``, possibly none.
    most : int, optional
        How many steps are sampled at most, of all series together. None: all.
    """

    def __init__(
        self,
        panel: PanelWindows,
        content: str,
        first: np.ndarray,
        stop: np.ndarray,
        most: int | None = None,
        weights: PackedSeries | None = None,
    ) -> None:
        super().__init__(panel, content, weights=weights)
        count = np.maximum(stop - first, 0)
        self.first = first
        self.end = np.cumsum(count)
        self._before = self.end - count
        self.n_all = int(self.end[-1])
        n = self.n_all if most is None else min(self.n_all, most)
        self.shape = (self.shape[0], n, 1)

    def steps(self, rows: Segments) -> Segments:
        """Return the steps of the panel that are the given rows."""
        # computed on demand, not listed: there may be as many as values
        place = rows.series * self.n_all // self.shape[1]
        series = np.searchsorted(self.end, place, side="right")
        step = self.first[series] + place - self._before[series]
        return Segments.single_steps(series, step)

    def read_segments(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return the only step of the given rows: (1, B, F)."""
        return super().read_segments(self.steps(rows), 0, 1)[start:stop]
