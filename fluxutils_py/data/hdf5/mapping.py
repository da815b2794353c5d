"""Read arrays from HDF5 files: map them into memory if possible, else read them lazily."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.opening import (
    FileReplaced,
    PathLike,
    check_path,
    describe,
    find_dataset,
    fnt_axes,
    get_object,
    holds_numbers,
    identity_of,
    numpy_dtype,
    open_file,
    read_axes,
    read_names,
    unmappable_reason,
    warn_of_packing,
    wrap_h5_errors,
)
from fluxutils_py.errors import H5DataError

ATTEMPTS = 100  # to open a file that is being replaced


def h5mmap(
    path: PathLike,
    name: str,
    axes: str | None = None,
    mode: str = "r",
    fallback: str = "lazy",
) -> Any:
    """Return the array of shape (F, N, T) in an HDF5 file, without reading it.

    A contiguous dataset is mapped into memory: you get an ndarray whose pages are read when
    something touches them, for files of any size, written by :func:`h5save`, by h5py or by Julia's
    HDF5.jl. The file is closed again at once. Datasets that cannot be mapped (chunked, compressed,
    virtual, compact, never written, in a number format that NumPy lacks) come back as lazy arrays;
    training from those is several times slower.

    Parameters
    ----------
    path : path-like
    name : str
        Name of the dataset, ``"group/x"`` in a group.
    axes : str, optional
        The order of the axes in the file as h5py shows it: ``"TNF"`` is what Julia writes for an
        array (F, N, T). The default is the dataset's attribute ``axes``, which ``h5save`` writes; a
        dataset of three axes without it needs this argument. Arrays of fewer or more axes come as
        h5py shows them, unless ``axes`` names their axes.
    mode : "r" or "r+"
        With ``"r+"``, writing to the map writes to the file, for instance in ``est.predict(x,
        out=...)``.
    fallback : "lazy" or "error"
        If mapping is impossible, return an :class:`H5Lazy`, or raise an error that says why.

    Returns
    -------
    H5Map, H5Lazy or ndarray
        A dataset without elements gives an empty ndarray. Maps and lazy arrays of shape (F, N, T)
        have an attribute ``feature_names``: a tuple of F strings if the file names the features,
        else None. Slices have the names of their features.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    H5DataError
        If the file is not HDF5, or damaged, or locked; if it has no such dataset, or one that is
        not an array of real numbers; if a source file of the dataset is missing; if the order of
        axes is unknown; if the dataset cannot be mapped and ``fallback`` is ``"error"`` or ``mode``
        is ``"r+"``.

    Notes
    -----
    A map shows what others write to the file later. A map holds no lock on the file; a lazy array
    does. Overwrite a mapped file with ``h5save``, which puts a new file in its place, never with
    ``h5py.File(path, "w")``: shortening a mapped file kills the process that reads it (SIGBUS).

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "data.h5")
    >>> from fluxutils_py.data import h5save
    >>> h5save(path, {"x": np.arange(24.0).reshape(2, 3, 4)})
    >>> x = h5mmap(path, "x")
    >>> type(x).__name__, x.shape, float(x[1, 2, 3])
    ('H5Map', (2, 3, 4), 23.0)
    """
    where = describe(check_path(path), name)
    if mode not in ("r", "r+"):
        raise H5DataError(
            f"{where}: mode must be 'r' or 'r+', got {mode!r}; h5create makes new datasets"
        )
    if fallback not in ("lazy", "error"):
        raise H5DataError(f"{where}: fallback must be 'lazy' or 'error', got {fallback!r}")
    for left in reversed(range(ATTEMPTS)):
        try:
            result = _try_map(path, name, axes, mode)
            break
        except FileReplaced:  # between reading the layout and mapping: the layout is read again
            if not left:
                raise
    if not isinstance(result, str):
        return result
    if mode == "r+":
        raise H5DataError(
            f"{where} cannot be written to in place: it {result}; make one that can be with "
            "h5create"
        )
    if fallback == "error":
        raise H5DataError(
            f"{where} cannot be mapped: it {result}; write it again with h5save, or pass "
            "fallback='lazy'"
        )
    return H5Lazy(path, name, axes)


def _try_map(path: PathLike, name: str, axes: str | None, mode: str) -> np.ndarray | str:
    """Return the map of a dataset, or the reason why it cannot be mapped.

    Everything comes from one version of the file, or there is an error.
    """
    where = describe(path, name)
    with contextlib.closing(open_file(path)) as file, wrap_h5_errors(where):
        # open for writing in this process: the map would miss what is still in HDF5's buffers
        if file.mode != "r":
            file.flush()
        dataset = find_dataset(file, path, name)
        order = fnt_axes(read_axes(dataset, axes, where), dataset.ndim)
        dtype = numpy_dtype(dataset)
        shape = dataset.shape
        if 0 in shape:  # there is nothing to map, and mmap refuses a length of 0
            return np.empty(shape, dtype).transpose(order)
        reason = unmappable_reason(dataset)
        if reason is not None:
            return reason
        warn_of_packing(dataset, where)
        # by Python's integers, which do not overflow
        strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        # not that of the argument: an external link leads to another file
        real_path = os.path.realpath(dataset.file.filename)
        try:
            return H5Map(
                real_path,
                dtype,
                tuple(shape[i] for i in order),
                tuple(strides[i] for i in order),
                dataset.id.get_offset(),
                mode,
                identity_of(dataset.file).without_contents(),
                read_names(dataset, shape[order[0]]),
            )
        except PermissionError as error:
            raise H5DataError(
                f"{where} cannot be opened for writing ({error.strerror}); use mode='r'"
            ) from error
        except OSError as error:
            return f"is on a file system that maps no files ({error.strerror})"


def h5load(
    path: PathLike,
    names: str | Sequence[str] | None = None,
    axes: str | None = None,
    *,
    mmap: bool = True,
) -> Any:
    """Return the contents of an HDF5 file: the inverse of :func:`h5save`.

    Parameters
    ----------
    path : path-like
    names : str or sequence of str, optional
        Names of datasets or groups. The default is everything in the file.
    axes : str, optional
        The order of three axes in files that do not note it; see :func:`h5mmap`.
    mmap : bool
        Map arrays of numbers, or read them lazily, as :func:`h5mmap` does. False reads them into
        memory.

    Returns
    -------
    dict
        Arrays by name, with a dict for each group. Single numbers and strings are read. If
        ``names`` is one string, the object of that name itself.

    Raises
    ------
    FileNotFoundError, H5DataError
        As in :func:`h5mmap`; also if the file has no object of that name.

    Notes
    -----
    Source: ``h5load`` of HDF5Utils.jl.

    Examples
    --------
    >>> import os, tempfile
    >>> from fluxutils_py.data import h5save
    >>> path = os.path.join(tempfile.mkdtemp(), "data.h5")
    >>> h5save(path, {"x": np.arange(24.0).reshape(2, 3, 4), "info": {"unit": "kWh"}})
    >>> data = h5load(path)
    >>> type(data["x"]).__name__, data["info"]
    ('H5Map', {'unit': 'kWh'})
    """
    with contextlib.closing(open_file(path)) as file, wrap_h5_errors(os.fsdecode(path)):
        if isinstance(names, str):
            return _load_object(file, path, names, axes, mmap)
        wanted = list(file) if names is None else names
        return {name: _load_object(file, path, name, axes, mmap) for name in wanted}


def _load_object(file: h5py.File, path: PathLike, name: str, axes: str | None, mmap: bool) -> Any:
    value = get_object(file, path, name)
    if isinstance(value, h5py.Group):
        return {key: _load_object(file, path, f"{name}/{key}", axes, mmap) for key in value}
    if holds_numbers(value) and value.shape:
        if value.ndim != 3:
            axes = None  # the argument is for arrays of three axes
        if mmap:
            return h5mmap(path, name, axes)
        return np.array(h5mmap(path, name, axes))
    if h5py.check_string_dtype(value.dtype) is not None:
        return value.asstr()[()]  # else h5py gives bytes
    return value[()]
