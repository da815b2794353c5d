"""An array in an HDF5 file that is read when it is indexed."""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.arrays import DuckArray
from fluxutils_py.data.hdf5 import opening
from fluxutils_py.data.hdf5.datasets import warn_of_packing
from fluxutils_py.data.hdf5.feature_names import read_names
from fluxutils_py.data.hdf5.identity import (
    FileIdentity,
    FileReplaced,
    check_same_file,
    current_identity,
    identity_of,
)
from fluxutils_py.data.hdf5.opening import describe, open_file
from fluxutils_py.data.hdf5.source_files import check_open_file_limit, check_sources
from fluxutils_py.data.indexing import Index, read_slices
from fluxutils_py.errors import H5DataError

_inherited: list[
    h5py.File
] = []  # from the process that forked: to close them would release its locks


class H5Lazy(DuckArray):
    """A dataset that cannot be mapped (chunked, compressed, virtual, ...), as a lazy array of shape
    (F, N, T).

    It is not an ndarray: every indexing reads a fresh array. It takes integers, slices and ``...``
    as NumPy does, and along one axis an array of indices or booleans, in any order. ``np.asarray``
    reads everything.

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
    swmr : bool
        Open a file that another process is writing to in HDF5's single-writer, multiple-reader
        mode. The shape stays as it is now, until :meth:`refresh`.

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
        path: str | os.PathLike[str],
        name: str,
        axes: str | None = None,
        *,
        swmr: bool = False,
    ) -> None:
        self.path, self.name, self.swmr = os.path.realpath(opening.check_path(path)), name, swmr
        file = open_file(path, swmr=swmr)
        try:
            dataset = opening.find_dataset(file, path, name)
            where = describe(path, name)
            with opening.wrap_h5_errors(where):
                self._axes = opening.fnt_axes(opening.read_axes(dataset, axes, where), dataset.ndim)
                self.dtype = opening.numpy_dtype(dataset)
                self.shape = tuple(int(dataset.shape[i]) for i in self._axes)
                self.feature_names = (
                    read_names(dataset, self.shape[0]) if len(self.shape) == 3 else None
                )
                self._virtual = dataset.is_virtual
                check_sources(dataset, where)
                warn_of_packing(dataset, where)
        except BaseException:
            file.close()
            raise
        self.closed = False
        known = identity_of(file)
        self._identity = known.without_contents() if swmr else known
        self._handle: tuple[int, h5py.File, h5py.Dataset] | None = (os.getpid(), file, dataset)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"H5Lazy({self.path!r}, {self.name!r}, shape={self.shape}, dtype={self.dtype}{state})"
        )

    def read(self, *index: Index) -> np.ndarray:
        return read_slices(self._read_slices, index, strides=True)

    # -- the file ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file in this process. Reading afterwards is an error."""
        self.closed, handle, self._handle = True, self._handle, None
        if handle is not None and handle[0] == os.getpid():
            handle[1].close()

    def refresh(self) -> H5Lazy:
        """Take on the shape that the dataset has now, where another process makes it grow
        (``swmr=True``).
        """
        dataset = self._dataset()
        with opening.wrap_h5_errors(describe(self.path, self.name)):
            dataset.refresh()
            self.shape = tuple(int(dataset.shape[i]) for i in self._axes)
        return self

    def __enter__(self) -> H5Lazy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        opened = (
            {}
            if self._handle is None
            else {"_identity": current_identity(self.path, self._identity)}
        )
        return self.__dict__ | {"_handle": None} | opened

    def _dataset(self) -> h5py.Dataset:
        """The open dataset of this process."""
        if self.closed:
            raise H5DataError(
                f"{describe(self.path, self.name)} was closed; open it again with h5mmap"
            )
        handle = self._handle
        if handle is None or handle[0] != os.getpid():
            identity = self._identity
            if handle is not None:
                _inherited.append(handle[1])
                identity = current_identity(self.path, identity)
            if not os.path.exists(self.path):
                raise FileNotFoundError(f"{self.path}: the file no longer exists")
            file = open_file(self.path, swmr=self.swmr)
            try:
                dataset = self._same_dataset(file, identity)
            except BaseException:
                file.close()
                raise
            self._handle = handle = (os.getpid(), file, dataset)
        return handle[2]

    def _same_dataset(self, file: h5py.File, identity: FileIdentity) -> h5py.Dataset:
        """The dataset in a file that was opened again."""
        check_same_file(self.path, identity_of(file), identity)
        dataset, where = (
            opening.find_dataset(file, self.path, self.name),
            describe(self.path, self.name),
        )
        shape = (
            tuple(int(dataset.shape[i]) for i in self._axes)
            if len(self._axes) == dataset.ndim
            else None
        )
        if opening.numpy_dtype(dataset) != self.dtype or (shape != self.shape and not self.swmr):
            raise FileReplaced(
                f"{where} was replaced since it was opened: it is of another type or shape"
            )
        check_sources(dataset, where)
        return dataset

    def _read_slices(self, key: tuple[slice, ...]) -> np.ndarray:
        sizes = [len(range(s.start, s.stop, s.step or 1)) for s in key]
        order = np.argsort(self._axes).tolist()  # which axis of (F, N, T) each axis of the file is
        out = np.empty([sizes[i] for i in order], self.dtype)
        if out.size:
            self._read_into(out, self._dataset(), tuple(key[i] for i in order))
        return out.transpose(self._axes)

    def _read_into(self, out: np.ndarray, dataset: h5py.Dataset, source: tuple[slice, ...]) -> None:
        try:
            if self.swmr:
                dataset.refresh()
            dataset.read_direct(out, source)
            if self._virtual:
                check_open_file_limit(describe(self.path, self.name))
        except H5DataError:
            # what was not found stays so while the file is open
            handle, self._handle = (
                self._handle,
                None,
            )
            if handle is not None:
                handle[1].close()
            raise
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            if self.closed:
                self._dataset()
            raise H5DataError(
                f"{describe(self.path, self.name)} cannot be read at {_key_text(source)} "
                f"({error}); check the file and its sources, or write it again"
            ) from error


def _key_text(key: tuple[slice, ...]) -> str:
    return (
        "["
        + ", ".join(
            f"{s.start}:{s.stop}" + (f":{s.step}" if s.step not in (None, 1) else "") for s in key
        )
        + "]"
    )
