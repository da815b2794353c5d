"""Create room for an array in an HDF5 file."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5 import opening
from fluxutils_py.data.hdf5.damage import read_attribute
from fluxutils_py.data.hdf5.opening import describe, open_file
from fluxutils_py.data.hdf5.reading import h5mmap
from fluxutils_py.data.hdf5.writing import ALIGN, allocate
from fluxutils_py.errors import H5DataError
from fluxutils_py.validation import check_integer

SPARE = 1 << 20  # bytes for what HDF5 notes about a dataset
LARGEST = 1 << 62  # bytes: HDF5 counts them in 64 bits, and wraps


def h5create(
    path: str | os.PathLike[str],
    name: str,
    shape: Sequence[int],
    dtype: Any = "float32",
    axes: str = "TNF",
    *,
    exist_ok: bool = False,
    overwrite: bool = False,
    sparse: bool = False,
) -> Any:
    """Make room for an array of shape (F, N, T) in an HDF5 file, new or existing, and map it for writing.

    The dataset is contiguous, takes its room on the disk at once, and reads as zeros where it is not written. Other
    datasets in the file, and maps of them, do not change.

    Parameters
    ----------
    path : path-like
    name : str
        Name of the new dataset; missing groups are created.
    shape : sequence of int
    dtype : dtype
        Of real numbers.
    axes : str
        Order of three axes in the file, slowest first. ``"TNF"`` is the fast one for training.
    exist_ok : bool
        If a dataset of that name, shape, type and order already exists, map that one with its numbers, so that a script
        can run a second time.
    overwrite : bool
        If something of that name already exists, replace it by a new dataset. Maps of the old one keep its numbers; its
        room in the file is not used again (``h5repack`` gives it back). Together with ``exist_ok``, replace only
        datasets that do not fit.
    sparse : bool
        Take room on the disk only where the map is written. If the disk is full then, the system kills the process
        (SIGBUS), with no error to catch.

    Returns
    -------
    H5Map
        The map, in mode ``"r+"``; an empty ndarray for a shape without elements.

    Raises
    ------
    H5DataError
        If something of that name already exists, if there can be no such array, if the disk has no room for it, or if
        the file is open elsewhere. The file then does not change.

    Examples
    --------
    >>> import os, tempfile
    >>> out = h5create(os.path.join(tempfile.mkdtemp(), "predictions.h5"), "yhat", (1, 3, 4))
    >>> out[:, 0] = 7  # as est.predict(x, out=out) would
    >>> float(out.sum())
    28.0
    """
    opening.check_path(path)
    opening.check_name(path, name)
    where = describe(path, name)
    shape, kind = _check_shape(shape, dtype, where)
    order = opening.check_axes(axes, len(shape), where)
    file_shape, noted = tuple(shape[i] for i in np.argsort(order)), axes if len(shape) == 3 else None
    is_new, temporary = not os.path.exists(path), f"{secrets.token_hex(8)}.part"
    try:
        with contextlib.closing(open_file(path, "a", **ALIGN)) as file:
            exists = _name_exists(file, name)
            misfit = _describe_misfit(file, path, name, file_shape, kind, noted) if exists and exist_ok else None
            if exists and not overwrite and (misfit or not exist_ok):
                raise H5DataError(f"{where} exists already{misfit or _WAYS_OUT}")
            if not exists or misfit or not exist_ok:
                n_bytes = math.prod(shape) * kind.itemsize
                _check_room(path, os.path.getsize(path), n_bytes, where, sparse)
                try:  # at the end of the file: it does not shrink below maps of an old dataset
                    allocate(file, temporary, file_shape, kind, noted)
                    if not sparse:
                        _take_room(file, file[temporary].id.get_offset(), n_bytes, where)
                    if exists:
                        del file[name]
                    file.move(temporary, name)
                finally:
                    file.pop(temporary, None)
            elif not sparse:
                _take_room(file, file[name].id.get_offset(), file[name].nbytes, where)
        return h5mmap(path, name, mode="r+")
    except BaseException as error:
        if is_new:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(error, OSError | RuntimeError | TypeError | ValueError) and not isinstance(
            error, H5DataError | FileNotFoundError
        ):
            raise H5DataError(
                f"{where} cannot be created ({error}); give it another name, or make it smaller"
            ) from error
        raise


_WAYS_OUT = (
    "; to write to it pass exist_ok=True or take h5mmap(path, name, mode='r+'), to put a new one in its place pass "
    "overwrite=True"
)


def _check_shape(shape: Any, dtype: Any, where: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array of real numbers."""
    try:
        sizes = tuple(check_integer("", n) for n in ([shape] if isinstance(shape, str | bytes) else shape))
    except TypeError:
        raise H5DataError(
            f"{where}: shape must be a sequence of whole numbers, as (1, 37, 100), got {shape!r}"
        ) from None
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise H5DataError(f"{where}: dtype must be a type of real numbers, as 'float32', got {dtype!r}") from error
    if kind.kind not in "fiub" or not sizes or min(sizes) < 0:
        raise H5DataError(f"{where}: expected the shape and type of an array of real numbers, got {sizes} of {kind}")
    if math.prod(sizes) * kind.itemsize > LARGEST or max(sizes) > LARGEST:
        raise H5DataError(f"{where}: an array of shape {sizes} of {kind} is larger than any file")
    return sizes, kind


def _check_room(path: Any, size: int, n_bytes: int, where: str, sparse: bool) -> None:
    """Check that the file system takes so large a file: HDF5 finds out while it writes, and breaks the file.

    Unless ``sparse``, its disk must have room for the ``n_bytes`` that are added to a file of ``size``.
    """
    folder = os.path.dirname(os.path.realpath(path))
    with contextlib.suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as f:
        try:
            f.truncate(size + n_bytes + SPARE)
        except OSError as error:
            raise H5DataError(
                f"{where} cannot be created: the file system takes no file of {size + n_bytes} bytes ({error.strerror})"
            ) from error
    if not sparse and shutil.disk_usage(folder).free < n_bytes:
        raise _full_disk(where, n_bytes, shutil.disk_usage(folder).free)


def _take_room(file: h5py.File, offset: int | None, n_bytes: int, where: str) -> None:
    """Have the disk give a dataset all of its room: a process that writes to a map dies of a full disk (SIGBUS).

    Where a file system cannot, as some network file systems, :func:`_check_room` has looked at what is free.
    """
    if offset is None or not n_bytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.id.get_vfd_handle(), offset, n_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full_disk(where, n_bytes, None) from error
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
            raise


def _full_disk(where: str, n_bytes: int, free: int | None) -> H5DataError:
    there = "" if free is None else f", which has {free} free"
    return H5DataError(
        f"{where} cannot be created: it needs {n_bytes} bytes on the disk{there}; make room, or pass sparse=True to "
        "take room only where it is written"
    )


def _name_exists(file: h5py.File, name: str) -> bool:
    """Whether something has that name, be it a link that leads nowhere."""
    try:
        return file.get(name, getlink=True) is not None
    except (OSError, RuntimeError, ValueError):
        return name in file


def _describe_misfit(
    file: h5py.File, path: Any, name: str, shape: tuple[int, ...], dtype: np.dtype, axes: str | None
) -> str | None:
    """Return why a dataset cannot be used instead of a new one; None if it can."""
    dataset = opening.find_dataset(file, path, name)
    present = f"shape {dataset.shape} of {opening.numpy_dtype(dataset)}"
    wanted = f"shape {shape} of {dtype}"
    if axes:
        present, wanted = f"{present} in the order {read_attribute(dataset, 'axes')}", f"{wanted} in the order {axes}"
    if present != wanted:
        return (
            f" and has, in the file, {present} in place of {wanted}; pass overwrite=True to put a new one in its place"
        )
    reason = opening.unmappable_reason(dataset)
    return reason and f" and cannot be written to in place: it {reason}; pass overwrite=True for one that can"
