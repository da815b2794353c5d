"""Choose season, transform and lags from the data."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.features import LARGEST, Features, rolling_mean
from fluxutils_py.forecasting.frequency import DAY, Frequency
from fluxutils_py.forecasting.panel_windows import ArraySource, PackedSeries

SAMPLED = 256, 2048  # number of series and of last steps to sample
BLOCK_SERIES, BLOCK_STEPS = 256, 2048  # of an array that is read for its smallest value
MOST_SEASONS = 8  # largest long season, in seasons
SMALLEST_SCALE = 1e-6  # of a series, relative to the typical change of all
LEAST_CHANGE = (
    0.002  # of a series that has a say in the choice of a long season, relative to the largest
)
LEAST_SHARE = 0.02  # share of the variance of errors that a long season must explain


def usual_season(frequency: Frequency | None) -> int:
    """Return the usual season of a frequency: a day of hours, a week of days, a year of weeks,
    months or quarters.
    """
    if frequency is None or frequency.kind == "integer":
        return 1
    if frequency.kind == "months":
        return max(1, 12 // frequency.size)
    if frequency.kind == "business":
        return 5 if frequency.size == 1 else 1
    if frequency.kind == "days":
        return {DAY: 7, 7 * DAY: 52}.get(frequency.size, 1)
    return DAY // frequency.size if DAY % frequency.size == 0 else 1


def season_within(season: int, longest: int) -> int:
    """Return the usual season, or where no series is longer than it, the hour or minute in place of
    the day, and warn.

    A season that no series has teaches nothing, and costs memory and time by its length.
    """
    if season < longest:
        return season
    for parts in (24, 24 * 60):
        shorter = season // parts
        if season % parts == 0 and 1 < shorter < longest:
            warn(
                f"the longest series has {longest} steps, fewer than a day of {season}: "
                f"season_length is {'an hour' if parts == 24 else 'a minute'} of {shorter} steps; "
                "set season_length for another",
            )
            return shorter
    return season


def sample(source: PackedSeries | ArraySource) -> np.ndarray:
    """Return the last steps (B, K) of evenly spaced series, NaN before a series' first step."""
    n, k = SAMPLED
    series = np.unique(np.linspace(0, source.n_series - 1, min(n, source.n_series)).astype(int))
    k = min(k, int(source.lengths[series].max()))
    return source.cut(series, source.lengths[series] - k, k)[0]


def smallest_value(source: PackedSeries | ArraySource) -> float:
    """Return the smallest of all values, read block by block; NaN if all are missing."""
    smallest = np.nan
    if isinstance(source, PackedSeries):
        return float(np.fmin.reduce(source.values[0], initial=np.nan))
    for first in range(0, source.n_series, BLOCK_SERIES):
        series = np.arange(first, min(first + BLOCK_SERIES, source.n_series))
        for start in range(0, source.n_steps, BLOCK_STEPS):
            n_steps = min(BLOCK_STEPS, source.n_steps - start)
            block = source.cut(series, np.full(len(series), start), n_steps)[0]
            smallest = float(np.fmin(smallest, np.fmin.reduce(block, axis=None)))
    return smallest


def choose_features(
    source: PackedSeries | ArraySource,
    h: int,
    season: int,
    lag: Any,
    input_size: int | None,
    transform: str,
) -> Features:
    """Choose from the data what the user leaves open: transform, long season, input size and unit.

    Raises
    ------
    DataError
        If all values are missing, or ``transform`` is "log" and some values are not positive.
    SpecError
        If ``lag`` is no multiple of the season.
    """
    some = sample(source)
    smallest = smallest_value(source)
    if np.isnan(smallest):
        raise DataError("there is no value to learn from: the target is missing everywhere")
    positive = smallest > 0
    if transform == "log" and not positive:
        raise DataError(
            f"transform='log' needs positive values, the smallest is {smallest:g}; use "
            "transform='none'"
        )
    log = positive if transform == "auto" else transform == "log"
    z = np.log(some) if log else some
    unit = typical_change(z, season)
    if lag == "auto":
        lag = choose_lag(z, season)
    elif lag is None:
        lag = season
    if lag % season:
        raise SpecError(f"lag must be a multiple of the season of {season} steps, got {lag}")
    size = int(input_size or min(max(season, 12), 48))
    return Features(h, season, int(lag), size, log, unit, smallest_scale=SMALLEST_SCALE * unit)


def typical_change(z: np.ndarray, season: int) -> float:
    """Return the mean absolute change of values (B, K) from season to season, else from step to
    step, else 1.

    Changes at the last digits of the values are rounding errors, which count as none.
    """
    rounding = 1e-12 * float(np.nanmax(np.abs(z), initial=0.0))
    for back in (season, 1):
        change = np.abs(z[:, back:] - z[:, :-back])
        change = change[np.isfinite(change)]
        if len(change) and change.mean() > rounding:
            return float(change.mean())
    return 1.0


def choose_lag(z: np.ndarray, season: int) -> int:
    """Choose the long season whose last cycle best explains the errors of the seasonal naive
    forecast, from (B, K).

    Correlates the errors one season ahead with how values a long season earlier differed from the
    last season, levels removed. Returns the shortest within 3 % of the largest squared correlation;
    the season if below ``LEAST_SHARE``.
    """
    m, n_steps = season, z.shape[1]
    change = np.abs(z[:, m:] - z[:, :-m])
    if m == 1 or not np.isfinite(change).any():
        return m
    level = rolling_mean(z, m)
    scale = np.where(np.isfinite(change), change, 0.0).sum(1) / np.maximum(
        np.isfinite(change).sum(1), 1
    )
    unit = np.maximum(scale, LEAST_CHANGE * max(float(scale.max()), 1e-30))[:, None]
    shares = {}
    for lag in range(2 * m, MOST_SEASONS * m + 1, m):
        if 3 * lag > n_steps:
            break
        now, before = slice(lag, n_steps - m), slice(0, n_steps - m - lag)
        error = (z[:, lag + m :] - z[:, now]) / unit
        earlier = (
            (z[:, m : n_steps - lag] - level[:, before]) - (z[:, now] - level[:, now])
        ) / unit
        both = np.isfinite(error) & np.isfinite(earlier)
        a, b = (np.clip(v[both], -LARGEST, LARGEST) for v in (error, earlier))
        shares[lag] = float((a @ b) ** 2 / max((a @ a) * (b @ b), 1e-30))
    best = max(shares.values(), default=0.0)
    return (
        next((lag for lag, share in shares.items() if share >= 0.97 * best), m)
        if best >= LEAST_SHARE
        else m
    )
