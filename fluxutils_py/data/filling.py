"""Fill in missing values with the last one before them, lazily and in any order of reading."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.data.arrays import read_block
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import DerivedArray, Function

LOOK_BACK = 64  # steps that are read first, to find the last value before a block; then ever more


class _Ending(NamedTuple):
    """Where a read ended, and the last values there: (F, n), NaN where there is none."""

    series: range
    stop: int
    values: np.ndarray

    def ends_before(self, series: Index, step: int) -> bool:
        # only ranges compare as a whole
        return self.stop == step and isinstance(series, range) and self.series == series


class ForwardFilled(DerivedArray):
    """An (F, N, T) array whose missing values are filled in, when read, with the last value before
    them.

    The result does not depend on how it is read: if a block begins with a missing value, earlier
    steps are read until one has a value. Later steps are never read for it. It pickles like
    :class:`fluxutils_py.data.LazyArray`.

    Parameters
    ----------
    source : array of shape (F, N, T)
    start : ndarray of shape (F,)
        Value before the first one of a series.
    convert : callable
        Turns blocks of the source into fresh blocks (F, n, t) of floating-point numbers.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    feature_names : tuple of str or None
        Names of the source.
    """

    def __init__(
        self,
        source: Any,
        start: np.ndarray,
        convert: Function,
    ) -> None:
        self.source = source
        self.start = start
        self.convert = convert
        self.shape = tuple(source.shape)
        n_features = self.shape[0]
        trial = np.zeros((n_features, 1, 1), source.dtype)
        self.dtype = convert(trial).dtype
        self._last: _Ending | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_last": None}

    def read_stretch(self, series: Index, steps: range) -> np.ndarray:
        block = self._read_source(series, steps)
        begins_missing = np.isnan(block[:, :, 0])
        state = self._values_before(series, steps.start, begins_missing)
        last = forward_fill(block, state, self.start)
        if isinstance(series, range):  # the next window most often continues here
            self._last = _Ending(series, steps.stop, last)
        return block

    def _read_source(self, series: Index, steps: range) -> np.ndarray:
        features = range(self.shape[0])
        block = read_block(self.source, features, series, steps)
        return self.convert(block)

    def _values_before(
        self,
        series: Index,
        stop: int,
        missing: np.ndarray,
    ) -> np.ndarray:
        """Return the last values before a step where ``missing`` is true; NaN elsewhere and where
        there is none.
        """
        known = self._last  # read once: other threads may replace it
        if known is not None and known.ends_before(series, stop):
            return known.values
        values = np.full(missing.shape, np.nan, self.dtype)
        size = LOOK_BACK
        while stop > 0 and missing.any():
            columns = np.flatnonzero(missing.any(0))
            steps = range(max(0, stop - size), stop)
            earlier = self._read_source(np.asarray(series)[columns], steps)
            values[:, columns] = np.where(
                missing[:, columns],
                last_values(earlier),
                values[:, columns],
            )
            missing = missing & np.isnan(values)
            stop = steps.start
            size *= 2  # so that a long gap is read in few pieces
        return values


def last_positions(present: np.ndarray) -> np.ndarray:
    """Return, for each place along the last axis, the last one up to it that is present; -1 where
    there is none.
    """
    n = present.shape[-1]
    places = np.where(present, np.arange(n), -1)
    return np.maximum.accumulate(places, axis=-1)


def forward_fill(
    block: np.ndarray,
    state: np.ndarray,
    start: np.ndarray,
) -> np.ndarray:
    """Fill in the missing values of a block (F, N, S) in place; return its last values (F, N), or
    NaN.

    Parameters
    ----------
    block : ndarray of shape (F, N, S)
    state : ndarray of shape (F, N)
        The last values before the block; NaN where there is none.
    start : ndarray of shape (F,)
        Value to use where there is none before.
    """
    missing = np.isnan(block)
    if not missing.any():
        return block[:, :, -1].copy()
    at = last_positions(~missing)
    has_none = at < 0
    at = np.maximum(at, 0)
    filled = np.take_along_axis(block, at, 2)
    before = state[:, :, None]
    filled = np.where(has_none, before, filled)
    # without the start, which is no value of the series: it is not to be carried on
    first = start[:, None, None].astype(block.dtype)
    complete = np.where(np.isnan(filled), first, filled)
    block[missing] = complete[missing]
    return filled[:, :, -1]


def last_values(block: np.ndarray) -> np.ndarray:
    """Return the last values (F, N) of a block (F, N, S), NaN where there is none."""
    backwards = ~np.isnan(block[:, :, ::-1])
    n_after = backwards.argmax(2)  # 0 where there is none: the last value, which is NaN
    at = block.shape[2] - 1 - n_after
    values = np.take_along_axis(block, at[:, :, None], 2)
    return values[:, :, 0]
