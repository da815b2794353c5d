"""Baselines: against utilsforecast-like definitions, one value at a time."""

import numpy as np

from fluxutils_py.forecasting.baselines import baseline_forecasts


def test_baselines_are_their_definitions(rng):
    y = rng.normal(size=(1, 11))
    found = {name: f[0] for name, f in baseline_forecasts(y, h=7, season=3).items()}
    np.testing.assert_array_equal(found["Naive"], np.full(7, y[0, -1]))
    np.testing.assert_array_equal(found["SeasonalNaive"], y[0, [8, 9, 10, 8, 9, 10, 8]])
    slope = (y[0, -1] - y[0, 0]) / 10
    np.testing.assert_allclose(found["Drift"], y[0, -1] + slope * np.arange(1, 8))
    np.testing.assert_allclose(found["WindowAverage"], np.full(7, y[0, -3:].mean()))


def test_missing_values_are_passed_over():
    y = np.array([[np.nan, 1.0, 2.0, np.nan, 4.0, np.nan], [np.nan] * 6, [np.nan] * 5 + [7.0]])
    found = baseline_forecasts(y, h=4, season=2)
    np.testing.assert_array_equal(found["Naive"], [[4] * 4, [np.nan] * 4, [7] * 4])
    np.testing.assert_array_equal(found["SeasonalNaive"], [[4, 1, 4, 1], [np.nan] * 4, [7] * 4])
    np.testing.assert_allclose(found["Drift"][0], 4 + np.arange(2, 6))
    np.testing.assert_array_equal(found["WindowAverage"][[0, 2]], [[4] * 4, [7] * 4])


def test_drift_goes_through_the_first_value_of_a_long_series():
    # T = 3000 values, of which the forecasts see the last 2000: y[T] + h (y[T] - y[1]) / (T - 1)
    y = 1000 + np.cumsum(np.random.default_rng(0).normal(size=3000))
    found = baseline_forecasts(y[None, -2000:], h=3, season=7, first=(y[:1], np.array([2999])))
    np.testing.assert_allclose(found["Drift"][0], y[-1] + np.arange(1, 4) * (y[-1] - y[0]) / 2999)
    tail = np.append(y[-2000:], [np.nan, np.nan])  # the last two steps are missing
    found = baseline_forecasts(tail[None], h=3, season=7, first=(y[:1], np.array([3001])))
    np.testing.assert_allclose(found["Drift"][0], y[-1] + np.arange(3, 6) * (y[-1] - y[0]) / 2999)
