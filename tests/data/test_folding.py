"""Folded arrays, against plain slicing and the emulation of FluxUtils.jl."""

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data import LazyArray, SeriesArray, rebatch
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError

ORDERS = {
    "C": lambda x: x,
    "TNF": lambda x: np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0),
    "NTF": lambda x: np.ascontiguousarray(x.transpose(1, 2, 0)).transpose(2, 0, 1),
}


def numbered(*shape, dtype=float):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def by_hand(x, batchsize, fill=np.nan):
    """Row b * n + k holds fold k of series b."""
    *_, n_series, n_steps = x.shape
    n = batchsize // n_series
    if n < 2 or n_steps <= n:
        return x
    rows = [f for b in range(n_series) for f in np.array_split(x[..., b, :], n, -1)]
    longest = max(r.shape[-1] for r in rows)
    pad = [(0, 0)] * (x.ndim - 2)
    rows = [np.pad(r, [*pad, (0, longest - r.shape[-1])], constant_values=fill) for r in rows]
    return np.stack(rows, -2)


@pytest.mark.parametrize("batchsize", [1, 3, 5, 6, 8, 9, 12, 14, 21, 40, 1000])
@pytest.mark.parametrize(
    "shape", [(2, 3, 12), (2, 1, 13), (1, 3, 7), (3, 12), (2, 5, 1), (1, 1, 41)]
)
@pytest.mark.parametrize("order", ORDERS)
def test_folds_hold_every_step_once_in_its_place(shape, batchsize, order):
    x = numbered(*shape)
    x = ORDERS[order](x) if x.ndim == 3 else x
    before = x.copy()
    got = rebatch(x, batchsize)
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, by_hand(before, batchsize))
    values = got[~np.isnan(got)]
    assert sorted(values.tolist()) == sorted(before.ravel().tolist())
    np.testing.assert_array_equal(x, before)


def test_the_result_is_that_of_fluxutils_where_nothing_is_dropped():
    x = numbered(2, 3, 12)
    n = 10 // 3
    # column-major reshape of (F, T', n, N) to (F, T', N n), time before series
    julia = (
        x.transpose(0, 2, 1)
        .reshape(2, 36, order="F")
        .reshape(2, 12 // n, 3 * n, order="F")
        .transpose(0, 2, 1)
    )
    np.testing.assert_array_equal(rebatch(x, 10), julia)


@pytest.mark.parametrize(
    ("x", "batchsize", "view"),
    [
        (numbered(2, 3, 12), 12, True),
        (numbered(3, 12), 12, True),
        (numbered(2, 3, 12).transpose(2, 1, 0).copy().transpose(2, 1, 0), 12, False),
        (numbered(2, 1, 12).transpose(2, 1, 0).copy().transpose(2, 1, 0), 6, True),
        (numbered(2, 3, 13), 12, False),
        (numbered(4, 3, 12)[::2], 12, True),
        (numbered(2, 3, 13)[..., :12], 12, False),
        (numbered(2, 3, 13)[..., :12], 5, True),  # nothing to fold
    ],
)
def test_it_is_a_view_where_the_memory_allows(x, batchsize, view):
    assert np.shares_memory(rebatch(x, batchsize), x) == view
    t = torch.from_numpy(x)
    got = rebatch(t, batchsize)
    np.testing.assert_array_equal(got.numpy(), rebatch(x, batchsize))
    assert np.shares_memory(got.numpy(), x) == view


def test_integers_need_something_to_fill_up_with():
    x = numbered(2, 3, 13, dtype=int)
    message = (
        "13 steps do not divide into 4 folds, and int64 has no NaN to fill up the shorter ones; "
        "give fill=, or a batchsize for which batchsize // N divides T"
    )
    for a, dtype in ((x, "int64"), (torch.from_numpy(x), "torch.int64")):
        with pytest.raises(DataError) as caught:
            rebatch(a, 12)
        assert str(caught.value) == message.replace("int64", dtype)
        got = np.asarray(rebatch(a, 12, fill=-1))
        assert got.dtype == int
        np.testing.assert_array_equal(got, by_hand(x, 12, -1))
    np.testing.assert_array_equal(rebatch(x[..., :12], 12), by_hand(x[..., :12], 12, 0))
    np.testing.assert_array_equal(rebatch(x > 7, 12, fill=False), by_hand(x > 7, 12, False))


def test_tuples_are_folded_alike():
    x, y, w = numbered(2, 3, 13), numbered(1, 3, 13), numbered(3, 13)
    got = rebatch((x, y, w), 12)
    assert isinstance(got, tuple)
    for a, b in zip(got, (x, y, w), strict=True):
        np.testing.assert_array_equal(a, by_hand(b, 12))
    np.testing.assert_array_equal(rebatch(w, 12, fill=0), by_hand(w, 12, 0))


@pytest.mark.parametrize(
    ("x", "batchsize", "error", "message"),
    [
        (numbered(4), 8, ShapeError, "rebatch takes arrays of shape (F, N, T) or (N, T), got (4,)"),
        (
            (numbered(1, 2, 6), numbered(1, 2, 1)),
            8,
            ShapeError,
            "arrays of shapes (1, 2, 6) and (1, 2, 1) cannot be folded together: they must be (F, "
            "N, T) with equal N and T",
        ),
        (numbered(1, 2, 6), 0, ValueError, "batchsize must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_folded_is_refused(x, batchsize, error, message):
    with pytest.raises(error) as caught:
        rebatch(x, batchsize)
    assert str(caught.value) == message


# -- larger than memory --------------------------------------------------------------------------------


def sources(tmp_path, x):
    """The same array as a memory map, as an HDF5 dataset, and as something that can only be sliced."""
    mapped = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape[::-1])
    mapped[:] = x.transpose(2, 1, 0)
    yield mapped.transpose(2, 1, 0)
    with h5py.File(tmp_path / "x.h5", "w") as f:
        yield f.create_dataset("x", data=x)


KEYS = [
    np.s_[:],
    np.s_[...],
    np.s_[:, :, :],
    np.s_[:, 2:9, 1:3],
    np.s_[1, ..., -1],
    np.s_[:, 3],
    np.s_[:, -1, 2],
    np.s_[..., 0],
    np.s_[0],
    np.s_[0, 4, 2],
    np.s_[:, ::3, ::2],
    np.s_[::-1, ::-1, ::-1],
    np.s_[:, np.array([7, 0, 7, 2])],
    np.s_[:, np.arange(12) % 5 == 0, 1:],
    np.s_[[1, 0]],
    np.s_[:, 2:9, [2, 0]],
    np.s_[:, 5:5],
    np.s_[:, :, 4:4],
    np.s_[:, 3:99, 2:99],
]


@pytest.mark.parametrize("n_steps", [12, 13, 15])
def test_arrays_on_disk_are_folded_without_reading_and_sliced_as_arrays(tmp_path, n_steps):
    x = numbered(2, 3, n_steps, dtype="float32")
    expected = by_hand(x, 12)
    for source in sources(tmp_path, x):
        folds = rebatch(source, 12)
        assert isinstance(folds, LazyArray)
        assert (folds.shape, folds.ndim, folds.dtype, len(folds)) == (expected.shape, 3, x.dtype, 2)
        for key in KEYS:
            got = folds[key]
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(got, expected[key], err_msg=str(key))
        np.testing.assert_array_equal(np.asarray(folds), expected)
        np.testing.assert_array_equal(np.array(folds, "float64"), expected)


def test_only_what_is_sliced_is_read():
    class Recorder:
        shape, dtype, ndim = (2, 3, 40), np.dtype("float32"), 3
        steps = 0

        def __getitem__(self, key):
            got = numbered(*self.shape, dtype="float32")[key]
            self.steps += got[0].size
            return got

    source = Recorder()
    folds = rebatch(source, 12)
    assert source.steps == 0
    assert folds[:, 4:8, 2:5].shape == (2, 4, 3)
    assert source.steps <= 4 * 3


def test_folds_are_a_source_of_windows(tmp_path):
    x = numbered(2, 3, 13, dtype="float32")
    for source in sources(tmp_path, x):
        folds = rebatch(source, 12)
        series = SeriesArray(folds, "x")
        got = series.read(Segments.from_lengths(series.N, series.T)[2:7], 1, 4)
        np.testing.assert_array_equal(got, by_hand(x, 12)[:, 2:7, 1:4].transpose(2, 1, 0))


def test_a_map_is_folded_lazily(tmp_path):
    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=(2, 3, 12))
    assert isinstance(rebatch(mapped, 12), LazyArray)
    with pytest.raises(ShapeError, match=r"three axes .*\(3, 12\)"):
        rebatch(mapped[0], 15)


@pytest.mark.parametrize(
    "key", [np.s_[0, 0, 0, 0], np.s_[[0, 1], [0, 1]], np.s_[:, :, None], np.s_[:, 12]]
)
def test_other_indices_are_refused(tmp_path, key):
    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=(2, 3, 13))
    with pytest.raises(IndexError):
        rebatch(mapped, 12)[key]


def test_reading_is_a_copy(tmp_path):
    folds = rebatch(np.memmap(tmp_path / "x", "float32", "w+", shape=(2, 3, 13)), 12)
    with pytest.raises(ValueError, match="without copying"):
        folds.__array__(copy=False)
