"""An array in an HDF5 file, mapped into memory."""

from __future__ import annotations

import functools
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data.arrays import Names
from fluxutils_py.data.hdf5.opening import (
    FileIdentity,
    Shape,
    check_same_file,
    current_identity,
    identity_of,
)
from fluxutils_py.data.indexing import index_names
from fluxutils_py.errors import H5DataError

PAGE = mmap.PAGESIZE
WILLNEED = getattr(mmap, "MADV_WILLNEED", None)
OF_MAP = ("_identity", "_first", "_address")  # which views share


class H5Map(np.memmap):
    """A memory map of a dataset or a part of it; views travel between processes as exactly as the
    whole.

    Two things differ from ``np.memmap``. Any view pickles as the location of its bytes in the file,
    never as data, so it arrives intact in another process, whatever its memory order. (joblib sends
    a *transposed* ``np.memmap`` with permuted values, silently.) And the kernel is told not to read
    ahead (``MADV_RANDOM``): a window of time-major data touches a few pages in every row, and
    reading ahead would fetch sixteen times the bytes. :meth:`willneed` asks for the pages of a
    window only. Arithmetic and index arrays give plain arrays.

    Parameters
    ----------
    path : str
    dtype : dtype
    shape, strides : tuple of int
        As for any NumPy array, strides in bytes.
    offset : int
        Position of element ``[0, 0, ...]`` in the file, in bytes; need not be aligned.
    mode : "r" or "r+"
    identity : FileIdentity, optional
        Identity of the file.
    feature_names : tuple of str, optional
        One per index of the first of three axes. A slice of that axis has the names of the slice; a
        result with other axes has none.

    Raises
    ------
    H5DataError
        If the file is too short, or is not the one that ``identity`` describes.

    Notes
    -----
    A file that is truncated while it is mapped kills the process that reads it (SIGBUS), with no
    error to catch. ``h5save`` and ``h5concat`` therefore write to a new file and move it into
    place: a map keeps the old one. Do not overwrite a mapped file with ``h5py.File(path, "w")``.
    """

    _mmap: mmap.mmap | None  # what np.memmap has, whose type its stubs leave out
    filename: str
    _identity: FileIdentity
    _first: int  # place in the file of the first byte that is mapped
    _address: int  # of that byte in memory
    feature_names: Names | None

    def __new__(
        cls,
        path: str,
        dtype: DTypeLike,
        shape: Shape,
        strides: Shape,
        offset: int = 0,
        mode: str = "r",
        identity: FileIdentity | None = None,
        feature_names: Names | None = None,
    ) -> H5Map:
        dtype = np.dtype(dtype)
        reaches = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        lowest = offset + sum(reach for reach in reaches if reach < 0)
        stop = offset + sum(reach for reach in reaches if reach > 0) + dtype.itemsize
        first = lowest // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(path, "rb" if mode == "r" else "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            current = identity_of(file.fileno())
            if identity is not None:
                check_same_file(path, current, identity)
            if stop > size:
                raise H5DataError(
                    f"{path}: the file has {size} bytes, the data in it reach to "
                    f"{stop}: it is truncated, or not completely written yet; write or "
                    "copy it again, or close it where it is written"
                )
            access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
            memory = mmap.mmap(file.fileno(), stop - first, access=access, offset=first)
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)
        # not the mmap itself: joblib would take a plain view for one of an np.memmap, and send its
        # strides wrong
        raw = np.frombuffer(memory, "u1")
        self = np.ndarray.__new__(cls, shape, dtype, raw, offset - first, strides)
        self._mmap = memory
        self.filename = path
        self.offset = offset
        self.mode = mode
        self.feature_names = feature_names
        self._identity = current if mode == "r" else current.without_contents()
        self._first = first
        self._address = _memory_address(raw)
        return self

    def __array_finalize__(self, obj: object) -> None:
        super().__array_finalize__(obj)
        if self.is_mapped:
            for name in OF_MAP:
                setattr(self, name, getattr(obj, name))
        self.feature_names = None

    @property
    def is_mapped(self) -> bool:
        """Whether the values are in the file; false for a copy of them."""
        return self._mmap is not None  # np.memmap leaves it to views

    def __array_wrap__(
        self, array: Any, context: object = None, return_scalar: bool = False
    ) -> Any:
        if array is self or getattr(array, "is_mapped", False):  # given as ``out``
            return array
        return array[()] if return_scalar or array.ndim == 0 else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        view = np.ndarray.__getitem__(self, index)
        if not isinstance(view, H5Map):
            return view
        if not view.is_mapped:  # an array of indices makes a copy
            return np.asarray(view)
        if view.ndim == 3:
            view.feature_names = index_names(self.feature_names, index, self.ndim)
        return view

    def __enter__(self) -> H5Map:
        """Return itself: ``with h5mmap(...) as x`` works as for a lazy array. Garbage collection
        closes a map.
        """
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Write changes to the disk now; without it, the system does so later."""
        if self._mmap is not None and self.mode != "r":
            self._mmap.flush()

    # -- other processes ---------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        if not self.is_mapped or not self.size:
            return np.array(self).__reduce__()
        return H5Map, (
            self.filename,
            self.dtype,
            self.shape,
            self.strides,
            _memory_address(self) - self._address + self._first,
            self.mode if self.flags.writeable else "r",
            current_identity(self.filename, self._identity),
            self.feature_names,
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        # ndarray's own, which protocol 5 would call, sends the values
        return self.__reduce__()

    # -- reading from disk -------------------------------------------------------------------------

    def willneed(self, *views: np.ndarray) -> None:
        """Ask the kernel to read the pages of views, all at once and in the background.

        Call it just before the views are copied: it is worth a factor of five when the file is not
        in the page cache. When it is, asking takes up to a microsecond for each range of pages.

        Parameters
        ----------
        *views : ndarray
            Any views of this map or of its views, in any memory order: a window, or its single
            rows. Arrays outside the map are ignored.
        """
        memory = self._mmap
        if memory is None or WILLNEED is None:
            return
        # where the pages of each view start, and its bytes stop
        starts: list[np.ndarray] = []
        stops: list[np.ndarray] = []
        for view in views:
            runs, length = _contiguous_ranges(view.shape, view.strides, view.itemsize)
            begins = runs + (_memory_address(view) - self._address)
            if view.size and begins[0] >= 0 and begins[-1] + length <= len(memory):
                starts.append(begins // PAGE * PAGE)
                stops.append(begins + length)
        if not starts:
            return
        firsts = np.concatenate(starts)
        order = np.argsort(firsts, kind="stable")
        firsts = firsts[order]
        ends = np.maximum.accumulate(np.concatenate(stops)[order])
        # a range that begins after all before it have ended begins a new one
        news = np.flatnonzero(np.r_[True, firsts[1:] > ends[:-1]])
        lengths = ends[np.r_[news[1:] - 1, -1]] - firsts[news]
        for first, n_bytes in zip(firsts[news].tolist(), lengths.tolist(), strict=True):
            memory.madvise(WILLNEED, first, n_bytes)


def _memory_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# -- which pages -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _contiguous_ranges(shape: Shape, strides: Shape, itemsize: int) -> tuple[np.ndarray, int]:
    """Return the contiguous ranges of memory that a view covers: their offsets from element [0, 0,
    ...], and the length that all have.

    Ranges with less than a page between them are joined.
    """
    first = 0
    length = itemsize
    outer = []
    # from the fastest axis to the slowest
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda axis: abs(axis[1])):
        first += min(0, (n - 1) * stride)
        if abs(stride) - length < PAGE or n == 1:
            length += (n - 1) * abs(stride)
        else:
            outer.append(np.arange(n) * abs(stride))
    runs = np.array([first])
    for steps in outer:
        runs = (steps[:, None] + runs).ravel()
    return runs, length
