"""Join many HDF5 files into one."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Self

import h5py
import numpy as np

from fluxutils_py.data.hdf5.datasets import warn_of_packing
from fluxutils_py.data.hdf5.feature_names import Names, read_names, write_names
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.hdf5.opening import (
    PathLike,
    Shape,
    check_heap,
    check_path,
    describe,
    find_dataset,
    fnt_axes,
    get_object,
    holds_numbers,
    numpy_dtype,
    open_file,
    read_axes,
    wrap_h5_errors,
)
from fluxutils_py.data.hdf5.reading import h5mmap
from fluxutils_py.data.hdf5.source_files import check_sources, escape
from fluxutils_py.data.hdf5.writing import allocate, copy_into, make_dataset, new_file
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar

# References, which are invalid in another file.
NOT_COPIED = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST"}


class JoinAxes(NamedTuple):
    """The axes along which rows of files follow each other, and the files within a row."""

    rows: int | None  # None: there is only one row
    files: int

    def __str__(self) -> str:
        return str(self.files if self.rows is None else tuple(self))

    def exist_in(self, ndim: int) -> bool:
        """Whether an array of so many axes has them."""
        return all(d is None or -ndim <= d < ndim for d in self)

    def counted_from_0(self, ndim: int) -> Self:
        rows = None if self.rows is None else self.rows % ndim
        return self._replace(rows=rows, files=self.files % ndim)


@dataclass
class Source:
    """A dataset of numbers in one of the files, or the gap that it leaves where a file lacks it."""

    path: str
    axes: str | None
    shape: Shape  # as (F, N, T)
    dtype: np.dtype
    h5_type: h5py.h5t.TypeID
    names: Names | None  # of features
    at: list[int] = field(default_factory=list)  # where it begins in the result
    exists: bool = True

    @property
    def size(self) -> int:
        # NumPy's product of 64 bits may wrap
        return math.prod(self.shape)


@dataclass(frozen=True)
class JoinedDataset:
    """What is known of a dataset of the result before it is written."""

    name: str
    sources: list[Source]  # without gaps
    shape: Shape  # as (F, N, T)
    feature_names: Names | None
    fill: float | None  # the value where no source has data; None if there is no such place
    type: Any  # of HDF5 for a virtual dataset, of NumPy for a copy

    @property
    def axes(self) -> str | None:
        return self.sources[0].axes

    @property
    def n_bytes(self) -> int:
        """Bytes to copy."""
        return sum(source.size * source.dtype.itemsize for source in self.sources)


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
    dst = check_path(dst, "dst")
    join_axes = _check_dims(dims, dst)
    rows = _file_grid(dst, srcs, join_axes)
    if names is not None:
        names = _checked_names(dst, names)
    paths = [path for row in rows for path in row]
    title = f"h5concat {os.path.basename(dst)}"
    with progress_bar(verbose, f"{title}: looking", len(paths), "file") as update:
        sources, copied = inspect_sources(paths, names, axes, join_axes, fill, update)
    joined = [
        _plan_dataset(name, sources[name], rows, join_axes, virtual, fill) for name in sources
    ]
    n_bytes = 0 if virtual else sum(dataset.n_bytes for dataset in joined)
    with new_file(dst) as file, progress_bar(verbose, title, n_bytes, "B") as update:
        for planned in joined:
            if virtual:
                dataset = _refer_to_sources(file, planned, dst)
            else:
                dataset = _copy_sources(file, planned, update)
            _write_attributes(dataset, planned, dst)
        with open_file(paths[0]) as first:
            _copy_attributes(first, file)
        for name, path in copied.items():
            with open_file(path) as source:
                source.copy(name, file, name)


# -- the arguments ---------------------------------------------------------------------------------


def _file_grid(
    dst: str,
    srcs: object,
    join_axes: JoinAxes,
) -> list[list[str]]:
    """Return rows of files, none of which is the result."""
    rows = []
    for row in _as_rows(srcs, join_axes, dst):
        paths = [path for item in row for path in _matching_files(item, dst)]
        _require_not_among(paths, dst)
        rows.append(paths)
    return rows


def _check_dims(dims: object, dst: str) -> JoinAxes:
    pair = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    if len(pair) not in (1, 2) or not all(isinstance(d, int | np.integer) for d in pair):
        raise H5DataError(f"{dst}: dims must be an axis or a pair of axes, got {dims!r}")
    rows = None if len(pair) == 1 else int(pair[0])
    return JoinAxes(rows, int(pair[-1]))


def _as_rows(
    srcs: Any,
    join_axes: JoinAxes,
    dst: str,
) -> list[Sequence[object]]:
    """Return the sources as rows, one if they are joined along one axis."""
    if isinstance(srcs, str | bytes | os.PathLike) or not np.iterable(srcs):
        srcs = [srcs]
    srcs = list(srcs)
    nested = [isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in srcs]
    if not srcs or any(nested) != all(nested) or (nested[0] and not all(srcs)):
        raise H5DataError(
            f"{dst}: srcs must be a list of files or a list of lists of them, none empty, got "
            f"{srcs!r}"
        )
    has_two = join_axes.rows is not None
    if nested[0] != has_two:
        wanted = "a plain list of files"
        if has_two:
            wanted = "a list of lists of files, one list per row"
        raise H5DataError(
            f"{dst}: dims={join_axes} needs {wanted}; for two axes give both, as dims=(-2, -1)"
        )
    return srcs if has_two else [srcs]


def _require_not_among(paths: list[str], dst: str) -> None:
    """Check that no source is the file to write, under whatever name."""
    for path in paths:
        is_same = os.path.realpath(path) == os.path.realpath(dst)
        if not is_same and os.path.exists(path) and os.path.exists(dst):
            is_same = os.path.samefile(path, dst)  # a hard link
        if is_same:
            raise H5DataError(
                f"{dst}: this file is among the sources; give the result another name"
            )


def _matching_files(source: object, dst: str) -> list[str]:
    """Return the files that match a path or pattern."""
    path = check_path(source, f"{dst}: each of srcs")
    # a file may have such characters in its name
    if os.path.exists(path) or not any(character in path for character in "*?["):
        return [path]
    paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise FileNotFoundError(f"{path}: no file matches this pattern")
    return paths


def _checked_names(dst: str, names: Any) -> list[str]:
    """Check the names of the datasets to join, and return them without superfluous slashes."""
    is_list = not isinstance(names, str | bytes) and np.iterable(names)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise H5DataError(
            f"{dst}: names must be a list of names of datasets, as ['x', 'y'], got {names!r}"
        )
    full_names = ["/".join(part for part in name.split("/") if part) for name in names]
    if not full_names or len(set(full_names)) < len(full_names):
        raise H5DataError(
            f"{dst}: names must name one dataset or more, and each once, got {names!r}"
        )
    return full_names


# -- what the files hold ---------------------------------------------------------------------------


def inspect_sources(
    paths: list[str],
    names: Sequence[str] | None,
    axes: str | None,
    join_axes: JoinAxes,
    fill: float | None,
    update: Callable[[int], object],
) -> tuple[dict[str, list[Source]], dict[str, str]]:
    """Return the datasets to join, with a source for each file, and those to copy whole, with their
    file.
    """
    contents = _Contents(axes, join_axes, fill)
    for path in paths:
        with open_file(path) as file, wrap_h5_errors(path):
            contents.add_file(file, path, names)
        update(1)
    joined: dict[str, list[Source]] = {}
    for name in contents.names():
        sources = contents.sources_of(name)
        if sources is not None:
            joined[name] = sources
    if not joined:
        values = ", ".join(contents.values) or "none at all"
        raise H5DataError(
            f"{paths[0]}: no dataset in it has an axis {join_axes} to join along; it holds "
            f"{values} (datasets in groups are joined when named: names=['group/x'])"
        )
    return joined, contents.copied()


class _FileDatasets(NamedTuple):
    path: str
    by_name: dict[str, Source | None]  # None for one that can only be copied


class _FirstValue(NamedTuple):
    """A dataset that can only be copied, as the first file has it."""

    path: str
    value: object


class _Contents:
    """What is in the files to join."""

    def __init__(
        self,
        axes: str | None,
        join_axes: JoinAxes,
        fill: float | None,
    ) -> None:
        self.axes = axes
        self.join_axes = join_axes
        self.fill = fill
        self.files: list[_FileDatasets] = []
        self.values: dict[str, _FirstValue] = {}
        self.groups: dict[str, str] = {}  # with the first file that has them

    def add_file(
        self,
        file: h5py.File,
        path: str,
        names: Sequence[str] | None,
    ) -> None:
        """Inspect the named datasets of a file, or all objects at its top level."""
        datasets: dict[str, Source | None] = {}
        for name in names or file:
            if names and self.fill is not None and name not in file:
                continue  # leaves a gap
            read = find_dataset if names else get_object
            item = read(file, path, name)
            if isinstance(item, h5py.Group):
                self.groups.setdefault(name, path)
            elif isinstance(item, h5py.Dataset):
                datasets[name] = self._inspect_dataset(item, file, path, name)
        self.files.append(_FileDatasets(path, datasets))

    def _inspect_dataset(
        self,
        dataset: h5py.Dataset,
        file: h5py.File,
        path: str,
        name: str,
    ) -> Source | None:
        if holds_numbers(dataset) and self.join_axes.exist_in(dataset.ndim):
            return _read_source(dataset, path, name, self.axes)
        check_heap(file, name, describe(path, name), values=True)
        self._require_same_values(dataset, path, name)
        return None

    def _require_same_values(
        self,
        dataset: h5py.Dataset,
        path: str,
        name: str,
    ) -> None:
        first = self.values.setdefault(name, _FirstValue(path, dataset[()]))
        if _equal_values(first.value, dataset[()]):
            return
        reason = "does not hold numbers"
        if holds_numbers(dataset):
            reason = f"has no axis {self.join_axes}"
        raise H5DataError(
            f"{describe(path, name)} {reason}, so that it can only be copied, and is not the same "
            f"as in {first.path}; put it into a group (which is copied from the first file) or "
            "leave it out with names=[...]"
        )

    def names(self) -> list[str]:
        """Return the names of all datasets, in the order in which they came."""
        return list(dict.fromkeys(name for file in self.files for name in file.by_name))

    def copied(self) -> dict[str, str]:
        """Return what to copy whole, with the file to copy it from."""
        return {name: first.path for name, first in self.values.items()} | self.groups

    def sources_of(self, name: str) -> list[Source] | None:
        """Return the source in each file, or its gap; None if the dataset can only be copied."""
        having = [file for file in self.files if name in file.by_name]
        first = having[0].by_name[name]
        for file in having:
            if (file.by_name[name] is None) != (first is None):
                raise H5DataError(
                    f"{describe(file.path, name)} has another type or number of axes than in "
                    f"{having[0].path}; write it again like that one, or leave it out with "
                    "names=[...]"
                )
        if self.fill is None:
            self._require_in_all(name, having[0].path)
        if first is None:
            return None
        return [file.by_name.get(name) or self._gap_of(first, file, name) for file in self.files]

    def _require_in_all(self, name: str, first_path: str) -> None:
        for file in self.files:
            if name not in file.by_name:
                raise H5DataError(
                    f"{describe(file.path, name)} is missing, {first_path} has it; pass "
                    "fill=np.nan to leave a gap there, or leave it out with names=[...]"
                )

    def _gap_of(
        self,
        like: Source,
        file: _FileDatasets,
        name: str,
    ) -> Source:
        """Return the gap of a file without the dataset, as long as the other datasets in it."""
        sources = [source for source in file.by_name.values() if source is not None]
        shape = list(like.shape)
        for axis in self.join_axes:
            if axis is None:
                continue
            lengths = {source.shape[axis] for source in sources}
            if len(lengths) != 1:
                raise H5DataError(
                    f"{describe(file.path, name)} is missing, and how long a gap to leave along "
                    f"axis {axis} cannot be told from the file's other datasets; write one of NaN "
                    "there, or leave it out with names=[...]"
                )
            shape[axis] = lengths.pop()
        return replace(like, path=file.path, shape=tuple(shape), names=None, exists=False)


def _read_source(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    axes: str | None,
) -> Source:
    where = describe(path, name)
    letters = read_axes(dataset, axes if dataset.ndim == 3 else None, where)
    check_sources(dataset, where)
    warn_of_packing(dataset, where)
    check_heap(dataset.file, dataset.name, where, list(dataset.attrs))  # all of which are copied
    shape = tuple(dataset.shape[i] for i in fnt_axes(letters, dataset.ndim))
    return Source(
        path,
        letters,
        shape,
        numpy_dtype(dataset),
        dataset.id.get_type().copy(),  # it is used after the file was closed
        read_names(dataset, shape[0]) if len(shape) == 3 else None,
    )


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, h5py.Empty) or isinstance(b, h5py.Empty):  # NumPy has no such value
        return a == b
    a = np.asarray(a)
    b = np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


# -- the result ------------------------------------------------------------------------------------


def _plan_dataset(
    name: str,
    sources: list[Source],
    rows: list[list[str]],
    join_axes: JoinAxes,
    virtual: bool,
    fill: float | None,
) -> JoinedDataset:
    shape = _place_parts(name, sources, rows, join_axes)
    feature_names = _feature_names(name, sources, shape)
    existing = [source for source in sources if source.exists]
    is_full = sum(source.size for source in existing) == math.prod(shape)
    gap_fill = None if is_full else fill or 0
    joined_type = _common_type(name, existing, virtual, gap_fill)
    return JoinedDataset(name, existing, shape, feature_names, gap_fill, joined_type)


def _place_parts(
    name: str,
    sources: list[Source],
    rows: list[list[str]],
    join_axes: JoinAxes,
) -> Shape:
    """Set the offset of each part, and return the shape of the joined dataset."""
    first = sources[0]
    ndim = len(first.shape)
    along = join_axes.counted_from_0(ndim)
    if along.rows == along.files:
        raise H5DataError(
            f"{describe(first.path, name)}: dims={join_axes} name the same axis of {ndim}; give "
            "two axes"
        )
    end = [0] * ndim
    remaining = iter(sources)
    for row in rows:
        start = [0] * ndim
        if along.rows is not None:
            start[along.rows] = end[along.rows]
        for part in islice(remaining, len(row)):
            _require_fitting_shape(name, part, first, join_axes)
            part.at = list(start)
            # of the longest row: others may have fewer files
            end = [max(e, s + n) for e, s, n in zip(end, start, part.shape, strict=True)]
            start[along.files] += part.shape[along.files]
    return tuple(end)


def _require_fitting_shape(
    name: str,
    part: Source,
    first: Source,
    join_axes: JoinAxes,
) -> None:
    ndim = len(first.shape)
    if len(part.shape) == ndim:
        along = join_axes.counted_from_0(ndim)
        if all(part.shape[i] == first.shape[i] for i in range(ndim) if i not in along):
            return
    raise H5DataError(
        f"{describe(part.path, name)} has shape {part.shape}, in {first.path} it is "
        f"{first.shape}; they may differ only along {join_axes}; join along another axis, or leave "
        "it out with names=[...]"
    )


def _common_type(
    name: str,
    sources: list[Source],
    virtual: bool,
    fill: float | None,
) -> Any:
    """Return the type of the joined dataset: the HDF5 type if all are equal, else NumPy's
    promotion.
    """
    first = sources[0]
    if virtual and not fill and all(s.h5_type.equal(first.h5_type) for s in sources):
        return first.h5_type
    dtype = _promoted_dtype(sources, fill)
    if not virtual:
        return dtype
    for s in sources:
        if s.dtype.kind == "b" or isinstance(s.h5_type, h5py.h5t.TypeBitfieldID):
            raise H5DataError(
                f"{describe(s.path, name)} has another type than in the other files, and HDF5 "
                "cannot convert it in a virtual dataset; pass virtual=False"
            )
    return h5py.h5t.py_create(dtype, logical=True)


def _promoted_dtype(sources: list[Source], fill: float | None) -> np.dtype:
    dtypes = {source.dtype for source in sources}
    if fill:
        return np.result_type(*dtypes, fill)
    if len(dtypes) == 1:  # result_type would change the byte order
        return sources[0].dtype
    return np.result_type(*dtypes)


def _feature_names(
    name: str,
    sources: list[Source],
    shape: Shape,
) -> Names | None:
    """Return the names of all features; None if a feature is named in no file."""
    if len(shape) != 3:
        return None
    names: list[str | None] = [None] * shape[0]
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
    return complete if len(complete) == len(names) > 0 else None


def _refer_to_sources(
    file: h5py.File,
    joined: JoinedDataset,
    dst: str,
) -> h5py.Dataset:
    """Create a virtual dataset that refers to the sources."""
    first = joined.sources[0]
    # HDF5 cannot change the order of axes
    for source in joined.sources:
        if source.axes != first.axes:
            raise H5DataError(
                f"{describe(source.path, joined.name)} is in the order {source.axes}, in "
                f"{first.path} it is {first.axes}; pass virtual=False"
            )
    # the axis of (F, N, T) for each axis in the file
    order = np.argsort(fnt_axes(first.axes, len(joined.shape)))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if joined.fill:
        plist.set_fill_value(np.asarray(joined.fill, joined.type.dtype))
    file_shape = tuple(joined.shape[i] for i in order)
    space = h5py.h5s.create_simple(file_shape)
    folder = os.path.dirname(os.path.realpath(dst))
    for source in joined.sources:
        if 0 in source.shape:  # HDF5 takes no empty selections
            continue
        size = tuple(source.shape[i] for i in order)
        space.select_hyperslab(tuple(source.at[i] for i in order), size)
        # relative, so that the folder can be moved as a whole
        path = escape(os.path.relpath(os.path.realpath(source.path), folder))
        selection = h5py.h5s.create_simple(size)
        # a fixed region: the file may grow later
        selection.select_hyperslab((0,) * len(size), size)
        plist.set_virtual(space, os.fsencode(path), escape(joined.name).encode(), selection)
    return make_dataset(file, joined.name, file_shape, joined.type, plist)


def _copy_sources(
    file: h5py.File,
    joined: JoinedDataset,
    update: Callable[[int], object],
) -> h5py.Dataset:
    order = fnt_axes(joined.axes, len(joined.shape))
    file_shape = [joined.shape[i] for i in np.argsort(order)]
    dataset = allocate(file, joined.name, file_shape, joined.type, joined.axes, joined.fill)
    for source in joined.sources:
        array = h5mmap(source.path, joined.name, source.axes)
        # the file may have been replaced since it was inspected
        if array.shape != source.shape or array.dtype != source.dtype:
            raise H5DataError(
                f"{describe(source.path, joined.name)} was replaced while being copied; join again"
            )
        copy_into(dataset, array, order, update, source.at)
        if isinstance(array, H5Lazy):
            array.close()
    return dataset


def _write_attributes(
    dataset: h5py.Dataset,
    joined: JoinedDataset,
    dst: str,
) -> None:
    with open_file(joined.sources[0].path) as first:
        _copy_attributes(first[joined.name], dataset)
    if joined.axes is not None:
        dataset.attrs["axes"] = joined.axes
    # those of the first file may be other features than those of the result
    dataset.attrs.pop("feature_names", None)
    if joined.feature_names is not None:
        write_names(dataset, joined.feature_names, describe(dst, joined.name))


def _copy_attributes(source: h5py.Dataset | h5py.File, target: h5py.Dataset | h5py.File) -> None:
    for key, value in source.attrs.items():
        if key not in NOT_COPIED:
            target.attrs[key] = value
