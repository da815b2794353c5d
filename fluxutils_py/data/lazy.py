"""Some series and steps of an array, and functions of them, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.featurenames import get_feature_names
from fluxutils_py.data.hdf5identity import current_identity, identity_at
from fluxutils_py.data.hdf5map import H5Map, reopen
from fluxutils_py.data.indexing import DuckArray, compose_index, contiguous_runs, parse_index
from fluxutils_py.data.series import in_memory
from fluxutils_py.errors import DataError

Index = range | np.ndarray  # places along an axis, in any order
Function = Callable[[np.ndarray], np.ndarray]


class LazyArray(DuckArray):
    """An (F, N, T) array made of some series and some steps of another one, and of functions applied on reading.

    It takes indices as NumPy does (one array of indices at most) and returns NumPy arrays, which may be views of the
    source and are not to be written to; ``np.asarray`` reads it all. Axes keep their order, as in h5py, where NumPy
    moves that of an array of indices to the front: ``a[0, :, [2, 1]]`` has shape (N, 2). It may be pickled: a source in
    a file goes as the file's name.

    Parameters
    ----------
    source : array of shape (F, N, T)
    series, steps : range or ndarray of int, optional
        Which, in order. None: all.
    functions : tuple of callables
        Each takes and returns blocks of shape (F, n, t), for any n and t; F may change. One that leaves each feature
        in its place says so by an attribute ``keeps_features = True``, as the transformers of this package do; NumPy's
        ufuncs are known to.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    feature_names : tuple of str or None
        Those of the source, if all functions keep the features.
    """

    def __init__(
        self, source: Any, series: Index | None = None, steps: Index | None = None, functions: tuple[Function, ...] = ()
    ) -> None:
        self.source, self.functions = source, functions
        self.series: Index = range(source.shape[1]) if series is None else series
        self.steps: Index = range(source.shape[2]) if steps is None else steps
        trial = self._apply(np.zeros((source.shape[0], 1, 1), source.dtype))
        self.shape = (trial.shape[0], len(self.series), len(self.steps))
        self.dtype = trial.dtype

    @property
    def nonblocking(self) -> bool:
        """Whether reading never waits for a disk."""
        return getattr(self.source, "nonblocking", in_memory(self.source))

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return get_feature_names(self.source) if preserve_features(self.functions) else None

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={self.dtype}, of {type(self.source).__name__})"

    def __getitem__(self, key: Any) -> Any:
        wanted = parse_index(key, self.shape)
        f, n, t = (range(p, p + 1) if isinstance(p, int) else p for p in wanted)
        block = self._apply(read_block(self.source, compose_index(self.series, n), compose_index(self.steps, t)))
        block = block[_index(f)]
        return block[tuple(0 if isinstance(p, int) else slice(None) for p in wanted)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array that is read lazily cannot be had without copying it")
        return np.array(self[...], dtype)

    def __reduce__(self) -> Any:
        return LazyArray, (as_picklable(self.source), self.series, self.steps, self.functions)

    def _apply(self, block: np.ndarray) -> np.ndarray:
        for f in self.functions:
            block = f(block)
        return block


def preserve_features(functions: tuple[Function, ...]) -> bool:
    """Whether functions of blocks (F, n, t) leave each feature in its place, as far as they tell."""
    return all(isinstance(f, np.ufunc) or getattr(f, "keeps_features", False) for f in functions)


def select(source: Any, series: Index | None, steps: Index | None, functions: tuple[Function, ...] = ()) -> Any:
    """Some series and steps of an (F, N, T) array: a NumPy view if there can be one, else a :class:`LazyArray`."""
    series = None if _is_all(series, source.shape[1]) else series
    steps = None if _is_all(steps, source.shape[2]) else steps
    if series is None and steps is None and not functions:
        return source
    plain = all(i is None or (isinstance(i, range) and len(i)) for i in (series, steps))
    if isinstance(source, np.ndarray) and plain and not functions:
        return source[:, _index(series), _index(steps)]
    return LazyArray(source, series, steps, functions)


def read_block(source: Any, series: Index, steps: Index) -> np.ndarray:
    """A block of shape (F, n, t) of any array that takes three slices, in whatever memory order it comes."""
    if len(series) == 0 or len(steps) == 0:
        return np.empty((source.shape[0], len(series), len(steps)), source.dtype)
    if isinstance(source, np.ndarray):
        if isinstance(series, range) or isinstance(steps, range):
            return np.asarray(source[:, _index(series), _index(steps)])
        return np.asarray(source[:, series[:, None], steps[None, :]])
    columns = []
    for t in contiguous_runs(steps):
        span = slice(int(steps[t.start]), int(steps[t.stop - 1]) + 1)
        if isinstance(source, LazyArray):
            columns.append(source[:, _index(series), span])
            continue
        stretches = (slice(int(series[n.start]), int(series[n.stop - 1]) + 1) for n in contiguous_runs(series))
        blocks = [np.asarray(source[:, n, span]) for n in stretches]
        columns.append(blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1))
    return columns[0] if len(columns) == 1 else np.concatenate(columns, 2)


def as_picklable(source: Any) -> Any:
    """What to pickle in place of an array: for one in a file, the place of its bytes, never the data.

    ``np.memmap`` would go as data; and joblib ships one that is transposed with permuted values.
    """
    if isinstance(source, h5py.Dataset):
        return _Stored(source)
    if isinstance(source, H5Map):
        return source
    root: Any = source
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or getattr(root, "filename", None) is None:
        return source
    if root.mode == "c":  # the file lacks the changes; joblib would nevertheless send its name
        return np.array(source)
    ahead = source.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    path = str(root.filename)
    identity = current_identity(path, identity_at(path))
    return _Mapped(path, source.dtype, source.shape, source.strides, root.offset + ahead, "r", identity)


class _Mapped:
    """A memory map as the place of its bytes; unpickling maps the file again, if it is still the same."""

    def __init__(self, *place: Any) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return reopen, self.place


class _Stored:
    """An h5py dataset as the names of its file and of itself; unpickling opens the file for reading."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        if not dataset:
            raise DataError("an HDF5 file that was closed cannot be opened elsewhere; keep it open, or take h5mmap")
        self.place = (dataset.file.filename, dataset.name)

    def __reduce__(self) -> Any:
        return _open_dataset, self.place


def _open_dataset(path: str, name: str) -> h5py.Dataset:
    return h5py.File(path, "r")[name]


def _is_all(index: Index | None, n: int) -> bool:
    return index is None or (isinstance(index, range) and index == range(n))


def _index(index: Index | None) -> Any:
    """What NumPy takes: a slice where it can be one."""
    if index is None:
        return slice(None)
    if not isinstance(index, range):
        return index
    if len(index) == 0:
        return slice(0, 0)
    return slice(index.start, None if index.stop < 0 else index.stop, index.step)
