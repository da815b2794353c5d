"""Check a dataset that h5py opened, and read what its attributes say: the order of its axes, names
of features, and packing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.arrays import Names, stored_names
from fluxutils_py.data.hdf5.opening import describe, find_dataset, open_file, wrap_h5_errors
from fluxutils_py.errors import H5DataError, warn

LETTERS = "FNT"
# of NetCDF (CF conventions, sections 2.5.1 and 8.1), with values that change nothing
PACKING = {"_FillValue": None, "missing_value": None, "scale_factor": 1.0, "add_offset": 0.0}


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


# -- order of axes ---------------------------------------------------------------------------------


def read_axes(dataset: h5py.Dataset, axes: str | None, where: str) -> str | None:
    """Return which axis of the file is which, as ``"TNF"``; None where axes have no letters and
    stay as they are.

    Raises
    ------
    H5DataError
        If the order of three axes is not known, or not possible.
    """
    with wrap_h5_errors(where):
        noted = dataset.attrs.get("axes")
    if isinstance(noted, bytes):
        noted = noted.decode(errors="replace")
    # other software may use the name for something else
    known = noted if isinstance(noted, str) and _is_axes_order(noted, dataset.ndim) else None
    if axes is None:
        if known is None and dataset.ndim == 3:
            raise H5DataError(
                f"{where} has the attribute axes={noted!r}, so the order of its axes "
                f"{dataset.shape} cannot be known; pass axes='TNF' for a file from Julia or other "
                "column-major software, axes='FNT' if h5py shows (features, series, time steps)"
            )
        return known
    if not isinstance(axes, str) or not _is_axes_order(axes, dataset.ndim):
        raise H5DataError(
            f"{where} has {dataset.ndim} axes, {dataset.shape}; axes must name each by one of the "
            "letters F (features), N (series) and T (time steps), as in "
            f"{'TNF'[: dataset.ndim]!r}, got {axes!r}"
        )
    if known not in (None, axes):
        raise H5DataError(
            f"{where} is in the order {known!r} by its attribute 'axes', not {axes!r}; leave "
            "axes out"
        )
    return axes


def _is_axes_order(axes: str, ndim: int) -> bool:
    return len(axes) == ndim == len(set(axes)) and set(axes) <= set(LETTERS)


def fnt_axes(axes: str | None, ndim: int) -> list[int]:
    """Return the axis of the file for each axis of the (F, N, T) array, for ``transpose``."""
    if axes is None:
        return list(range(ndim))
    return sorted(range(ndim), key=lambda i: LETTERS.index(axes[i]))


def check_axes(axes: str, ndim: int, where: str) -> list[int]:
    """Return the axis of the file for each axis of an array; only three can change places."""
    if not isinstance(axes, str) or not _is_axes_order(axes, 3):
        raise H5DataError(
            f"{where}: axes must name F (features), N (series) and T (time steps), as 'TNF', got "
            f"{axes!r}"
        )
    return fnt_axes(axes if ndim == 3 else None, ndim)


# -- names of features -----------------------------------------------------------------------------


def check_names(names: Any, shape: Sequence[int], where: str) -> Names:
    """Check that there is one name for each feature of an array of a shape (F, N, T).

    Raises
    ------
    H5DataError
    """
    checked = names.tolist() if isinstance(names, np.ndarray) else names
    is_list = isinstance(checked, Iterable) and not isinstance(checked, str)
    if not is_list or not all(isinstance(n, str) and "\0" not in n for n in checked):
        raise H5DataError(
            f"{where}: feature_names must be a list of strings, without zero bytes, got {names!r}"
        )
    checked = tuple(checked)
    if len(shape) != 3 or len(checked) != shape[0]:
        raise H5DataError(
            f"{where}: {len(checked)} feature_names for an array of shape {tuple(shape)}; expected "
            "three axes (F, N, T) and F names"
        )
    return checked


def read_names(dataset: h5py.Dataset, n_features: int) -> Names | None:
    """Return the feature names that a dataset has as an attribute.

    Warns, and returns None, if the attribute is something else.
    """
    where = describe(dataset.file.filename, dataset.name)
    with wrap_h5_errors(where):
        names = stored_names(dataset, n_features)
    if names is None and "feature_names" in dataset.attrs:
        warn(
            f"{where} has an attribute 'feature_names' that does not hold {n_features} texts: the "
            "features have no names; write the attribute again, as with h5save"
        )
    return names


def write_names(dataset: h5py.Dataset, names: Names, where: str) -> None:
    """Store names as an attribute ``feature_names``: a vector of F strings, in UTF-8."""
    # an attribute holds 64 KiB at most
    sentence = (
        f"has {len(names)} feature_names, which do not fit into an HDF5 attribute ({{}}); save "
        "without them"
    )
    with wrap_h5_errors(where, sentence):
        dataset.attrs.create("feature_names", list(names), dtype=h5py.string_dtype())


# -- packing ---------------------------------------------------------------------------------------


def warn_of_packing(dataset: h5py.Dataset, where: str) -> None:
    """Warn where attributes of NetCDF, which nothing here applies, say which values are missing or
    how they are packed.
    """
    given = {name: np.ravel(dataset.attrs[name])[0] for name in PACKING if name in dataset.attrs}
    # NaN stands for a missing value everywhere in this package too
    ignored = {name: v for name, v in given.items() if v != PACKING[name] and v == v}
    if not ignored:
        return
    shown = ", ".join(f"{name}={value}" for name, value in ignored.items())
    variable = (dataset.name or "x").rpartition("/")[2]
    warn(
        f"{where} has the attributes {shown} of NetCDF, which h5py and h5mmap ignore: missing "
        "values stay the numbers that stand for them, packed values stay packed; use "
        f'xarray.open_dataset({os.fsdecode(dataset.file.filename)!r})["{variable}"], which '
        "applies them"
    )
