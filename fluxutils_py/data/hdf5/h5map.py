"""An array in an HDF5 file, mapped into memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluxutils_py.data.hdf5.feature_names import index_names
from fluxutils_py.data.hdf5.identity import (
    FileIdentity,
    FileReplaced,
    check_same_file,
    current_identity,
    identity_of,
)
from fluxutils_py.data.hdf5.opening import (
    describe,
    find_dataset,
    numpy_dtype,
    open_file,
    unmappable_reason,
)
from fluxutils_py.errors import H5DataError

PAGE = mmap.PAGESIZE
AT_ONCE = 256 << 20  # bytes: asking for more at once would push out what is in use


class Layout(NamedTuple):
    """Position, shape and type of a dataset in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # as in the file
    offset: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Layout:
        """That of a dataset which can be mapped."""
        shape = tuple(int(n) for n in dataset.shape)
        return cls(dataset.name, numpy_dtype(dataset).str, shape, dataset.id.get_offset())


class Origin(NamedTuple):
    """Where the memory of a map comes from."""

    path: str
    mode: str
    identity: FileIdentity
    layout: Layout | None
    start: int  # address at which byte 0 of the file would lie
    memory: mmap.mmap
    memory_start: int  # address of the first byte that is mapped
    reports_residency: bool


def _origin_of(array: object) -> Origin | None:
    return getattr(array, "_origin", None)


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
        As of any NumPy array, strides in bytes.
    offset : int
        Position of element ``[0, 0, ...]`` in the file, in bytes; need not be aligned.
    mode : "r" or "r+"
    identity : FileIdentity, optional
        Identity of the file.
    layout : Layout, optional
        Layout of the dataset that this map is part of; checked when the map is unpickled.
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
    _origin: Origin | None
    feature_names: tuple[str, ...] | None

    def __new__(
        cls,
        path: str,
        dtype: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        mode: str = "r",
        identity: FileIdentity | None = None,
        layout: Layout | None = None,
        feature_names: tuple[str, ...] | None = None,
    ) -> H5Map:
        dtype = np.dtype(dtype)
        # negative strides reach back
        below = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
        above = (
            sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0) + dtype.itemsize
        )
        first = (offset + below) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(path, "rb" if mode == "r" else "r+b") as file:
            stat, current = os.fstat(file.fileno()), identity_of(file.fileno())
            if identity is not None:
                check_same_file(path, current, identity)
            if offset + above > stat.st_size:
                raise H5DataError(
                    f"{path}: the file has {stat.st_size} bytes, the data in it reach to "
                    f"{offset + above}: it is truncated, or not completely written yet; write or "
                    "copy it again, or close it where it is written"
                )
            access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
            memory = mmap.mmap(file.fileno(), offset + above - first, access=access, offset=first)
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)
        # not the mmap itself: joblib would take a plain view for one of an np.memmap, and send its
        # strides wrong
        raw = np.frombuffer(memory, "u1")
        self = np.ndarray.__new__(cls, shape, dtype, raw, offset - first, strides)
        self._mmap, self.filename, self.offset, self.mode = memory, path, offset, mode
        start = _memory_address(raw)
        known = current if mode == "r" else current.without_contents()
        reports_residency, self.feature_names = _reports_residency(path, stat), feature_names
        self._origin = Origin(
            path, mode, known, layout, start - first, memory, start, reports_residency
        )
        return self

    def __array_finalize__(self, obj: Any) -> None:
        super().__array_finalize__(obj)
        self._origin = _origin_of(obj) if self._mmap is not None else None
        self.feature_names = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self or _origin_of(array) is not None:  # given as ``out``
            return array
        return array[()] if return_scalar or array.ndim == 0 else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        view = np.ndarray.__getitem__(self, index)
        if not isinstance(view, H5Map):
            return view
        if _origin_of(view) is None:
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
        if self._origin is not None and self._origin.mode != "r":
            self._origin.memory.flush()

    # -- other processes ---------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        if self._origin is None:
            return np.array(self).__reduce__()
        o = self._origin
        mode = o.mode if self.flags.writeable else "r"
        memory_layout = self.dtype, self.shape, self.strides, _memory_address(self) - o.start, mode
        return reopen, (
            o.path,
            *memory_layout,
            current_identity(o.path, o.identity),
            o.layout,
            self.feature_names,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    # -- reading from disk -------------------------------------------------------------------------

    # More than 12 branches: each way in which a view may lie in the file is one case.
    def willneed(self, *views: np.ndarray) -> bool:
        """Ask the kernel to read the pages of views, all at once and in the background.

        Call it just before the views are copied: it is worth a factor of five when the file is not
        in the page cache. When it is, this does nothing and costs microseconds.

        Parameters
        ----------
        *views : ndarray
            Any views of this map or of its views, in any memory order: a window, or its single
            rows. Arrays outside the map are ignored. Of several views, only the first and the last
            are checked for pages in memory.

        Returns
        -------
        bool
            Whether it asked for anything.
        """
        o, views = self._origin, tuple(view for view in views if view.size)
        if o is None or not views or not hasattr(mmap, "MADV_WILLNEED"):
            return False
        if (
            o.reports_residency
            and _probably_resident(views[0], o)
            and (len(views) == 1 or _probably_resident(views[-1], o))
        ):
            return False
        starts, stops = [], []
        for view in views:
            runs, length = _contiguous_ranges(view.shape, view.strides, view.itemsize)
            first = _memory_address(view) - o.memory_start
            if first + int(runs[0]) >= 0 and first + int(runs[-1]) + length <= len(o.memory):
                starts.append((first + runs) // PAGE * PAGE)
                stops.append(first + runs + length)
        if starts:
            for start, stop in _merge_ranges(np.concatenate(starts), np.concatenate(stops)):
                o.memory.madvise(mmap.MADV_WILLNEED, start, stop - start)
        return bool(starts)


def reopen(
    path: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    mode: str,
    identity: FileIdentity,
    layout: Layout | None = None,
    feature_names: tuple[str, ...] | None = None,
) -> np.ndarray:
    """Open a view of a map in another process, of the same file or not at all."""
    if not all(shape):
        return np.empty(shape, dtype)
    if layout is not None:
        with contextlib.closing(_open_beside_writers(path)) as file:
            check_same_file(path, identity_of(file), identity)
            dataset = find_dataset(file, path, layout.name)
            if unmappable_reason(dataset) or Layout.of(dataset) != layout:
                raise FileReplaced(
                    f"{describe(path, layout.name)} was replaced since it was mapped: it is of "
                    "another type or shape, or lies elsewhere in the file; map it again and send "
                    "that"
                )
    try:
        return H5Map(path, dtype, shape, strides, offset, mode, identity, layout, feature_names)
    except FileNotFoundError as error:
        raise _missing_file(path) from error


def _open_beside_writers(path: str) -> h5py.File:
    """Open a file to read its layout, without a lock: a map needs none, and others may go on
    writing.
    """
    if not os.path.exists(path):
        raise _missing_file(path)
    try:
        return h5py.File(path, "r", locking=False)
    except OSError:  # also where this process has it open, with a lock
        return open_file(path)


def _missing_file(path: str) -> FileNotFoundError:
    return FileNotFoundError(f"{path}: the file no longer exists")


def _memory_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# -- which pages -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _contiguous_ranges(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[np.ndarray, int]:
    """Return the contiguous ranges of memory that a view covers: their offsets from element [0, 0,
    ...], their length.

    Ranges with less than a page between them are joined.
    """
    first, length, outer = 0, itemsize, []
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda a: abs(a[1])):
        first += min(0, (n - 1) * stride)
        if abs(stride) - length < PAGE or n == 1:
            length += (n - 1) * abs(stride)
        else:
            outer.append(np.arange(n) * abs(stride))
    runs = np.array([first])
    for steps in outer:
        runs = (steps[:, None] + runs).ravel()
    return runs, length


def _merge_ranges(starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int]]:
    """Drop ranges that others cover; return only as many as one call to the kernel takes."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    begins = np.flatnonzero(np.r_[True, starts[1:] > stops[:-1]])
    starts, stops = starts[begins], stops[np.r_[begins[1:] - 1, -1]]
    few = np.cumsum(stops - starts) <= AT_ONCE
    return list(zip(starts[few].tolist(), stops[few].tolist(), strict=True))


def _probably_resident(view: np.ndarray, o: Origin) -> bool:
    """Whether a page in the middle of a view is in memory (neighbours touch only its ends). One
    call, 1.5 us.
    """
    assert _mincore is not None
    byte, vector = _memory_address(view), ctypes.create_string_buffer(1)
    for n, stride in zip(view.shape, view.strides, strict=True):
        byte += n // 2 * stride
    if not 0 <= byte - o.memory_start < len(o.memory):
        return True
    return not _mincore(byte // PAGE * PAGE, 1, vector) and vector.raw[0] & 1 == 1


def _find_mincore() -> Callable[..., int] | None:
    """Return the system call that reports which pages are in memory; None if missing or if it
    reports all pages.
    """
    try:
        call = ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    untouched, vector = mmap.mmap(-1, PAGE), ctypes.create_string_buffer(b"\1")
    if call(_memory_address(np.frombuffer(untouched, "u1")), PAGE, vector) or vector.raw[0] & 1:
        return None
    return call


_mincore = _find_mincore()


def _reports_residency(path: str, stat: os.stat_result) -> bool:
    """Whether the call is reliable: for files that we may not write to, Linux reports all pages as
    in memory.
    """
    return _mincore is not None and (os.access(path, os.W_OK) or stat.st_uid == os.geteuid())
