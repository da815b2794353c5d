"""Cuts of arrays, against numpy.array_split and plain slicing."""

import itertools

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data import part
from fluxutils_py.data.parts import dividebatch, indbatch, minibatch
from fluxutils_py.errors import ShapeError


def numbered(*shape):
    return np.arange(float(np.prod(shape))).reshape(shape)


class Sliceable:
    """Has a shape and takes slices, no more."""

    def __init__(self, array):
        self.array, self.shape, self.read = array, array.shape, []

    def __getitem__(self, key):
        self.read.append(key)
        return self.array[key]


# -- part ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, "series", "time"])
@pytest.mark.parametrize("shape", [(2, 7, 5), (3, 21, 4), (1, 9, 10)])
def test_shares_are_those_of_array_split(shape, axis):
    x = numbered(*shape)
    number = {"series": 1, "time": 2}.get(axis, axis)
    for size in (1, 2, 3, 4, 8, 25):
        for rank, expected in enumerate(np.array_split(x, size, number)):
            got = part(x, rank, size, axis)
            np.testing.assert_array_equal(got, expected)
            assert got.shape == expected.shape
            assert np.shares_memory(got, x) or got.size == 0


def test_shares_are_along_series_by_default():
    x = numbered(2, 3, 1000)
    assert part(x, 0, 2).shape == (2, 2, 1000)


def test_tuples_are_cut_alike_down_to_weights():
    x, y, w1, w2, w3 = (
        numbered(4, 7, 5),
        numbered(2, 7, 5),
        numbered(1, 7, 5),
        numbered(7, 5),
        numbered(7),
    )
    for rank in range(3):
        which = np.array_split(np.arange(7), 3)[rank]
        got = part((x, y, w1, w2, w3), rank, 3)
        assert isinstance(got, tuple)
        for a, e in zip(
            got, (x[:, which], y[:, which], w1[:, which], w2[which], w3[which]), strict=True
        ):
            np.testing.assert_array_equal(a, e)
    got = part((x, y, w1, w2), 2, 3, "time")
    for a, e in zip(got, (x[..., 4:], y[..., 4:], w1[..., 4:], w2[:, 4:]), strict=True):
        np.testing.assert_array_equal(a, e)
    assert isinstance(part((x,), 0, 2), tuple)


def test_other_arrays_are_sliced_and_nothing_else(tmp_path):
    x = numbered(2, 7, 5)
    expected = np.array_split(x, 3, 1)[1]
    t = torch.from_numpy(x)
    got = part(t, 1, 3)
    assert isinstance(got, torch.Tensor)
    assert got.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    np.testing.assert_array_equal(got.numpy(), expected)
    lazy = Sliceable(x)
    np.testing.assert_array_equal(part(lazy, 1, 3), expected)
    assert lazy.read == [(slice(None), slice(3, 5))]
    mapped = np.memmap(tmp_path / "x", float, "w+", shape=x.shape)
    mapped[:] = x
    assert isinstance(part(mapped, 1, 3), np.memmap)
    with h5py.File(tmp_path / "x.h5", "w") as f:
        np.testing.assert_array_equal(part(f.create_dataset("x", data=x), 1, 3), expected)
    np.testing.assert_array_equal(part(x.tolist(), 1, 3), expected)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            (numbered(2, 7, 5), 3, 3),
            ValueError,
            "rank must be from 0 to size - 1, got rank 3 of size 3",
        ),
        (
            (numbered(2, 7, 5), -1, 3),
            ValueError,
            "rank must be from 0 to size - 1, got rank -1 of size 3",
        ),
        (
            (numbered(2, 7, 5), 0, 0),
            ValueError,
            "rank must be from 0 to size - 1, got rank 0 of size 0",
        ),
        ((numbered(2, 7, 5), 0.5, 3), TypeError, "rank must be an integer, got 0.5"),
        (
            (numbered(2, 7, 5), 0, 3, "batch"),
            ValueError,
            "axis must be 'series', 'time' or an int, got 'batch'",
        ),
        ((numbered(2, 7, 5), 0, 3, 3), ShapeError, "an array of shape (2, 7, 5) has no axis 3"),
        ((numbered(7), 0, 3, "time"), ShapeError, "an array of shape (7,) has no axis 'time'"),
        (((), 0, 3), ShapeError, "got an empty tuple; give at least one array"),
        (
            ((numbered(2, 7, 5), numbered(1, 7, 1)), 0, 3, "time"),
            ShapeError,
            "arrays of shapes (2, 7, 5) and (1, 7, 1) differ along axis 'time': 5, 1",
        ),
    ],
)
def test_what_cannot_be_parted_is_refused(args, error, message):
    with pytest.raises(error) as caught:
        part(*args)
    assert str(caught.value) == message


# -- dividebatch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "bs"), [(10, 4), (100, 8), (3, 4), (103, 4), (5, 1), (7, 7), (1, 1)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_chunks_are_as_many_as_asked_and_put_together_the_batch(n, bs, axis):
    x, y = (np.moveaxis(numbered(n, *other), 0, axis) for other in ((2, 3), (4,)))
    chunks = dividebatch(bs, x, y, axis=axis)
    assert isinstance(chunks, tuple)
    assert len(chunks) == min(bs, n)
    sizes = [xc.shape[axis] for xc, yc in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [yc.shape[axis] for xc, yc in chunks]
    np.testing.assert_array_equal(np.concatenate([xc for xc, yc in chunks], axis), x)
    np.testing.assert_array_equal(np.concatenate([yc for xc, yc in chunks], axis), y)
    assert all(np.shares_memory(xc, x) and np.shares_memory(yc, y) for xc, yc in chunks)


def test_size_weighted_gradient_of_the_chunks_is_that_of_the_batch():
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, dtype=torch.float64)

    def grad(xb, yb):
        return torch.autograd.grad(((xb @ w - yb) ** 2).mean(), w)[0]

    chunks = dividebatch(4, x, y)
    assert [type(a) for chunk in chunks for a in chunk] == [torch.Tensor] * 8
    total = sum(len(xb) * grad(xb, yb) for xb, yb in chunks) / 10
    torch.testing.assert_close(total, grad(x, y), rtol=0, atol=1e-14)


def test_one_array_gives_tuples_of_one():
    got = dividebatch(2, [1, 2, 3])
    assert [tuple(a.tolist() for a in chunk) for chunk in got] == [([1, 2],), ([3],)]


def test_a_batch_of_series_is_divided_along_series():
    x, y = numbered(2, 5, 9), numbered(1, 5, 9)
    assert [(a.shape, b.shape) for a, b in dividebatch(2, x, y, axis="series")] == [
        ((2, 3, 9), (1, 3, 9)),
        ((2, 2, 9), (1, 2, 9)),
    ]


def test_an_empty_batch_has_no_chunks():
    assert dividebatch(4, numbered(0, 3)) == ()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((0, numbered(3)), ValueError, "bs must be a positive integer, got 0"),
        ((2.0, numbered(3)), TypeError, "bs must be a positive integer, got 2.0"),
        ((2,), TypeError, "dividebatch needs at least one array after bs"),
        (
            (2, numbered(3, 2), numbered(2, 3)),
            ShapeError,
            "arrays of shapes (3, 2) and (2, 3) differ along axis 0: 3, 2",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(args, error, message):
    with pytest.raises(error) as caught:
        dividebatch(*args)
    assert str(caught.value) == message


# -- indbatch, minibatch -------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "b"), [(10, 4), (12, 4), (3, 5), (1, 1), (0, 3)])
def test_indices_come_once_each_in_order(n, b):
    slices = list(indbatch(n, b))
    assert list(itertools.chain(*(range(n)[s] for s in slices))) == list(range(n))
    assert all(s.stop - s.start == b for s in slices[:-1])
    assert (
        slices
        == list(indbatch(numbered(2, n), b))
        == list(indbatch((numbered(n), numbered(3, n)), b))
    )


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 9, 10, 25])
@pytest.mark.parametrize(("n", "b"), [(10, 4), (12, 4), (3, 5), (1, 1)])
def test_offset_shifts_as_in_fluxutils(n, b, offset):
    # indbatch of FluxUtils.jl, which counts from 1 and includes the last
    expected = [(min(i + offset, n), min(i + offset + b - 1, n)) for i in range(1, n + 1, b)]
    assert [(s.start + 1, s.stop) for s in indbatch(n, b, offset)] == expected


def test_indbatch_is_lazy():
    it = indbatch(10**12, 1)
    assert iter(it) is it
    assert next(it) == slice(0, 1)


def test_minibatches_are_views_along_the_last_axis():
    x, y = numbered(2, 3, 10), numbered(10)
    got = minibatch(x, 4)
    assert isinstance(got, list)
    for a, e in zip(got, np.split(x, [4, 8], -1), strict=True):
        np.testing.assert_array_equal(a, e)
        assert np.shares_memory(a, x)
    for pair, e, f in zip(
        minibatch(x, y, 4), np.split(x, [4, 8], -1), np.split(y, [4, 8]), strict=True
    ):
        assert isinstance(pair, tuple)
        np.testing.assert_array_equal(pair[0], e)
        np.testing.assert_array_equal(pair[1], f)
        assert np.shares_memory(pair[0], x)
        assert np.shares_memory(pair[1], y)


def test_minibatches_of_tuples_are_tuples():
    x, z, y = numbered(2, 5), numbered(3, 5), torch.arange(5)
    assert [(a.shape, b.shape) for a, b in minibatch((x, z), 3)] == [
        ((2, 3), (3, 3)),
        ((2, 2), (3, 2)),
    ]
    (first, yb), _ = minibatch((x, z), y, 3)
    assert [a.shape for a in first] == [(2, 3), (3, 3)]
    assert torch.equal(yb, y[:3])
    assert [len(v) for v in minibatch((x,), 3)] == [1, 1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: indbatch(10, 0), ValueError, "b must be a positive integer, got 0"),
        (
            lambda: indbatch(10, 3, -1),
            ValueError,
            "offset must be an integer of at least 0, got -1",
        ),
        (
            lambda: indbatch(-1, 3),
            ValueError,
            "the number of indices must be an integer of at least 0, got -1",
        ),
        (
            lambda: indbatch((numbered(2, 3), numbered(4)), 3),
            ShapeError,
            "arrays of shapes (2, 3) and (4,) differ along axis -1: 3, 4",
        ),
        (lambda: minibatch(numbered(3), 0), ValueError, "b must be a positive integer, got 0"),
        (
            lambda: minibatch(numbered(2, 3), numbered(4), 2),
            ShapeError,
            "arrays of shapes (2, 3) and (4,) differ along axis -1: 3, 4",
        ),
        (
            lambda: minibatch(numbered(3)),
            TypeError,
            "expected minibatch(x, b) or minibatch(x, y, b), got 1 arguments",
        ),
    ],
)
def test_bad_sizes_are_refused_at_once(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
