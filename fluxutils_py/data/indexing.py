"""What an index parse_index along each axis of an array that is read lazily."""

from __future__ import annotations

import math
import operator
from types import EllipsisType
from typing import Any

import numpy as np


class DuckArray:
    """What a NumPy array tells about itself, for one that is read lazily: derived from ``shape`` and ``dtype``."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]


def parse_index(key: Any, shape: tuple[int, ...]) -> list[int | range | np.ndarray]:
    """What an index parse_index along each axis: one place, a range of places, or places in any order.

    Axes keep their order, as in h5py: where NumPy has an integer and a list of places apart, it moves that axis first.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if isinstance(k, EllipsisType)]
    if len(dots) > 1:
        raise IndexError("an index can have only one '...'")
    missing = len(shape) - len(keys) + len(dots)
    if missing < 0:
        raise IndexError(f"too many indices: the array has {len(shape)} axes, got {len(keys) - len(dots)} indices")
    at = dots[0] if dots else len(keys)
    keys[at : at + len(dots)] = [slice(None)] * missing
    found = [parse_axis_index(k, n, axis) for axis, (k, n) in enumerate(zip(keys, shape, strict=True))]
    if sum(isinstance(p, np.ndarray) for p in found) > 1:
        raise IndexError("arrays of indices are taken along one axis only; take slices along the others")
    return found


def parse_axis_index(key: Any, n: int, axis: int) -> int | range | np.ndarray:
    """What an index parse_index along one axis of ``n`` places."""
    if isinstance(key, slice):
        return range(*key.indices(n))
    try:
        index = np.asarray([operator.index(key)])
        single = True
    except TypeError:
        index, single = np.asarray(key), False
    if index.dtype == bool:
        if index.shape != (n,):
            raise IndexError(f"a mask along axis {axis} must have {n} values, got shape {index.shape}")
        return np.flatnonzero(index)
    if index.size == 0:
        index = index.astype(np.intp)
    if index.ndim != 1 or index.dtype.kind not in "iu" or isinstance(key, bool):
        raise IndexError(
            f"an index must be an integer, a slice, '...', or one list of integers or booleans, got {key!r}"
        )
    given, index = index, index.astype(np.intp, copy=False)  # comparisons in small types overflow
    out = (index < -n) | (index >= n) | ((index < 0) & (given > 0))  # uint64 wraps
    if out.any():
        raise IndexError(f"index {given[out][0]} is out of bounds for axis {axis} with size {n}")
    index = np.where(index < 0, index + n, index)
    return int(index[0]) if single else index


def compose_index(index: range | np.ndarray, which: range | np.ndarray) -> range | np.ndarray:
    """The places ``which`` of an index, as a range if they run up by one."""
    if isinstance(index, range) and isinstance(which, range) and which.step > 0:
        return index[which.start : which.stop : which.step]
    found = np.asarray(index)[np.asarray(which, dtype=np.intp)]
    if found.size == 0:
        return range(0)
    if found[-1] - found[0] == found.size - 1 and (np.diff(found) == 1).all():
        return range(int(found[0]), int(found[-1]) + 1)
    return found


def contiguous_runs(index: range | np.ndarray) -> list[slice]:
    """The stretches of an index that run up by one, as positions in it.

    >>> contiguous_runs(np.array([3, 4, 5, 9, 2, 3]))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 6, None)]
    """
    if len(index) == 0:
        return []
    if isinstance(index, range) and index.step == 1:
        return [slice(0, len(index))]
    cuts = np.flatnonzero(np.diff(np.asarray(index)) != 1) + 1
    return [slice(int(a), int(b)) for a, b in zip([0, *cuts], [*cuts, len(index)], strict=True)]
