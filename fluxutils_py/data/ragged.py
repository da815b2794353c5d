"""Series of unequal length, each an array of its own, as one (F, N, T) array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fluxutils_py.data.indexing import DuckArray, parse_index
from fluxutils_py.data.series import in_memory
from fluxutils_py.errors import DataError, ShapeError


class RaggedArray(DuckArray):
    """A list of arrays of shape (F, T_i) as an array of shape (F, N, max(T_i)), of which nothing is copied.

    It takes indices as NumPy does (one array of indices at most) and returns fresh NumPy arrays, with ``fill``
    where a series has ended. What is assigned to slices goes into the arrays, as far as they reach.

    Parameters
    ----------
    arrays : sequence of arrays of shape (F, T_i)
        NumPy arrays, memory maps, h5py datasets, torch tensors on the CPU: of equal F and dtype, T_i at least 1.
    name : str
        What error messages call the list.
    fill : number
        What steps behind the end of a series hold.

    Attributes
    ----------
    arrays : list
    lengths : ndarray of int, shape (N,)
    shape : (F, N, max(T_i))
    dtype : numpy.dtype

    Raises
    ------
    ShapeError, DataError
        If there are none, or one has other axes, no steps, or another F or dtype than the first.
    """

    def __init__(self, arrays: Sequence[Any], name: str, fill: float = 0) -> None:
        self.arrays = [_two_axes(a, f"{name}[{i}]") for i, a in enumerate(arrays)]
        if not self.arrays:
            raise ShapeError(f"{name} is an empty list; give at least one array of shape (F, T_i)")
        first = self.arrays[0]
        for i, a in enumerate(self.arrays):
            if a.shape[0] != first.shape[0]:
                raise ShapeError(
                    f"{name}[{i}] has {a.shape[0]} features and {name}[0] has {first.shape[0]}; the arrays of a list "
                    "are series (F, T_i) of equal F"
                )
            if _native(a.dtype) != _native(first.dtype) and not {a.dtype.kind, first.dtype.kind} <= {"U"}:
                raise DataError(
                    f"{name}[{i}] is of dtype {a.dtype} and {name}[0] of {first.dtype}; convert them, as with astype"
                )
        self.lengths = np.array([a.shape[1] for a in self.arrays])
        self.shape = (int(first.shape[0]), len(self.arrays), int(self.lengths.max()))
        self.dtype = np.result_type(*{_native(a.dtype) for a in self.arrays})  # of texts, the longest
        self.name, self.fill = name, fill

    @property
    def in_memory(self) -> bool:
        """Whether looking at all of it is cheap."""
        return all(in_memory(a) for a in self.arrays)

    @property
    def nonblocking(self) -> bool:
        """Whether reading never waits for a disk."""
        return self.in_memory

    def map(self, function: Callable[[Any], Any], fill: float = 0) -> RaggedArray:
        """Another list, of ``function`` of each array."""
        return RaggedArray([function(a) for a in self.arrays], self.name, fill)

    def __repr__(self) -> str:
        return f"RaggedArray(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> Any:
        wanted = parse_index(key, self.shape)
        f, n, t = (range(p, p + 1) if isinstance(p, int) else p for p in wanted)
        shape = len(f), len(n), len(t)
        out = np.full(shape, self.fill, self.dtype) if self.fill else np.zeros(shape, self.dtype)
        for i, series in enumerate(n):
            a, length = self.arrays[series], self.lengths[series]
            if isinstance(t, range) and t.step == 1 and isinstance(f, range) and f.step == 1:
                stop = min(t.stop, length)
                if t.start < stop:
                    out[:, i, : stop - t.start] = a[f.start : f.stop, t.start : stop]
                continue
            steps = np.asarray(t, dtype=np.intp)
            there = steps < length
            if there.any():
                first, last = int(steps[there].min()), int(steps[there].max())
                block = np.asarray(a[:, first : last + 1])[np.asarray(f, dtype=np.intp)]
                out[:, i, there] = block[:, steps[there] - first]
        return out[tuple(0 if isinstance(p, int) else slice(None) for p in wanted)]

    def __setitem__(self, key: tuple[Any, slice, slice], values: Any) -> None:
        _, n, t = parse_index(key, self.shape)
        assert isinstance(n, range)
        assert isinstance(t, range)
        values = np.broadcast_to(values, (self.shape[0], len(n), len(t)))
        for i, series in enumerate(n):
            stop = min(t.stop, self.lengths[series])
            if t.start < stop:
                self.arrays[series][:, t.start : stop] = values[:, i, : stop - t.start]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a list of arrays cannot be one array without copying it")
        return np.array(self[...], dtype)


class MappedSeries(DuckArray):
    """A function of one series (F, T_i), applied when it is read.

    Parameters
    ----------
    source : array of shape (F, T_i)
    function : callable
        Takes and returns blocks (F, n, t) for any n and t; F may change.
    """

    def __init__(self, source: Any, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self.source, self.function = source, function
        trial = function(np.zeros((source.shape[0], 1, 1), source.dtype))
        self.shape, self.dtype = (trial.shape[0], int(source.shape[1])), trial.dtype

    def __getitem__(self, key: Any) -> Any:
        f, t = parse_index(key, self.shape)
        steps = range(t, t + 1) if isinstance(t, int) else t
        block = self.function(np.asarray(self.source[:, _as_key(steps)])[:, None])[:, 0]
        return block[_as_key(f)][..., 0 if isinstance(t, int) else slice(None)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array that is read lazily cannot be had without copying it")
        return np.array(self[...], dtype)


def _as_key(index: int | range | np.ndarray) -> Any:
    """What arrays and h5py datasets take: a slice, where it can be one."""
    if isinstance(index, range) and index.step > 0:
        return slice(index.start, index.stop, index.step)
    return np.asarray(index) if isinstance(index, range) else index


def is_list_of_series(value: Any) -> bool:
    """Whether a value is a list of arrays that is not one matrix; nested lists of numbers are one array."""
    if not isinstance(value, list) or not value or not all(len(getattr(a, "shape", ())) for a in value):
        return False
    shapes = [tuple(a.shape) for a in value]
    return any(len(shape) > 1 for shape in shapes) or len(set(shapes)) > 1


def as_ragged(value: Any, name: str) -> Any:
    """A list of series as a :class:`RaggedArray`, in a tuple too; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(as_ragged(a, f"{name}[{i}]") for i, a in enumerate(value))
    return RaggedArray(value, name) if is_list_of_series(value) else value


def _two_axes(array: Any, name: str) -> Any:
    if hasattr(array, "iloc"):
        raise ShapeError(f"{name} is a data frame; the arrays of a list are series (F, T_i): {name}.to_numpy().T")
    if type(array).__module__.split(".")[0] == "torch":
        array = array.detach().cpu().numpy()
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose mask would be lost; use {name}.filled(np.nan)")
    shape = tuple(array.shape)
    if len(shape) != 2:
        way_out = f"; one feature is {name}[None]" if len(shape) == 1 else ""
        raise ShapeError(
            f"{name} has shape {shape}: the arrays of a list are series (F, T_i) = (features, time steps){way_out}"
        )
    for size, axis in zip(shape, ("features", "time steps"), strict=True):
        if size == 0:
            raise ShapeError(f"{name} has no {axis}: shape {shape}")
    return array


def _native(dtype: Any) -> np.dtype:
    return np.dtype(dtype).newbyteorder("=")
