"""Parse indices of lazy arrays, and read them by slices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

Index = range | np.ndarray  # places along one axis, in any order


def parse_index(key: Any, shape: tuple[int, ...]) -> list[int | Index]:
    """The places that an index of NumPy picks along each axis: one, a range, or an array of them in
    any order.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if isinstance(k, EllipsisType)]
    if len(dots) > 1:
        raise IndexError("an index can have only one '...'")
    missing = len(shape) - len(keys) + len(dots)
    if missing < 0:
        raise IndexError(
            f"too many indices: the array has {len(shape)} axes, got {len(keys) - len(dots)} "
            "indices"
        )
    at = dots[0] if dots else len(keys)
    keys[at : at + len(dots)] = [slice(None)] * missing
    index = [
        parse_axis_index(k, n, axis) for axis, (k, n) in enumerate(zip(keys, shape, strict=True))
    ]
    if sum(isinstance(i, np.ndarray) for i in index) > 1:
        raise IndexError(
            "arrays of indices are taken along one axis only; take slices along the others"
        )
    return index


def parse_axis_index(key: Any, n: int, axis: int) -> int | Index:
    """The places that an index picks along one axis of length ``n``."""
    if isinstance(key, slice):
        return range(*key.indices(n))
    try:
        # a boolean is an index for Python, and for NumPy 2.0
        index = np.asarray([None if isinstance(key, bool | np.bool_) else operator.index(key)])
        single = True
    except TypeError:
        index, single = np.asarray(key), False
    if index.dtype == bool:
        if index.shape != (n,):
            raise IndexError(
                f"a mask along axis {axis} must have {n} values, got shape {index.shape}"
            )
        return np.flatnonzero(index)
    if index.size == 0:
        index = index.astype(np.intp)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise IndexError(
            "an index must be an integer, a slice, '...', or one list of integers or booleans, "
            f"got {key!r}"
        )
    original, index = (
        index,
        index.astype(np.intp, copy=False),
    )  # comparisons in small types overflow
    out = (index < -n) | (index >= n) | ((index < 0) & (original > 0))  # uint64 wraps
    if out.any():
        raise IndexError(f"index {original[out][0]} is out of bounds for axis {axis} with size {n}")
    index = np.where(index < 0, index + n, index)
    return int(index[0]) if single else index


def as_key(index: Index) -> Any:
    """What NumPy takes as an index: a slice, where it can be one."""
    if not isinstance(index, range):
        return index
    if len(index) == 0:
        return slice(0, 0)
    return slice(
        index.start, None if index.stop < 0 else index.stop, None if index.step == 1 else index.step
    )


def compose_index(index: Index, which: Index) -> Index:
    """The places ``which`` of an index, as a range if they run up by one."""
    if isinstance(index, range) and isinstance(which, range) and which.step > 0:
        return index[which.start : which.stop : which.step]
    places = np.asarray(index)[np.asarray(which, dtype=np.intp)]
    if places.size == 0:
        return range(0)
    if places[-1] - places[0] == places.size - 1 and (np.diff(places) == 1).all():
        return range(int(places[0]), int(places[-1]) + 1)
    return places


def contiguous_runs(index: Index) -> list[slice]:
    """The runs of an index that go up by one, as positions in it.

    >>> contiguous_runs(np.array([3, 4, 5, 9, 2, 3]))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 6, None)]
    """
    if len(index) == 0:
        return []
    if isinstance(index, range) and index.step == 1:
        return [slice(0, len(index))]
    cuts = np.flatnonzero(np.diff(np.asarray(index)) != 1) + 1
    return [slice(int(a), int(b)) for a, b in zip([0, *cuts], [*cuts, len(index)], strict=True)]


def read_slices(
    read: Callable[[tuple[slice, ...]], np.ndarray], index: Sequence[Index], strides: bool = False
) -> np.ndarray:
    """The block where the places of every axis meet, of an array that only takes slices that go up,
    as h5py's do.

    Neighbours are read in one go, nothing between the places is read, and each place only once.

    Parameters
    ----------
    read : callable
        Takes a tuple of slices, one per axis.
    index : sequence of range or ndarray
    strides : bool
        Whether slices may have a step.
    """
    for axis, places in enumerate(index):
        if (
            isinstance(places, range)
            and len(places)
            and (places.step == 1 or (strides and places.step > 0))
        ):
            continue
        rising, order = np.unique(np.asarray(places, dtype=np.intp), return_inverse=True)
        if len(rising) == 0:
            return np.empty([len(i) for i in index], read((slice(0, 0),) * len(index)).dtype)
        steps = np.diff(rising)
        if strides and (steps == steps[:1]).all():
            runs = [range(int(rising[0]), int(rising[-1]) + 1, int(steps[0]) if len(steps) else 1)]
        else:
            runs = [
                range(int(rising[r.start]), int(rising[r.stop - 1]) + 1)
                for r in contiguous_runs(rising)
            ]
        blocks = [
            read_slices(read, [*index[:axis], run, *index[axis + 1 :]], strides) for run in runs
        ]
        block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis)
        in_order = len(order) == len(rising) and (np.diff(order) == 1).all()
        return block if in_order else block.take(order, axis)
    return read(tuple(as_key(i) for i in index))
