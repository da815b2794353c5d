"""Arrays of other libraries: masks, types that differ from what is declared, and named axes
(data/arrays.py).
"""

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceScaler,
    h5save,
    samples,
    timesteps,
)
from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.arrays import plain_block, read_block
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError
from tests.plain_networks import plain_regressor

F, N, T = 2, 5, 23


class Lazy:
    """An array that is read block by block, masked or scaled where it is read."""

    def __init__(self, values, dtype=None):
        self.values, self.shape, self.dtype = values, values.shape, np.dtype(dtype or values.dtype)

    def __getitem__(self, key):
        return self.values[key]


@pytest.fixture
def holes():
    values = np.random.default_rng(0).normal(size=(F, N, T)).astype("float32")
    mask = np.zeros((F, N, T), bool)
    mask[:, 1, 4:9] = True
    return np.ma.MaskedArray(np.where(mask, 9.96921e36, values), mask).astype("float32")


def test_masked_blocks_are_read_as_nan(holes):
    expected = holes.filled(np.nan)
    np.testing.assert_array_equal(
        SeriesArray(Lazy(holes), "x").read(Segments.from_lengths(N, T), 2, 11), expected.T[2:11]
    )
    np.testing.assert_array_equal(
        read_block(Lazy(holes), range(F), np.array([1, 3]), range(3, 6)), expected[:, [1, 3], 3:6]
    )


def test_masked_integers_have_no_nan_and_are_refused():
    labels = np.ma.MaskedArray(np.arange(T).reshape(1, 1, T), np.arange(T).reshape(1, 1, T) == 7)
    with pytest.raises(DataError, match=r"^y: 1 of the values.*int64"):
        SeriesArray(Lazy(labels), "y").read(Segments.from_lengths(1, T), 0, T)
    assert plain_block(labels[..., :7]).tolist() == [[list(range(7))]]


SPEC = {"epochs": 2, "batchsize": 2, "seqsize": 7}


def test_a_masked_one_of_several_inputs_is_an_error(holes):
    partly = np.ma.MaskedArray(holes.data, holes.mask & (np.arange(F) == 0)[:, None, None])
    for data in (Lazy(partly), partly.filled(np.nan)):
        with pytest.raises(DataError, match="NaN"):
            Estimator(spec=SPEC).fit(data, np.zeros((1, N, T), "float32"))
    with pytest.raises(DataError, match="sample_weight must be finite"):
        SampleWeight(Lazy(holes[0]), N, T).normalized(Segments.from_lengths(N, T), ())


def test_values_of_another_type_than_declared_are_refused():
    values = np.ones((F, N, T)) * 0.01
    lazy = Lazy(values, "int16")  # as netCDF4 gives packed variables
    series = [Lazy(values[:, n], "int16") for n in range(N)]
    for given, name in ((lazy, "x"), (series, r"x\[0\]")):
        with pytest.raises(DataError, match=rf"{name} says dtype int16, .*float64.*xarray"):
            Estimator(spec=SPEC).fit(given, values[:1])


class Named(Lazy):
    def __init__(self, values, dims):
        super().__init__(values)
        self.dims, self.data = dims, values

    def __getitem__(self, key):
        return self.values[key]


@pytest.mark.parametrize(
    ("dims", "remedy"),
    [
        (("time", "station", "variable"), "transpose('variable', 'station', 'time')"),
        (("variable", "time", "station"), "transpose('variable', 'station', 'time')"),
        (("station", "variable", "time"), "transpose('variable', 'station', 'time')"),
        (("Date", "lat", "lon"), "transpose('lat', 'lon', 'Date')"),
    ],
)
def test_names_of_axes_that_say_another_order_are_refused_with_the_transpose(dims, remedy):
    array = Named(np.zeros((4, 5, 6)), dims)
    good = np.zeros((4, 5, 6))
    calls = {
        "x": lambda: Estimator(spec=SPEC).fit(array, good[:1]),
        "y": lambda: Estimator(spec=SPEC).fit(good, array),
        "samples": lambda: samples(array),
        "scaler": lambda: SequenceScaler().fit(array),
        "ready-made": lambda: plain_regressor(epochs=1).fit(array, good[:1]),
    }
    for call in calls.values():
        with pytest.raises(ShapeError) as caught:
            call()
        assert remedy in str(caught.value)
        assert str(dims) in str(caught.value)


@pytest.mark.parametrize(
    "dims", [("variable", "station", "time"), ("a", "b", "c"), ("x", "time", "t")]
)
def test_names_of_axes_that_say_nothing_else_are_fine(dims):
    assert SeriesArray(Named(np.zeros((4, 5, 6)), dims), "x").shape == (4, 5, 6)


def test_a_dataset_whose_attribute_says_another_order_is_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(F, N, T))
    h5save(tmp_path / "x.h5", {"x": x})  # (T, N, F) in the file, and says so
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].shape == (T, N, F)
        with pytest.raises(ShapeError, match=r"\(23, 5, 2\).*'TNF'.*h5mmap\(.*x.h5"):
            Estimator(spec=SPEC).fit(file["x"], x[:1])


def test_series_of_a_list_with_time_first_are_refused():
    with pytest.raises(ShapeError, match=r"x\[0\].*transpose\('variable', 'time'\)"):
        Estimator(spec=SPEC).fit(
            [Named(np.zeros((7, 3)), ("time", "variable"))], [np.zeros((1, 7))]
        )


def test_both_layouts_with_series_first_are_named_with_their_transposes():
    x = np.zeros((50, 3, 20))  # (N, F, T)
    with pytest.raises(ShapeError) as caught:
        plain_regressor(epochs=1).fit(x, np.zeros(50))
    assert "(N, F, T)" in str(caught.value)
    assert "a.transpose(1, 0, 2)" in str(caught.value)
    assert "a.transpose(2, 0, 1)" in str(caught.value)


@pytest.mark.slow
def test_masked_labels_count_as_missing_or_are_refused(holes):
    x = np.random.default_rng(1).normal(size=(F, N, T)).astype("float32")
    labels = np.random.default_rng(2).integers(0, 3, (1, N, T))
    masked = np.ma.MaskedArray(np.where(holes.mask[:1], 99.0, labels), holes.mask[:1])
    lazy, plain = (
        EstimatorClassifier(spec=SPEC, random_state=0, verbose=False).fit(x, y)
        for y in (Lazy(masked), masked.filled(np.nan))
    )
    assert lazy.classes_.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(lazy.predict_proba(x), plain.predict_proba(x))
    integers = Lazy(np.ma.MaskedArray(np.where(holes.mask[:1], 99, labels), holes.mask[:1]))
    for est in (EstimatorClassifier(spec=SPEC), Estimator(None, nn.CrossEntropyLoss(), spec=SPEC)):
        with pytest.raises(DataError, match=r"^y: 5 of the values.*int64"):
            est.fit(x, integers)


def masked_integers(*shape):
    """Of which step 1 of the last series is masked, and the first value is not."""
    mask = np.zeros(shape, bool)
    mask[..., -1, 1] = True
    return Lazy(np.ma.MaskedArray(np.ones(shape, int), mask))


@pytest.mark.parametrize("name", ["x", "y", "sample_weight", "validation x", "validation y"])
@pytest.mark.parametrize("ready_made", [False, True])
def test_the_error_of_masked_integers_names_the_argument(name, ready_made):
    x, y = (
        np.random.default_rng(0).normal(size=(F, N, T)),
        np.random.default_rng(1).normal(size=(1, N, T)),
    )
    given = {"x": x, "y": y, "sample_weight": None, "validation x": x, "validation y": y}
    n_features = F if name.endswith("x") else 1  # one value of each is masked
    given[name] = masked_integers(n_features, N, T)
    est = plain_regressor(3, epochs=1) if ready_made else Estimator(spec={"epochs": 1})
    with pytest.raises(
        DataError,
        match=rf"^{name}: {n_features} .*mask .*int64",
    ):
        est.fit(
            given["x"],
            given["y"],
            given["sample_weight"],
            validation_data=(given["validation x"], given["validation y"]),
        )


@pytest.mark.parametrize(
    "how", [samples, timesteps, lambda x: (np.ones((1, N, T)), x), lambda x: x]
)
def test_predict_names_masked_integers_of_any_form(how):
    est = Estimator(spec={"epochs": 1}, random_state=0)
    x = np.random.default_rng(0).normal(size=(F, N, T))
    if isinstance(how(x), tuple):
        est.set_params(model=TwoInputs(), opt=torch.optim.AdamW)
    y = np.ones((1, N, T))
    est.fit(how(x), y if how(x) is x or isinstance(how(x), tuple) else how(y))
    with pytest.raises(DataError, match=r"^x(\[1\])?: \d+ .*mask .*int64"):
        est.predict(how(masked_integers(F, N, T)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1 + F, 1, dtype=torch.float64)

    def forward(self, a, b):
        return self.head(torch.cat([a, b.double()], -1))


@pytest.mark.parametrize("shape", [(9, 9), (1, 9, 9)])
def test_weights_whose_names_say_time_first_are_refused_where_the_shape_cannot_tell(shape):
    import xarray

    x = np.random.default_rng(0).normal(size=(2, 9, 9)).astype("float32")
    dims = ("time", "station") if len(shape) == 2 else ("variable", "time", "station")
    weight = xarray.DataArray(np.ones(shape), dims=dims)
    with pytest.raises(ShapeError, match=r"sample_weight .*'station', 'time'\)"):
        Estimator(spec={"epochs": 1}).fit(x, x[:1], sample_weight=weight)
