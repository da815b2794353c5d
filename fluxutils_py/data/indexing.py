"""Parse indices of lazy arrays, and read them by slices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np

Index = range | np.ndarray  # places along one axis, in any order


def parse_index(key: Any, shape: tuple[int, ...]) -> list[int | Index]:
    """Return the places that an index of NumPy picks along each axis: one, a range, or an array of
    them in any order.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    # not keys.index(...), which compares arrays
    dots = [i for i, k in enumerate(keys) if isinstance(k, EllipsisType)]
    if len(dots) > 1:
        raise IndexError("an index can have only one '...'")
    n_keys = len(keys) - len(dots)
    missing = len(shape) - n_keys
    if missing < 0:
        raise IndexError(f"too many indices: the array has {len(shape)} axes, got {n_keys} indices")
    # the dots, or the end of the index, stand for all axes that it does not name
    at = dots[0] if dots else len(keys)
    keys[at : at + len(dots)] = [slice(None)] * missing
    index = list(map(parse_axis_index, keys, shape, range(len(shape))))
    if sum(isinstance(places, np.ndarray) for places in index) > 1:
        raise IndexError(
            "arrays of indices are taken along one axis only; use slices along the others"
        )
    return index


def parse_axis_index(
    key: Any,
    n: int,
    axis: int,
) -> int | Index:
    """Return the places that an index picks along one axis of length ``n``."""
    if isinstance(key, slice):
        return range(*key.indices(n))
    single = _as_integer(key)
    index = np.asarray(key if single is None else [single])
    if index.dtype == bool and index.ndim:  # a single boolean is no mask
        if index.shape != (n,):
            raise IndexError(
                f"a mask along axis {axis} must have {n} values, got shape {index.shape}"
            )
        return np.flatnonzero(index)
    if index.size == 0:  # NumPy gives an empty list the type float
        index = index.astype(np.intp)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise IndexError(
            "an index must be an integer, a slice, '...', or one list of integers or booleans, "
            f"got {key!r}"
        )
    places = index.astype(np.intp, copy=False)  # comparisons in small types overflow
    outside = (places < -n) | (places >= n)
    outside |= (places < 0) & (index > 0)  # a uint64 that has wrapped
    if outside.any():
        raise IndexError(
            f"index {index[outside][0]} is out of bounds for axis {axis} with size {n}"
        )
    places = np.where(places < 0, places + n, places)
    return places if single is None else int(places[0])


def _as_integer(key: Any) -> int | None:
    # a boolean is an index for Python, and for NumPy 2.0
    if isinstance(key, bool | np.bool_):
        return None
    try:
        return operator.index(key)
    except TypeError:
        return None


def as_key(index: Index) -> Any:
    """Return what NumPy takes as an index: a slice, where it can be one."""
    if not isinstance(index, range):
        return index
    if len(index) == 0:
        return slice(0, 0)
    stop = None if index.stop < 0 else index.stop  # of a range that runs down to 0
    step = None if index.step == 1 else index.step
    return slice(index.start, stop, step)


def compose_index(index: Index, which: Index) -> Index:
    """Return the places ``which`` of an index, as a range if they run up by one."""
    # a range of a range is one, without arrays
    if isinstance(index, range) and isinstance(which, range) and which.step > 0:
        return index[which.start : which.stop : which.step]
    places = np.asarray(index)[np.asarray(which, dtype=np.intp)]
    if places.size == 0:
        return range(0)
    first = int(places[0])
    last = int(places[-1])
    # the cheap test first
    if last - first == places.size - 1 and (np.diff(places) == 1).all():
        return range(first, last + 1)
    return places


def index_names(names: tuple[str, ...] | None, key: Any, ndim: int) -> tuple[str, ...] | None:
    """Return the names of the features that an index keeps; None if the result has other axes."""
    keys = key if isinstance(key, tuple) else (key,)
    if names is None or ndim != 3 or any(k is None for k in keys):
        return None
    first = keys[0] if keys else slice(None)
    if first is Ellipsis and len(keys) < 4:  # more keys: it stands for no axis
        return names
    return names[first] if isinstance(first, slice) else None


def contiguous_runs(index: Index) -> list[slice]:
    """Return the runs of an index that go up by one, as positions in it.

    >>> contiguous_runs(np.array([3, 4, 5, 9, 2, 3]))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 6, None)]
    """
    if len(index) == 0:
        return []
    if isinstance(index, range) and index.step == 1:
        return [slice(0, len(index))]
    steps = np.diff(np.asarray(index))
    cuts = (np.flatnonzero(steps != 1) + 1).tolist()
    return [slice(*ends) for ends in pairwise([0, *cuts, len(index)])]


ReadSlices = Callable[[tuple[slice, ...]], np.ndarray]


def read_slices(read: ReadSlices, index: Sequence[Index]) -> np.ndarray:
    """Return the block where the places of every axis meet, of an array that only takes slices that
    go up, as h5py's do.

    Neighbours are read in one go, nothing between the places is read, and each place only once.

    Parameters
    ----------
    read : callable
        Takes a tuple of slices, one per axis.
    index : sequence of range or ndarray
    """
    for axis, places in enumerate(index):
        if not isinstance(places, range) or len(places) == 0 or places.step != 1:
            return _read_axis_by_slices(read, index, axis)
    return read(tuple(map(as_key, index)))


def _read_axis_by_slices(read: ReadSlices, index: Sequence[Index], axis: int) -> np.ndarray:
    """Read an index whose places along ``axis`` are not one slice."""
    places = np.asarray(index[axis], dtype=np.intp)
    rising, order = np.unique(places, return_inverse=True)
    if len(rising) == 0:
        nothing = read((slice(0, 0),) * len(index))  # for its dtype
        return np.empty([len(places) for places in index], nothing.dtype)
    blocks = []
    for run in contiguous_runs(rising):
        with_run = list(index)
        with_run[axis] = range(int(rising[run.start]), int(rising[run.stop - 1]) + 1)
        blocks.append(read_slices(read, with_run))
    block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis)
    is_rising = len(order) == len(rising) and (np.diff(order) == 1).all()
    return block if is_rising else block.take(order, axis)
