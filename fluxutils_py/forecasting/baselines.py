"""Compute naive baselines to compare forecasts with."""

from __future__ import annotations

import numpy as np

BASELINES = ("Naive", "SeasonalNaive", "Drift", "WindowAverage")


def baseline_forecasts(
    values: np.ndarray,
    h: int,
    season: int,
    first: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Forecast series from their last values alone.

    Parameters
    ----------
    values : ndarray of shape (N, K)
        Last values of each series, in order; NaN where missing, and before the first step.
    h : int
    season : int
    first : pair of ndarrays of shape (N,), optional
        The first value of each series, and how many steps it is before the last column of
        ``values``. None: the first value in ``values``.

    Returns
    -------
    dict of str to ndarray of shape (N, h)
        ``Naive``: the last value. ``SeasonalNaive``: the value at the same position of the most
        recent season that has one, else the last value. ``Drift``: the line through the first and
        the last value. ``WindowAverage``: the mean of the last season, else the last value. NaN for
        series without values.

    Notes
    -----
    Hyndman & Athanasopoulos (2021), Forecasting: principles and practice, section 5.2.

    Examples
    --------
    >>> forecasts = baseline_forecasts(np.array([[1.0, 2.0, 3.0, 4.0]]), h=2, season=2)
    >>> forecasts["SeasonalNaive"].tolist(), forecasts["Drift"].tolist()
    ([[3.0, 4.0]], [[5.0, 6.0]])
    """
    n, k = values.shape
    rows = np.arange(n)
    steps = np.arange(1, h + 1)
    known = ~np.isnan(values)
    # of a series without values these are places of NaN, which is then its forecast
    age_of_last = known[:, ::-1].argmax(1)
    last_at = k - 1 - age_of_last
    first_at = known.argmax(1)
    last = values[rows, last_at]
    if first is None:
        first = values[rows, first_at], k - 1 - first_at
    first_value, age = first
    # 1: a line through a single value is level
    distance = np.maximum(age - age_of_last, 1)
    slope = (last - first_value) / distance
    seasonal = np.full((n, h), np.nan)
    # in the last season, and then one season earlier with each turn
    season_of_step = -(-steps // season)
    at = k - 1 + steps - season * season_of_step
    for _ in range(k // season):
        missing = np.isnan(seasonal)
        if not missing.any():
            break
        seasonal = np.where(missing, values[:, at], seasonal)
        at = at - season
    count = known[:, -season:].sum(1)
    total = np.nansum(values[:, -season:], 1)
    mean = total / np.maximum(count, 1)
    mean = np.where(count > 0, mean, last)
    last = last[:, None]
    slope = slope[:, None]
    distance_ahead = age_of_last[:, None] + steps
    return {
        "Naive": np.repeat(last, h, 1),
        "SeasonalNaive": np.where(np.isnan(seasonal), last, seasonal),
        "Drift": last + slope * distance_ahead,
        "WindowAverage": np.repeat(mean[:, None], h, 1),
    }
