"""Look at a dataset that h5py opened before it is used, and open it in another process."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5 import opening
from fluxutils_py.data.hdf5.damage import read_attribute
from fluxutils_py.data.hdf5.identity import (
    FileIdentity,
    FileReplaced,
    check_same_file,
    current_identity,
    identity_at,
    identity_of,
)
from fluxutils_py.data.hdf5.opening import describe, open_file
from fluxutils_py.data.hdf5.source_files import check_sources
from fluxutils_py.data.refused_sources import refuse_source
from fluxutils_py.errors import DataError, warn

PLAIN = int | float | str | np.ndarray | np.generic | None
NEUTRAL = {"scale_factor": 1, "add_offset": 0}


def check_dataset(array: Any, name: str) -> Any:
    """Check a source of values before it is used as it is, also inside tuples and lists, and return
    what was given.

    Parameters
    ----------
    array : Any
    name : str
        What messages call it.

    Raises
    ------
    DataError
        If it cannot be read as an array (see :mod:`~fluxutils_py.data.refused_sources`), or is an
        h5py dataset whose file was closed.
    H5DataError
        If a file that it takes data from is missing or cannot be read: HDF5 would give fill values.

    Warns
    -----
    UserWarning
        If attributes of NetCDF say how to read it.
    """
    if not isinstance(array, h5py.Dataset):
        refuse_source(array, name)
        for i, item in enumerate(array if isinstance(array, tuple | list) else ()):
            if not isinstance(item, PLAIN):  # of nested lists of numbers there may be many
                check_dataset(item, f"{name}[{i}]")
        return array
    if not array:
        raise DataError(
            f"{name} is in an HDF5 file that was closed; keep that file open, or take h5mmap(path, "
            "name)"
        )
    where = f"{name}, {describe(array.file.filename, array.name or 'without a name')},"
    with opening.wrap_h5_errors(where):
        if array.is_virtual or array.external:
            check_sources(array, where)
        warn_of_packing(array, where)
    return array


def warn_of_packing(dataset: h5py.Dataset, where: str) -> None:
    """Warn where attributes of NetCDF, which nothing here applies, say which values are missing or
    how they are packed.

    NaN as the mark of missing values is what everything here takes it for; a scale of 1 and an
    offset of 0 change nothing.
    """
    found = {name: read_attribute(dataset, name) for name in opening.PACKING}
    told = {name: value for name, value in found.items() if _says_something(name, value)}
    if not told:
        return
    shown = ", ".join(f"{name}={np.asarray(value).ravel()[0]}" for name, value in told.items())
    variable = (dataset.name or "x").rpartition("/")[2]
    warn(
        f"{where} has the attributes {shown} of NetCDF, which h5py and h5mmap ignore: missing "
        "values stay the numbers that stand for them, packed values stay packed; take "
        f'xarray.open_dataset({os.fsdecode(dataset.file.filename)!r})["{variable}"], which '
        "applies them",
    )


def _says_something(name: str, value: Any) -> bool:
    if value is None or np.asarray(value).dtype.kind not in "fiub" or not np.size(value):
        return False
    if name in NEUTRAL:
        return bool(np.any(np.asarray(value) != NEUTRAL[name]))
    return not bool(np.isnan(value).all())


# -- other processes -------------------------------------------------------------------------------


def locate_dataset(dataset: h5py.Dataset) -> tuple[str, str, FileIdentity, tuple[int, ...], str]:
    """Return what :func:`open_located` needs to open a dataset in another process: the same one or
    none.

    Raises
    ------
    DataError
        If another process cannot open it.
    """
    if not dataset:
        raise DataError(
            "an HDF5 file that was closed cannot be opened elsewhere; keep it open, or take h5mmap"
        )
    file, name = dataset.file, dataset.name
    where = describe(file.filename, name or "without a name")
    if name is None:
        raise DataError(f"{where} cannot be opened in another process; give it a name in its file")
    if file.driver not in ("sec2", "stdio", "direct"):
        raise DataError(
            f"{where} cannot be opened in another process: it comes through the file driver "
            f"{file.driver!r}, not from a file on the disk; write it with h5save and take "
            "h5mmap(path, name), or use n_jobs=1"
        )
    if file.mode != "r":
        raise DataError(
            f"{where} is open for writing, so that no other process can open it; close the file "
            "and open it with mode='r', or take h5mmap(path, name), or use n_jobs=1"
        )
    known = identity_of(file) if file.driver == "sec2" else None
    path = _path_of(file, known)
    if path is None:
        raise DataError(
            f"{where} cannot be opened in another process: its file was moved or replaced, or the "
            "current directory has changed since it was opened by the relative name "
            f"{file.filename!r}; open it by os.path.abspath(name), or take h5mmap(path, name)"
        )
    identity = current_identity(path, identity_at(path) if known is None else known)
    return (
        path,
        name,
        identity,
        tuple(int(n) for n in dataset.shape),
        opening.numpy_dtype(dataset).str,
    )


def open_located(
    path: str, name: str, identity: FileIdentity, shape: tuple[int, ...], dtype: str
) -> h5py.Dataset:
    """Open a dataset that :func:`locate_dataset` described, for reading."""
    file = open_file(path)
    try:
        check_same_file(path, identity_of(file), identity)
        dataset = opening.find_dataset(file, path, name)
        found = tuple(int(n) for n in dataset.shape), opening.numpy_dtype(dataset).str
        if found != (shape, dtype):
            raise FileReplaced(
                f"{describe(path, name)} was replaced since it was opened: it is of another type "
                "or shape"
            )
        if dataset.is_virtual or dataset.external:
            check_sources(dataset, describe(path, name))
        return dataset
    except BaseException:
        file.close()
        raise


def _path_of(file: h5py.File, known: FileIdentity | None) -> str | None:
    """The absolute path of an open file. By its name, a relative one leads elsewhere after
    ``os.chdir``.
    """
    shown = os.fsdecode(file.filename)
    if known is None:
        return os.path.realpath(shown) if os.path.isabs(shown) and os.path.exists(shown) else None
    candidates = [os.path.realpath(shown)]
    with contextlib.suppress(OSError):  # Linux tells it
        candidates.append(os.readlink(f"/proc/self/fd/{file.id.get_vfd_handle()}"))
    for path in candidates:
        try:
            if known.without_contents().matches(identity_at(path)):
                return path
        except OSError:
            continue
    return None
