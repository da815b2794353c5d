"""Series of unequal length as one array: against padding by hand."""

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from fluxutils_py import SequenceScaler
from fluxutils_py.data import SeriesArray
from fluxutils_py.data.arrays import is_list_of_series, require_list_of_series
from fluxutils_py.data.ragged import RaggedArray, as_ragged
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import ShapeError
from tests.plain_networks import LagRegressor

LENGTHS = [5, 1, 9, 4]


@pytest.fixture
def arrays(rng):
    return [rng.normal(size=(3, t)) for t in LENGTHS]


def padded(arrays, fill=0.0):
    out = np.full((3, len(arrays), max(LENGTHS)), fill)
    for n, a in enumerate(arrays):
        out[:, n, : a.shape[1]] = a
    return out


def stored(arrays, kind, tmp_path):
    if kind == "map":
        for n, a in enumerate(arrays):
            np.save(tmp_path / f"{n}.npy", a)
        return [np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in range(len(arrays))]
    if kind == "h5py":
        file = h5py.File(tmp_path / "f.h5", "w")
        return [file.create_dataset(str(n), data=a) for n, a in enumerate(arrays)]
    return {
        "array": arrays,
        "transposed": [a.T.copy().T for a in arrays],
        "torch": list(map(torch.tensor, arrays)),
    }[kind]


KINDS = ["array", "transposed", "torch", "map", "h5py"]
KEYS = [
    np.s_[:], np.s_[:, 1:3, 2:8], np.s_[1, :, :], np.s_[:, 2, 3], np.s_[:, [2, 0], 1:4], np.s_[:, 1:, 8:],
    np.s_[..., -1], np.s_[::-1, :, 2:7], np.s_[:, :, ::2], np.s_[:, :, [4, 0, 8]], np.s_[[2, 0], :, 3:6],
    np.s_[:, 0:0, :], np.s_[0, 1, 2],
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices_are_those_of_the_padded_array(arrays, kind, key, tmp_path):
    found = RaggedArray(stored(arrays, kind, tmp_path), "x")
    np.testing.assert_array_equal(found[key], padded(arrays)[key])
    assert (found.shape, found.dtype, found.lengths.tolist()) == (
        (3, 4, 9),
        np.dtype(float),
        LENGTHS,
    )
    np.testing.assert_array_equal(np.asarray(found), padded(arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_as_from_the_padded_array(arrays, kind, tmp_path):
    rows = Segments(np.array([2, 0, 3, 2]), np.array([1, 0, 2, 5]), np.array([4, 5, 2, 4]))
    found = SeriesArray(RaggedArray(stored(arrays, kind, tmp_path), "x"), "x")
    live = rows.step_mask(0, 5)
    np.testing.assert_array_equal(
        found.read(rows, 0, 5)[live], SeriesArray(padded(arrays), "x").read(rows, 0, 5)[live]
    )
    assert found.in_memory == (kind not in ("map", "h5py"))


def test_what_is_assigned_goes_into_the_arrays(arrays):
    expected = padded(arrays, 7.0)
    new = np.random.default_rng(0).normal(size=(3, 2, 4))
    RaggedArray(arrays, "x")[:, 1:3, 2:6] = new
    expected[:, 1:3, 2:6] = new
    np.testing.assert_array_equal(
        padded(arrays), np.where(padded([np.ones_like(a) for a in arrays]), expected, 0)
    )


def test_other_fills_and_functions(arrays):
    found = RaggedArray(arrays, "x").map(lambda a: (a > 0).astype(int), fill=-100)
    np.testing.assert_array_equal(
        found[:], np.where(padded([np.ones_like(a) for a in arrays]), padded(arrays) > 0, -100)
    )


def test_beyond_the_ends_of_what_a_function_gave_there_are_zeros(arrays):
    found = RaggedArray(arrays, "x").map(lambda a: a + 3)
    np.testing.assert_array_equal(found[:], padded([a + 3 for a in arrays]))


def test_texts_may_differ_in_length():
    found = RaggedArray([np.array([["a", "bcd"]]), np.array([["ef"]])], "y")
    assert found[:].tolist() == [[["a", "bcd"], ["ef", ""]]]


def test_what_is_a_list_of_series(arrays):
    assert is_list_of_series(arrays)
    assert is_list_of_series(arrays[:1])
    for other in (
        padded(arrays),
        padded(arrays).tolist(),
        tuple(arrays),
        [],
        [1.0, 2.0],
        [np.arange(3), np.arange(3)],
    ):
        assert not is_list_of_series(other)
        assert as_ragged(other, "x") is other or isinstance(other, tuple)
    assert all(isinstance(a, RaggedArray) for a in as_ragged((arrays, arrays), "x"))


@pytest.mark.parametrize(("bad", "message"), [
    ([], r"^x is an empty list; .*\(F, T_i\)$"),
    ([np.zeros((4, 2)), np.zeros((5, 2))],
     r"^x\[1\] has 5 .*x\[0\] has 4; .*a\.T$"),
    ([np.ones((2, 3)), np.ones((3, 3))],
     r"^x\[1\] has 3 .*x\[0\] has 2; .*equal F: .* a\.T$"),
    ([np.ones((2, 3)), np.ones((2, 3), "f4")],
     r"^x\[1\] .*float32 .*float64; .*astype$"),
    ([np.ones((2, 3)), np.ones((2, 0))], r"^x\[1\] .*time steps: .*\(2, 0\)$"),
    ([np.ones((0, 3))], r"^x\[0\] .*features: .*\(0, 3\)$"),
    ([np.ones(4), np.ones(3)],
     r"^x\[0\] .*\(4,\): .*x\[0\]\[None\]$"),
    ([np.ones((2, 3)), np.ones((2, 3, 1))],
     r"^x\[1\] .*\(2, 3, 1\): .*\(F, T_i\)"),
    ([np.ma.masked_array(np.ones((2, 3)))],
     r"^x\[0\] .*mask.*x\[0\]\.filled\(np"),
], ids=range(9))  # fmt: skip
def test_arrays_that_do_not_fit(bad, message):
    with pytest.raises(ValueError, match=message):
        RaggedArray(bad, "x")


@pytest.mark.parametrize("kind", ["tuple", "objects", "frame"])
def test_series_that_are_not_in_a_list_are_refused_with_the_remedy(kind):
    series = [np.arange(2.0 * n).reshape(2, n) for n in (4, 6, 5)]
    given = tuple(series)
    if kind != "tuple":
        given = np.empty(3, object)
        given[:] = series
    if kind == "frame":
        given = pd.Series(given)
    est = LagRegressor(n_lags=1).fit(series, series)
    for call in (est.predict, lambda x: est.fit(x, series), SequenceScaler().fit):
        with pytest.raises(ShapeError, match=r"^x is .*3 arrays.*\(2, 4\).*list\(x\)"):
            call(given)
    with pytest.raises(ShapeError, match=r"^y is .*list\(y\)"):
        est.fit(series, given)
    require_list_of_series((np.zeros((2, 3, 4)), np.zeros((2, 3, 4))), "x")  # two inputs
    require_list_of_series(np.array(["a", None, np.nan], dtype=object), "y")
