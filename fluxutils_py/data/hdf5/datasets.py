"""Check a dataset that h5py opened before it is used, and open it in another process."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluxutils_py.data.hdf5.damage import read_attribute
from fluxutils_py.data.hdf5.identity import (
    FileIdentity,
    FileReplaced,
    check_same_file,
    current_identity,
    identity_at,
    identity_of,
)
from fluxutils_py.data.hdf5.opening import (
    PACKING,
    Shape,
    describe,
    find_dataset,
    numpy_dtype,
    open_file,
    wrap_h5_errors,
)
from fluxutils_py.data.hdf5.source_files import check_sources
from fluxutils_py.data.refused_sources import refuse_source
from fluxutils_py.errors import DataError, H5DataError, warn

PLAIN = int | float | str | np.ndarray | np.generic | None
# values of these attributes that change nothing
NEUTRAL = {"scale_factor": 1, "add_offset": 0}


def check_dataset(array: Any, name: str) -> Any:
    """Check a source of values before it is used as it is, also inside tuples and lists, and return
    what was given.

    Parameters
    ----------
    array : Any
    name : str
        Name used in error messages.

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
        if isinstance(array, tuple | list):
            for i, item in enumerate(array):
                if not isinstance(item, PLAIN):  # of nested lists of numbers there may be many
                    check_dataset(item, f"{name}[{i}]")
        return array
    require_open(array, name)
    where = f"{name}, {describe(array.file.filename, array.name or 'without a name')},"
    with wrap_h5_errors(where):
        check_sources(array, where)
        warn_of_packing(array, where)
    return array


def require_open(dataset: h5py.Dataset, name: str) -> None:
    """Raise H5DataError if the file of a dataset was closed."""
    if not dataset:
        raise H5DataError(
            f"{name} is in an HDF5 file that was closed; keep that file open, or use "
            "h5mmap(path, name)"
        )


def warn_of_packing(dataset: h5py.Dataset, where: str) -> None:
    """Warn where attributes of NetCDF, which nothing here applies, say which values are missing or
    how they are packed.
    """
    attributes = {name: read_attribute(dataset, name) for name in PACKING}
    ignored = {name: value for name, value in attributes.items() if _matters(name, value)}
    if not ignored:
        return
    shown = ", ".join(f"{name}={np.asarray(value).ravel()[0]}" for name, value in ignored.items())
    variable = (dataset.name or "x").rpartition("/")[2]
    warn(
        f"{where} has the attributes {shown} of NetCDF, which h5py and h5mmap ignore: missing "
        "values stay the numbers that stand for them, packed values stay packed; use "
        f'xarray.open_dataset({os.fsdecode(dataset.file.filename)!r})["{variable}"], which '
        "applies them"
    )


def _matters(name: str, value: object) -> bool:
    """Whether an attribute changes the meaning of the stored numbers."""
    numbers = np.asarray(value)
    if value is None or numbers.dtype.kind not in "fiub" or not numbers.size:
        return False
    if name in NEUTRAL:
        return bool(np.any(numbers != NEUTRAL[name]))
    # NaN stands for a missing value everywhere in this package too
    return not bool(np.isnan(numbers).all())


# -- other processes -------------------------------------------------------------------------------


class DatasetLocation(NamedTuple):
    """The arguments of :func:`open_located`."""

    path: str
    name: str
    identity: FileIdentity
    shape: Shape
    dtype: str


def locate_dataset(dataset: h5py.Dataset) -> DatasetLocation:
    """Return what another process needs to open a dataset: the same one or none.

    Raises
    ------
    DataError
        If another process cannot open it.
    """
    require_open(dataset, "the array to send to another process")
    file = dataset.file
    name = dataset.name
    where = describe(file.filename, name or "without a name")
    if name is None:
        raise DataError(f"{where} cannot be opened in another process; give it a name in its file")
    if file.driver not in ("sec2", "stdio", "direct"):
        raise DataError(
            f"{where} cannot be opened in another process: it comes through the file driver "
            f"{file.driver!r}, not from a file on the disk; write it with h5save and use "
            "h5mmap(path, name), or use n_jobs=1"
        )
    # of this process, whose lock keeps others out
    if file.mode != "r":
        raise DataError(
            f"{where} is open for writing, so that no other process can open it; close the file "
            "and open it with mode='r', or use h5mmap(path, name) or n_jobs=1"
        )
    # other drivers have no descriptor
    known = identity_of(file) if file.driver == "sec2" else None
    path = _path_of(file, known)
    if path is None:
        raise DataError(
            f"{where} cannot be opened in another process: its file was moved or replaced, or the "
            "current directory has changed since it was opened by the relative name "
            f"{file.filename!r}; open it by os.path.abspath(name), or use h5mmap(path, name)"
        )
    identity = current_identity(path, identity_at(path) if known is None else known)
    return DatasetLocation(path, name, identity, dataset.shape, numpy_dtype(dataset).str)


def open_located(
    path: str,
    name: str,
    identity: FileIdentity,
    shape: Shape | None,
    dtype: str,
    swmr: bool = False,
) -> h5py.Dataset:
    """Open a dataset for reading, if it is still the one that was described.

    ``shape`` is None for one that another process makes grow.
    """
    where = describe(path, name)
    file = open_file(path, swmr=swmr)
    try:
        check_same_file(path, identity_of(file), identity)
        dataset = find_dataset(file, path, name)
        if numpy_dtype(dataset).str != dtype or shape not in (None, dataset.shape):
            raise FileReplaced(
                f"{where} was replaced since it was opened: it is of another type or shape"
            )
        check_sources(dataset, where)
        return dataset
    except BaseException:
        file.close()
        raise


def _path_of(file: h5py.File, known: FileIdentity | None) -> str | None:
    """Return the absolute path of an open file; None if it cannot be found again."""
    shown = os.fsdecode(file.filename)
    if known is None:
        # nothing to compare with, and a relative name leads elsewhere after os.chdir
        is_certain = os.path.isabs(shown) and os.path.exists(shown)
        return os.path.realpath(shown) if is_certain else None
    candidates = [os.path.realpath(shown)]
    with contextlib.suppress(OSError):  # only Linux knows the path of a descriptor
        candidates.append(os.readlink(f"/proc/self/fd/{file.id.get_vfd_handle()}"))
    for path in candidates:
        # another file may be at the path by now
        try:
            if known.without_contents().matches(identity_at(path)):
                return path
        except OSError:
            continue
    return None
