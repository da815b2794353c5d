"""Look at what the files hold that are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5 import opening
from fluxutils_py.data.hdf5.datasets import warn_of_packing
from fluxutils_py.data.hdf5.feature_names import read_names
from fluxutils_py.data.hdf5.opening import check_heap, describe
from fluxutils_py.data.hdf5.source_files import check_sources
from fluxutils_py.errors import H5DataError

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
    """Return the datasets to join, with a source for each file, and those to copy whole, with their file."""
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
                    joins = opening.holds_numbers(item) and all(d is None or -item.ndim <= d < item.ndim for d in pair)
                    files[-1][name] = _read_source(item, path, name, axes) if joins else None
                    if not joins:
                        check_heap(file, name, describe(path, name), values=True)
                        _require_same_values(values, item, path, name, pair)
        update(1)
    joined: dict[str, list[Source]] = {}
    for name in dict.fromkeys(name for datasets in files for name in datasets):
        having = [(path, datasets[name]) for path, datasets in zip(paths, files, strict=True) if name in datasets]
        first_path, first = having[0]
        for path, source in having:
            if (source is None) != (first is None):
                raise H5DataError(
                    f"{describe(path, name)} has another type or number of axes than in {first_path}; write it again "
                    "like that one, or leave it out with names=[...]"
                )
        if len(having) < len(files) and fill is None:
            path = next(path for path, datasets in zip(paths, files, strict=True) if name not in datasets)
            raise H5DataError(
                f"{describe(path, name)} is missing, {first_path} has it; pass fill=np.nan to leave a gap there, or "
                "leave it out with names=[...]"
            )
        if first is not None:
            joined[name] = [h.get(name) or _gap_of(first, h, p, name, pair) for p, h in zip(paths, files, strict=True)]
    if not joined:
        raise H5DataError(
            f"{paths[0]}: no dataset in it has an axis {show_axes(pair)} to join along; it holds "
            f"{', '.join(values) or 'none at all'} (datasets in groups are joined when named: names=['group/x'])"
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
    return Source(path, letters, shape, opening.numpy_dtype(dataset), dataset.id.get_type().copy(), names)


def _gap_of(like: Source, datasets: dict[str, Source | None], path: str, name: str, pair: Axes) -> Source:
    """What a file leaves that lacks a dataset: as long as the other datasets in it."""
    shape = list(like.shape)
    for axis in (axis for axis in pair if axis is not None):
        lengths = {source.shape[axis] for source in datasets.values() if source is not None}
        if len(lengths) != 1:
            raise H5DataError(
                f"{describe(path, name)} is missing, and how long a gap to leave along axis {axis} cannot be told from "
                f"the file's other datasets; write one of NaN there, or leave it out with names=[...]"
            )
        shape[axis] = lengths.pop()
    return replace(like, path=path, shape=tuple(shape), names=None, exists=False)


def _require_same_values(
    values: dict[str, tuple[str, Any]], dataset: h5py.Dataset, path: str, name: str, pair: Axes
) -> None:
    first_path, first = values.setdefault(name, (path, dataset[()]))
    if not _equal_values(first, dataset[()]):
        reason = f"has no axis {show_axes(pair)}" if opening.holds_numbers(dataset) else "does not hold numbers"
        raise H5DataError(
            f"{describe(path, name)} {reason}, so that it can only be copied, and is not the same as in {first_path}; "
            "put it into a group (which is copied from the first file) or leave it out with names=[...]"
        )


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, h5py.Empty) or isinstance(b, h5py.Empty):
        return a == b
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def show_axes(pair: Axes) -> str:
    return str(pair[1] if pair[0] is None else pair)
