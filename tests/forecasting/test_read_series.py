"""Arrays (F, N, T) become series at integer times."""

import numpy as np
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.read_series import read_series
from fluxutils_py.frames.panel import Columns


@pytest.mark.parametrize("order", ["C", "F"])
def test_each_feature_of_an_array_is_a_series(rng, order):
    x = np.asarray(rng.normal(size=(2, 5, 9)), order=order)
    x[1, 3, 4] = np.nan
    panel = read_series(x, Columns(), None)
    assert panel.shape == (2, 5)
    assert panel.ids.tolist() == [*range(10)]
    assert panel.lengths.tolist() == [9] * 10
    np.testing.assert_array_equal(panel.values["y"], x.reshape(-1))
    assert panel.times(np.array([7]), np.array([4])).tolist() == [4]


def test_what_an_array_cannot_have_is_refused():
    x = np.zeros((1, 3, 30))
    with pytest.raises(DataError, match=r"sample_weight .*for data frames"):
        read_series(x, Columns(), None, sample_weight="w")
    with pytest.raises(DataError, match="covariates are columns"):
        read_series(x, Columns(hist=("a",)), None)
    x[0, 2, 7] = np.inf
    with pytest.raises(DataError, match=r"infinite at \[0, 2, 7\]"):
        read_series(x, Columns(), None)
