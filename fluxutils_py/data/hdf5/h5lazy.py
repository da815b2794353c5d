"""An array in an HDF5 file that is read when it is indexed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from fluxutils_py.data.arrays import DuckArray
from fluxutils_py.data.hdf5.opening import (
    PathLike,
    check_path,
    check_same_file,
    check_sources,
    current_identity,
    describe,
    find_dataset,
    fnt_axes,
    identity_of,
    numpy_dtype,
    open_file,
    read_axes,
    read_names,
    warn_of_packing,
    wrap_h5_errors,
)
from fluxutils_py.data.indexing import (
    Index,
    compose_index,
    index_names,
    parse_index,
    read_slices,
)
from fluxutils_py.errors import H5DataError

Handle = tuple[int, h5py.Dataset]  # an open dataset, after the process that opened it

# from the process that forked: to close them would release its locks
_inherited: list[Handle] = []


class H5Lazy(NDArrayOperatorsMixin, DuckArray):
    """A dataset that cannot be mapped (chunked, compressed, virtual, ...), as a lazy array of shape
    (F, N, T).

    It is not an ndarray. Slices of it are lazy too, as those of a map are views, and arithmetic
    reads and gives ndarrays. It takes integers as NumPy does, and along one axis an array of
    indices or booleans, in any order: these read a fresh array, as does ``np.asarray``.

    It pickles as the names of file and dataset, and opens the same file or none; sources of a
    virtual dataset are found by their names. After a fork, each process opens its own file. Several
    threads may read, one after the other: HDF5 has one lock. While it is open, no other process can
    open the file for writing; close it with :meth:`close` or ``with``. A cache holds 64 MiB of
    chunks.

    Parameters
    ----------
    path : path-like
    name : str
        Name of the dataset, ``"group/x"`` in a group.
    axes : str, optional
        As in :func:`h5mmap`.

    Attributes
    ----------
    shape, dtype, ndim, size, nbytes
    path : str
        The real path of the file.
    name : str
    feature_names : tuple of str or None
        One per feature, if the file has an attribute of that name.
    closed : bool

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    H5DataError
        If the dataset cannot be read; when indexed, if it was closed or the file was replaced.
    """

    def __init__(
        self,
        path: PathLike,
        name: str,
        axes: str | None = None,
    ) -> None:
        self.path = os.path.realpath(check_path(path))
        self.name = name
        where = describe(path, name)
        file = open_file(path)
        try:
            # all checks are made here, so that reading a window makes none
            dataset = find_dataset(file, path, name)
            with wrap_h5_errors(where):
                self._axes = fnt_axes(read_axes(dataset, axes, where), dataset.ndim)
                self.dtype = numpy_dtype(dataset)
                self.shape = tuple(dataset.shape[i] for i in self._axes)
                self._index: Sequence[Index] | None = None  # of a slice
                self.feature_names = None
                if dataset.ndim == 3:
                    self.feature_names = read_names(dataset, self.shape[0])
                self._virtual = dataset.is_virtual
                check_sources(dataset, where)
                warn_of_packing(dataset, where)
        except BaseException:
            file.close()
            raise
        self.closed = False
        self._identity = identity_of(file)
        self._handle: Handle | None = os.getpid(), dataset

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"H5Lazy({self.path!r}, {self.name!r}, shape={self.shape}, dtype={self.dtype}{state})"
        )

    def __getitem__(self, key: Any) -> Any:
        self._dataset()  # opened once for all slices
        index = [places for places in parse_index(key, self.shape) if isinstance(places, range)]
        if len(index) < self.ndim:
            return super().__getitem__(key)
        part = object.__new__(type(self))  # it opens the file again if this one is closed before
        part.__dict__.update(self.__dict__, _index=self._in_whole(index))
        part.feature_names = index_names(self.feature_names, key, self.ndim)
        part.shape = tuple(map(len, index))
        return part

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(a) if isinstance(a, DuckArray) else a for a in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def read(self, *index: Index) -> np.ndarray:
        return read_slices(self._read_slices, self._in_whole(index))

    def _in_whole(self, index: Sequence[Index]) -> Sequence[Index]:
        return index if self._index is None else list(map(compose_index, self._index, index))

    # -- the file ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file in this process. Reading afterwards is an error."""
        self.closed = True
        self._close_file()

    def _close_file(self) -> None:
        process, dataset = self._handle or (None, None)
        self._handle = None
        if process == os.getpid() and dataset:  # the parent's would give up its lock
            dataset.file.close()

    def __enter__(self) -> H5Lazy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_handle": None}
        if self._handle is not None:
            state["_identity"] = current_identity(self.path, self._identity)
        return state

    def _dataset(self) -> h5py.Dataset:
        """Return the open dataset of this process."""
        if self.closed:
            raise H5DataError(
                f"{describe(self.path, self.name)} was closed; open it again with h5mmap"
            )
        handle = self._handle  # read once: other threads may replace it
        process, dataset = handle or (None, None)
        identity = self._identity
        if process == os.getpid() and dataset:  # not closed through a slice
            return dataset
        if handle is not None and process != os.getpid():
            # the parent has the file open, and may have written to it since
            _inherited.append(handle)
            identity = current_identity(self.path, identity)
        file = open_file(self.path)
        try:
            check_same_file(self.path, identity_of(file), identity)
            dataset = find_dataset(file, self.path, self.name)
            check_sources(dataset, describe(self.path, self.name))
        except BaseException:
            file.close()
            raise
        self._handle = os.getpid(), dataset
        return dataset

    def _read_slices(self, key: tuple[slice, ...]) -> np.ndarray:
        source = tuple(key[i] for i in np.argsort(self._axes))
        out = np.empty([s.stop - s.start for s in source], self.dtype)
        transposed = out.transpose(self._axes)
        if not out.size:  # HDF5 takes no empty selections
            return transposed
        dataset = self._dataset()
        try:
            dataset.read_direct(out, source)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            if self.closed:  # meanwhile, by another thread
                self._dataset()
            raise H5DataError(
                f"{describe(self.path, self.name)} cannot be read at {source} ({error}); check the "
                "file and its sources, or write it again"
            ) from error
        if not self._virtual:
            return transposed
        # HDF5 keeps the sources open: if one more file can be opened, none was left out. Sources
        # beyond as many files as this process may open are taken for missing.
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            # a source that HDF5 has not found stays missing while the file is open
            self._close_file()
            raise H5DataError(
                f"{describe(self.path, self.name)} is virtual and needs more files open at once "
                f"than this process may have ({error.strerror}); raise the limit, as with `ulimit "
                "-n 65536`, or copy it with h5concat(..., virtual=False)"
            ) from error
        return transposed
