"""Sample forecast origins of a panel as inputs and targets, for networks without a state."""

from __future__ import annotations

import numpy as np

from fluxutils_py.data.arrays import DuckArray
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.panel_windows import (
    PackedSeries,
    PanelWindows,
    with_weights,
)


class Origins:
    """Evenly spaced steps of all series, from which a network learns to forecast.

    Parameters
    ----------
    first, stop : ndarray of int, shape (N,)
        Each series has the steps ``first[n]`` to ``stop[n]``, possibly none.
    most : int, optional
        How many steps are sampled at most, of all series together. None: all.

    Attributes
    ----------
    n_all : int
        Number of steps of all series.
    n : int
        Number of sampled steps.
    """

    def __init__(self, first: np.ndarray, stop: np.ndarray, most: int | None = None) -> None:
        self.first = first
        count = np.maximum(stop - first, 0)
        self.end = np.cumsum(count)
        self.n_all = int(self.end[-1])
        self.n = self.n_all if most is None else min(self.n_all, most)
        self._before = self.end - count
        self._last: tuple[Segments, Segments] | None = None

    def steps(self, rows: Segments) -> Segments:
        """Return the sampled steps, 0 to ``n``, that are the series of these rows."""
        # the same object for the targets as for the inputs, which are then cut only once
        if self._last is not None and self._last[0] is rows:
            return self._last[1]
        # computed on demand, not listed: there may be as many as values
        place = rows.series * self.n_all // self.n
        series = np.searchsorted(self.end, place, side="right")
        step = self.first[series] + place - self._before[series]
        found = Segments(series, step, np.ones(len(series), int))
        self._last = rows, found
        return found


class OriginArray(DuckArray):
    """Inputs or targets at origins as an (F, N, 1) array, computed on access: N origins of one step
    each.

    Parameters
    ----------
    panel : PanelWindows
    origins : Origins
    content : "inputs" or "targets"
    weights : PackedSeries, optional
        As of :class:`WindowArray`.
    """

    def __init__(
        self,
        panel: PanelWindows,
        origins: Origins,
        content: str,
        weights: PackedSeries | None = None,
    ) -> None:
        self.panel = panel
        self.weights = weights
        self.origins = origins
        self.content = content
        size = panel.channels.total
        if content == "targets":
            size = panel.features.h if weights is None else 2 * panel.features.h
        self.shape = (size, origins.n, 1)
        self.dtype = np.dtype(np.float32)
        self.nonblocking = True

    def read_segments(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Return the only step of the given rows: (1, B, F)."""
        cut = self.panel.inputs if self.content == "inputs" else self.panel.targets
        steps = self.origins.steps(rows)
        out = cut(steps, 0, 1)
        if self.weights is not None:
            out = with_weights(out, self.weights, steps.series, steps.start)
        return out.transpose(1, 0, 2)[start:stop]

    def read(self, *index: Index) -> np.ndarray:
        features, origins, steps = map(np.asarray, index)
        rows = Segments.from_lengths(self.shape[1], 1)[origins]
        block = self.read_segments(rows, 0, 1).transpose(2, 1, 0)
        return block[:, :, steps][features]
