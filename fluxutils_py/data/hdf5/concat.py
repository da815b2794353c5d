"""Join many HDF5 files into one."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5 import opening
from fluxutils_py.data.hdf5.datasets import warn_of_packing
from fluxutils_py.data.hdf5.feature_names import read_names, write_names
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.opening import check_heap, describe, fnt_axes, open_file
from fluxutils_py.data.hdf5.reading import h5mmap
from fluxutils_py.data.hdf5.source_files import check_sources, escape
from fluxutils_py.data.hdf5.writing import allocate, copy_into, make_dataset, new_file
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar

Axes = tuple[int | None, int]  # along which rows of files follow each other, and files within a row


@dataclass
class Source:
    """A dataset of numbers in one of the files, or the gap that it leaves where a file lacks it."""

    path: str
    axes: str | None
    shape: tuple[int, ...]  # as (F, N, T)
    dtype: np.dtype
    kind: Any  # the type as HDF5 has it
    names: tuple[str, ...] | None  # of features
    at: list[int] = field(default_factory=list)  # where it begins in the result
    exists: bool = True


def inspect_sources(
    paths: list[str],
    names: Sequence[str] | None,
    axes: str | None,
    pair: Axes,
    fill: float | None,
    update: Callable[[int], Any],
) -> tuple[dict[str, list[Source]], dict[str, str]]:
    """Return the datasets to join, with a source for each file, and those to copy whole, with their
    file.
    """
    files: list[dict[str, Source | None]] = []  # what each holds: None for what can only be copied
    values: dict[str, tuple[str, Any]] = {}  # of what can only be copied, and the file
    groups: dict[str, str] = {}
    for path in paths:
        files.append({})
        with opening.open_file(path) as file, opening.wrap_h5_errors(path):
            for name in names or file:
                if names and fill is not None and name not in file:
                    continue
                item = (opening.find_dataset if names else opening.get_object)(file, path, name)
                if isinstance(item, h5py.Group):
                    groups.setdefault(name, path)
                elif isinstance(item, h5py.Dataset):
                    joins = opening.holds_numbers(item) and all(
                        d is None or -item.ndim <= d < item.ndim for d in pair
                    )
                    files[-1][name] = _read_source(item, path, name, axes) if joins else None
                    if not joins:
                        check_heap(file, name, describe(path, name), values=True)
                        _require_same_values(values, item, path, name, pair)
        update(1)
    joined: dict[str, list[Source]] = {}
    for name in dict.fromkeys(name for datasets in files for name in datasets):
        having = [
            (path, datasets[name])
            for path, datasets in zip(paths, files, strict=True)
            if name in datasets
        ]
        first_path, first = having[0]
        for path, source in having:
            if (source is None) != (first is None):
                raise H5DataError(
                    f"{describe(path, name)} has another type or number of axes than in "
                    f"{first_path}; write it again like that one, or leave it out with names=[...]"
                )
        if len(having) < len(files) and fill is None:
            path = next(
                path for path, datasets in zip(paths, files, strict=True) if name not in datasets
            )
            raise H5DataError(
                f"{describe(path, name)} is missing, {first_path} has it; pass fill=np.nan to "
                "leave a gap there, or leave it out with names=[...]"
            )
        if first is not None:
            joined[name] = [
                h.get(name) or _gap_of(first, h, p, name, pair)
                for p, h in zip(paths, files, strict=True)
            ]
    if not joined:
        raise H5DataError(
            f"{paths[0]}: no dataset in it has an axis {show_axes(pair)} to join along; it holds "
            f"{', '.join(values) or 'none at all'} (datasets in groups are joined when named: "
            "names=['group/x'])"
        )
    return joined, {name: path for name, (path, _) in values.items()} | groups


def _read_source(dataset: h5py.Dataset, path: str, name: str, axes: str | None) -> Source:
    where = describe(path, name)
    letters = opening.read_axes(dataset, axes if dataset.ndim == 3 else None, where)
    check_sources(dataset, where)
    warn_of_packing(dataset, where)
    check_heap(dataset.file, dataset.name, where, list(dataset.attrs))  # all of which are copied
    shape = tuple(int(dataset.shape[i]) for i in opening.fnt_axes(letters, dataset.ndim))
    names = read_names(dataset, shape[0]) if len(shape) == 3 else None
    return Source(
        path, letters, shape, opening.numpy_dtype(dataset), dataset.id.get_type().copy(), names
    )


def _gap_of(
    like: Source, datasets: dict[str, Source | None], path: str, name: str, pair: Axes
) -> Source:
    """What a file leaves that lacks a dataset: as long as the other datasets in it."""
    shape = list(like.shape)
    for axis in (axis for axis in pair if axis is not None):
        lengths = {source.shape[axis] for source in datasets.values() if source is not None}
        if len(lengths) != 1:
            raise H5DataError(
                f"{describe(path, name)} is missing, and how long a gap to leave along axis {axis} "
                "cannot be told from the file's other datasets; write one of NaN there, or leave "
                "it out with names=[...]"
            )
        shape[axis] = lengths.pop()
    return replace(like, path=path, shape=tuple(shape), names=None, exists=False)


def _require_same_values(
    values: dict[str, tuple[str, Any]], dataset: h5py.Dataset, path: str, name: str, pair: Axes
) -> None:
    first_path, first = values.setdefault(name, (path, dataset[()]))
    if not _equal_values(first, dataset[()]):
        reason = (
            f"has no axis {show_axes(pair)}"
            if opening.holds_numbers(dataset)
            else "does not hold numbers"
        )
        raise H5DataError(
            f"{describe(path, name)} {reason}, so that it can only be copied, and is not the same "
            f"as in {first_path}; put it into a group (which is copied from the first file) or "
            "leave it out with names=[...]"
        )


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, h5py.Empty) or isinstance(b, h5py.Empty):
        return a == b
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def show_axes(pair: Axes) -> str:
    return str(pair[1] if pair[0] is None else pair)


PathLike = str | os.PathLike[str]
NOT_COPIED = {
    "CLASS",
    "NAME",
    "DIMENSION_LIST",
    "REFERENCE_LIST",
}  # references, which are invalid in another file


def h5concat(
    dst: PathLike,
    srcs: Any,
    dims: int | Sequence[int],
    virtual: bool = True,
    *,
    axes: str | None = None,
    names: Sequence[str] | None = None,
    fill: float | None = None,
    verbose: Any = "auto",
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
        Join only these datasets, which may lie in groups, and copy nothing else.
    fill : number, optional
        Value where no file has data, by default 0; ``np.nan`` makes gaps that training ignores. If
        given, a file may also lack a dataset, which leaves a gap as long as the other datasets of
        the file.
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
    rows, dims_pair = _file_grid(dst, srcs, dims)
    names = None if names is None else _checked_names(dst, names)
    paths, title = (
        [path for row in rows for path in row],
        f"h5concat {os.path.basename(os.fsdecode(dst))}",
    )
    with progress_bar(verbose, f"{title}: looking", len(paths), "file") as update:
        joined, copied = inspect_sources(paths, names, axes, dims_pair, fill, update)
    shapes = {
        name: _place_parts(name, sources, rows, dims_pair) for name, sources in joined.items()
    }
    features = {
        name: _feature_names(name, sources, shapes[name]) for name, sources in joined.items()
    }
    joined = {name: [s for s in sources if s.exists] for name, sources in joined.items()}
    sizes = {
        name: sum(int(np.prod(s.shape, dtype=object)) for s in sources)
        for name, sources in joined.items()
    }
    fills = {
        name: (fill or 0) if size < int(np.prod(shapes[name], dtype=object)) else None
        for name, size in sizes.items()
    }
    types = {
        name: _common_type(name, sources, virtual, fills[name]) for name, sources in joined.items()
    }
    total = sum(sizes[name] * sources[0].dtype.itemsize for name, sources in joined.items())
    with (
        new_file(dst) as file,
        progress_bar(verbose, title, 0 if virtual else total, "B") as update,
    ):
        for name, sources in joined.items():
            if virtual:
                folder = os.path.dirname(os.path.realpath(os.fsdecode(dst)))
                dataset = _refer_to_sources(
                    file, name, sources, shapes[name], types[name], fills[name], folder
                )
            else:
                dataset = _copy_sources(
                    file, name, sources, shapes[name], types[name], fills[name], update
                )
            with open_file(sources[0].path) as first:
                _copy_attributes(first[name], dataset)
            if sources[0].axes is not None:
                dataset.attrs["axes"] = sources[0].axes
            dataset.attrs.pop("feature_names", None)
            if (feature_names := features[name]) is not None:
                write_names(dataset, feature_names, describe(dst, name))
        with open_file(paths[0]) as first:
            _copy_attributes(first, file)
        for name, path in copied.items():
            with open_file(path) as source:
                source.copy(name, file, name)


def _file_grid(dst: PathLike, srcs: Any, dims: Any) -> tuple[list[list[str]], Axes]:
    """Return rows of files, and the axes along which to join rows and files."""
    shown = opening.check_path(dst, "dst")
    srcs = (
        [srcs]
        if isinstance(srcs, str | bytes | os.PathLike) or not np.iterable(srcs)
        else list(srcs)
    )
    pair = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    if len(pair) not in (1, 2) or not all(isinstance(d, int | np.integer) for d in pair):
        raise H5DataError(f"{shown}: dims must be an axis or a pair of axes, got {dims!r}")
    nested = [isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in srcs]
    if not srcs or any(nested) != all(nested) or (nested[0] and not all(srcs)):
        raise H5DataError(
            f"{shown}: srcs must be a list of files or a list of lists of them, none empty, got "
            f"{srcs!r}"
        )
    if nested[0] != (len(pair) == 2):
        wanted = (
            "a list of lists of files, one list per row"
            if len(pair) == 2
            else "a plain list of files"
        )
        raise H5DataError(
            f"{shown}: dims={dims!r} needs {wanted}; for two axes give both, as dims=(-2, -1)"
        )
    rows = [
        [path for item in row for path in _matching_files(item, shown)]
        for row in (srcs if nested[0] else [srcs])
    ]
    for path in (path for row in rows for path in row):
        if os.path.realpath(path) == os.path.realpath(shown) or (
            os.path.exists(path) and os.path.exists(shown) and os.path.samefile(path, shown)
        ):
            raise H5DataError(
                f"{shown}: this file is among the sources; give the result another name"
            )
    return rows, (None if len(pair) == 1 else int(pair[0]), int(pair[-1]))


def _matching_files(source: Any, shown: str) -> list[str]:
    """Return the files that match a path or pattern."""
    path = opening.check_path(source, f"{shown}: each of srcs")
    if os.path.exists(path) or not any(character in path for character in "*?["):
        return [path]
    paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise FileNotFoundError(f"{path}: no file matches this pattern")
    return paths


def _checked_names(dst: PathLike, names: Any) -> list[str]:
    """Check the names of the datasets to join, and return them without superfluous slashes."""
    shown = os.fsdecode(dst)
    if (
        isinstance(names, str | bytes)
        or not np.iterable(names)
        or not all(isinstance(n, str) for n in names)
    ):
        raise H5DataError(
            f"{shown}: names must be a list of names of datasets, as ['x', 'y'], got {names!r}"
        )
    full_names = ["/".join(part for part in name.split("/") if part) for name in names]
    if not full_names or len(set(full_names)) < len(full_names):
        raise H5DataError(
            f"{shown}: names must name one dataset or more, and each once, got {names!r}"
        )
    return full_names


# -- output dataset -----------------------------------------------------------------------------------------


def _place_parts(
    name: str, sources: list[Source], rows: list[list[str]], pair: Axes
) -> tuple[int, ...]:
    """Set the offset of each part, and return the shape of the joined dataset."""
    first = sources[0]
    ndim = len(first.shape)
    along = [None if d is None else d % ndim for d in pair]
    if along[0] == along[1]:
        raise H5DataError(
            f"{describe(first.path, name)}: dims={pair} name the same axis of {ndim}; give two axes"
        )
    end, remaining = [0] * ndim, iter(sources)
    for row in rows:
        start = [0] * ndim
        if along[0] is not None:
            start[along[0]] = end[along[0]]
        for part in (next(remaining) for _ in row):
            odd = len(part.shape) != ndim or any(
                m != n and i not in along
                for i, (m, n) in enumerate(zip(part.shape, first.shape, strict=False))
            )
            if odd:
                raise H5DataError(
                    f"{describe(part.path, name)} has shape {part.shape}, in {first.path} it is "
                    f"{first.shape}; they may differ only along {show_axes(pair)}; join along "
                    "another axis, or leave it out with names=[...]"
                )
            part.at = list(start)
            end = [max(e, s + n) for e, s, n in zip(end, start, part.shape, strict=True)]
            start[along[1] or 0] += part.shape[along[1] or 0]
    return tuple(end)


def _common_type(name: str, sources: list[Source], virtual: bool, fill: float | None) -> Any:
    """Return the type of the joined dataset: the HDF5 type if all are equal, else NumPy's
    promotion.
    """
    first = sources[0]
    if virtual and not fill and all(s.kind.equal(first.kind) for s in sources):
        return first.kind
    dtypes = {s.dtype for s in sources}
    dtype = (
        first.dtype
        if len(dtypes) == 1 and not fill
        else np.result_type(*dtypes, *([fill] if fill else []))
    )
    unconvertible = [
        s for s in sources if s.dtype.kind == "b" or isinstance(s.kind, h5py.h5t.TypeBitfieldID)
    ]
    if virtual and unconvertible:
        raise H5DataError(
            f"{describe(unconvertible[0].path, name)} has another type than in the other files, "
            "and HDF5 cannot convert it in a virtual dataset; pass virtual=False"
        )
    return h5py.h5t.py_create(dtype, logical=True) if virtual else dtype


def _feature_names(
    name: str, sources: list[Source], shape: tuple[int, ...]
) -> tuple[str, ...] | None:
    """Return the names of all features; None if a feature is named in no file."""
    names: list[str | None] = [None] * (shape[0] if len(shape) == 3 else 0)
    for part in sources:
        for i, feature in enumerate(part.names or (), part.at[0]):
            if names[i] not in (None, feature):
                raise H5DataError(
                    f"{describe(part.path, name)}: feature {i} is {feature!r}, in another file it "
                    f"is {names[i]!r}; bring the features into one order, or correct the attribute "
                    "'feature_names'"
                )
            names[i] = feature
    complete = tuple(feature for feature in names if feature is not None)
    return complete if names and len(complete) == len(names) else None


def _refer_to_sources(
    file: h5py.File,
    name: str,
    sources: list[Source],
    shape: tuple[int, ...],
    kind: Any,
    fill: float | None,
    folder: str,
) -> h5py.Dataset:
    """Create a virtual dataset that refers to the sources."""
    first = sources[0]
    for source in sources:
        if source.axes != first.axes:
            raise H5DataError(
                f"{describe(source.path, name)} is in the order {source.axes}, in {first.path} it "
                f"is {first.axes}; pass virtual=False"
            )
    order = np.argsort(
        fnt_axes(first.axes, len(shape))
    )  # the axis of (F, N, T) for each axis in the file
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if fill:
        plist.set_fill_value(np.asarray(fill, kind.dtype))
    file_shape = tuple(shape[i] for i in order)
    space = h5py.h5s.create_simple(file_shape)
    for source in sources:
        if 0 in source.shape:
            continue
        size = tuple(source.shape[i] for i in order)
        space.select_hyperslab(tuple(source.at[i] for i in order), size)
        relative = escape(os.path.relpath(os.path.realpath(source.path), folder))
        taken = h5py.h5s.create_simple(size)
        taken.select_hyperslab((0,) * len(size), size)  # a fixed region: the file may grow later
        plist.set_virtual(space, os.fsencode(relative), escape(name).encode(), taken)
    return make_dataset(file, name, file_shape, kind, plist)


def _copy_sources(
    file: h5py.File,
    name: str,
    sources: list[Source],
    shape: tuple[int, ...],
    dtype: np.dtype,
    fill: float | None,
    update: Callable[[int], Any],
) -> h5py.Dataset:
    first = sources[0]
    order = fnt_axes(first.axes, len(shape))
    file_shape = [shape[i] for i in np.argsort(order)]
    dataset = allocate(file, name, file_shape, dtype, first.axes, fill)
    for source in sources:
        array = h5mmap(source.path, name, source.axes)
        if array.shape != source.shape or array.dtype != source.dtype:
            raise H5DataError(
                f"{describe(source.path, name)} was replaced while being copied; join again"
            )
        copy_into(dataset, array, order, update, source.at)
        if isinstance(array, H5Lazy):
            array.close()
    return dataset


def _copy_attributes(source: Any, target: Any) -> None:
    for key, value in source.attrs.items():
        if key not in NOT_COPIED:
            target.attrs[key] = value
