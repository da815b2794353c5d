"""Choose season, transform and lags from the data."""

from __future__ import annotations

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.features import LARGEST, Features, rolling_mean
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frequency import DAY, Frequency

# of a sample
N_SERIES = 256
N_STEPS = 2048
N_WANDER = 32  # series of the sample that show how far a series goes in a horizon
MOST_SEASONS = 8  # largest long season, in seasons
SMALLEST_SCALE = 1e-6  # of a series, relative to the typical change of all
# of a series that has a say in the choice of a long season, relative to the largest
LEAST_CHANGE = 0.002
LEAST_SHARE = 0.02  # share of the variance of errors that a long season must explain


def usual_season(frequency: Frequency) -> int:
    """Return the usual season of a frequency: a day of hours, a week of days, a year of weeks,
    months or quarters.
    """
    if frequency.kind == "integer":
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
                f"season_length is {shorter} steps; set season_length for another"
            )
            return shorter
    return season


def sample(source: PackedSeries) -> np.ndarray:
    """Return the last steps (B, K) of evenly spaced series, NaN before a series' first step."""
    n = source.n_series
    series = np.linspace(0, n - 1, min(N_SERIES, n))
    series = series.astype(int)
    lengths = source.lengths[series]
    k = min(N_STEPS, int(lengths.max()))
    return source.cut(series, lengths - k, k)[0]


def choose_features(
    source: PackedSeries,
    h: int,
    season: int,
    lag: int | str | None,
    transform: str,
) -> Features:
    """Choose from the data what the user leaves open: transform, long season, and the
    input size and unit.

    Raises
    ------
    DataError
        If all values are missing, or ``transform`` is "log" and some values are not positive.
    SpecError
        If ``lag``, the long season, is no multiple of the season.
    """
    values = sample(source)
    smallest = float(np.fmin.reduce(source.values[0], initial=np.nan))
    if np.isnan(smallest):
        raise DataError("there is no value to learn from: the target is missing everywhere")
    if transform == "log" and smallest <= 0:
        raise DataError(
            f"transform='log' needs positive values, but the smallest is {smallest:g}: write NaN, "
            "which forecasts accept, where it stands for a missing value; else use "
            "transform='none'"
        )
    log = transform != "none" and smallest > 0
    z = np.log(values) if log else values
    unit = typical_change(z, season)
    if lag is None:
        lag = season
    n_lag = choose_lag(z, season) if lag == "auto" else int(lag)
    if n_lag % season:
        raise SpecError(
            f"the long season of season_length must be a multiple of the season of {season} steps, "
            f"got {lag}"
        )
    smallest_scale = SMALLEST_SCALE * unit
    return Features(
        h,
        season,
        n_lag,
        min(max(season, 12), 48),
        log,
        unit,
        smallest_scale,
        nonnegative=smallest >= 0,
        wander=usual_wander(z, h),
    )


def typical_change(z: np.ndarray, season: int) -> float:
    """Return the mean absolute change of values (B, K) from season to season, else from step to
    step, else 1.

    Changes at the last digits of the values are rounding errors, which count as none.
    """
    largest = float(np.nanmax(np.abs(z), initial=0.0))
    rounding = 1e-12 * largest
    for back in (season, 1):
        change = np.abs(z[:, back:] - z[:, :-back])
        change = change[np.isfinite(change)]
        if len(change) and change.mean() > rounding:
            return float(change.mean())
    return 1.0


def usual_wander(z: np.ndarray, h: int) -> tuple[float, ...]:
    """Return the usual absolute change of values (B, K) over 1 to ``h`` steps: the median of the
    mean change of each series, of those that change.

    What no series is long enough to show is taken to be as large as over fewer steps.
    """
    few = z[:: -(-len(z) // N_WANDER)]
    usual = 0.0
    wander = []
    for back in range(1, h + 1):
        change = np.abs(few[:, back:] - few[:, :-back])
        known = np.isfinite(change)
        total = np.where(known, change, 0.0).sum(1)
        changes = total > 0
        if changes.any():
            usual = float(np.median(total[changes] / known.sum(1)[changes]))
        wander.append(usual)
    return tuple(wander)


def choose_lag(z: np.ndarray, season: int) -> int:
    """Choose the long season whose last cycle best explains the errors of the seasonal naive
    forecast, from (B, K).

    Correlates the errors one season ahead with how values a long season earlier differed from the
    last season, levels removed. Returns the shortest within 3 % of the largest squared correlation;
    the season if below ``LEAST_SHARE``.
    """
    m = season
    change = np.abs(z[:, m:] - z[:, :-m])
    known = np.isfinite(change)
    if m == 1 or not known.any():
        return m
    total = np.where(known, change, 0.0).sum(1)
    scale = total / np.maximum(known.sum(1), 1)
    # errors are divided by the scale: series that hardly change would outweigh all others
    least = LEAST_CHANGE * max(float(scale.max()), 1e-30)
    unit = np.maximum(scale, least)[:, None]
    level = rolling_mean(z, m)
    shares = {}
    largest = MOST_SEASONS * m
    for lag in range(2 * m, largest + 1, m):
        if 3 * lag > z.shape[1]:
            break
        shares[lag] = _explained_share(z, level, unit, m, lag)
    best = max(shares.values(), default=0.0)
    if best < LEAST_SHARE:
        return m
    # longer seasons repeat the shortest, and cost more steps
    enough = 0.97 * best
    return next(lag for lag, share in shares.items() if share >= enough)


def _explained_share(
    z: np.ndarray,
    level: np.ndarray,
    unit: np.ndarray,
    season: int,
    lag: int,
) -> float:
    """Return the squared correlation of the errors with the values a long season earlier."""
    n_steps = z.shape[1]
    now = slice(lag, n_steps - season)
    before = slice(0, n_steps - season - lag)
    error = (z[:, lag + season :] - z[:, now]) / unit
    earlier = z[:, season : n_steps - lag] - level[:, before]
    current = z[:, now] - level[:, now]
    earlier = (earlier - current) / unit
    both = np.isfinite(error) & np.isfinite(earlier)
    # clipped, or a few outliers would decide
    a = np.clip(error[both], -LARGEST, LARGEST)
    b = np.clip(earlier[both], -LARGEST, LARGEST)
    size = (a @ a) * (b @ b)
    return float((a @ b) ** 2 / max(size, 1e-30))
