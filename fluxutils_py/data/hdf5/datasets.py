"""Check a dataset that h5py opened before it is used, and open it in another process."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import h5py

from fluxutils_py.data.hdf5.attributes import warn_of_packing
from fluxutils_py.data.hdf5.opening import (
    FileIdentity,
    FileReplaced,
    Shape,
    check_same_file,
    current_identity,
    describe,
    find_dataset,
    identity_of,
    numpy_dtype,
    open_file,
    wrap_h5_errors,
)
from fluxutils_py.errors import DataError, H5DataError


def check_dataset(dataset: h5py.Dataset, name: str) -> None:
    """Check a dataset before it is used as it is; ``name`` is that in messages.

    Raises
    ------
    H5DataError
        If its file was closed, or a file that it takes data from is missing: HDF5 would give fill
        values.

    Warns
    -----
    UserWarning
        If attributes of NetCDF say how to read it.
    """
    _require_open(dataset, name)
    where = f"{name}, {describe(dataset.file.filename, dataset.name or 'without a name')},"
    with wrap_h5_errors(where):
        check_sources(dataset, where)
        warn_of_packing(dataset, where)


def _require_open(dataset: h5py.Dataset, name: str) -> None:
    if not dataset:
        raise H5DataError(
            f"{name} is in an HDF5 file that was closed; keep that file open, or use "
            "h5mmap(path, name)"
        )


def check_sources(dataset: h5py.Dataset, where: str) -> None:
    """Check that there are the files and datasets that a virtual dataset takes data from.

    HDF5 itself gives fill values, and no error, where one is missing; so it does past the end of
    an external file, for which such datasets are refused.

    Raises
    ------
    H5DataError
    """
    if dataset.external:
        raise H5DataError(
            f"{where} is in external files, of which HDF5 reads zeros where they are short; save "
            "what h5py reads of it, h5save(path, {'x': file['x'][:]})"
        )
    if not dataset.is_virtual:
        return
    here = os.path.realpath(dataset.file.filename)
    missing = []
    # each dataset once, however many parts of it are used
    for source in dict.fromkeys((s.file_name, s.dset_name) for s in dataset.virtual_sources()):
        # a name with a pattern stands for as many as there are
        if any(re.search(r"%\d*b", name.replace("%%", "")) for name in source):
            continue
        file_name, name = (text.replace("%%", "%") for text in source)
        path = here if file_name == "." else _locate_file(file_name, os.path.dirname(here))
        if path is None:
            missing.append(file_name)
            continue
        with open_file(path) as file:
            check_sources(find_dataset(file, path, name), f"{where} takes data from {path}, which")
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise H5DataError(
            f"{where} is virtual and {len(missing)} of its source files are missing: {shown}; "
            "put them back, or recreate the dataset (HDF5 would give fill values in their place)"
        )


def _locate_file(name: str, folder: str) -> str | None:
    """Return the path at which HDF5 finds a source.

    It looks below its prefix, in the folder of the file, and in the current directory.
    """
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
    for base in (prefix or folder, folder, os.getcwd()):
        path = os.path.join(base, name)
        if os.path.exists(path):
            return os.path.realpath(path)
    return None


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
    _require_open(dataset, "the array to send to another process")
    file = dataset.file
    path = os.path.realpath(os.fsdecode(file.filename))
    # other drivers have no descriptor, and a file open for writing keeps others out by its lock
    if file.driver == "sec2" and file.mode == "r" and dataset.name and os.path.exists(path):
        known = identity_of(file)
        identity = current_identity(path, known)
        if identity_of(path).matches(known):
            dtype = numpy_dtype(dataset).str
            return DatasetLocation(path, dataset.name, identity, dataset.shape, dtype)
    raise DataError(
        f"{describe(file.filename, dataset.name)} cannot be opened in another process: it has no "
        "name, or its file was replaced, is not found from here, or is open with "
        f"mode={file.mode!r} and the driver {file.driver!r}; open it by its absolute path with "
        "mode='r', or use h5mmap(path, name), or n_jobs=1"
    )


def open_located(
    path: str,
    name: str,
    identity: FileIdentity,
    shape: Shape,
    dtype: str,
) -> h5py.Dataset:
    """Open a dataset for reading, if it is still the one that was described."""
    where = describe(path, name)
    file = open_file(path)
    try:
        check_same_file(path, identity_of(file), identity)
        dataset = find_dataset(file, path, name)
        if numpy_dtype(dataset).str != dtype or dataset.shape != shape:
            raise FileReplaced(
                f"{where} was replaced since it was opened: it is of another type or shape"
            )
        check_sources(dataset, where)
        return dataset
    except BaseException:
        file.close()
        raise
