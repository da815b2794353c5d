"""Compute naive baselines to compare forecasts with."""

from __future__ import annotations

import numpy as np

BASELINES = ("Naive", "SeasonalNaive", "Drift", "WindowAverage")


def baseline_forecasts(
    values: np.ndarray, h: int, season: int, first: tuple[np.ndarray, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Forecast series from their last values alone.

    Parameters
    ----------
    values : ndarray of shape (N, K)
        Last values of each series, in order; NaN where missing, and before the first step.
    h : int
    season : int
    first : pair of ndarrays of shape (N,), optional
        The first value of each series, and how many steps it lies before the last column of
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
    known = ~np.isnan(values)
    any_known = known.any(1)
    rows, steps = np.arange(n), np.arange(1, h + 1)
    last_at = k - 1 - known[:, ::-1].argmax(1)
    first_at = known.argmax(1)
    last = np.where(any_known, values[rows, last_at], np.nan)
    if first is None:
        first = np.where(any_known, values[rows, first_at], np.nan), k - 1 - first_at
    first_value, age = first
    slope = (last - first_value) / np.maximum(age - (k - 1 - last_at), 1)
    seasonal = np.full((n, h), np.nan)
    for turn in range(1, 1 + k // season):
        at = k - 1 + steps - season * (-(-steps // season) + turn - 1)
        use = at >= 0
        older = np.where(use, values[:, np.maximum(at, 0)], np.nan)
        seasonal = np.where(np.isnan(seasonal), older, seasonal)
        if not np.isnan(seasonal).any():
            break
    recent = values[:, -season:]
    count = (~np.isnan(recent)).sum(1)
    mean = np.where(count > 0, np.nansum(recent, 1) / np.maximum(count, 1), last)
    return {
        "Naive": np.repeat(last[:, None], h, 1),
        "SeasonalNaive": np.where(np.isnan(seasonal), last[:, None], seasonal),
        "Drift": last[:, None] + slope[:, None] * (k - 1 - last_at[:, None] + steps),
        "WindowAverage": np.repeat(mean[:, None], h, 1),
    }
