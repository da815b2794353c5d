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
