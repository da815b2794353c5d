"""Covariates as channels: standardised numbers, indicators and numbers of categories."""

import numpy as np
import pytest

from fluxutils_py.forecasting.covariates import Covariate, filled_forward


def test_numbers_are_standardised_by_what_there_is(rng):
    values = rng.normal(5, 3, size=40)
    values[7] = np.nan
    found = Covariate.of("price", values).channels(values)[0]
    np.testing.assert_allclose(found, (values - np.nanmean(values)) / np.nanstd(values))
    np.testing.assert_array_equal(Covariate.of("flat", np.full(4, 1e9)).channels(np.full(4, 1e9)), np.zeros((1, 4)))
    np.testing.assert_array_equal(Covariate.of("none", np.full(2, np.nan)).channels(np.ones(2)), [[1, 1]])


def test_categories_are_indicators_and_new_ones_count_as_none():
    values = np.array(["b", "a", None, "b"], object)
    covariate = Covariate.of("kind", values)
    np.testing.assert_array_equal(covariate.channels(values), [[0, 1, np.nan, 0], [1, 0, np.nan, 1]])
    assert covariate.codes(np.array(["a", "b"], object)).tolist() == [1, 2]
    with pytest.warns(UserWarning, match="column 'kind' has values that were not there in training: 'z'"):
        assert covariate.codes(np.array(["z", "a"], object)).tolist() == [0, 1]


def test_missing_values_are_those_before_within_each_series():
    x = np.array([[np.nan, 1, np.nan, 2, np.nan, np.nan, 5, np.nan]])
    np.testing.assert_array_equal(filled_forward(x, np.array([3, 2, 3])), [[0, 1, 1, 2, 2, 0, 5, 5]])
