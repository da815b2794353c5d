"""Join many HDF5 files into one."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluxutils_py.data.arrays import Names
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.mapping import h5mmap
from fluxutils_py.data.hdf5.opening import (
    PathLike,
    Shape,
    check_path,
    check_sources,
    describe,
    fnt_axes,
    get_object,
    holds_numbers,
    numpy_dtype,
    open_file,
    read_axes,
    read_names,
    warn_of_packing,
    wrap_h5_errors,
    write_names,
)
from fluxutils_py.data.hdf5.writing import allocate, copy_into, new_file
from fluxutils_py.errors import H5DataError

# References, which are invalid in another file.
NOT_COPIED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST"}

Dims = tuple[int, ...]  # the axis of rows of files, if there are some, and that of files in a row


class Part(NamedTuple):
    """A dataset of numbers in one of the files."""

    path: str
    axes: str | None
    shape: Shape  # as (F, N, T)
    dtype: np.dtype
    names: Names | None  # of features


def h5concat(
    dst: PathLike,
    srcs: Any,
    dims: int | Sequence[int],
    virtual: bool = True,
    *,
    axes: str | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Concatenate the datasets of many HDF5 files along one or two axes.

    Joins every numeric dataset at the top level with the datasets of the same name in the other
    files; where no file has data, the result has zeros. Copies groups, and
    datasets that lack the axis or are not numeric, from the first file that has them, and
    attributes from the first file.

    Parameters
    ----------
    dst : path-like
        The new file, written atomically; replaces an existing file.
    srcs : path-like, list of path-like, or list of lists
        The files in order. A pattern such as ``"parts/*.h5"`` gives the matching files in
        alphabetical order. For two axes, a list of rows: rows are joined along the first axis of
        ``dims``, the files within a row along the second. Rows may have different numbers of files.
    dims : int, or pair of int
        Axes of the array that :func:`h5mmap` returns: for ``(F, N, T)``, 1 or -2 is series and 2 or
        -1 is time. Negative axes count from the end, which suits files that also contain arrays of
        shape (N, T).
    virtual : bool
        True stores only references to the data: quick and small, but lazy to read, 5 times slower
        than a map and worse for small windows. Paths are relative, so the folder can be moved as a
        whole. False copies the data into a dataset that can be mapped; use it for training.
    axes : str, optional
        Order of three axes in the files, if the files do not store it.
    names : list of str, optional
        Join only these datasets, which may be in groups, and copy nothing else.

    Raises
    ------
    FileNotFoundError
        If a file does not exist.
    H5DataError
        If a file lacks a dataset, shapes do not fit, or a source is ``dst`` itself. An existing
        ``dst`` then stays unchanged.

    Notes
    -----
    Types are promoted as by ``numpy.result_type``. Different names of one feature (``h5save``) are
    an error. Source: ``h5concat`` of HDF5Utils.jl, where shapes that do not fit leave zeros, and a
    dataset that one file lacks shifts the data after it.

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
    dst = check_path(dst, "dst")
    join_axes = _check_dims(dims, dst)
    rows = _file_grid(dst, srcs, join_axes)
    paths = [path for row in rows for path in row]
    joined, copied = _inspect_sources(paths, names, axes, join_axes)
    with new_file(dst) as file:
        for name, parts in joined.items():
            shape, places = _place_parts(name, parts, rows, join_axes)
            feature_names = _feature_names(name, parts, places, shape)
            dtype = np.result_type(*(part.dtype for part in parts))
            order = np.argsort(fnt_axes(parts[0].axes, len(shape))).tolist()
            in_file = tuple(shape[i] for i in order)
            if virtual:
                layout = h5py.VirtualLayout(in_file, dtype)
                _refer_to_sources(layout, name, parts, places, order, dst)
                dataset = file.create_virtual_dataset(name, layout)
            else:
                dataset = allocate(file, name, in_file, dtype, parts[0].axes)
                for part, place in zip(parts, places, strict=True):
                    array = h5mmap(part.path, name, part.axes)
                    copy_into(dataset, array, fnt_axes(part.axes, len(shape)), place)
                    if isinstance(array, H5Lazy):
                        array.close()
            with open_file(paths[0]) as first:
                _copy_attributes(first[name], dataset)
            if parts[0].axes is not None:
                dataset.attrs["axes"] = parts[0].axes
            # those of the first file may be other features than those of the result
            dataset.attrs.pop("feature_names", None)
            if feature_names is not None:
                write_names(dataset, feature_names, describe(dst, name))
        with open_file(paths[0]) as first:
            _copy_attributes(first, file)
        for name, path in copied.items():
            with open_file(path) as source:
                source.copy(name, file, name)


# -- the arguments ---------------------------------------------------------------------------------


def _check_dims(dims: object, dst: str) -> Dims:
    pair = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    if len(pair) not in (1, 2) or not all(isinstance(d, int | np.integer) for d in pair):
        raise H5DataError(f"{dst}: dims must be an axis or a pair of axes, got {dims!r}")
    return tuple(int(d) for d in pair)


def _file_grid(dst: str, srcs: Any, dims: Dims) -> list[list[str]]:
    """Return rows of files, one if they are joined along one axis; none is the result."""
    if isinstance(srcs, str | bytes | os.PathLike) or not np.iterable(srcs):
        srcs = [srcs]
    rows = list(srcs) if len(dims) == 2 else [list(srcs)]
    if not rows or not all(isinstance(row, list | tuple) and row for row in rows):
        raise H5DataError(
            f"{dst}: srcs must be a list of files, or, with a pair dims=(-2, -1), a list of such "
            f"lists, one per row, and none empty; got {srcs!r} with dims={dims}"
        )
    return [[path for item in row for path in _matching_files(item, dst)] for row in rows]


def _matching_files(source: object, dst: str) -> list[str]:
    """Return the files that match a path or pattern."""
    path = check_path(source, f"{dst}: each of srcs")
    paths = [path]
    # a file may have such characters in its name
    if not os.path.exists(path) and any(character in path for character in "*?["):
        paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise FileNotFoundError(f"{path}: no file matches this pattern")
    # under whatever name
    if os.path.exists(dst) and any(os.path.exists(p) and os.path.samefile(p, dst) for p in paths):
        raise H5DataError(f"{dst}: this file is among the sources; give the result another name")
    return paths


# -- what the files hold ---------------------------------------------------------------------------


def _inspect_sources(
    paths: list[str], names: Sequence[str] | None, axes: str | None, dims: Dims
) -> tuple[dict[str, list[Part]], dict[str, str]]:
    """Return the datasets to join, with a part for each file, and what to copy whole, with its
    first file.
    """
    joined: dict[str, list[Part]] = {}
    copied: dict[str, str] = {}
    for path in paths:
        with open_file(path) as file, wrap_h5_errors(path):
            for name in dict.fromkeys(names or file):
                item = get_object(file, path, name)
                is_array = isinstance(item, h5py.Dataset) and holds_numbers(item)
                if not (is_array and all(-item.ndim <= d < item.ndim for d in dims)):
                    copied.setdefault(name, path)
                    continue
                where = describe(path, name)
                letters = read_axes(item, axes if item.ndim == 3 else None, where)
                check_sources(item, where)
                warn_of_packing(item, where)
                shape = tuple(item.shape[i] for i in fnt_axes(letters, item.ndim))
                known = read_names(item, shape[0]) if item.ndim == 3 else None
                part = Part(path, letters, shape, numpy_dtype(item), known)
                joined.setdefault(name, []).append(part)
    _check_joined(paths, joined, copied, dims)
    return joined, copied


def _check_joined(
    paths: list[str], joined: dict[str, list[Part]], copied: dict[str, str], dims: Dims
) -> None:
    """Raise H5DataError if there is nothing to join, or a file lacks a part of it."""
    if not joined:
        raise H5DataError(
            f"{paths[0]}: no dataset in it has an axis {_shown(dims)} to join along; it holds "
            f"{', '.join(copied) or 'none at all'} (datasets in groups are joined when named: "
            "names=['group/x'])"
        )
    for name, parts in joined.items():
        missing = [path for path in paths if path not in {part.path for part in parts}]
        if missing:
            raise H5DataError(
                f"{describe(missing[0], name)} is missing there, or has another type or number of "
                f"axes than in {parts[0].path}; write one of NaN there, or leave it out with "
                "names=[...]"
            )


def _shown(dims: Dims) -> str:
    return str(dims[0] if len(dims) == 1 else dims)


# -- the result ------------------------------------------------------------------------------------


def _place_parts(
    name: str, parts: list[Part], rows: list[list[str]], dims: Dims
) -> tuple[Shape, list[Shape]]:
    """Return the shape of the joined dataset, and where each part begins in it."""
    first = parts[0]
    ndim = len(first.shape)
    along = [axis % ndim for axis in dims]
    if len(set(along)) < len(along):
        raise H5DataError(
            f"{describe(first.path, name)}: dims={dims} name the same axis of {ndim}; give two axes"
        )
    places: list[Shape] = []
    end = [0] * ndim
    remaining = iter(parts)
    for row in rows:
        start = [0] * ndim
        if len(along) == 2:
            start[along[0]] = end[along[0]]
        for _, part in zip(row, remaining, strict=False):
            if part.axes != first.axes or _sizes(part, along) != _sizes(first, along):
                raise H5DataError(
                    f"{describe(part.path, name)} has shape {part.shape}, in the order "
                    f"{part.axes}, in {first.path} it is {first.shape}, in the order {first.axes}; "
                    f"they may differ only along {_shown(dims)}; join along another axis, write "
                    "it in that order with h5save(axes=), or leave it out with names=[...]"
                )
            places.append(tuple(start))
            # of the longest row: others may have fewer files
            end = [max(e, s + n) for e, s, n in zip(end, start, part.shape, strict=True)]
            start[along[-1]] += part.shape[along[-1]]
    return tuple(end), places


def _sizes(part: Part, along: list[int]) -> list[int]:
    """Return the sizes along the other axes."""
    return [n for axis, n in enumerate(part.shape) if axis not in along]


def _feature_names(name: str, parts: list[Part], places: list[Shape], shape: Shape) -> Names | None:
    """Return the names of all features; None if a feature is named in no file."""
    if len(shape) != 3:
        return None
    names: list[str | None] = [None] * shape[0]
    for part, place in zip(parts, places, strict=True):
        for i, feature in enumerate(part.names or (), place[0]):
            if names[i] not in (None, feature):
                raise H5DataError(
                    f"{describe(part.path, name)}: feature {i} is {feature!r}, in another file it "
                    f"is {names[i]!r}; bring the features into one order, or correct the attribute "
                    "'feature_names'"
                )
            names[i] = feature
    complete = tuple(feature for feature in names if feature is not None)
    return complete if len(complete) == len(names) > 0 else None


def _refer_to_sources(
    layout: h5py.VirtualLayout,
    name: str,
    parts: list[Part],
    places: list[Shape],
    order: list[int],
    dst: str,
) -> None:
    """Make a virtual dataset refer to the sources; ``order`` is the axis of (F, N, T) for each axis
    in the file.
    """
    folder = os.path.dirname(os.path.realpath(dst))
    pattern = name.replace("%", "%%")  # which begins a pattern
    for part, place in zip(parts, places, strict=True):
        if 0 in part.shape:  # HDF5 takes no empty selections
            continue
        # relative, so that the folder can be moved as a whole
        path = os.path.relpath(os.path.realpath(part.path), folder).replace("%", "%%")
        size = tuple(part.shape[i] for i in order)
        # a fixed region: the file may grow later
        source = h5py.VirtualSource(path, pattern, size)[tuple(map(slice, size))]
        layout[tuple(slice(place[i], place[i] + part.shape[i]) for i in order)] = source


def _copy_attributes(source: h5py.Dataset | h5py.File, target: h5py.Dataset | h5py.File) -> None:
    for key, value in source.attrs.items():
        if key not in NOT_COPIED:
            target.attrs[key] = value
