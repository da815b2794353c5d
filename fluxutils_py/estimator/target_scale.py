"""Targets of mean 0 and variance 1 to train on, and predictions back in their units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.weights import block_slices
from fluxutils_py.estimator.moments import Standardize, moments, safe_scale


@dataclass(frozen=True)
class TargetScale:
    """One mean and one scale per output.

    Attributes
    ----------
    mean, scale : ndarray of shape (G,), float64
    dtype : numpy.dtype
        Of the targets: predictions are no shorter, or a large mean would take their digits.
    """

    mean: np.ndarray
    scale: np.ndarray
    dtype: np.dtype

    @classmethod
    def of(cls, y: SeriesArray, rows: Segments, weight: SampleWeight | None) -> TargetScale:
        """The mean and the standard deviation of targets over the steps that count, in one pass in blocks.

        Parameters
        ----------
        y : SeriesArray
        rows : Segments
            Row ``n`` says which steps of series ``n`` there are.
        weight : SampleWeight, optional
        """
        count, mean, squares = moments(_live_blocks(y, rows, weight), y.F)
        variance = np.maximum(squares, 0) / np.where(count > 0, count, 1)  # below 0 with weights that are refused later
        return cls(mean, safe_scale(mean, variance), y.dtype)

    @classmethod
    def from_plain(cls, stored: dict[str, Any]) -> TargetScale:
        """The inverse of :meth:`plain`."""
        return cls(np.array(stored["mean"], float), np.array(stored["scale"], float), np.dtype(stored["dtype"]))

    def plain(self) -> dict[str, Any]:
        """As lists and strings, for files."""
        return {"mean": self.mean.tolist(), "scale": self.scale.tolist(), "dtype": self.dtype.name}

    def scaled(self, y: SeriesArray) -> SeriesArray:
        """The targets as the model learns them; nothing is copied."""
        return y.map(Standardize(self.mean, self.scale, inverse=False))

    def undone(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs (S, B, G) of the model in the units of the targets."""
        return (outputs * self.scale + self.mean).astype(np.result_type(outputs.dtype, self.dtype))


def _live_blocks(
    y: SeriesArray, rows: Segments, weight: SampleWeight | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The targets (G, B, S), NaN where there is none, and their weights (B, S)."""
    for series, steps in block_slices(y.N, y.T, y.F):
        part, t = rows[series], np.arange(steps.start, steps.stop)
        y.prefetch(part, steps.start, steps.stop)
        block = np.asarray(y.array[:, series, steps])
        start = part.start[:, None]
        live = (t >= start) & (t < start + part.length[:, None]) & np.isfinite(block)  # infinite: an error elsewhere
        yield np.where(live, block, np.nan), None if weight is None else weight.block(series, steps)
