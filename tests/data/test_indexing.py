"""Indices, against NumPy's own."""

import numpy as np
import pytest

from fluxutils_py.data.indexing import compose_index, contiguous_runs, parse_axis_index, parse_index

A = np.arange(3 * 5 * 7).reshape(3, 5, 7)
KEYS = [
    0,
    -1,
    np.int64(2),
    np.array(1),
    slice(None),
    slice(1, None),
    slice(None, None, -1),
    slice(4, 0, -2),
    slice(2, 2),
    slice(-2, 99),
    ...,
    [2, 0, 1],
    [-1, 0],
    [],
    np.array([], dtype=float),
    np.array([1, 1, 0]),
    np.array([True, False, True]),
    [False, False, False],
    (slice(None), 2),
    (0, slice(1, 3), [6, 2, 2]),
    (..., 3),
    (1, ...),
    (0, ..., [1, 2]),
    (..., slice(None, None, -3)),
    (slice(None), [True, False, True, False, False], slice(1)),
    (1, 2, 3),
    (1, 2, 3, ...),
    (),
]


def take(key):
    """What a function that reads places along each axis gives."""
    found = parse_index(key, A.shape)
    block = A
    for axis, p in enumerate(found):
        block = np.take(block, np.atleast_1d(np.asarray(p, dtype=int)), axis)
    return block[tuple(0 if isinstance(p, int) else slice(None) for p in found)]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_an_index_picks_what_numpy_picks(key):
    wanted = A[[]] if isinstance(key, np.ndarray) and key.size == 0 else A[key]
    if isinstance(key, tuple) and key[:1] == (0,) and isinstance(key[-1], list):
        # NumPy moves the axis of an index array before that of an earlier integer; h5py does not
        wanted = wanted.T
    found = take(key)
    assert found.shape == wanted.shape
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("key", "message"), [
    ((0, 0, 0, 0), "too many indices: the array has 3 axes, got 4 indices"),
    ((..., 0, ...), "an index can have only one '...'"),
    ((0, [1], [2]), "arrays of indices are taken along one axis only; use slices along the others"),
    (3, "index 3 is out of bounds for axis 0 with size 3"),
    (-4, "index -4 is out of bounds for axis 0 with size 3"),
    ((0, [1, 5]), "index 5 is out of bounds for axis 1 with size 5"),
    (([0, 1], [0, 1]), "arrays of indices are taken along one axis only; use slices along the others"),
    ((0, [True, False]), "a mask along axis 1 must have 5 values, got shape (2,)"),
    (True, "an index must be an integer, a slice, '...', or one list of integers or booleans, got True"),
    (np.True_, "an index must be an integer, a slice, '...', or one list of integers or booleans, got np.True_"),
    (1.0, "an index must be an integer, a slice, '...', or one list of integers or booleans, got 1.0"),
    ("a", "an index must be an integer, a slice, '...', or one list of integers or booleans, got 'a'"),
    (None, "an index must be an integer, a slice, '...', or one list of integers or booleans, got None"),
    ([[0]], "an index must be an integer, a slice, '...', or one list of integers or booleans, got [[0]]"),
    ([0.0], "an index must be an integer, a slice, '...', or one list of integers or booleans, got [0.0]"),
])  # fmt: skip
def test_a_bad_index_says_why(key, message):
    with pytest.raises(IndexError) as info:
        parse_index(key, A.shape)
    assert str(info.value) == message


def test_unsigned_indices_do_not_wrap():
    assert parse_axis_index(np.array([2, 0], dtype=np.uint8), 300, 0).tolist() == [2, 0]
    assert parse_axis_index(np.uint8(255), 300, 0) == 255


INDEX = [range(10), range(3, 9), range(8, 1, -2), np.array([5, 1, 1, 7, 8, 9]), range(0)]


@pytest.mark.parametrize("index", INDEX, ids=repr)
@pytest.mark.parametrize(
    "key", [slice(None), slice(1, 4), slice(None, None, -1), slice(0, 0), [-1, 0], []], ids=repr
)
def test_an_index_of_an_index_is_that_of_numpy(index, key):
    if len(index) == 0 and key == [-1, 0]:
        return
    found = compose_index(index, parse_axis_index(key, len(index), 0))
    assert np.asarray(found, dtype=int).tolist() == np.asarray(index, dtype=int)[np.asarray(key, int)
                                                    if isinstance(key, list) else key].tolist()  # fmt: skip


def test_what_runs_up_by_one_is_a_range():
    assert compose_index(range(10), np.array([3, 4, 5])) == range(3, 6)
    assert compose_index(np.array([1, 3, 4, 9]), np.array([1, 2])) == range(3, 5)
    assert compose_index(np.array([1, 3]), np.array([1])) == range(3, 4)
    # as long as what lies between its ends
    assert isinstance(compose_index(range(10), np.array([3, 5, 4, 6])), np.ndarray)


@pytest.mark.parametrize(
    "index", [*INDEX, range(1, 9, 3), np.array([4, 5, 6, 2, 3, 9]), np.array([7])], ids=repr
)
def test_runs_put_together_are_the_index(index):
    found = contiguous_runs(index)
    a = np.asarray(index, dtype=int)
    assert [i for r in found for i in range(len(a))[r]] == list(range(len(a)))
    assert all((np.diff(a[r]) == 1).all() for r in found)
    assert all(a[p.stop] != a[p.stop - 1] + 1 for p in found[:-1])  # none could be longer


def test_an_index_beyond_int64_is_out_of_bounds():
    with pytest.raises(IndexError) as caught:
        parse_axis_index(np.array([1, 2**64 - 1], "u8"), 5, 1)  # as int64 it is -1
    assert str(caught.value) == "index 18446744073709551615 is out of bounds for axis 1 with size 5"
