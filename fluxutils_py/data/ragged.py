"""A list of series of different lengths as one lazy (F, N, T) array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import (
    TIME_FIRST,
    DuckArray,
    check_named_axes,
    check_no_empty_axis,
    check_read_dtype,
    in_memory,
    is_list_of_series,
    read_block,
    reject_masked,
    to_numpy,
)
from fluxutils_py.data.indexing import Index, parse_index
from fluxutils_py.data.lazy import as_picklable
from fluxutils_py.data.series import check_source
from fluxutils_py.errors import DataError, ShapeError


class RaggedArray(DuckArray):
    """A list of arrays of shape (F, T_i) as one array of shape (F, N, max(T_i)), without copying
    anything.

    Indexing works as in NumPy (with one array of indices at most) and returns fresh NumPy arrays,
    with ``fill`` where a series has ended. Assigning to slices writes into the arrays, as far as
    they reach.

    Parameters
    ----------
    arrays : sequence of arrays of shape (F, T_i)
        NumPy arrays, memory maps, h5py datasets, torch tensors on the CPU: of equal F and dtype,
        T_i at least 1.
    name : str
        Name of the list in error messages.
    fill : number
        Value of steps beyond the end of a series.

    Attributes
    ----------
    arrays : list
    lengths : ndarray of int, shape (N,)
    shape : (F, N, max(T_i))
    dtype : numpy.dtype

    Raises
    ------
    ShapeError, DataError
        If the list is empty, or an array does not have two axes, has no steps, or differs from the
        first in F or dtype.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        name: str,
        fill: float = 0,
    ) -> None:
        self.name = name
        self.fill = fill
        self.arrays = [_two_axes(a, f"{name}[{i}]") for i, a in enumerate(arrays)]
        if not self.arrays:
            raise ShapeError(f"{name} is an empty list; give at least one array of shape (F, T_i)")
        first = self.arrays[0]
        for i, a in enumerate(self.arrays):
            if a.shape[0] != first.shape[0]:
                raise ShapeError(
                    f"{name}[{i}] has {a.shape[0]} features and {name}[0] has {first.shape[0]}; "
                    f"the arrays of a list are series (F, T_i) of equal F{TIME_FIRST}"
                )
            are_texts = a.dtype.kind == first.dtype.kind == "U"  # of any length
            if _native(a.dtype) != _native(first.dtype) and not are_texts:
                raise DataError(
                    f"{name}[{i}] is of dtype {a.dtype} and {name}[0] of {first.dtype}; convert "
                    "them, as with astype"
                )
        self.lengths = np.array([a.shape[1] for a in self.arrays])
        self.shape = (int(first.shape[0]), len(self.arrays), int(self.lengths.max()))
        # of texts, the longest
        self.dtype = np.result_type(*{_native(a.dtype) for a in self.arrays})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"arrays": [as_picklable(a) for a in self.arrays]}

    @property
    def in_memory(self) -> bool:
        """Whether scanning all of it is cheap."""
        return all(in_memory(a) for a in self.arrays)

    @property
    def nonblocking(self) -> bool:  # type: ignore[override]  # as the arrays are
        """Whether reading never waits for a disk."""
        return self.in_memory

    def map(self, function: Callable[[Any], Any], fill: float = 0) -> RaggedArray:
        """Return the list with ``function`` applied to each array."""
        return RaggedArray([function(a) for a in self.arrays], self.name, fill)

    def read(self, *index: Index) -> np.ndarray:
        features, series, steps = index
        out = np.zeros([len(places) for places in index], self.dtype)  # "" for text
        if self.fill:
            out[:] = self.fill
        for i, n in enumerate(series):
            array = self.arrays[n]
            length = self.lengths[n]
            if isinstance(steps, range) and steps.step == 1:  # a slice, which is read in one go
                k = max(0, min(steps.stop, length) - steps.start)
                out[:, i, :k] = read_block(array, features, steps[:k])
            else:
                places = np.asarray(steps)
                inside = np.flatnonzero(places < length)
                out[:, i, inside] = read_block(array, features, places[inside])
        return out

    def __setitem__(self, key: tuple[object, slice, slice], values: np.ndarray) -> None:
        _, n, t = parse_index(key, self.shape)
        assert isinstance(n, range)
        assert isinstance(t, range)
        values = np.broadcast_to(values, (self.shape[0], len(n), len(t)))
        for i, series in enumerate(n):
            stop = min(t.stop, self.lengths[series])
            if t.start < stop:  # else the series ends before
                self.arrays[series][:, t.start : stop] = values[:, i, : stop - t.start]


def as_ragged(value: Any, name: str) -> Any:
    """Turn a list of series into a :class:`RaggedArray`, also inside a tuple; return anything else
    unchanged.
    """
    if isinstance(value, tuple):
        return tuple(as_ragged(a, f"{name}[{i}]") for i, a in enumerate(value))
    return RaggedArray(value, name) if is_list_of_series(value) else value


def _two_axes(array: Any, name: str) -> Any:
    array = to_numpy(check_source(array, name))
    reject_masked(array, name)
    if len(array.shape) != 2 or hasattr(array, "iloc"):
        raise ShapeError(
            f"{name} has shape {tuple(array.shape)}: the arrays of a list are series (F, T_i) = "
            f"(features, time steps); a data frame becomes one by {name}.to_numpy().T, a single "
            f"feature by {name}[None]"
        )
    check_no_empty_axis(array, name, ("features", "time steps"))
    check_named_axes(array, name)
    check_read_dtype(array, name)
    return array


def _native(dtype: Any) -> np.dtype:
    return np.dtype(dtype).newbyteorder("=")
