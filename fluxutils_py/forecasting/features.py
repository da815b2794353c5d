"""Compute causal features of series: normalised values, lags and statistics.

:class:`Features` has the formulas, once for NumPy and torch: training reads the past of all steps
of a window through :class:`Past`, and the exported step reads that of one step in torch.
:class:`Correction` is what is done to the outputs of networks; ``calibration.py`` learns it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fluxutils_py.data.filling import last_positions
from fluxutils_py.errors import DataError

LARGEST = 8.0  # inputs are clipped to this absolute value
SEASONS_BACK = 2  # number of past seasons from which to fill in a missing value
TRANSFORMS = ("log", "none")
# Forecasts beside the seasonal naive one that need no network: the last value, the line through the
# first and last value of the memory, the mean of the last season and of the memory, the naive
# forecast of the long season, and the mean of the last N_SEASONS seasons at the same place.
BASELINE_NAMES = ("last", "drift", "level", "mean", "long season", "seasonal mean")
SOURCES = ("network", "seasonal naive", *BASELINE_NAMES)
N_SEASONS = 4  # the memory holds as many
DEVIATION = math.sqrt(math.pi / 2)  # of a normal error, in units of its mean absolute value

Array = Any  # of NumPy or torch


class Past:
    """Values before and at the last S steps of B series, with missing ones filled in, and what
    :meth:`Features.describe` says of them. Of NumPy; ``StepPast`` is of torch.

    Parameters
    ----------
    z, filled : array of shape (B, K)
        Transformed values up to the last step, as they were given, and with missing ones filled in.
    n_steps : int
        S.

    Attributes
    ----------
    xp : module
        NumPy or torch: the formulas use ``where``, ``isnan`` and ``log``.
    naive : array of shape (B, S, h)
        Seasonal naive forecast in units of the transform: the last known value at the same position
        in the season.
    level, scale : array of shape (B, S)
        Mean of the last season; mean absolute difference between values one season apart.
    known : array of bool, shape (B, S)
        Whether there is a value to forecast from. Elsewhere ``naive`` and ``level`` are 0 and
        ``scale`` is 1.
    """

    xp: Any = np  # of the class: modules cannot be pickled
    naive: Array
    level: Array
    scale: Array
    known: Array

    def __init__(self, z: Array, filled: Array, n_steps: int) -> None:
        self.z = z
        self.filled = filled
        self.n_steps = n_steps
        # of all K steps, by their length: several features need the same mean
        self._means: dict[int, np.ndarray] = {}

    def recent(self, n: int) -> Array:
        """Return the last ``n`` values at each step, (B, S, n), without a copy."""
        views = sliding_window_view(self.filled, n, axis=1)
        return views[:, -self.n_steps :]

    def at(self, offsets: np.ndarray) -> Array:
        """Return the values at ``step + offset`` for each offset, 0 or less: (B, S, offsets)."""
        lowest = int(offsets.min())
        return self.recent(1 - lowest)[:, :, offsets - lowest]

    def back(self, n: int) -> Array:
        """Return the value ``n`` steps before each step: (B, S)."""
        return self._shifted(self.filled, n)

    def any_missing(self, values: Array) -> bool:
        """Whether formulas must treat missing values; always true where a graph is traced."""
        return bool(np.isnan(values).any())

    def mean(self, n: int, back: int = 0) -> Array:
        """Return the mean of the known values in the ``n`` steps up to ``back`` steps before each
        step: (B, S), NaN if there are none.
        """
        if n not in self._means:
            self._means[n] = rolling_mean(self.filled, n)
        return self._shifted(self._means[n], back)

    def mean_of(self, values: Array, n: int) -> Array:
        """Return the mean of those values (B, K) that are known among the last ``n`` columns at
        each step: (B, S), NaN if none is.
        """
        return self._shifted(rolling_mean(values, n), 0)

    def mean_change(self, back: int, n: int) -> Array:
        """Return the mean absolute change over ``back`` steps in the last ``n`` steps: (B, S).

        Only values that were given count, not those that were filled in. NaN if there are none.
        """
        return self.mean_of(abs(changes(self.z, back)), n)

    def _shifted(self, values: np.ndarray, back: int) -> np.ndarray:
        """Return ``values`` (B, K) ``back`` steps before each step; NaN before the first column."""
        # columns before the first one are reached where a window has no steps before it
        stop = values.shape[1] - back
        start = stop - self.n_steps
        if start >= 0:
            return values[:, start:stop]
        shape = (len(values), self.n_steps)
        out = np.full(shape, np.nan)
        if stop > 0:
            out[:, -stop:] = values[:, :stop]
        return out


def changes(values: Array, back: int) -> Array:
    """Return the changes of values (B, K) over ``back`` columns: (B, K - back)."""
    return values[:, back:] - values[:, : values.shape[1] - back]


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
    nonnegative : bool
        Whether no value was below 0, so that forecasts are not either.
    wander : tuple of float
        Usual absolute change of a series of ``fit`` over 1 to ``h`` steps, in units of the
        transform.

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
    nonnegative: bool = False
    wander: tuple[float, ...] = field(default=(), repr=False)

    @property
    def memory(self) -> int:
        """Number of steps over which the scale is averaged, and from which a missing value may be
        filled in.
        """
        return max(
            128,
            4 * self.season,
            2 * self.lag,
            min(28 * self.season, 672),
        )

    @property
    def n_lags(self) -> int:
        """Number of long seasons back to the counterpart of the last forecast step."""
        return -(-self.h // self.lag)

    @property
    def reach(self) -> int:
        """Number of earlier steps that the features of a step need, if no value is missing."""
        return max(
            self.memory + self.season,
            self.n_lags * self.lag + self.season,
            -(-self.h // self.season) * self.season,
            self.input_size,
        )

    @property
    def lookback(self) -> int:
        """Like :attr:`reach`, if values may be missing: includes the steps from which to fill them
        in.
        """
        return self.reach + self.memory + SEASONS_BACK * self.season

    @property
    def n_inputs(self) -> int:
        n_lagged = self.h if self.lag > self.season else 0
        return self.input_size + 4 + n_lagged

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

    def past(self, z: np.ndarray, n_steps: int) -> Past:
        """Compute the past of the last ``n_steps`` of transformed values (B, K), with the steps
        before.
        """
        past = Past(z, self._fill_missing(z), n_steps)
        self.describe(past)
        return past

    def inputs(self, past: Past, out: np.ndarray) -> None:
        """Write the inputs of each step to ``out``, of shape (B, S, n_inputs)."""
        start = 0
        for columns in self.input_columns(past):
            stop = start + columns.shape[2]
            out[:, :, start:stop] = columns
            start = stop
        np.clip(out, -LARGEST, LARGEST, out=out)
        missing = np.isnan(out)
        np.copyto(out, 0.0, where=missing)
        if not past.known.all():
            out[~past.known] = 0.0

    def describe(self, past: Past) -> None:
        """Compute level, scale and seasonal naive forecast at each step."""
        xp = past.xp
        scale = past.mean_change(self.season, self.memory)
        if past.any_missing(scale):  # in the first season: change from step to step
            by_step = past.mean_change(1, self.memory)
            scale = xp.where(xp.isnan(scale), by_step, scale)
        # also where the scale is NaN, which no comparison is true of
        smallest = self.smallest_scale
        scale = xp.where(scale > smallest, scale, smallest)
        level = past.mean(self.season)
        last = past.back(0)
        # missing values are filled in: none is left where there was one in reach
        known = ~xp.isnan(last)
        naive = past.at(self.counterparts())
        if past.any_missing(last) or past.any_missing(naive):
            missing = xp.isnan(naive)
            last = last[:, :, None]
            naive = xp.where(missing, last, naive)
            # zeros: nothing downstream may become NaN
            naive = xp.where(known[:, :, None], naive, 0.0)
            level = xp.where(known, level, 0.0)
            scale = xp.where(known, scale, 1.0)
        past.naive = naive
        past.level = level
        past.scale = scale
        past.known = known

    def input_columns(self, past: Past) -> Iterator[Array]:
        """Yield the inputs in order, in groups of columns (B, S, n); not clipped, NaN where
        missing.
        """
        level = past.level
        scale = past.scale
        # one division for all inputs, which are many more than scales
        inverse = 1.0 / scale[:, :, None]
        recent = past.recent(self.input_size)
        yield (recent - level[:, :, None]) * inverse
        trends = (
            level - past.mean(self.season, self.lag),
            past.back(0) - past.back(self.season),
            past.mean(self.lag) - level,
        )
        for trend in trends:
            yield (trend / scale)[:, :, None]
        size = past.xp.log(scale / self.unit)
        yield size[:, :, None]
        if self.lag > self.season:
            yield from self._lagged_columns(past, inverse)

    def _lagged_columns(
        self,
        past: Past,
        inverse: Array,
    ) -> Iterator[Array]:
        """Yield how each forecast step's value a few long seasons ago differed from its level then,
        less what the seasonal naive forecast already says.
        """
        level = past.level[:, :, None]
        for turn in range(1, self.n_lags + 1):
            shift = turn * self.lag
            # the forecast steps whose last counterpart is so many long seasons back
            first = shift - self.lag
            stop = min(shift, self.h)
            offsets = np.arange(first, stop) + 1 - shift
            lagged = past.at(offsets)
            level_then = past.mean(self.season, shift)
            # in place: these are the largest arrays of a window
            lagged -= level_then[:, :, None]
            lagged -= past.naive[:, :, first:stop] - level
            lagged *= inverse
            yield lagged

    def baselines(self, past: Past) -> Array:
        """Return the forecasts of BASELINE_NAMES as differences from the seasonal naive one, in
        units of the scale: (B, S, 6, h). Where a value is missing, the difference is 0.
        """
        xp = past.xp
        naive = past.naive[:, :, None]
        last = past.back(0)[:, :, None]
        # of values that are known or filled in
        slope = past.mean_of(changes(past.filled, 1), self.memory)
        drift = last + slope[:, :, None] * xp.arange(1, self.h + 1)
        mean = past.mean(self.memory)[:, :, None]
        long_season = past.at(self.counterparts(self.lag))
        # a graph is traced: few operations on larger arrays
        zeros = 0.0 * past.naive
        parts = [zeros + last, drift, zeros + past.level[:, :, None], zeros + mean, long_season]
        others = xp.stack(parts, 2) - naive
        others = xp.where(xp.isnan(others), 0.0, others)
        turns = np.arange(1, N_SEASONS)[:, None] * self.season
        seasons = past.at((self.counterparts() - turns).ravel())
        seasons = seasons.reshape(*seasons.shape[:2], N_SEASONS - 1, self.h) - naive
        seasons = xp.where(xp.isnan(seasons), 0.0, seasons).sum(2) / N_SEASONS
        scale = past.scale[:, :, None, None]
        return xp.concatenate([others, seasons[:, :, None]], 2) / scale

    def denormalised(
        self,
        out: Array,
        past: Past,
        quantiles: Sequence[float],
        correction: Correction | None,
    ) -> Array:
        """Convert outputs (B, 1 + Q, h) at one step to the units of the series; nothing is below 0
        if ``nonnegative``. NaN where no value is known: the naive forecast of 0 would pass for one.
        """
        xp = past.xp
        if correction is not None:
            out = correction.apply(out, self.baselines(past)[:, 0], xp)
        z = self.widened(past.naive + past.scale[:, :, None] * out, past, quantiles)
        if self.log:
            z = xp.exp(z)
        elif self.nonnegative:
            z = xp.clip(z, 0.0, None)
        return xp.where(past.known[:, :, None], z, xp.nan)

    def widened(
        self,
        z: Array,
        past: Past,
        quantiles: Sequence[float],
    ) -> Array:
        """Return forecasts (B, 1 + Q, h) from one step, in units of the transform, with wider
        quantiles where the series has not shown yet how much it varies.

        That is where no two values a season apart are known. A network's quantiles, which are in
        units of the scale, are narrow there, or nothing at all. They become at least as wide as
        those of normal errors that are as large as the usual changes of the series of ``fit``.
        """
        if not self.wander or not quantiles:
            return z
        xp = past.xp
        unknown = xp.isnan(past.mean_change(self.season, self.memory))
        from_last = xp.isnan(past.at(self.counterparts()))
        error = xp.where(from_last, xp.asarray(np.array(self.wander)), self.unit)
        deviation = DEVIATION * error[:, 0]
        point = z[:, 0]
        rows = [point]
        for i, q in enumerate(quantiles, 1):
            level = z[:, i]
            far = point + NormalDist().inv_cdf(q) * deviation
            # each to its side, which keeps them in order; a median stays
            if q < 0.5:
                rows.append(xp.where(unknown, xp.minimum(level, far), level))
            elif q > 0.5:
                rows.append(xp.where(unknown, xp.maximum(level, far), level))
            else:
                rows.append(level)
        return xp.stack(rows, 1)

    def counterparts(self, season: int | None = None) -> np.ndarray:
        """Return the offset (0 or less) from the current step to the last counterpart of each
        forecast step, in its season or a longer one: (h,).
        """
        length = self.season if season is None else season
        ahead = np.arange(1, self.h + 1)
        season_of_step = -(-ahead // length)
        return ahead - length * season_of_step

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
            later = filled[:, shift:]
            # from z, not from filled: a value that was itself filled in does not count
            earlier = z[:, :-shift]
            np.copyto(later, earlier, where=np.isnan(later))
        missing = np.isnan(filled)
        last = last_positions(~missing)
        age = np.arange(z.shape[1]) - last
        near = missing & (last >= 0) & (age <= self.memory)
        rows, columns = np.nonzero(near)
        origins = last[rows, columns]
        filled[rows, columns] = filled[rows, origins]
        return filled


@dataclass(frozen=True)
class Correction:
    """What is done to the outputs of networks before they are converted to values.

    All in units of the series' scale, so that bands are as wide as each series varies. It depends
    on a series' past as the outputs do, and on nothing else.

    Attributes
    ----------
    weights : ndarray of shape (sources, h)
        Of each of SOURCES in the point forecast; they add up to 1.
    spread : ndarray of shape (h,)
        Factor of the distances between quantiles and point forecast.
    offsets : ndarray of shape (Q, h)
        Added to the quantiles then.
    trust : ndarray of shape (h,)
        Share of what the held-out end taught in all of them, from 0 to 1; the rest is the network
        as it is.
    """

    weights: np.ndarray
    spread: np.ndarray
    offsets: np.ndarray
    trust: np.ndarray

    def apply(self, out: Array, baselines: Array, xp: Any) -> Array:
        """Return corrected outputs (..., 1 + Q, h), for baselines (..., B, h)."""
        as_array = np.asarray if xp is np else xp.as_tensor
        network = out[..., :1, :]
        others = as_array(self.weights[2:]) * baselines
        point = as_array(self.weights[:1]) * network + others.sum(-2)[..., None, :]
        distances = as_array(self.spread) * (out[..., 1:, :] - network)
        levels = point + distances + as_array(self.offsets)
        rows = [point]
        for i in range(len(self.offsets)):
            row = levels[..., i : i + 1, :]
            # never below the quantile before
            rows.append(row if i == 0 else xp.maximum(rows[-1], row))
        return xp.concatenate(rows, -2)


def rolling_mean(values: np.ndarray, n: int) -> np.ndarray:
    """Return the mean of the known values in the last ``n`` columns, or fewer at the start; NaN if
    there are none.
    """
    known = ~np.isnan(values)
    at = known.argmax(1)[:, None]
    first = np.take_along_axis(values, at, 1)
    above = values - first  # sums of small differences stay exact, however high the level
    if known.all():
        lengths = np.arange(1, values.shape[1] + 1)
        counts = np.minimum(lengths, n)
        return first + _rolling_sum(above, n) / counts
    sums = _rolling_sum(np.where(known, above, 0.0), n)
    counts = _rolling_sum(known.astype(np.float64), n)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = first + sums / counts
    return np.where(counts > 0.5, means, np.nan)


def _rolling_sum(values: np.ndarray, n: int) -> np.ndarray:
    total = np.cumsum(values, axis=1)
    if n < values.shape[1]:
        # the copy: NumPy would read columns that it has already changed
        earlier = total[:, :-n].copy()
        total[:, n:] -= earlier
    return total
