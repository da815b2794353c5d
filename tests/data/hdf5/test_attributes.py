"""Names of features, from the file through maps, lazy arrays and slices to other processes and
files.
"""

import copy
import pickle

import h5py
import numpy as np
import pytest

from fluxutils_py.data import H5Lazy, H5Map, LazyArray, h5concat, h5mmap, h5save
from fluxutils_py.data.lazy import select
from fluxutils_py.errors import H5DataError

F, N, T = 3, 5, 7
NAMES = ("température", "wind", "load")
X = np.arange(F * N * T).reshape(F, N, T).astype("f4")


def saved(path, names=NAMES, x=X, **others):
    h5save(path, {"x": x, **others}, feature_names=None if names is None else {"x": names})
    return h5mmap(path, "x")


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_names_stand_beside_the_data(tmp_path, form):
    h5save(
        tmp_path / "a.h5",
        {"g": {"x": X}, "y": X[:1], "n": 3},
        feature_names={"g/x": form(NAMES), "y": ["load"]},
    )
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["g/x"].attrs["axes"] == "TNF"
        assert file["g/x"].attrs["feature_names"].tolist() == list(NAMES)
        assert (
            h5py.check_string_dtype(file["g/x"].attrs.get_id("feature_names").dtype).encoding
            == "utf-8"
        )
        assert file["y"].attrs["feature_names"].tolist() == ["load"]
    assert h5mmap(tmp_path / "a.h5", "g/x").feature_names == NAMES
    # of the one array that has features
    assert saved(tmp_path / "c.h5", None).feature_names is None


@pytest.mark.parametrize("chunked", [False, True])
def test_names_in_a_file_of_other_software(tmp_path, chunked):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=X.T, chunks=True if chunked else None)
        dataset.attrs["axes"], dataset.attrs["feature_names"] = "TNF", np.array([b"a", b"b", b"c"])
    x = h5mmap(tmp_path / "a.h5", "x")
    assert type(x) is (H5Lazy if chunked else H5Map)
    assert x.feature_names == ("a", "b", "c")
    for other in (7, "abc", ["a", "b"], [1, 2, 3], np.zeros(3, "S4"), np.zeros(3)):
        with h5py.File(tmp_path / "b.h5", "w") as file:
            dataset = file.create_dataset("x", data=X.T, chunks=True if chunked else None)
            dataset.attrs["axes"], dataset.attrs["feature_names"] = "TNF", other
        with pytest.warns(UserWarning, match=r"b\.h5: .*'/x'.*'feature_names'.* 3"):
            assert h5mmap(tmp_path / "b.h5", "x").feature_names is None


SLICES = {
    "whole": (lambda x: x[...], NAMES),
    "features": (lambda x: x[1:], NAMES[1:]),
    "backwards": (lambda x: x[::-1, 1:3], NAMES[::-1]),
    "one feature": (lambda x: x[1:2, :, ::2], NAMES[1:2]),
    "series": (lambda x: x[:, 2:4], NAMES),
    "window": (lambda x: x[..., 1:3, 2:5], NAMES),
    "last steps": (lambda x: x[..., -2:], NAMES),
    "twice": (lambda x: x[1:][::-1][:1], NAMES[2:]),
    "all axes and dots": (lambda x: x[1:, :, :, ...], NAMES[1:]),
    "one series": (lambda x: x[:, 2], None),
    "transposed": (lambda x: x.transpose(1, 0, 2), None),
    "transposed and sliced": (lambda x: x.transpose(1, 0, 2)[:3], None),
    "new axis": (lambda x: x[None, :, 2], None),
    "new axis in the middle": (lambda x: x[:, None, 2], None),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_a_map_have_the_names_of_what_they_hold(tmp_path, name):
    view, expected = SLICES[name]
    found = view(saved(tmp_path / "a.h5"))
    assert type(found) is H5Map
    assert found.feature_names == expected
    if expected is not None:
        assert found.feature_names == tuple(
            NAMES[int(value) // (N * T)] for value in found[:, 0, 0]
        )
    sent = pickle.loads(pickle.dumps(found))
    assert sent.feature_names == expected
    assert np.array_equal(sent, found)


def test_lazy_arrays_have_the_names_of_their_source(tmp_path):
    x = saved(tmp_path / "a.h5")
    with H5Lazy(tmp_path / "a.h5", "x") as lazy:
        for source in (x, lazy):
            half = LazyArray(source, np.array([3, 1]), range(2, 6))
            assert half.feature_names == NAMES
            assert pickle.loads(pickle.dumps(half)).feature_names == NAMES
            assert select(source, range(1, 3), None).feature_names == NAMES
            assert LazyArray(half, functions=(np.negative,)).feature_names == NAMES
            # who knows what they do
            for function in (
                lambda block: block[:2],
                lambda block: block[::-1],
            ):
                assert LazyArray(half, functions=(function,)).feature_names is None
            assert LazyArray(x[1:]).feature_names == NAMES[1:]
        assert (
            pickle.loads(pickle.dumps(lazy)).feature_names == copy.copy(lazy).feature_names == NAMES
        )
    with h5py.File(tmp_path / "a.h5") as file:
        assert LazyArray(file["x"]).feature_names is None  # its first axis is time
    assert LazyArray(X).feature_names is None


def test_an_array_keeps_its_names_in_another_file(tmp_path):
    x = saved(tmp_path / "a.h5")
    h5save(tmp_path / "b.h5", {"x": x[1:], "y": x, "z": X}, feature_names={"y": ["a", "b", "c"]})
    assert h5mmap(tmp_path / "b.h5", "x").feature_names == NAMES[1:]
    assert h5mmap(tmp_path / "b.h5", "y").feature_names == ("a", "b", "c")
    assert h5mmap(tmp_path / "b.h5", "z").feature_names is None


BAD = {
    "dataset 'x': 2 feature_names for an array of shape (3, 5, 7); expected three axes (F, N, T) and F names": (
        {"x": ["a", "b"]}
    ),
    "dataset 'm': 3 feature_names for an array of shape (3, 5); expected three axes (F, N, T) and F names": (
        {"m": NAMES}
    ),
    "dataset 'x': feature_names must be a list of strings, without zero bytes, got 'abc'": {
        "x": "abc"
    },
    "dataset 'x': feature_names must be a list of strings, without zero bytes, got [1, 2, 3]": {
        "x": [1, 2, 3]
    },
    "dataset 'x': feature_names must be a list of strings, without zero bytes, got ['a', 'b\\x00', 'c']": {
        "x": ["a", "b\0", "c"]
    },
    "feature_names are given for 'w', which is not among the arrays to save: x, y, m": {"w": NAMES},
    "feature_names must say of which array they are, as {'x': [...]}, got tuple": NAMES,
}


@pytest.mark.parametrize("message", BAD)
def test_names_that_do_not_fit(tmp_path, message):
    with pytest.raises(H5DataError) as caught:
        h5save(tmp_path / "a.h5", {"x": X, "y": X, "m": X[..., 0]}, feature_names=BAD[message])
    assert str(caught.value) == f"{tmp_path}/a.h5: {message}"
    assert not (tmp_path / "a.h5").exists()


def test_more_names_than_an_attribute_holds(tmp_path):
    names = [f"f{i}" for i in range(5000)]
    with pytest.raises(H5DataError, match=r"5000 feature_names.*HDF5 attribute"):
        h5save(tmp_path / "a.h5", {"x": np.zeros((5000, 1, 1))}, feature_names={"x": names})


# -- many files ---------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("virtual", [True, False])
def test_files_that_agree_keep_their_names(tmp_path, virtual):
    for i, names in enumerate((NAMES, NAMES, None)):  # one without names goes with any
        saved(tmp_path / f"{i}.h5", names, X + i)
    sources = [tmp_path / f"{i}.h5" for i in (2, 0, 1)]
    h5concat(tmp_path / "all.h5", sources, 1, virtual)
    assert h5mmap(tmp_path / "all.h5", "x").feature_names == NAMES
    h5concat(tmp_path / "grid.h5", [sources[:2], sources[2:]], (1, 2), virtual)
    assert h5mmap(tmp_path / "grid.h5", "x").feature_names == NAMES


@pytest.mark.few
@pytest.mark.parametrize("virtual", [True, False])
def test_names_follow_each_other_where_features_do(tmp_path, virtual):
    saved(tmp_path / "a.h5", NAMES[:2], X[:2])
    saved(tmp_path / "b.h5", NAMES[2:], X[2:])
    saved(tmp_path / "c.h5", None, X[:1])
    h5concat(tmp_path / "ab.h5", [tmp_path / "a.h5", tmp_path / "b.h5"], 0, virtual)
    assert h5mmap(tmp_path / "ab.h5", "x").feature_names == NAMES
    h5concat(tmp_path / "ac.h5", [tmp_path / "a.h5", tmp_path / "c.h5"], 0, virtual)
    assert h5mmap(tmp_path / "ac.h5", "x").feature_names is None


def test_files_that_differ_are_not_mixed(tmp_path):
    saved(tmp_path / "a.h5")
    saved(tmp_path / "b.h5", NAMES[::-1])
    with pytest.raises(H5DataError) as caught:
        h5concat(tmp_path / "all.h5", [tmp_path / "a.h5", tmp_path / "b.h5"], 1)
    assert str(caught.value) == (
        f"{tmp_path}/b.h5: dataset 'x': feature 0 is 'load', in another file it is 'température'; "
        "bring the features into one order, or correct the attribute 'feature_names'"
    )
    assert not (tmp_path / "all.h5").exists()
