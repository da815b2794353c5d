"""Check a dataset that h5py opened before it is used."""

from __future__ import annotations

import os
import re

import h5py

from fluxutils_py.data.hdf5.attributes import warn_of_packing
from fluxutils_py.data.hdf5.opening import describe, find_dataset, open_file, wrap_h5_errors
from fluxutils_py.errors import H5DataError


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
    require_open(dataset, name)
    where = f"{name}, {describe(dataset.file.filename, dataset.name or 'without a name')},"
    with wrap_h5_errors(where):
        check_sources(dataset, where)
        warn_of_packing(dataset, where)


def require_open(dataset: h5py.Dataset, name: str) -> None:
    """Raise H5DataError if the file of a dataset was closed."""
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
