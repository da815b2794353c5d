"""Causal features of a series at each step: normalised values, lags and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fluxutils_py.errors import DataError

LOWEST = 0.002  # of a scale: in logs, or relative to the level
LARGEST = 8.0  # of an input
SEASONS_BACK = 2  # from how many seasons ago a missing value is filled in
TRANSFORMS = ("log", "none")


class Past(NamedTuple):
    """What is known at each step of a stretch of series, from values up to that step.

    Attributes
    ----------
    naive : ndarray of shape (B, S, h)
        The seasonal naive forecast in units of the transform: the last value known at the same place in the season.
    level, scale : ndarray of shape (B, S)
        Mean of the last season; how much values differ from those a season before.
    known : ndarray of bool, shape (B, S)
        Whether there is any value to go by. Elsewhere the rest is zero, the scale one.
    filled, levels : ndarray of shape (B, K)
        The values with missing ones filled in, and the level, from some steps before the stretch on.
    steps : slice
        The stretch, within these.
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
    """How a series' past becomes numbers that look alike for all series.

    Parameters
    ----------
    h : int
        Steps ahead.
    season : int
        Steps of a season; 1 means none.
    lag : int
        Steps of the long season, a multiple of ``season``.
    input_size : int
        How many last values are inputs.
    log : bool
        Whether values are taken to logarithms first.
    unit : float
        The typical size of the values, in the units of the transform: below a millionth of it, nothing counts.

    Notes
    -----
    Every number at a step is a function of that step and the ``lookback`` ones before it, whatever stretch is computed.
    The scale is a mean over ``memory`` steps of the absolute difference from a season before, as in the scaled error
    of Hyndman & Koehler (2006), Int. J. Forecasting 22(4), 679-688.
    """

    h: int
    season: int
    lag: int
    input_size: int
    log: bool
    unit: float

    @property
    def memory(self) -> int:
        """Steps of which the scale is a mean, and that a missing value may be filled in from."""
        return max(128, 4 * self.season, 2 * self.lag, min(28 * self.season, 672))

    @property
    def reach(self) -> int:
        """Steps before the first one that are needed to compute it, if no value is missing."""
        turns = -(-self.h // self.lag)  # long seasons back to the counterparts of all steps ahead
        reach = max(self.memory + self.season, turns * self.lag + self.season, -(-self.h // self.season) * self.season)
        return max(reach, self.input_size)

    @property
    def lookback(self) -> int:
        """As :attr:`reach`, if values may be missing, whose last ones before must be found."""
        return self.reach + self.memory + SEASONS_BACK * self.season

    @property
    def n_inputs(self) -> int:
        return self.input_size + 4 + self.h * (self.lag > self.season)

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Into the units of the transform."""
        if not self.log:
            return values
        if (values <= 0).any():  # NaN is not
            raise DataError(
                f"the series were positive when the forecaster was fitted, and are modelled by their logarithms, but "
                f"now there is {np.nanmin(values):g}; fit with transform='none'"
            )
        return np.log(values)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Back to the units of the series."""
        return np.exp(values) if self.log else values

    def past(self, z: np.ndarray, n_steps: int) -> Past:
        """What is known at the last ``n_steps`` of transformed values (B, K), which begin ``lookback`` steps before."""
        m, K = self.season, z.shape[1]
        steps = slice(K - n_steps, K)
        filled = self._fill(z)
        known = ~np.isnan(filled)
        whole = bool(known.all())
        zeros = filled if whole else np.where(known, filled, 0.0)
        count = None if whole else known
        levels = rolling_mean(zeros, count, m)
        level = levels[:, steps]
        scale = self._scale(z, zeros, count)[:, steps]
        here = known[:, steps]
        ahead = self.counterparts()
        naive = _gather(filled, steps, ahead)
        last = filled[:, steps, None]
        if not whole:
            naive = np.where(np.isnan(naive), last, naive)
            naive = np.where(here[:, :, None], naive, 0.0)
            level, scale = np.where(here, level, 0.0), np.where(here, scale, 1.0)
        return Past(naive, level, scale, here, filled, levels, steps)

    def inputs(self, past: Past, out: np.ndarray) -> None:
        """Write the ``n_inputs`` inputs of each step to ``out`` of shape (B, S, n_inputs)."""
        filled, steps, level, scale = past.filled, past.steps, past.level, past.scale
        n, inverse = self.input_size, 1.0 / scale[:, :, None]
        last = sliding_window_view(filled, n, axis=1)[:, steps.start - n + 1 : steps.stop - n + 1]
        out[:, :, :n] = (last - level[:, :, None]) * inverse
        known = ~np.isnan(filled)
        zeros = np.where(known, filled, 0.0)
        before = slice(steps.start - self.lag, steps.stop - self.lag)
        unit = scale if self.log else scale / self.unit
        statistics = (
            level - past.levels[:, before],
            filled[:, steps] - filled[:, steps.start - self.season : steps.stop - self.season],
            rolling_mean(zeros, known, self.lag)[:, steps] - level,
        )
        for i, column in enumerate(statistics):
            out[:, :, n + i] = column / scale
        out[:, :, n + 3] = np.log(np.maximum(unit, 1e-30)) + (2.5 if self.log else 0.0)
        if self.lag > self.season:
            lagged = _gather(filled, steps, self.counterparts(self.lag))
            turns = -(-np.arange(1, self.h + 1) // self.lag)  # how many long seasons back
            for turn in np.unique(turns):
                shift = int(turn) * self.lag
                lagged[:, :, turns == turn] -= _shifted(past.levels, steps, shift)[:, :, None]
            out[:, :, n + 4 :] = (lagged - (past.naive - level[:, :, None])) * inverse
        np.clip(out, -LARGEST, LARGEST, out=out)
        np.copyto(out, 0.0, where=np.isnan(out))
        if not past.known.all():
            out[~past.known] = 0.0

    def counterparts(self, period: int | None = None) -> np.ndarray:
        """Where the last known counterpart of each step ahead lies, counted from the step at hand: 0 or less."""
        period = self.season if period is None else period
        k = np.arange(1, self.h + 1)
        return k - period * -(-k // period)

    def _fill(self, z: np.ndarray) -> np.ndarray:
        """Missing values filled in, from the same place in one of the last seasons, else with the last value."""
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

    def _scale(self, z: np.ndarray, zeros: np.ndarray, known: np.ndarray | None) -> np.ndarray:
        m = self.season
        seasonal = _mean_change(z, m, self.memory)
        if known is not None or np.isnan(seasonal).any():  # before a season has passed: from step to step
            seasonal = np.where(np.isnan(seasonal), _mean_change(z, 1, self.memory), seasonal)
        if self.log:
            lowest: np.ndarray | float = LOWEST
        else:
            size = rolling_mean(np.abs(zeros), known, self.memory)
            lowest = np.fmax(LOWEST * size, 1e-6 * self.unit)
        return np.fmax(seasonal, lowest)


def rolling_mean(values: np.ndarray, known: np.ndarray | None, n: int) -> np.ndarray:
    """Mean over the last ``n`` columns, or as many as there are, of those that are known; NaN where none is."""
    sums = _rolling_sum(values, n)
    if known is None:
        return sums / np.minimum(np.arange(1, values.shape[1] + 1), n)
    counts = _rolling_sum(known.astype(np.float64), n)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0.5, sums / counts, np.nan)


def _rolling_sum(values: np.ndarray, n: int) -> np.ndarray:
    total = np.cumsum(values, axis=1)
    if n < values.shape[1]:
        total[:, n:] -= total[:, :-n].copy()
    return total


def _mean_change(z: np.ndarray, back: int, n: int) -> np.ndarray:
    change = np.full(z.shape, np.nan)
    np.abs(z[:, back:] - z[:, :-back], out=change[:, back:])
    there = ~np.isnan(change)
    return rolling_mean(np.where(there, change, 0.0), there, n)


def _gather(filled: np.ndarray, steps: slice, ahead: np.ndarray) -> np.ndarray:
    """Values at ``step + ahead`` for each step: shape (B, S, len(ahead))."""
    low = int(ahead.min())
    view = sliding_window_view(filled, 1 - low, axis=1)[:, steps.start + low : steps.stop + low]  # step+low .. step
    return view[:, :, ahead - low]


def _shifted(values: np.ndarray, steps: slice, back: int) -> np.ndarray:
    """The values ``back`` steps before each step; NaN where they lie before the first column."""
    first = steps.start - back
    if first >= 0:
        return values[:, first : steps.stop - back]
    out = np.full((len(values), steps.stop - steps.start), np.nan)
    n = max(0, steps.stop - back)
    if n:
        out[:, -n:] = values[:, :n]
    return out
