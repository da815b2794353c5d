"""Join many HDF5 files into one."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import h5py
import numpy as np

from fluxutils_py.data.arrays import Names
from fluxutils_py.data.hdf5.attributes import (
    fnt_axes,
    read_axes,
    read_names,
    warn_of_packing,
    write_names,
)
from fluxutils_py.data.hdf5.datasets import check_sources
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.mapping import h5mmap
from fluxutils_py.data.hdf5.opening import (
    PathLike,
    Shape,
    check_path,
    describe,
    get_object,
    holds_numbers,
    numpy_dtype,
    open_file,
    wrap_h5_errors,
)
from fluxutils_py.data.hdf5.writing import allocate, copy_into, new_file
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar

# References, which are invalid in another file.
NOT_COPIED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST"}

Dims = tuple[int, ...]  # the axis of rows of files, if there are some, and that of files in a row


class Part(NamedTuple):
    """A dataset of numbers in one of the files."""

    path: str
    axes: str | None
    shape: Shape  # as (F, N, T)
    dtype: np.dtype
    h5_type: h5py.h5t.TypeID
    names: Names | None  # of features

    @property
    def n_bytes(self) -> int:
        # NumPy's product of 64 bits may wrap
        return math.prod(self.shape) * self.dtype.itemsize


def h5concat(
    dst: PathLike,
    srcs: Any,
    dims: int | Sequence[int],
    virtual: bool = True,
    *,
    axes: str | None = None,
    names: Sequence[str] | None = None,
    fill: float | None = None,
    verbose: bool | str = "auto",
) -> None:
    """Concatenate the datasets of many HDF5 files along one or two axes.

    Joins every numeric dataset at the top level with the datasets of the same name in the other
    files. Copies datasets that lack the axis or are not numeric; they must be equal in all files.
    Copies groups whole from the first file that has them, and attributes from the first file.

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
    fill : number, optional
        Value where no file has data, by default 0; ``np.nan`` makes gaps that training ignores.
    verbose : "auto" or bool
        Whether to show a progress bar. "auto": on a terminal or in a notebook, if it takes long.

    Raises
    ------
    FileNotFoundError
        If a file does not exist.
    H5DataError
        If a file lacks a dataset, shapes do not fit, or a source is ``dst`` itself. An existing
        ``dst`` then stays unchanged.

    Notes
    -----
    Types are promoted as by ``numpy.result_type``, including the type of ``fill`` where there are
    gaps. Different names of one feature (``h5save``) are an error. Source: ``h5concat`` of
    HDF5Utils.jl, where shapes that do not fit leave zeros, and a dataset that one file lacks shifts
    the data after it.

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
    if names is not None:
        names = _checked_names(dst, names)
    paths = [path for row in rows for path in row]
    title = f"h5concat {os.path.basename(dst)}"
    with progress_bar(verbose, f"{title}: looking", len(paths), "file") as update:
        joined, copied = inspect_sources(paths, names, axes, join_axes, update)
    n_bytes = 0 if virtual else sum(part.n_bytes for parts in joined.values() for part in parts)
    with new_file(dst) as file, progress_bar(verbose, title, n_bytes, "B") as update:
        for name, parts in joined.items():
            shape, places = _place_parts(name, parts, rows, join_axes)
            feature_names = _feature_names(name, parts, places, shape)
            gap_fill = _gap_fill(parts, shape, fill)
            dtype = _common_type(name, parts, virtual, gap_fill)
            if virtual:
                layout = _layout_of_sources(name, parts, places, shape, dtype, dst)
                dataset = file.create_virtual_dataset(name, layout, gap_fill or None)
            else:
                in_file = [shape[i] for i in _axes_in_file(parts[0])]
                dataset = allocate(file, name, in_file, dtype, parts[0].axes, gap_fill)
                _copy_parts(name, parts, places, dataset, update)
            _write_attributes(dataset, parts[0], name, feature_names, dst)
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


def _checked_names(dst: str, names: Any) -> list[str]:
    """Check the names of the datasets to join, and return them without superfluous slashes."""
    given = list(names) if np.iterable(names) and not isinstance(names, str | bytes) else []
    checked = [name.strip("/") if isinstance(name, str) else "" for name in given]
    if not checked or not all(checked) or len(set(checked)) < len(checked):
        raise H5DataError(
            f"{dst}: names must be a list of names of datasets, as ['x', 'y'], each once, got "
            f"{names!r}"
        )
    return checked


# -- what the files hold ---------------------------------------------------------------------------


def inspect_sources(
    paths: list[str],
    names: Sequence[str] | None,
    axes: str | None,
    dims: Dims,
    update: Callable[[int], object],
) -> tuple[dict[str, list[Part]], dict[str, str]]:
    """Return the datasets to join, with a part for each file, and what to copy whole, with its
    first file.
    """
    joined: dict[str, list[Part]] = {}
    copied: dict[str, str] = {}
    values: dict[str, Any] = {}  # of datasets that can only be copied
    holders: dict[str, list[int]] = {}  # which files have a dataset
    for i, path in enumerate(paths):
        with open_file(path) as file, wrap_h5_errors(path):
            for name in names or file:
                item = get_object(file, path, name)
                if isinstance(item, h5py.Group):
                    copied.setdefault(name, path)
                    continue
                holders.setdefault(name, []).append(i)
                if _can_be_joined(item, dims):
                    joined.setdefault(name, []).append(_read_part(item, path, name, axes))
                    continue
                value = item[()]
                if not _equal_values(values.setdefault(name, value), value):
                    raise H5DataError(
                        f"{describe(path, name)} is no array of numbers with an axis "
                        f"{_shown(dims)}, so that it can only be copied, and is not the same as in "
                        f"{copied[name]}; put it into a group (which is copied from the first file)"
                        " or leave it out with names=[...]"
                    )
                copied.setdefault(name, path)
        update(1)
    for name, which in holders.items():
        _require_in_all(name, which, paths)
        if name in joined and name in values:
            first = paths[which[0]]
            other = copied[name] if joined[name][0].path == first else joined[name][0].path
            raise H5DataError(
                f"{describe(other, name)} has another type or number of axes than in {first}; "
                "write it again like that one, or leave it out with names=[...]"
            )
    if not joined:
        _refuse_nothing_to_join(paths[0], copied, dims)
    return joined, copied


def _refuse_nothing_to_join(path: str, copied: dict[str, str], dims: Dims) -> NoReturn:
    """Raise H5DataError, with what the files hold instead."""
    raise H5DataError(
        f"{path}: no dataset in it has an axis {_shown(dims)} to join along; it holds "
        f"{', '.join(copied) or 'none at all'} (datasets in groups are joined when named: "
        "names=['group/x'])"
    )


def _require_in_all(name: str, holders: list[int], paths: list[str]) -> None:
    """Raise H5DataError if a dataset is missing in a file."""
    missing = sorted(set(range(len(paths))) - set(holders))
    if missing:
        raise H5DataError(
            f"{describe(paths[missing[0]], name)} is missing, {paths[holders[0]]} has it; write "
            "one of NaN there, or leave it out with names=[...]"
        )


def _can_be_joined(dataset: h5py.Dataset, dims: Dims) -> bool:
    return holds_numbers(dataset) and all(-dataset.ndim <= d < dataset.ndim for d in dims)


def _shown(dims: Dims) -> str:
    return str(dims[0] if len(dims) == 1 else dims)


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, h5py.Empty) or isinstance(b, h5py.Empty):  # NumPy has no such value
        return a == b
    a = np.asarray(a)
    b = np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _read_part(dataset: h5py.Dataset, path: str, name: str, axes: str | None) -> Part:
    where = describe(path, name)
    letters = read_axes(dataset, axes if dataset.ndim == 3 else None, where)
    check_sources(dataset, where)
    warn_of_packing(dataset, where)
    shape = tuple(dataset.shape[i] for i in fnt_axes(letters, dataset.ndim))
    return Part(
        path,
        letters,
        shape,
        numpy_dtype(dataset),
        dataset.id.get_type().copy(),  # it is used after the file was closed
        read_names(dataset, shape[0]) if len(shape) == 3 else None,
    )


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
            if len(part.shape) != ndim or _sizes(part, along) != _sizes(first, along):
                raise H5DataError(
                    f"{describe(part.path, name)} has shape {part.shape}, in {first.path} it is "
                    f"{first.shape}; they may differ only along {_shown(dims)}; join along another "
                    "axis, or leave it out with names=[...]"
                )
            places.append(tuple(start))
            # of the longest row: others may have fewer files
            end = [max(e, s + n) for e, s, n in zip(end, start, part.shape, strict=True)]
            start[along[-1]] += part.shape[along[-1]]
    return tuple(end), places


def _sizes(part: Part, along: list[int]) -> list[int]:
    """Return the sizes along the other axes."""
    return [n for axis, n in enumerate(part.shape) if axis not in along]


def _gap_fill(parts: list[Part], shape: Shape, fill: float | None) -> float | None:
    """Return the value where no file has data; None if the parts fill the joined dataset."""
    is_full = sum(math.prod(part.shape) for part in parts) == math.prod(shape)
    return None if is_full else fill or 0


def _common_type(name: str, parts: list[Part], virtual: bool, fill: float | None) -> Any:
    """Return the type of the joined dataset: the HDF5 type if all are equal, else NumPy's
    promotion.
    """
    first = parts[0]
    if virtual and not fill and all(part.h5_type.equal(first.h5_type) for part in parts):
        return h5py.Datatype(first.h5_type)
    dtypes = {part.dtype for part in parts}
    dtype = first.dtype  # result_type would change the byte order
    if fill or len(dtypes) > 1:
        dtype = np.result_type(*dtypes, *([fill] if fill else []))
    if virtual:
        _require_convertible(name, parts)
    return dtype


def _require_convertible(name: str, parts: list[Part]) -> None:
    """Raise H5DataError for types that HDF5 cannot convert to others as it reads."""
    for part in parts:
        if part.dtype.kind == "b" or isinstance(part.h5_type, h5py.h5t.TypeBitfieldID):
            raise H5DataError(
                f"{describe(part.path, name)} has another type than in the other files, and HDF5 "
                "cannot convert it in a virtual dataset; pass virtual=False"
            )


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


def _axes_in_file(part: Part) -> list[int]:
    """Return the axis of (F, N, T) for each axis in the file."""
    return np.argsort(fnt_axes(part.axes, len(part.shape))).tolist()


def _layout_of_sources(
    name: str, parts: list[Part], places: list[Shape], shape: Shape, dtype: Any, dst: str
) -> h5py.VirtualLayout:
    """Return the layout of a virtual dataset that refers to the sources."""
    order = _axes_in_file(parts[0])
    layout = h5py.VirtualLayout(tuple(shape[i] for i in order), dtype)
    folder = os.path.dirname(os.path.realpath(dst))
    pattern = name.replace("%", "%%")  # which begins a pattern
    for part, place in zip(parts, places, strict=True):
        if part.axes != parts[0].axes:  # HDF5 cannot change the order of axes
            raise H5DataError(
                f"{describe(part.path, name)} is in the order {part.axes}, in {parts[0].path} it "
                f"is {parts[0].axes}; pass virtual=False"
            )
        if 0 in part.shape:  # HDF5 takes no empty selections
            continue
        # relative, so that the folder can be moved as a whole
        path = os.path.relpath(os.path.realpath(part.path), folder).replace("%", "%%")
        size = tuple(part.shape[i] for i in order)
        # a fixed region: the file may grow later
        source = h5py.VirtualSource(path, pattern, size)[tuple(map(slice, size))]
        layout[tuple(slice(place[i], place[i] + part.shape[i]) for i in order)] = source
    return layout


def _copy_parts(
    name: str,
    parts: list[Part],
    places: list[Shape],
    dataset: h5py.Dataset,
    update: Callable[[int], object],
) -> None:
    order = fnt_axes(parts[0].axes, dataset.ndim)
    for part, place in zip(parts, places, strict=True):
        array = h5mmap(part.path, name, part.axes)
        # the file may have been replaced since it was inspected
        if array.shape != part.shape or array.dtype != part.dtype:
            raise H5DataError(
                f"{describe(part.path, name)} was replaced while being copied; join again"
            )
        copy_into(dataset, array, order, update, place)
        if isinstance(array, H5Lazy):
            array.close()


def _write_attributes(
    dataset: h5py.Dataset, first: Part, name: str, feature_names: Names | None, dst: str
) -> None:
    with open_file(first.path) as file:
        _copy_attributes(file[name], dataset)
    if first.axes is not None:
        dataset.attrs["axes"] = first.axes
    # those of the first file may be other features than those of the result
    dataset.attrs.pop("feature_names", None)
    if feature_names is not None:
        write_names(dataset, feature_names, describe(dst, name))


def _copy_attributes(source: h5py.Dataset | h5py.File, target: h5py.Dataset | h5py.File) -> None:
    for key, value in source.attrs.items():
        if key not in NOT_COPIED:
            target.attrs[key] = value
