"""Arrays in HDF5 files: map and save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.featurenames import Names, check_names, get_feature_names, read_names, write_names
from fluxutils_py.data.hdf5file import (
    check_axes,
    check_name,
    check_path,
    describe,
    find_dataset,
    fnt_axes,
    numpy_dtype,
    open_file,
    read_axes,
    unmappable_reason,
    wrap_h5_errors,
)
from fluxutils_py.data.hdf5identity import FileReplaced, identity_of
from fluxutils_py.data.hdf5lazy import H5Lazy
from fluxutils_py.data.hdf5map import H5Map, Layout
from fluxutils_py.data.hdf5write import ALIGN, allocate, aside, copy_into
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar

ATTEMPTS = 100  # to open a file that is being replaced


def h5mmap(
    path: str | os.PathLike[str],
    name: str,
    axes: str | None = None,
    mode: str = "r",
    fallback: str = "lazy",
    *,
    swmr: bool = False,
) -> Any:
    """The array of shape (F, N, T) in an HDF5 file, without reading it.

    A contiguous dataset is mapped into memory where it lies: an ndarray whose pages are read when they are touched,
    for files of any size, written by :func:`h5save`, by h5py or by Julia's HDF5.jl. The file is closed again at once.
    What cannot be mapped (chunked, compressed, virtual, external, compact, never written, number formats that NumPy
    lacks) comes back as a lazy array that reads what is asked for; training from one is several times slower.

    Parameters
    ----------
    path : path-like
    name : str
        Of the dataset, ``"group/x"`` in a group.
    axes : str, optional
        The order of the axes in the file as h5py shows it: ``"TNF"`` is what Julia writes for an array (F, N, T).
        By default what the dataset's attribute ``axes`` says, which ``h5save`` writes; needed for three axes without
        that attribute. Arrays of fewer or more axes come as h5py shows them, unless ``axes`` names the axes they have.
    mode : "r" or "r+"
        ``"r+"`` writes to the file what is written to the map, for instance by ``est.predict(x, out=...)``.
    fallback : "lazy", "error" or "read"
        What to do where mapping is impossible: give an :class:`H5Lazy`, say why not, or read the array into memory.
    swmr : bool
        Read a file, lazily, that another process is writing to in HDF5's single-writer, multiple-reader mode.

    Returns
    -------
    H5Map, H5Lazy or ndarray
        An empty ndarray for a dataset without elements. A map and a lazy array of shape (F, N, T) have an attribute
        ``feature_names``: a tuple of F strings if the file names the features, else None. Slices keep it right.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    H5DataError
        If it is no HDF5 file, is damaged or locked; if it holds no such dataset, or one that is not an array of real
        numbers; if a file that the dataset takes data from is missing; if the order of its axes is not known; if it
        cannot be mapped and ``fallback`` is ``"error"`` or ``mode`` is ``"r+"``.

    Notes
    -----
    A map shows what others write to the file later. It keeps no lock, a lazy array does. Overwrite a mapped file with
    ``h5save``, which puts a new one in its place, and never with ``h5py.File(path, "w")``: shortening a file below a
    map kills the process that reads it (SIGBUS).

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "data.h5")
    >>> h5save(path, {"x": np.arange(24.0).reshape(2, 3, 4)})
    >>> x = h5mmap(path, "x")
    >>> type(x).__name__, x.shape, float(x[1, 2, 3])
    ('H5Map', (2, 3, 4), 23.0)
    """
    check_path(path)
    if mode not in ("r", "r+"):
        raise H5DataError(
            f"{describe(path, name)}: mode must be 'r' or 'r+', got {mode!r}; h5create makes new datasets"
        )
    if fallback not in ("lazy", "error", "read"):
        raise H5DataError(f"{describe(path, name)}: fallback must be 'lazy', 'error' or 'read', got {fallback!r}")
    where = describe(path, name)
    for _ in range(ATTEMPTS):
        try:
            found = _map_or_reason(path, name, axes, mode, swmr)
            break
        except FileReplaced:  # between reading the layout and mapping
            continue
    else:
        raise H5DataError(f"{where} cannot be mapped: the file is being replaced all the time; read it when it rests")
    if not isinstance(found, str):
        return found
    reason = found
    if mode == "r+":
        raise H5DataError(f"{where} cannot be written to in place: it {reason}; make one that can be with h5create")
    if fallback == "error":
        raise H5DataError(
            f"{where} cannot be mapped: it {reason}; write it again with h5save, or pass fallback='lazy' or 'read'"
        )
    lazy = H5Lazy(path, name, axes, swmr=swmr)
    if fallback == "lazy":
        return lazy
    with lazy:
        return lazy[...]


def _map_or_reason(path: str | os.PathLike[str], name: str, axes: str | None, mode: str, swmr: bool) -> Any:
    """The map of a dataset, or a sentence that says why there can be none. One open file: one version of the data."""
    where = describe(path, name)
    with contextlib.closing(open_file(path, swmr=swmr)) as file, wrap_h5_errors(where):
        if file.mode != "r":  # open for writing in this process: the map would miss what is not written yet
            file.flush()
        dataset = find_dataset(file, path, name)
        order = fnt_axes(read_axes(dataset, axes, where), dataset.ndim)
        dtype, shape = numpy_dtype(dataset), tuple(int(n) for n in dataset.shape)
        if 0 in shape:
            return np.empty(shape, dtype).transpose(order)
        reason = unmappable_reason(dataset) or ("is being written to in SWMR mode" if swmr else None)
        if reason is not None:
            return reason
        strides = [dtype.itemsize * int(np.prod(shape[i + 1 :], dtype=object)) for i in range(len(shape))]
        layout, real_path = Layout.of(dataset), os.path.realpath(dataset.file.filename)
        try:
            return H5Map(
                real_path,
                dtype,
                tuple(shape[i] for i in order),
                tuple(strides[i] for i in order),
                layout.offset,
                mode,
                identity_of(dataset.file).without_contents(),
                layout,
                read_names(dataset, shape[order[0]]),
            )
        except FileNotFoundError as error:
            raise FileReplaced(f"{real_path}: the file was moved while it was opened") from error
        except PermissionError as error:
            raise H5DataError(f"{where} cannot be opened for writing ({error.strerror}); use mode='r'") from error
        except OSError as error:
            return f"lies where files cannot be mapped ({error.strerror})"


def h5save(
    path: str | os.PathLike[str],
    mapping: Mapping[str, Any],
    axes: str = "TNF",
    *,
    feature_names: Any = None,
    verbose: Any = "auto",
) -> None:
    """Write arrays to an HDF5 file from which they can be mapped.

    The file is written aside and then put in place of an old one of that name: nobody sees half of it, and whoever
    has mapped or opened the old one keeps that, so that the arrays may themselves come from there. A map of the old
    file cannot be sent to other processes any more.

    Parameters
    ----------
    path : path-like
    mapping : mapping of str to array, or to another such mapping
        Arrays of shape (F, N, T), of any kind, which may be larger than memory: they are copied block by block. A
        mapping within the mapping becomes a group. Arrays of fewer or more axes, numbers and strings are stored as
        they are. Masked values are stored as NaN.
    axes : str
        Order of three axes in the file, slowest first, and so in memory. ``"TNF"`` is the fast one for training, and
        what Julia shows as (F, N, T). It is noted in the dataset's attribute ``axes``.
    feature_names : mapping of str to list of str, optional
        Names of the features of arrays by the names of these, as ``{"x": ["temperature", "wind"]}``; for one array
        just its list. They are noted in the dataset's attribute ``feature_names``, a vector of F strings, and what
        ``h5mmap`` gives has them as its attribute ``feature_names``. An array that has such an attribute keeps it.
    verbose : "auto" or bool
        Whether to show a progress bar; by default on a terminal or in a notebook, if it takes long.

    Raises
    ------
    H5DataError
        If something cannot be stored: objects, masked integers, two values for one name. An old file of that name is
        still there then, and no new one.

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "data.h5")
    >>> h5save(path, {"x": np.zeros((4, 3, 5)), "train": {"n_series": 2}})
    >>> with h5py.File(path) as f:
    ...     f["x"].shape, f["x"].attrs["axes"], f["train/n_series"][()].item()
    ((5, 3, 4), 'TNF', 2)
    """
    found = _by_name(path, mapping)
    check_axes(axes, 3, check_path(path))
    names = _names_by_name(path, found, feature_names)
    total = sum(int(np.prod(v.shape, dtype=object)) * v.dtype.itemsize for v in found.values() if v is not None)
    with (
        aside(path) as new,
        h5py.File(new, "w", **ALIGN) as file,
        progress_bar(verbose, f"h5save {os.path.basename(os.fsdecode(path))}", total, "B") as done,
    ):
        for name, value in found.items():
            try:
                if value is None:
                    file.require_group(name)
                elif value.dtype.kind not in "fiub" or len(value.shape) == 0:
                    text = value.dtype.kind == "U"
                    data, kind = (value.astype(object), h5py.string_dtype()) if text else (value, None)
                    file.create_dataset(name, data=data, dtype=kind)
                else:
                    order = check_axes(axes, len(value.shape), describe(path, name))
                    disk = [int(value.shape[i]) for i in np.argsort(order)]
                    dataset = allocate(file, name, disk, value.dtype, axes if len(disk) == 3 else None)
                    copy_into(dataset, value, order, done)
                    if name in names:
                        write_names(dataset, names[name], describe(path, name))
            except (TypeError, ValueError, KeyError) as error:
                if isinstance(error, H5DataError):
                    raise
                raise H5DataError(
                    f"{describe(path, name)}: cannot store {type(value).__name__} of type {value.dtype} ({error}); "
                    "convert it to an array of numbers, or give it another name"
                ) from error


def _by_name(path: str | os.PathLike[str], mapping: Any) -> dict[str, Any]:
    """Arrays by the full names that HDF5 gives them, None for a group."""
    found: dict[str, Any] = {}
    for full_name, value in _leaves(check_path(path), mapping, ""):
        name = "/".join(part for part in full_name.split("/") if part not in ("", "."))
        if name in found and not (value is None and found[name] is None):
            raise H5DataError(f"{describe(path, name)} is given twice; give one of the two another name")
        found[name] = value
    return found


def _names_by_name(path: str | os.PathLike[str], arrays: dict[str, Any], given: Any) -> dict[str, Names]:
    """Feature names by the names of arrays: those that are given, and those that arrays carry."""
    found = {name: get_feature_names(value) for name, value in arrays.items() if value is not None}
    if given is not None and not isinstance(given, Mapping):
        three = [name for name, value in arrays.items() if value is not None and len(value.shape) == 3]
        if len(three) != 1:
            raise H5DataError(
                f"{os.fsdecode(path)}: feature_names must say of which array they are, as {{'x': [...]}}, where "
                f"{len(three)} arrays have three axes"
            )
        given = {three[0]: given}
    for name, names in (given or {}).items():
        value = arrays.get(name.strip("/") if isinstance(name, str) else name)
        if value is None:
            raise H5DataError(
                f"{os.fsdecode(path)}: feature_names are given for {name!r}, which is no array of those to be saved; "
                f"these are {', '.join(n for n, v in arrays.items() if v is not None)}"
            )
        found[name.strip("/")] = check_names(names, value.shape, describe(path, name))
    return {name: names for name, names in found.items() if names is not None}


def _leaves(path: str | os.PathLike[str], mapping: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and arrays, None for an empty group."""
    if not isinstance(mapping, Mapping):
        raise H5DataError(
            f"{os.fsdecode(path)}: expected a mapping of names to arrays, as {{'x': x, 'y': y}}, got "
            f"{type(mapping).__name__}"
        )
    for name, value in mapping.items():
        check_name(path, name)
        if isinstance(value, Mapping):
            yield prefix + name, None
            yield from _leaves(path, value, f"{prefix}{name}/")
            continue
        value = _unmasked(value, describe(path, prefix + name))
        if isinstance(value, h5py.Dataset) and not value:
            raise H5DataError(
                f"{describe(path, prefix + name)}: the array for it is in an HDF5 file that was closed; keep that file "
                "open, or take h5mmap"
            )
        if type(value).__module__.split(".")[0] == "torch":
            try:
                value = value.detach().cpu().numpy()
            except TypeError as error:
                raise H5DataError(
                    f"{describe(path, prefix + name)}: HDF5 has no numbers like those of this tensor ({error}); "
                    "convert it, as with x.float()"
                ) from error
        if not all(hasattr(value, part) for part in ("shape", "dtype", "__getitem__")):
            try:
                value = np.asarray(value)
            except ValueError as error:
                raise H5DataError(
                    f"{describe(path, prefix + name)}: this is no array ({error}); make it one with equal lengths"
                ) from error
        yield prefix + name, value


def _unmasked(value: Any, where: str) -> Any:
    """An array whose masked values are NaN: HDF5 files have no masks."""
    if isinstance(value, list | tuple) and any(isinstance(v, np.ma.MaskedArray) for v in value):
        value = np.ma.stack(value)
    if not isinstance(value, np.ma.MaskedArray):
        return value
    if value.dtype.kind == "f":
        return value.filled(np.nan)
    if np.ma.is_masked(value):
        raise H5DataError(
            f"{where}: {np.ma.count_masked(value)} values are masked, and a file has no mask for {value.dtype}; "
            "convert the array to float, in which they are stored as NaN, or fill them, as with x.filled(0)"
        )
    return value.data
