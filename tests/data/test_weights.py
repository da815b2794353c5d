"""Weights of series and steps against sums written out."""

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError

N, T = 5, 7
LENGTHS = np.array([7, 1, 4, 6, 7])


def whole(lengths=None):
    return Segments.from_lengths(N, T, lengths)


def stretched(w):
    """Any form of weights as (N, T)."""
    w = np.asarray(w, dtype=float)
    return np.broadcast_to(w[:, None] if w.ndim == 1 else w.reshape(N, T), (N, T))


def uneven(shape):
    w = np.random.default_rng(0).uniform(0.1, 5, shape)
    w.reshape(-1)[1::4] = 0
    return w


FORMS = {
    "series": uneven((N,)),
    "steps": uneven((N, T)),
    "steps with an axis": uneven((1, N, T)),
    "float32": uneven((N, T)).astype("f4"),
    "integers": np.arange(N),
    "booleans": np.arange(N * T).reshape(N, T) % 3 > 0,
    "column order": np.asfortranarray(uneven((N, T))),
    "list": [1, 2, 0, 4, 5],
    "torch": torch.tensor(uneven((N, T))),
    "torch, one a series": torch.tensor(uneven((N,))),
}


def hdf5(array, folder):
    with h5py.File(folder / "w.h5", "w") as f:
        f.create_dataset("w", data=array)
    return h5py.File(folder / "w.h5", "r")["w"]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("form", FORMS)
def test_the_mean_over_the_steps_that_count_is_one(form, lengths):
    source = FORMS[form]
    rows = whole(lengths)
    weight = SampleWeight(source, N, T)
    weight = weight.normalized(rows, ())
    got = weight.read(rows, 0, T).T  # (N, T)
    plain = stretched(source)
    live = (plain > 0) & (np.arange(T) < rows.length[:, None])
    assert got[live].mean() == pytest.approx(1, abs=1e-6 if form == "float32" else 1e-12)
    np.testing.assert_allclose(got[live], plain[live] / plain[live].mean(), rtol=1e-6)
    np.testing.assert_array_equal(got[live] > 0, True)
    exists = np.arange(T) < rows.length[:, None]
    assert not got[exists & ~live].any()


@pytest.mark.parametrize(
    "form", [f for f in FORMS if f not in ("list", "torch", "torch, one a series")]
)
def test_weights_in_hdf5_are_those_in_memory(form, tmp_path):
    array = np.asarray(FORMS[form])
    in_file = hdf5(array, tmp_path)
    for rows in (whole(), whole(LENGTHS).fold(12)[::-1]):
        got, expected = (
            SampleWeight(a, N, T).normalized(whole(LENGTHS), ()) for a in (in_file, array)
        )
        np.testing.assert_array_equal(got.read(rows, 0, 2), expected.read(rows, 0, 2))


@pytest.mark.parametrize("form", FORMS)
def test_the_source_is_left_as_it_is(form):
    source = FORMS[form]
    before = np.asarray(source).copy()
    if isinstance(source, np.ndarray):
        source.flags.writeable = False  # whoever writes to it gets an error
    weight = SampleWeight(source, N, T)
    weight = weight.normalized(whole(), ())
    weight.read(whole(), 0, T)[:] = 7
    weight.read(whole()[::-1], 0, T)[:] = 7
    np.testing.assert_array_equal(np.asarray(source), before)


def test_constant_weights_become_ones():
    for source in (np.full(N, 3), np.full((N, T), 0.1)):
        weight = SampleWeight(source, N, T)
        weight = weight.normalized(whole(), ())
        np.testing.assert_allclose(weight.read(whole(), 0, T), np.ones((T, N)), rtol=1e-14)


def test_steps_without_a_target_do_not_count():
    y = np.random.default_rng(1).normal(size=(2, N, T))
    y[0, 1, 2:5] = np.nan
    y[1, 4, 0] = np.nan
    z = np.zeros((1, N, T), "f4")
    z[0, 3] = np.nan
    labels, flags = np.zeros((1, N, T), int), np.ones((1, N, T), bool)
    source = uneven((N, T))
    weight = SampleWeight(source, N, T)
    weight = weight.normalized(whole(LENGTHS), [SeriesArray(a, "y") for a in (y, z, labels, flags)])
    live = (source > 0) & ~np.isnan(y).any(0) & ~np.isnan(z[0]) & (np.arange(T) < LENGTHS[:, None])
    got = weight.read(whole(), 0, T).T
    assert got[live].mean() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(got, source / source[live].mean(), rtol=1e-12)


ROWS = {
    "whole": whole(),
    "some": whole()[1:4],
    "permuted": whole()[np.array([3, 0, 4, 1, 2])],
    "of other lengths": whole(LENGTHS),
    "folded": whole().fold(12),
    "folded and permuted": whole(LENGTHS).fold(15)[np.random.default_rng(2).permutation(13)],
    "far apart": Segments(np.array([0, 1]), np.array([0, 5]), np.array([7, 2])),
    "the same series twice": Segments(np.array([0, 0]), np.array([0, 0]), np.array([7, 7])),
    "from the middle": Segments(np.array([2, 3]), np.array([4, 4]), np.array([3, 2])),
}


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("which", ROWS)
@pytest.mark.parametrize("form", ["series", "steps", "steps with an axis", "list"])
def test_weights_are_read_for_any_rows(form, which, size):
    weight, plain, rows = SampleWeight(FORMS[form], N, T), stretched(FORMS[form]), ROWS[which]
    weight.scale = 2.5
    for start in range(0, rows.max_length, size):
        stop = min(start + size, rows.max_length)
        got = weight.read(rows, start, stop)
        assert got.shape == (stop - start, len(rows))
        for i, (s, begin, length) in enumerate(
            zip(rows.series, rows.start, rows.length, strict=True)
        ):
            end = min(stop, length)
            expected = 2.5 * plain[s, begin + start : begin + end]
            np.testing.assert_array_equal(
                got[: max(end - start, 0), i], expected[: max(end - start, 0)]
            )


@pytest.mark.parametrize(
    "shape", [(), (N + 1,), (T, N), (1, N), (N, 1), (N, T, 1), (2, N, T), (1, 1, N, T)]
)
def test_weights_of_another_shape_are_refused(shape):
    with pytest.raises(
        ShapeError,
        match=r"sample_weight .*\(5,\).*\(1, 5, 7\)",
    ):
        SampleWeight(np.ones(shape), N, T)


@pytest.mark.parametrize("dtype", ["c16", "U3", "O"])
def test_weights_that_are_no_real_numbers_are_refused(dtype):
    with pytest.raises(DataError, match=r"sample_weight .*real .*got dtype"):
        SampleWeight(np.ones(N, dtype), N, T)


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(N,), (N, T), (1, N, T)])
def test_weights_that_are_negative_or_no_number_are_refused(shape, value):
    w = np.ones(shape)
    w.reshape(-1)[-1] = value
    weight = SampleWeight(w, N, T)
    with pytest.raises(DataError, match=r"sample_weight .*not negative; use 0"):
        weight = weight.normalized(whole(), ())


def test_weights_that_leave_nothing_are_refused():
    y = np.zeros((1, N, T))
    y[0, 0] = np.nan
    only_first = np.zeros(N)
    only_first[0] = 1
    late = np.zeros((N, T))
    late[1, 4] = 1
    for w, lengths, ys in (
        (np.zeros(N), None, ()),
        (only_first, None, (SeriesArray(y, "y"),)),
        (late, LENGTHS, ()),
    ):
        weight = SampleWeight(w, N, T)
        with pytest.raises(
            DataError,
            match=r"sample_weight .*every step .* 0",
        ):
            weight = weight.normalized(whole(lengths), ys)
        assert weight.scale == 1


@pytest.mark.parametrize("block", [1, 6, 16])
def test_scaling_does_not_depend_on_the_blocks(monkeypatch, block):
    y = np.zeros((2, N, T))
    y[1, 2, 3] = np.nan
    scales = []
    for size in (block, 1 << 20):
        monkeypatch.setattr(blocks_module, "BLOCK", size)
        weight = SampleWeight(FORMS["steps"], N, T)
        weight = weight.normalized(whole(LENGTHS), (SeriesArray(y, "y"),))
        scales.append(weight.scale)
    assert scales[0] == pytest.approx(scales[1], rel=1e-12)
