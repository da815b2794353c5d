"""Lazy selections of series and steps of an array, and lazy functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data.arrays import (
    AsRead,
    DuckArray,
    get_feature_names,
    is_nonblocking,
    read_block,
)
from fluxutils_py.data.hdf5.datasets import locate_dataset, open_located
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.opening import current_identity, identity_of
from fluxutils_py.data.indexing import Index, as_key, compose_index
from fluxutils_py.errors import DataError

Function = Callable[[np.ndarray], np.ndarray]
Functions = tuple[Function, ...]
FunctionOfPlaces = Callable[[np.ndarray, Index, Index], np.ndarray]


class DerivedArray(DuckArray):
    """An array that is computed from another one, ``source``, when it is indexed.

    A subclass defines :meth:`read`, or :meth:`read_stretch` if it is computed for stretches of
    consecutive steps of arrays (F, N, T). It may be pickled: a source in a file goes as the file's
    name. Names of features are those of the source.
    """

    source: Any

    @property
    def nonblocking(self) -> bool:  # type: ignore[override]  # as the source now is
        return is_nonblocking(self.source)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return get_feature_names(self.source)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, of {type(self.source).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": as_picklable(self.source)}

    def read_stretch(self, series: Index, steps: range) -> np.ndarray:
        """Return all features of some series and consecutive steps."""
        raise NotImplementedError

    def read(self, *index: Index) -> np.ndarray:
        features, series, steps = index
        if len(series) == 0 or len(steps) == 0:
            return np.empty([len(places) for places in index], self.dtype)
        t = np.asarray(steps)
        stretch = range(int(t.min()), int(t.max()) + 1)
        block = self.read_stretch(series, stretch)
        # else the steps are the stretch itself, and the block may stay a view
        if len(t) < len(stretch) or t[0] > stretch.start:
            block = block[:, :, t - stretch.start]
        return block[as_key(features)]


class LazyArray(DerivedArray):
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
        dtype: DTypeLike | None = None,
    ) -> None:
        self.source = source
        self.functions = functions
        self.at = at
        n_features, *n_series, n_steps = source.shape
        self.series: Index = range(*n_series or [1]) if series is None else series
        self.steps: Index = range(n_steps) if steps is None else steps
        if dtype is None:
            zeros = np.zeros((n_features, 1, 1), source.dtype)
            trial = self._apply_all(zeros)  # for the F and dtype of the functions
            n_features, dtype = len(trial), trial.dtype
        self.dtype = np.dtype(dtype)
        self.shape = (n_features, len(self.series), len(self.steps))
        if not n_series:
            self.shape = (n_features, len(self.steps))

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return super().feature_names if preserve_features(self.functions) else None

    def read(self, *index: Index) -> np.ndarray:
        features, *of_series, of_steps = index
        series = [compose_index(self.series, which) for which in of_series]
        steps = compose_index(self.steps, of_steps)
        # a function may need all features
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


def preserve_features(functions: Functions) -> bool:
    """Whether functions of blocks (F, n, t) say that they leave each feature in its place."""
    return all(isinstance(f, np.ufunc) or getattr(f, "keeps_features", False) for f in functions)


def select(source: Any, series: Index | None, steps: Index | None) -> Any:
    """Return some series and steps of an (F, N, T) array: a NumPy view if there can be one, else a
    :class:`LazyArray`.
    """
    series = _unless_all(series, source.shape[1])
    steps = _unless_all(steps, source.shape[2])
    if series is None and steps is None:
        return source
    # NumPy copies where an index is an array: a lazy array reads only what is needed
    sliceable = _is_sliceable(series) and _is_sliceable(steps)
    if isinstance(source, np.ndarray) and sliceable:
        return source[:, _as_slice(series), _as_slice(steps)]
    return LazyArray(source, series, steps)


def _unless_all(index: Index | None, n: int) -> Index | None:
    # only a range compares as a whole
    return None if isinstance(index, range) and index == range(n) else index


def _is_sliceable(index: Index | None) -> bool:
    if index is None:
        return True
    return isinstance(index, range) and len(index) > 0


def _as_slice(index: Index | None) -> slice:
    return slice(None) if index is None else as_key(index)


def as_picklable(source: Any) -> Any:
    """Return what to pickle instead of an array: for one in a file, the position of its bytes,
    never the data.
    """
    _refuse_netcdf4(source)
    if isinstance(source, h5py.Dataset):
        return _Recipe(open_located, *locate_dataset(source))
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
    address = source.__array_interface__["data"][0]
    first_byte = root.__array_interface__["data"][0] - root.offset  # of the file
    path = str(root.filename)
    return _Recipe(
        H5Map,
        path,
        source.dtype,
        source.shape,
        source.strides,
        address - first_byte,
        "r",
        current_identity(path, identity_of(path)),
    )


def _refuse_netcdf4(source: Any) -> None:
    # AsRead wraps the packed ones, which say another dtype than they give
    variable = source.source if isinstance(source, AsRead) else source
    if type(variable).__module__.split(".")[0] == "netCDF4":
        raise DataError(
            "a variable of netCDF4 cannot go to worker processes: use "
            f"xarray.open_dataset({variable.group().filepath()!r})[{variable.name!r}], or n_jobs=1"
        )


class _Recipe:
    """A function and its arguments, pickled instead of the array that the call opens again."""

    def __init__(self, open_array: Callable[..., object], *arguments: object) -> None:
        self.open_array = open_array
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.open_array, self.arguments
