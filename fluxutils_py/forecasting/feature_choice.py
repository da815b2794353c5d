"""Choose season, transform and lags from the data."""

from __future__ import annotations

import math
import warnings

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.features import LARGEST, Features, rolling_mean
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frequency import DAY, Frequency

# of a sample
N_SERIES = 256
N_STEPS = 2048
N_WANDER = 32  # series of the sample that show how far a series goes in a horizon
# Steps of a day, a week or a year at usual frequencies, in which values without dates may repeat.
LIKELY_SEASONS = (4, 7, 12, 24, 48, 52, 96, 168, 336)
CLEAR = 0.2  # correlation of changes a season apart that makes a season clear; of few steps, more
MOST_SEASONS = 8  # largest long season, in seasons
SMALLEST_SCALE = 1e-6  # of a series, relative to the typical change of all
# of a series that has a say in the choice of a long season, relative to the largest
LEAST_CHANGE = 0.002
FEW = 0.05  # largest share of values that may stand for missing ones, of all and of a series
SMALL = 1 / 3  # of the median of a series: values that lead down to 0
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
    for parts, name in (
        (24, "an hour"),
        (24 * 60, "a minute"),
    ):
        shorter = season // parts
        if season % parts == 0 and 1 < shorter < longest:
            warn(
                f"the longest series has {longest} steps, fewer than a day of {season}: "
                f"season_length is {name} of {shorter} steps; set season_length for another"
            )
            return shorter
    return season


def find_season(source: PackedSeries) -> int | None:
    """Return a usual season in which the values clearly repeat, or None.

    The changes from step to step are correlated with those a season before: more than chance
    explains, more than with their neighbours, and more than with those half a season before; none
    further away are clearly more alike. Of noise and random walks, this is true at no distance.
    """
    values = sample(source)
    change = np.diff(values, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # series without a change
        change -= np.nanmean(change, axis=1, keepdims=True)
        change /= np.nanmean(np.abs(change), axis=1, keepdims=True)
    # clipped, or a few outliers would decide
    change = np.clip(np.where(np.isfinite(change), change, 0.0), -3.0, 3.0)
    size = max(float((change**2).sum()), 1e-30)

    def correlation(back: int) -> float:
        return float((change[:, back:] * change[:, :-back]).sum()) / size

    clear = {}
    for season in LIKELY_SEASONS:
        n_pairs = change.shape[1] - season
        if n_pairs < 2 * season:
            break
        found = correlation(season)
        chance = 2 / math.sqrt(n_pairs)  # series may move together: their number adds nothing
        if found < max(CLEAR, 3 * chance, 1.5 * correlation(season // 2)):
            continue
        far = max(season // 6, 1)
        furthest = min(max(3 * season, 64), n_pairs)
        around = [correlation(season + d) for d in range(-far, far + 1)]
        others = [correlation(d) for d in range(season + far + 1, furthest)]
        if (
            found >= max(around)
            and found > max(around[0], around[-1]) + chance
            and found >= 0.8 * max(others, default=0.0)
        ):
            clear[season] = found
    # longer seasons repeat the shortest
    enough = 0.9 * max(clear.values(), default=0.0)
    return next((season for season, found in clear.items() if found >= enough), None)


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
    ids: np.ndarray,
) -> Features:
    """Choose from the data what the user leaves open: transform, long season, and the
    input size and unit.

    Warns if a few values, which look like missing ones, are why logarithms are not used; ``ids``
    are the names of the series.

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
    log = _takes_logarithms(transform, smallest, source, ids)
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


def _takes_logarithms(
    transform: str, smallest: float, source: PackedSeries, ids: np.ndarray
) -> bool:
    if smallest > 0 or transform == "none":
        return transform != "none"
    counts = low_counts(source)
    n_known = int((~np.isnan(source.values[0])).sum())
    low = np.flatnonzero(counts)
    where = f"series {ids[low[0]]!r}"
    if len(low) > 1:
        where = f"{len(low)} series, such as {ids[low[0]]!r}"
    found = (
        f"{counts.sum()} of {n_known} values are 0 or below ({where}; the smallest is "
        f"{smallest:g}): write NaN where they stand for missing values, which forecasts do not "
        "need; if they are true, use transform='none'"
    )
    if transform == "log":
        raise DataError(f"transform='log' needs positive values, and {found}")
    if counts.sum() <= FEW * n_known and _are_apart(counts, source):
        warn(f"logarithms are not modelled, since {found}")
    return False


def low_counts(source: PackedSeries) -> np.ndarray:
    """Return how many values of each series, (N,), are 0 or below, and have no logarithm."""
    low = np.flatnonzero(source.values[0] <= 0)
    series = np.searchsorted(source.offsets, low, "right") - 1
    return np.bincount(series, minlength=source.n_series)


def _are_apart(counts: np.ndarray, source: PackedSeries) -> bool:
    """Whether low values, so many of each series, are few there and apart from all others, as if
    they stood for missing ones.

    In each series that has them, positive values below a third of their median are then fewer. Of
    counts with a small mean, or values that vary around 0, they are more.
    """
    for i in np.flatnonzero(counts)[:N_SERIES]:
        values = source.cut(np.array([i]), np.array([0]), int(source.lengths[i]))[0]
        positive = values[values > 0]
        # a series without any teaches nothing of its own
        if not len(positive):
            continue
        n_small = int((positive <= SMALL * np.median(positive)).sum())
        if counts[i] > FEW * (len(positive) + counts[i]) or n_small >= counts[i]:
            return False
    return True


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
