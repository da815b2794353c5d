"""Arrays of xarray in, arrays of xarray out: values as without, labels as xarray's own selection."""

import numpy as np
import pandas as pd
import pytest
import xarray

from fluxutils_py import Estimator, EstimatorClassifier
from fluxutils_py.errors import DataError, ShapeError

SPEC = {"epochs": 1, "batchsize": 2, "seqsize": 7}


@pytest.fixture
def x():
    values = np.random.default_rng(0).normal(size=(2, 5, 23)).astype("float32")
    return xarray.DataArray(
        values,
        dims=("variable", "station", "time"),
        coords={
            "variable": ["wind", "sun"],
            "station": list("abcde"),
            "height": ("station", np.arange(5)),
            "time": pd.date_range("2024-01-01", periods=23),
            "run": 7,
        },
    )


@pytest.mark.slow
def test_predictions_have_the_labels_of_series_and_time(x):
    est = Estimator(spec=SPEC, random_state=0).fit(x, x[:1])
    plain = est.predict(x)
    assert type(plain) is np.ndarray
    found, state = est.predict(x, out="xarray", return_state=True)
    assert len(state) == 2
    labels = x.isel(variable=0, drop=True).expand_dims("output").copy(data=plain)
    xarray.testing.assert_identical(found, labels)
    later = x.isel(station=[3, 1], time=slice(4, 11))
    again = est.predict(later, out="xarray")
    xarray.testing.assert_identical(again["height"], later["height"])
    np.testing.assert_array_equal(again, est.predict(later.values))


@pytest.mark.slow
def test_one_prediction_per_series_has_its_labels(x):
    clf = EstimatorClassifier(spec=SPEC, random_state=0).fit(x, list("uvuvu"))
    found = clf.predict(x, out="xarray")
    assert found.dims == ("station",)
    assert set(found.coords) == {"station", "height", "run"}
    np.testing.assert_array_equal(found, clf.predict(x))


def test_what_has_no_labels_is_refused(x):
    est = Estimator(spec=SPEC, random_state=0).fit(x, x[:1])
    with pytest.raises(DataError, match="ndarray"):
        est.predict(x.values, out="xarray")
    with pytest.raises(DataError, match="'array'"):
        est.predict(x, out="array")


def test_labels_are_for_three_dimensions(x):
    from fluxutils_py.inputs.labelled_arrays import with_labels

    with pytest.raises(ShapeError, match="time"):
        with_labels(np.zeros((1, 5, 23)), x[0])
