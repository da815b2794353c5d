"""Compute inputs and targets of a forecasting network, window by window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import DuckArray
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.features import Features, Past
from fluxutils_py.forecasting.sources import ArraySource, PackedSeries


@dataclass(frozen=True)
class Channels:
    """Numbers of channels of each kind in an input, in this order.

    Attributes
    ----------
    history, hist, stat, futr : int
        Features of the target; then numbers: past covariates, static covariates, covariates known ahead, at the current
        step.
    hist_categories, stat_categories, futr_categories : tuple of int
        Number of codes of each categorical covariate, which has one channel at the current step. Code 0: missing, or
        not seen in training.
    ahead : int
        Each covariate known ahead, numbers first, at the next ``h`` steps, and at the ``h`` steps that the seasonal
        naive forecast repeats.
    base : bool
        Whether the ``h`` steps of the seasonal naive forecast follow, divided by the scale; for logarithms, less the
        level. The scale is always the last channel.
    """

    h: int
    history: int
    hist: int = 0
    stat: int = 0
    futr: int = 0
    hist_categories: tuple[int, ...] = ()
    stat_categories: tuple[int, ...] = ()
    futr_categories: tuple[int, ...] = ()
    base: bool = False

    @property
    def numeric(self) -> int:
        return self.history + self.hist + self.stat + self.futr

    @property
    def categories(self) -> tuple[int, ...]:
        return self.hist_categories + self.stat_categories + self.futr_categories

    @property
    def n_ahead(self) -> int:
        """Number of covariates known ahead."""
        return self.futr + len(self.futr_categories)

    @property
    def ahead(self) -> int:
        return 2 * self.h * self.n_ahead

    @property
    def positions(self) -> list[int]:
        """Positions of the covariates at the current step: past, static, known ahead, numbers first in each group."""
        number, code, found = self.history, self.numeric, []
        groups = (self.hist, self.hist_categories), (self.stat, self.stat_categories), (self.futr, self.futr_categories)
        for n_numbers, codes in groups:
            found += [*range(number, number + n_numbers), *range(code, code + len(codes))]
            number, code = number + n_numbers, code + len(codes)
        return found

    @property
    def total(self) -> int:
        return self.numeric + len(self.categories) + self.ahead + self.h * self.base + 1


@dataclass
class PanelWindows:
    """Cut windows of inputs and targets out of a panel.

    Parameters
    ----------
    source : PackedSeries or ArraySource
        The series: channel 0 is the target in its original units, the others are the past covariates.
    features : Features
    channels : Channels
    static : ndarray of shape (N, C), optional
        Static covariates.
    ahead : PackedSeries, optional
        Covariates known ahead, as long as the series or longer.

    Covariates are scaled numbers, followed by codes of categories.
    """

    source: PackedSeries | ArraySource
    features: Features
    channels: Channels
    static: np.ndarray | None = None
    ahead: PackedSeries | None = None
    _cached: tuple[Any, int, int, np.ndarray, np.ndarray, Past] | None = field(default=None, repr=False)

    @property
    def n_series(self) -> int:
        return self.source.n_series

    @property
    def lookback(self) -> int:
        """Number of earlier steps to read with a window."""
        return self.features.reach if self.source.is_complete else self.features.lookback

    def inputs(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return inputs (B, S, channels), float32, at steps ``start`` to ``stop`` of each row, from the row's start."""
        values, _, past = self._cut_window(rows, start, stop)
        c, features = self.channels, self.features
        n_steps = stop - start
        out = np.empty((len(rows), n_steps, c.total), np.float32)
        features.inputs(past, out[:, :, : c.history])
        now = [*values[1:, :, past.steps]]
        if c.stat or c.stat_categories:
            assert self.static is not None
            now += [*self.static[rows.series].T[:, :, None]]
        if c.n_ahead:
            assert self.ahead is not None
            known = self.ahead.cut(rows.series, rows.start + start - self.lookback, values.shape[2] + c.h)
            now += [*known[:, :, past.steps]]
            at = c.numeric + len(c.categories)
            for channel in known:
                for offsets in (np.arange(1, c.h + 1), features.counterparts()):
                    for k, offset in enumerate(offsets):
                        first = past.steps.start + int(offset)
                        out[:, :, at + k] = channel[:, first : first + n_steps]
                    at += c.h
        for at, channel in zip(c.positions, now, strict=True):
            out[:, :, at] = channel
        if c.base:
            base = past.naive - past.level[:, :, None] if features.log else past.naive
            np.divide(base, past.scale[:, :, None], out=out[:, :, -1 - c.h : -1], casting="same_kind")
        out[:, :, -1] = past.scale
        np.nan_to_num(out[:, :, c.history :], copy=False)
        return out

    def targets(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return the targets (B, S, h), float32, of these steps; NaN where a value is not known."""
        _, z, past = self._cut_window(rows, start, stop)
        features, n_steps = self.features, stop - start
        out = np.full((len(rows), n_steps, features.h), np.nan, np.float32)
        later = features.forward(self.source.cut(rows.series, rows.start + stop, features.h)[0])
        both = np.concatenate([z[:, past.steps], later], axis=1)  # (B, S + h)
        for k in range(1, features.h + 1):
            out[:, :, k - 1] = (both[:, k : k + n_steps] - past.naive[:, :, k - 1]) / past.scale
        out[~past.known] = np.nan
        return out

    def past(self, rows: Segments, start: int, stop: int) -> Past:
        return self._cut_window(rows, start, stop)[2]

    def _cut_window(self, rows: Segments, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, Past]:
        """Return values and transformed values of a window with its earlier steps, and the statistics.

        Caches the last result, because training reads the targets of a window after its inputs.
        """
        last = self._cached
        if last is not None and last[0] is rows and last[1:3] == (start, stop):
            return last[3:]
        lookback = self.lookback
        values = self.source.cut(rows.series, rows.start + start - lookback, stop - start + lookback)
        z = self.features.forward(values[0])
        past = self.features.past(z, stop - start)
        self._cached = rows, start, stop, values, z, past
        return values, z, past


class WindowArray(DuckArray):
    """Inputs or targets of a panel as an (F, N, T) array, computed on access.

    Parameters
    ----------
    panel : PanelWindows
    what : "inputs" or "targets"
    warmup : ndarray of int, shape (N,), optional
        First step of each series with targets; earlier targets are NaN.
    n_steps : int, optional
        T. By default the length of the longest series.
    """

    def __init__(
        self, panel: PanelWindows, what: str, warmup: np.ndarray | None = None, n_steps: int | None = None
    ) -> None:
        self.panel, self.what, self.warmup = panel, what, warmup
        size = panel.channels.total if what == "inputs" else panel.features.h
        self.shape = (size, panel.n_series, int(panel.source.lengths.max()) if n_steps is None else n_steps)
        self.dtype = np.dtype(np.float32)
        self.nonblocking = panel.source.in_memory

    def read_segments(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return the steps ``start`` to ``stop`` of the given rows: (S, B, F)."""
        if self.what == "inputs":
            return self.panel.inputs(rows, start, stop).transpose(1, 0, 2)
        out = self.panel.targets(rows, start, stop)
        if self.warmup is not None:
            steps = rows.start[:, None] + np.arange(start, stop)
            out[steps < self.warmup[rows.series][:, None]] = np.nan
        return out.transpose(1, 0, 2)

    def read(self, *index: Index) -> np.ndarray:
        features, series, steps = map(np.asarray, index)
        rows = Segments(series, np.zeros(len(series), int), np.full(len(series), self.shape[2]))
        first, last = int(steps.min()), int(steps.max()) + 1
        return self.read_segments(rows, first, last).transpose(2, 1, 0)[:, :, steps - first][features]
