"""Arrays of all kinds, and the one implementation of indexing, against NumPy."""

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.data.arrays import (
    DuckArray,
    in_memory,
    is_nonblocking,
    is_tensor,
    read_block,
    to_numpy,
)

X = np.arange(3 * 5 * 7).reshape(3, 5, 7)


class Doubled(DuckArray):
    """Twice X, by nothing but the method that a subclass must have."""

    shape, dtype = X.shape, X.dtype

    def read(self, *index):
        return 2 * X[np.ix_(*index)]


@pytest.mark.parametrize(
    "key",
    [
        (),
        0,
        ...,
        np.s_[1:, ::-2],
        np.s_[0, 4, 2],
        np.s_[:, 1],
        np.s_[..., -1],
        np.s_[:, [4, 0, 0]],
        np.s_[0, :, [2, 1]],
        np.s_[0, [2, 1]],
        np.s_[:, [2, 1], 3],
        np.s_[:, np.arange(5) % 2 == 0],
        np.s_[:, :, 3:3],
    ],
)
def test_indices_are_numpys(key):
    found, wanted = Doubled()[key], 2 * X[key]
    assert np.shape(found) == wanted.shape
    assert np.array_equal(found, wanted)


def test_it_tells_what_numpys_arrays_tell():
    a = Doubled()
    assert (a.ndim, a.size, a.nbytes, len(a)) == (X.ndim, X.size, X.nbytes, len(X))
    assert repr(a) == f"Doubled(shape=(3, 5, 7), dtype={X.dtype})"
    assert np.array_equal(np.asarray(a), 2 * X)
    assert np.array_equal(list(a), list(2 * X))
    assert np.asarray(a, "f4").dtype == "f4"
    with pytest.raises(ValueError, match="without copying"):
        np.array(a, copy=False)


INDICES = [
    (range(3), range(1, 4), range(7)),
    (range(2, -1, -1), range(0, 5, 2), range(1, 2)),
    (range(3), np.array([4, 0, 0, 1]), range(2, 7)),
    (np.array([2, 0]), np.array([3, 1]), np.array([6, 0, 1])),
    (range(3), range(0), range(7)),
    (range(3), np.array([], int), np.array([2])),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "h5py", "lazy"])
def test_blocks_are_where_the_places_meet(index, kind, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        source = {"numpy": X, "h5py": file.create_dataset("x", data=X), "lazy": Doubled()}[kind]
        found = read_block(source, *index)
    assert found.dtype == X.dtype
    assert np.array_equal(
        found, X[np.ix_(*(np.asarray(i, int) for i in index))] * (2 if kind == "lazy" else 1)
    )


def test_tensors_are_told_from_arrays():
    t = torch.arange(3.0, requires_grad=True)
    assert (is_tensor(t), is_tensor(X), is_tensor([1])) == (True, False, False)
    assert to_numpy(t).tolist() == [0, 1, 2]
    assert to_numpy(X) is X


def test_what_is_in_memory(tmp_path):
    np.save(tmp_path / "x.npy", X)
    m = np.load(tmp_path / "x.npy", mmap_mode="r")
    for a, expected in (
        (X, True),
        (X[:, 1:].T, True),
        (m, False),
        (np.asarray(m)[1:].T, False),
        (Doubled(), False),
    ):
        assert (in_memory(a), is_nonblocking(a)) == (expected, expected)
