"""Compute causal features of series: normalised values, lags and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fluxutils_py.errors import DataError

LARGEST = 8.0  # inputs are clipped to this absolute value
SEASONS_BACK = 2  # number of past seasons from which to fill in a missing value
TRANSFORMS = ("log", "none")


class Past(NamedTuple):
    """Statistics at each of S steps of B series, from values up to that step.

    Attributes
    ----------
    naive : ndarray of shape (B, S, h)
        Seasonal naive forecast in units of the transform: the last known value at the same position
        in the season.
    level, scale : ndarray of shape (B, S)
        Mean of the last season; mean absolute difference between values one season apart.
    known : ndarray of bool, shape (B, S)
        Whether there is a value to forecast from. Elsewhere ``naive`` and ``level`` are 0 and
        ``scale`` is 1.
    filled, levels : ndarray of shape (B, K)
        Values with missing ones filled in, and the level, at the S steps and K - S steps before
        them.
    steps : slice
        Position of the S steps among the K.
    """

    naive: np.ndarray
    level: np.ndarray
    scale: np.ndarray
    known: np.ndarray
    filled: np.ndarray
    levels: np.ndarray
    steps: slice


@dataclass(frozen=True)
class Features:
    """Conversion of a series' past to network inputs of the same scale for all series.

    Parameters
    ----------
    h : int
        Number of steps to forecast.
    season : int
        Steps per season; 1 means no season.
    lag : int
        Steps per long season, a multiple of ``season``.
    input_size : int
        Number of last values that are inputs.
    log : bool
        Whether to take logarithms first.
    unit : float
        Typical change from season to season, in units of the transform.
    smallest_scale : float
        No scale is below it. It bounds the targets of a series that was constant for a long time
        and then changes.

    Notes
    -----
    The features of a step depend only on that step and the ``lookback`` steps before it, whatever
    range is computed. Adding a constant to all values changes no input, whatever its size: all
    statistics are differences. The scale is a mean over ``memory`` steps of the absolute difference
    from a season before, as in the scaled error of Hyndman & Koehler (2006), Int. J. Forecasting
    22(4), 679-688.
    """

    h: int
    season: int
    lag: int
    input_size: int
    log: bool
    unit: float
    smallest_scale: float

    @property
    def memory(self) -> int:
        """Number of steps over which the scale is averaged, and from which a missing value may be
        filled in.
        """
        return max(128, 4 * self.season, 2 * self.lag, min(28 * self.season, 672))

    @property
    def reach(self) -> int:
        """Number of earlier steps that the features of a step need, if no value is missing."""
        turns = -(
            -self.h // self.lag
        )  # number of long seasons back to the counterpart of the last forecast step
        reach = max(
            self.memory + self.season,
            turns * self.lag + self.season,
            -(-self.h // self.season) * self.season,
        )
        return max(reach, self.input_size)

    @property
    def lookback(self) -> int:
        """Like :attr:`reach`, if values may be missing: includes the steps from which to fill them
        in.
        """
        return self.reach + self.memory + SEASONS_BACK * self.season

    @property
    def n_inputs(self) -> int:
        return self.input_size + 4 + self.h * (self.lag > self.season)

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Transform values: take logarithms if ``log``, else return them as they are."""
        if not self.log:
            return values
        if (values <= 0).any():  # False for NaN
            raise DataError(
                "the series were positive when the forecaster was fitted, and are modelled by "
                f"their logarithms, but now there is {np.nanmin(values):g}; fit with "
                "transform='none'"
            )
        return np.log(values)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Undo :meth:`forward`."""
        return np.exp(values) if self.log else values

    def past(self, z: np.ndarray, n_steps: int) -> Past:
        """Compute the statistics at the last ``n_steps`` of transformed values (B, K), with the
        steps before.
        """
        K = z.shape[1]
        steps = slice(K - n_steps, K)
        filled = self._fill_missing(z)
        levels = rolling_mean(filled, self.season)
        level = levels[:, steps]
        scale = self._compute_scale(z)[:, steps]
        here = ~np.isnan(filled[:, steps])
        naive = _gather_steps(filled, steps, self.counterparts())
        if not here.all() or np.isnan(naive).any():
            naive = np.where(np.isnan(naive), filled[:, steps, None], naive)
            naive = np.where(here[:, :, None], naive, 0.0)
            level = np.where(here, level, 0.0)
            scale = np.where(here, scale, 1.0)
        return Past(naive, level, scale, here, filled, levels, steps)

    def inputs(self, past: Past, out: np.ndarray) -> None:
        """Write the inputs of each step to ``out``, of shape (B, S, n_inputs)."""
        filled, steps, level, scale = past.filled, past.steps, past.level, past.scale
        n, inverse = self.input_size, 1.0 / scale[:, :, None]
        last = sliding_window_view(filled, n, axis=1)[:, steps.start - n + 1 : steps.stop - n + 1]
        out[:, :, :n] = (last - level[:, :, None]) * inverse
        before = slice(steps.start - self.lag, steps.stop - self.lag)
        statistics = (
            level - past.levels[:, before],
            filled[:, steps] - filled[:, steps.start - self.season : steps.stop - self.season],
            rolling_mean(filled, self.lag)[:, steps] - level,
        )
        for i, column in enumerate(statistics):
            out[:, :, n + i] = column / scale
        out[:, :, n + 3] = np.log(scale / self.unit)
        if self.lag > self.season:
            lagged = _gather_steps(filled, steps, self.counterparts(self.lag))
            turns = -(-np.arange(1, self.h + 1) // self.lag)  # number of long seasons back
            for turn in np.unique(turns):
                shift = int(turn) * self.lag
                lagged[:, :, turns == turn] -= _shift_steps(past.levels, steps, shift)[:, :, None]
            lagged -= past.naive - level[:, :, None]
            np.multiply(lagged, inverse, out=out[:, :, n + 4 :], casting="same_kind")
        np.clip(out, -LARGEST, LARGEST, out=out)
        np.copyto(out, 0.0, where=np.isnan(out))
        if not past.known.all():
            out[~past.known] = 0.0

    def counterparts(self, period: int | None = None) -> np.ndarray:
        """Return the offset (0 or less) from the current step to the last counterpart of each
        forecast step: (h,).
        """
        period = self.season if period is None else period
        k = np.arange(1, self.h + 1)
        return k - period * -(-k // period)

    def _fill_missing(self, z: np.ndarray) -> np.ndarray:
        """Fill in missing values from the same position in one of the last seasons, else with the
        last value.
        """
        missing = np.isnan(z)
        if not missing.any():
            return z
        filled = z.copy()
        for back in range(1, SEASONS_BACK + 1):
            shift = back * self.season
            earlier = z[:, :-shift]
            now = filled[:, shift:]
            np.copyto(now, earlier, where=np.isnan(now))
        missing = np.isnan(filled)
        at = np.where(missing, -1, np.arange(z.shape[1]))
        at = np.maximum.accumulate(at, axis=1)
        near = missing & (at >= 0) & (np.arange(z.shape[1]) - at <= self.memory)
        rows, columns = np.nonzero(near)
        filled[rows, columns] = filled[rows, at[rows, columns]]
        return filled

    def _compute_scale(self, z: np.ndarray) -> np.ndarray:
        scale = _mean_change(z, self.season, self.memory)
        if np.isnan(scale).any():  # in the first season: change from step to step
            scale = np.where(np.isnan(scale), _mean_change(z, 1, self.memory), scale)
        return np.fmax(scale, self.smallest_scale)


def rolling_mean(values: np.ndarray, n: int) -> np.ndarray:
    """Return the mean of the known values in the last ``n`` columns, or fewer at the start; NaN if
    there are none.
    """
    known = ~np.isnan(values)
    first = np.take_along_axis(values, known.argmax(1)[:, None], 1)
    above = values - first  # sums of small differences stay exact, however high the level
    if known.all():
        return first + _rolling_sum(above, n) / np.minimum(np.arange(1, values.shape[1] + 1), n)
    sums = _rolling_sum(np.where(known, above, 0.0), n)
    counts = _rolling_sum(known.astype(np.float64), n)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0.5, first + sums / counts, np.nan)


def _rolling_sum(values: np.ndarray, n: int) -> np.ndarray:
    total = np.cumsum(values, axis=1)
    if n < values.shape[1]:
        total[:, n:] -= total[:, :-n].copy()
    return total


def _mean_change(z: np.ndarray, back: int, n: int) -> np.ndarray:
    change = np.full(z.shape, np.nan)
    np.abs(z[:, back:] - z[:, :-back], out=change[:, back:])
    return rolling_mean(change, n)


def _gather_steps(filled: np.ndarray, steps: slice, ahead: np.ndarray) -> np.ndarray:
    """Return the values at ``step + ahead`` for each step: (B, S, len(ahead))."""
    low = int(ahead.min())
    view = sliding_window_view(filled, 1 - low, axis=1)[
        :, steps.start + low : steps.stop + low
    ]  # step+low .. step
    return view[:, :, ahead - low]


def _shift_steps(values: np.ndarray, steps: slice, back: int) -> np.ndarray:
    """Return the values ``back`` steps before each step; NaN before the first column."""
    first = steps.start - back
    if first >= 0:
        return values[:, first : steps.stop - back]
    out = np.full((len(values), steps.stop - steps.start), np.nan)
    n = max(0, steps.stop - back)
    if n:
        out[:, -n:] = values[:, :n]
    return out
