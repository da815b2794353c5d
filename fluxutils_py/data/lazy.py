"""Lazy selections of series and steps of an array, and lazy functions of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data.arrays import (
    DuckArray,
    get_feature_names,
    is_nonblocking,
    read_block,
)
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.opening import describe, identity_of, require_open
from fluxutils_py.data.indexing import Index, as_key, compose_index
from fluxutils_py.errors import DataError

Function = Callable[[np.ndarray], np.ndarray]
Functions = tuple[Function, ...]
FunctionOfPlaces = Callable[[np.ndarray, Index, Index], np.ndarray]
Reader = Callable[[Any, Index, range], np.ndarray]


class LazyArray(DuckArray):
    """Some series and steps of another array, with functions applied on reading.

    It takes indices as NumPy does, one array of indices at most, and returns NumPy arrays, which
    may be views of the source and are not to be written to; ``np.asarray`` reads it all. It may be
    pickled: a source in a file goes as the file's name.

    Parameters
    ----------
    source : array of shape (F, N, T), or (F, T) of one series
    series, steps : range or ndarray of int, optional
        Which, in order. None: all.
    functions : tuple of callables
        Each takes and returns blocks of shape (F, n, t), for any n and t; F may change. One that
        leaves each feature in its place says so by an attribute ``keeps_features = True``, as the
        transformers of this package do; NumPy's ufuncs are known to.
    at : callable, optional
        Applied after the functions to the block and the series and steps of the source that are in
        it: ``at(block, series, steps)`` returns a block of the same shape.
    reader : callable, optional
        Reads the source in place of slices of it, for what depends on other steps too:
        ``reader(source, series, steps)`` returns a block of consecutive steps, a range, with all
        features. A method of an object with ``keeps_features = True`` keeps features in place.
    shape : tuple of int, optional
        What a ``reader`` makes of the shape of the source.
    dtype : dtype, optional
        That of the result, if functions and ``at`` keep F. By default it is what the functions
        make of zeros.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    feature_names : tuple of str or None
        Those of the source, if all functions keep the features.
    """

    def __init__(
        self,
        source: Any,
        series: Index | None = None,
        steps: Index | None = None,
        functions: Functions = (),
        *,
        at: FunctionOfPlaces | None = None,
        reader: Reader | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        self.source = source
        self.functions = functions
        self.at = at
        self.reader = reader
        n_features, *n_series, n_steps = source.shape if shape is None else shape
        self.series: Index = range(*n_series or [1]) if series is None else series
        self.steps: Index = range(n_steps) if steps is None else steps
        if dtype is None:
            # for the F and dtype of the functions
            trial = self._apply_all(np.zeros((n_features, 1, 1), source.dtype))
            n_features, dtype = len(trial), trial.dtype
        self.dtype = np.dtype(dtype)
        self.shape = (n_features, len(self.series), len(self.steps))
        if not n_series:
            self.shape = (n_features, len(self.steps))

    @property
    def nonblocking(self) -> bool:  # type: ignore[override]  # as the source now is
        return is_nonblocking(self.source)

    @property
    def keeps_features(self) -> bool:
        """Whether each feature is in its place in the source, and in the source's own source."""
        readers = () if self.reader is None else (self.reader,)
        # of methods, the objects say so
        owners = [getattr(f, "__self__", f) for f in (*readers, *self.functions)]
        known = (isinstance(f, np.ufunc) or getattr(f, "keeps_features", False) for f in owners)
        return all(known) and getattr(self.source, "keeps_features", True)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return get_feature_names(self.source) if self.keeps_features else None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, of {type(self.source).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": as_picklable(self.source)}

    def read(self, *index: Index) -> np.ndarray:
        if 0 in map(len, index):
            return np.empty([len(places) for places in index], self.dtype)
        features, *of_series, of_steps = index
        series = [compose_index(self.series, which) for which in of_series]
        steps = compose_index(self.steps, of_steps)
        if self.reader is not None:
            # the consecutive steps that these are among
            t = np.asarray(steps)
            stretch = range(int(t.min()), int(t.max()) + 1)
            block = self.reader(self.source, series[0], stretch)
            # else the steps are the stretch itself, and the block may stay a view
            if len(t) < len(stretch) or t[0] > stretch.start:
                block = block[:, :, t - stretch.start]
        else:  # a function may need all features
            block = read_block(self.source, range(self.source.shape[0]), *series, steps)
        block = self._apply_all(block if series else block[:, None])
        if self.at is not None:
            block = self.at(block, series[0] if series else self.series, steps)
        block = block[as_key(features)]
        return block if series else block[:, 0]

    def _apply_all(self, block: np.ndarray) -> np.ndarray:
        for f in self.functions:
            block = f(block)
        return block


def select(source: Any, series: Index | None, steps: Index | None) -> Any:
    """Return some series and steps of an (F, N, T) array: a NumPy view if there can be one, else a
    ``LazyArray``.
    """
    every = range(source.shape[1]), range(source.shape[2])
    series = every[0] if series is None else series
    steps = every[1] if steps is None else steps
    # NumPy copies where an index is an array: a lazy array reads only what is needed
    if isinstance(series, range) and isinstance(steps, range) and series and steps:
        if (series, steps) == every:
            return source
        if isinstance(source, np.ndarray):
            return source[:, as_key(series), as_key(steps)]
    return LazyArray(source, series, steps)


def as_picklable(source: Any) -> Any:
    """Return what to pickle in place of an array: for one in a file, an array that goes as the
    position of its bytes, never as the data.

    Raises
    ------
    DataError
        If another process cannot open it.
    """
    if isinstance(source, h5py.Dataset):
        return _reopened(source)
    if isinstance(source, H5Map):
        return source
    # np.memmap would be pickled as data, and joblib sends a transposed one with permuted values
    root: Any = source
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or getattr(root, "filename", None) is None:
        return source
    # the file lacks changes of mode "c", though joblib would send its name
    if root.mode == "c" or not source.size:
        return np.array(source)
    first_byte = root.__array_interface__["data"][0] - root.offset  # of the file
    offset = source.__array_interface__["data"][0] - first_byte
    return H5Map(str(root.filename), source.dtype, source.shape, source.strides, offset)


def _reopened(dataset: h5py.Dataset) -> H5Lazy:
    """Return a dataset that h5py opened as an array that any process can open."""
    require_open(dataset, "the array to send to another process")
    file = dataset.file
    path = os.path.realpath(os.fsdecode(file.filename))
    # other drivers have no descriptor, and a file open for writing keeps others out by its lock
    is_plain = file.driver == "sec2" and file.mode == "r" and os.path.exists(path)
    if is_plain and dataset.name and identity_of(path).matches(identity_of(file)):
        return H5Lazy(path, dataset.name, "FNT" if dataset.ndim == 3 else None)
    raise DataError(
        f"{describe(file.filename, dataset.name)} cannot be opened in another process: it has no "
        "name, or its file was replaced, is not found from here, or is open with "
        f"mode={file.mode!r} and the driver {file.driver!r}; open it by its absolute path with "
        "mode='r', or use h5mmap(path, name), or n_jobs=1"
    )
