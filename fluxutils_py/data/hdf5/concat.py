"""One HDF5 file that holds what many hold, end to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5.concat_sources import ConcatSource, axes_shown, inspect_sources
from fluxutils_py.data.hdf5.feature_names import write_names
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.opening import check_path, describe, fnt_axes, open_file
from fluxutils_py.data.hdf5.reading import h5mmap
from fluxutils_py.data.hdf5.source_files import escape
from fluxutils_py.data.hdf5.writing import allocate, copy_into, make_dataset, new_file
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar

PathLike = str | os.PathLike[str]
NOT_COPIED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST"}  # references, which mean nothing in another file


def h5concat(
    dst: PathLike,
    srcs: Sequence[Any],
    dims: int | Sequence[int],
    virtual: bool = True,
    *,
    axes: str | None = None,
    names: Sequence[str] | None = None,
    verbose: Any = "auto",
) -> None:
    """Join the datasets of many HDF5 files along one axis, or two.

    Every dataset of numbers that the files hold at their top level is joined with those of its name in the others.
    What lacks the axis, and what holds no numbers, must be the same in all files, and is copied. A group is copied
    whole from the first file that has it. Attributes come from the first file.

    Parameters
    ----------
    dst : path-like
        The new file, written aside and then put in place of an old one of that name.
    srcs : list of path-like, or list of lists
        The files in order. For two axes a list of rows: the rows follow each other along the first axis of ``dims``,
        the files within a row along the second. A row may have fewer files than another; what no file covers is 0.
    dims : int, or pair of int
        Axes of the array as :func:`h5mmap` gives it, so that for ``(F, N, T)`` 1 or -2 is series and 2 or -1 is time.
        Negative ones count from the end, which suits files that also hold arrays of shape (N, T).
    virtual : bool
        Write only where the data are, and leave them in their files: quick and small, but lazy to read, 5 times
        slower than a map and worse for small windows. Paths are relative, so that a folder can be moved as a whole.
        False copies the data into a dataset that can be mapped: do that for training.
    axes : str, optional
        The order of three axes in the files, where they do not say it themselves.
    names : list of str, optional
        Join these datasets only, and copy nothing else. They may lie in groups.
    verbose : "auto" or bool
        Whether to show a progress bar; by default on a terminal or in a notebook, if it takes long.

    Raises
    ------
    FileNotFoundError
        If one of the files does not exist.
    H5DataError
        If a dataset is missing from one of the files, shapes do not fit, one of the files is ``dst``. An old file of
        that name is still there then, and no new one.

    Notes
    -----
    Types are promoted as by ``numpy.result_type``. Names of features (``h5save``) are kept: files that name one feature
    differently are an error, one without names goes with any. Source: ``h5concat`` of HDF5Utils.jl, where shapes that
    do not fit leave zeros, and a dataset that one file lacks shifts what follows.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py.data import h5save
    >>> folder = tempfile.mkdtemp()
    >>> for i in range(3):
    ...     h5save(f"{folder}/{i}.h5", {"x": np.full((2, 4, 5), i)})
    >>> h5concat(f"{folder}/all.h5", [f"{folder}/{i}.h5" for i in range(3)], dims=-2, virtual=False)
    >>> x = h5mmap(f"{folder}/all.h5", "x")
    >>> x.shape, x[0, :, 0].tolist()
    ((2, 12, 5), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    """
    rows, pair = _grid(dst, srcs, dims)
    names = None if names is None else _checked_names(dst, names)
    paths = [path for row in rows for path in row]
    parts, same, groups = inspect_sources(paths, names, axes, pair, verbose, os.fsdecode(dst))
    shapes = {name: _place(name, found, rows, pair) for name, found in parts.items()}
    kinds = {name: _common_type(name, found, virtual) for name, found in parts.items()}
    features = {name: _feature_names(name, found, shapes[name]) for name, found in parts.items()}
    total = 0 if virtual else sum(p.dtype.itemsize * int(np.prod(p.shape)) for found in parts.values() for p in found)
    with (
        new_file(dst) as file,
        progress_bar(verbose, f"h5concat {os.path.basename(os.fsdecode(dst))}", total, "B") as done,
    ):
        folder = os.path.dirname(os.path.realpath(os.fsdecode(dst)))
        for name, found in parts.items():
            if virtual:
                dataset = _refer(file, name, found, shapes[name], kinds[name], folder)
            else:
                dataset = _copy(file, name, found, shapes[name], kinds[name], done)
            with open_file(found[0].path) as first:
                _copy_attributes(first[name], dataset)
            if found[0].axes is not None:
                dataset.attrs["axes"] = found[0].axes
            dataset.attrs.pop("feature_names", None)
            if whole := features[name]:
                write_names(dataset, whole, describe(dst, name))
        with open_file(paths[0]) as first:
            _copy_attributes(first, file)
            for name in same:
                first.copy(name, file, name)
        for name, path in groups.items():
            with open_file(path) as source:
                source.copy(name, file)


def _grid(dst: PathLike, srcs: Any, dims: Any) -> tuple[list[list[str]], tuple[int | None, int]]:
    """Rows of files, and the axes along which rows and files follow each other."""
    shown = check_path(dst, "dst")
    if isinstance(srcs, str | bytes | os.PathLike) or not isinstance(srcs, Sequence):
        srcs = [srcs] if isinstance(srcs, str | bytes | os.PathLike) or not np.iterable(srcs) else list(srcs)
    given = (dims,) if not isinstance(dims, Sequence) else tuple(dims)
    if len(given) not in (1, 2) or not all(isinstance(d, int | np.integer) for d in given):
        raise H5DataError(f"{shown}: dims must be an axis or a pair of axes, got {dims!r}")
    nested = [isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in srcs]
    if not srcs or any(nested) != all(nested) or (nested[0] and not all(srcs)):
        raise H5DataError(f"{shown}: srcs must be a list of files or a list of lists of them, none empty, got {srcs!r}")
    if nested[0] != (len(given) == 2):
        wanted = "a list of lists of files, one list per row" if len(given) == 2 else "a plain list of files"
        raise H5DataError(f"{shown}: dims={dims!r} needs {wanted}; for two axes give both, as dims=(-2, -1)")
    rows = [[check_path(path, f"{shown}: each of srcs") for path in row] for row in (srcs if nested[0] else [srcs])]
    target = os.path.realpath(shown)
    for path in (p for row in rows for p in row):
        if os.path.realpath(path) == target or (os.path.exists(target) and _is_file(path, target)):
            raise H5DataError(f"{shown}: this file is among the sources; give the result another name")
    return rows, (None if len(given) == 1 else int(given[0]), int(given[-1]))


def _checked_names(dst: PathLike, names: Any) -> list[str]:
    """The datasets to join, each named once."""
    if isinstance(names, str | bytes) or not np.iterable(names) or not all(isinstance(n, str) for n in names):
        raise H5DataError(
            f"{os.fsdecode(dst)}: names must be a list of names of datasets, as ['x', 'y'], got {names!r}"
        )
    whole = ["/".join(part for part in name.split("/") if part) for name in names]
    if not whole or len(set(whole)) < len(whole):
        raise H5DataError(f"{os.fsdecode(dst)}: names must name one dataset or more, and each once, got {names!r}")
    return whole


def _is_file(path: str, target: str) -> bool:
    return os.path.exists(path) and os.path.samefile(path, target)


# -- where it goes ------------------------------------------------------------------------------------------


def _place(
    name: str, parts: list[ConcatSource], rows: list[list[str]], pair: tuple[int | None, int]
) -> tuple[int, ...]:
    """Set where each part begins; the shape of the whole."""
    first = parts[0]
    ndim = len(first.shape)
    along = [None if d is None else d % ndim for d in pair]
    if along[0] == along[1]:
        raise H5DataError(f"{describe(first.path, name)}: dims={pair} name the same axis of {ndim}; give two axes")
    end, remaining = [0] * ndim, iter(parts)
    for row in rows:
        start = [0] * ndim
        if along[0] is not None:
            start[along[0]] = end[along[0]]
        for part in (next(remaining) for _ in row):
            odd = len(part.shape) != ndim or any(
                m != n and i not in along for i, (m, n) in enumerate(zip(part.shape, first.shape, strict=False))
            )
            if odd:
                raise H5DataError(
                    f"{describe(part.path, name)} has shape {part.shape}, in {first.path} it is {first.shape}; they "
                    f"may differ only along {axes_shown(pair)}; join along another axis, or leave it out with "
                    "names=[...]"
                )
            part.at = list(start)
            end = [max(e, s + n) for e, s, n in zip(end, start, part.shape, strict=True)]
            start[along[1] or 0] += part.shape[along[1] or 0]
    return tuple(end)


def _common_type(name: str, parts: list[ConcatSource], virtual: bool) -> Any:
    """The type of the whole: HDF5's own where all have the same, else NumPy's promotion."""
    first = parts[0]
    if virtual and all(p.kind.equal(first.kind) for p in parts):
        return first.kind
    dtype = first.dtype if all(p.dtype == first.dtype for p in parts) else np.result_type(*(p.dtype for p in parts))
    odd = [p for p in parts if p.dtype.kind == "b" or isinstance(p.kind, h5py.h5t.TypeBitfieldID)]
    if virtual and odd:
        raise H5DataError(
            f"{describe(odd[0].path, name)} is of another type than in other files, and HDF5 cannot convert it in a "
            "virtual dataset; pass virtual=False"
        )
    return h5py.h5t.py_create(dtype, logical=True) if virtual else dtype


def _feature_names(name: str, parts: list[ConcatSource], shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The names of all features; None where a file does not name those that it alone has."""
    found: list[str | None] = [None] * (shape[0] if len(shape) == 3 else 0)
    for part in parts:
        for i, feature in enumerate(part.names or (), part.at[0]):
            if found[i] not in (None, feature):
                raise H5DataError(
                    f"{describe(part.path, name)}: feature {i} is {feature!r}, in another file it is {found[i]!r}; "
                    "bring the features into one order, or set the attribute 'feature_names' right"
                )
            found[i] = feature
    whole = tuple(feature for feature in found if feature is not None)
    return whole if found and len(whole) == len(found) else None


def _refer(
    file: h5py.File, name: str, parts: list[ConcatSource], shape: tuple[int, ...], kind: Any, folder: str
) -> h5py.Dataset:
    """A virtual dataset."""
    first = parts[0]
    for part in parts:
        if part.axes != first.axes:
            raise H5DataError(
                f"{describe(part.path, name)} is in the order {part.axes}, in {first.path} it is {first.axes}; pass "
                "virtual=False"
            )
    disk = np.argsort(fnt_axes(first.axes, len(shape)))  # which axis of the face each axis of the file is
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    whole = tuple(shape[i] for i in disk)
    space = h5py.h5s.create_simple(whole)
    for part in parts:
        if 0 in part.shape:
            continue
        size = tuple(part.shape[i] for i in disk)
        space.select_hyperslab(tuple(part.at[i] for i in disk), size)
        source = os.path.realpath(part.path)
        relative = escape(os.path.relpath(source, folder))
        taken = h5py.h5s.create_simple(size)
        taken.select_hyperslab((0,) * len(size), size)  # by place: the file may grow later
        plist.set_virtual(space, os.fsencode(relative), escape(name).encode(), taken)
    return make_dataset(file, name, whole, kind, plist)


def _copy(
    file: h5py.File,
    name: str,
    parts: list[ConcatSource],
    shape: tuple[int, ...],
    dtype: np.dtype,
    done: Callable[[int], Any],
) -> h5py.Dataset:
    first = parts[0]
    order = fnt_axes(first.axes, len(shape))
    gaps = sum(int(np.prod(p.shape, dtype=object)) for p in parts) < int(np.prod(shape, dtype=object))
    disk = [shape[i] for i in np.argsort(order)]
    dataset = allocate(file, name, disk, dtype, first.axes, fill=0 if gaps else None)
    for part in parts:
        source = h5mmap(part.path, name, part.axes)
        if source.shape != part.shape or source.dtype != part.dtype:
            raise H5DataError(f"{describe(part.path, name)} was replaced while it was to be copied; join again")
        copy_into(dataset, source, order, done, part.at)
        if isinstance(source, H5Lazy):
            source.close()
    return dataset


def _copy_attributes(source: Any, target: Any) -> None:
    for key, value in source.attrs.items():
        if key not in NOT_COPIED:
            target.attrs[key] = value
