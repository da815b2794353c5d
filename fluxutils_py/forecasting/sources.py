"""Read ranges of steps of series from memory or files."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.errors import DataError


class PackedSeries:
    """Series of different lengths, one after the other in one array.

    Parameters
    ----------
    values : ndarray of shape (C, total)
        C channels, one column per step; series ``n`` begins at column ``offsets[n]``. NaN where missing. Not copied.
    lengths : ndarray of int, shape (N,)

    Attributes
    ----------
    n_series : int
    offsets : ndarray of int, shape (N,)
    is_complete : bool
        Whether the first channel has a value at every step.
    """

    in_memory = True

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.lengths = values, np.asarray(lengths)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(int)
        self.n_series = len(self.lengths)
        self.is_complete = not np.isnan(values[0]).any()

    def cut(self, series: np.ndarray, start: np.ndarray, n_steps: int) -> np.ndarray:
        """Return the steps ``start[b]`` to ``start[b] + n_steps`` of the series ``series[b]``.

        Returns
        -------
        ndarray of shape (C, B, n_steps), float64
            A copy. NaN before the first step of a series and after the last.
        """
        steps = start[:, None] + np.arange(n_steps)  # (B, K)
        outside = (steps < 0) | (steps >= self.lengths[series][:, None])
        at = self.offsets[series][:, None] + np.where(outside, 0, steps)
        out = self.values.take(np.minimum(at, self.values.shape[1] - 1), axis=1).astype(np.float64, copy=False)
        if outside.any():
            out[:, outside] = np.nan
        return out


class ArraySource:
    """An (F, N, T) array as ``F * N`` series: feature ``f`` of series ``n`` is series ``f * N + n``.

    Parameters
    ----------
    array : array of shape (F, N, T)
        A NumPy array, a memory map, an h5py dataset, or any object that takes three slices. Reads only what is cut.
    """

    is_complete = False

    def __init__(self, array: Any) -> None:
        self.array = array
        n_features, self.n_per_feature, self.n_steps = (int(n) for n in array.shape)
        self.n_series = n_features * self.n_per_feature
        self.lengths = np.full(self.n_series, self.n_steps)
        self.in_memory = type(array) is np.ndarray

    def cut(self, series: np.ndarray, start: np.ndarray, n_steps: int) -> np.ndarray:
        """Like :meth:`PackedSeries.cut`; reads neighbouring series with equal starts at once.

        Raises
        ------
        DataError
            If a value is infinite. The message names feature, series and step.
        """
        out = np.full((1, len(series), n_steps), np.nan)
        feature, n = np.divmod(series, self.n_per_feature)
        new = (np.diff(series) != 1) | (np.diff(feature) != 0) | (np.diff(start) != 0)
        for run in np.split(np.arange(len(series)), np.flatnonzero(new) + 1):
            b, first = run[0], int(start[run[0]])
            begin, stop = max(first, 0), min(first + n_steps, self.n_steps)
            if begin >= stop:
                continue
            f, where = int(feature[b]), slice(int(n[b]), int(n[b]) + len(run))
            block = plain_block(self.array[f : f + 1, where, begin:stop])
            _refuse_infinite(block, f, int(n[b]), begin)
            out[:, run, begin - first : stop - first] = block
        return out


def _refuse_infinite(block: np.ndarray, feature: int, series: int, step: int) -> None:
    """Raise DataError if a block (1, N, T), cut from this feature, series and step on, holds an infinite value."""
    bad = np.isinf(block)
    if bad.any():
        _, n, t = (int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"the array is {block[0, n, t]} at [{feature}, {series + n}, {step + t}] (feature, series, step); correct "
            "it, or set NaN"
        )
