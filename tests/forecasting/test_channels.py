"""Covariates as channels: standardised numbers, and codes of categories."""

import numpy as np
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.channels import Covariate, filled_forward


def test_numbers_are_standardised_by_what_there_is(rng):
    values = rng.normal(5, 3, size=40)
    values[7] = np.nan
    found = Covariate.of("price", values).channel(values)
    np.testing.assert_allclose(found, (values - np.nanmean(values)) / np.nanstd(values))
    np.testing.assert_array_equal(
        Covariate.of("flat", np.full(4, 1e9)).channel(np.full(4, 1e9)), np.zeros(4)
    )
    np.testing.assert_array_equal(
        Covariate.of("none", np.full(2, np.nan)).channel(np.ones(2)), [1, 1]
    )


def test_categories_are_numbered_from_one_and_new_ones_are_zero():
    values = np.array(["b", "a", None, "b"], object)
    covariate = Covariate.of("kind", values)
    np.testing.assert_array_equal(covariate.channel(values), [2, 1, np.nan, 2])
    with pytest.warns(UserWarning, match=r"'kind' has categories .*'z'"):
        assert covariate.channel(np.array(["z", "a"], object)).tolist() == [0, 1]


def test_columns_that_change_their_kind_are_refused():
    numbers, words = np.array([1.0, 2.0]), np.array(["a", "b"], object)
    with pytest.raises(
        DataError,
        match=r"'price' holds text.* held numbers",
    ):
        Covariate.of("price", numbers).channel(words)
    with pytest.raises(DataError, match=r"'kind' holds numbers.* held categories"):
        Covariate.of("kind", words).channel(numbers)


def test_missing_values_are_those_before_within_each_series():
    x = np.array([[np.nan, 1, np.nan, 2, np.nan, np.nan, 5, np.nan]])
    np.testing.assert_array_equal(
        filled_forward(x, np.array([3, 2, 3])), [[0, 1, 1, 2, 2, 0, 5, 5]]
    )
