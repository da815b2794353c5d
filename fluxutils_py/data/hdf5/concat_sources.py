"""What is in the files that are to be joined."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5.feature_names import read_names
from fluxutils_py.data.hdf5.opening import (
    check_heap,
    describe,
    find_dataset,
    fnt_axes,
    holds_numbers,
    numpy_dtype,
    open_file,
    read_axes,
    wrap_h5_errors,
)
from fluxutils_py.data.hdf5.source_files import check_sources
from fluxutils_py.errors import H5DataError
from fluxutils_py.terminal import progress_bar


@dataclass
class ConcatSource:
    """A dataset of numbers in one of the files."""

    path: str
    axes: str | None
    shape: tuple[int, ...]  # as (F, N, T)
    dtype: np.dtype
    kind: Any  # the type as HDF5 has it
    names: tuple[str, ...] | None  # of features
    at: list[int] = field(default_factory=list)  # where it begins in the result


def inspect_sources(
    paths: list[str],
    names: Sequence[str] | None,
    axes: str | None,
    pair: tuple[int | None, int],
    verbose: Any,
    shown: str,
) -> tuple[dict[str, list[ConcatSource]], list[str], dict[str, str]]:
    """Datasets to join, datasets that are the same in all files, groups and the file that each is copied from."""
    parts: dict[str, list[ConcatSource]] = {}
    same: dict[str, Any] = {}
    groups: dict[str, str] = {}
    with progress_bar(verbose, f"h5concat {os.path.basename(shown)}: looking", len(paths), "file") as done:
        for path in paths:
            with open_file(path) as file, wrap_h5_errors(path):
                datasets, groups_here = _names_in(file, path, names)
                for name in groups_here:
                    groups.setdefault(name, path)
                if parts or same:
                    _require_same_names(paths[0], {*parts, *same}, path, set(datasets))
                for name in datasets:
                    check_heap(file, name, describe(path, name))
                    dataset = file[name]
                    numbers = holds_numbers(dataset) and all(d is None or _has_axis(d, dataset.ndim) for d in pair)
                    if (name in parts) if not numbers else (name in same):
                        raise H5DataError(
                            f"{describe(path, name)} has another type or number of axes than in {paths[0]}; "
                            "write it again like that one, or leave it out with names=[...]"
                        )
                    if numbers:
                        parts.setdefault(name, []).append(_part(file, path, name, axes))
                    else:
                        check_heap(file, name, describe(path, name), values=True)
                        _require_same_values(same, dataset, paths[0], path, name, pair)
            done(1)
    if not parts:
        raise H5DataError(
            f"{paths[0]}: no dataset in it has an axis {axes_shown(pair)} to join along; it holds "
            f"{', '.join(same) or 'none at all'} (datasets in groups are joined when named: names=['group/x'])"
        )
    return parts, list(same), groups


def _names_in(file: h5py.File, path: str, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Names of datasets and of groups, at the top level unless names are given."""
    if names is not None:
        for name in names:
            find_dataset(file, path, name)
        return list(names), []
    kinds = {}
    for name in file:
        try:
            kinds[name] = type(file[name])
        except (KeyError, OSError, RuntimeError):
            find_dataset(file, path, name)  # a dead link: says where it leads
    return [n for n, k in kinds.items() if k is h5py.Dataset], [n for n, k in kinds.items() if k is h5py.Group]


def _part(file: h5py.File, path: str, name: str, axes: str | None) -> ConcatSource:
    dataset, where = find_dataset(file, path, name), describe(path, name)
    letters = read_axes(dataset, axes if dataset.ndim == 3 else None, where)
    check_sources(dataset, where)
    check_heap(file, name, where, list(dataset.attrs))  # all of which are copied
    shape = tuple(int(dataset.shape[i]) for i in fnt_axes(letters, dataset.ndim))
    names = read_names(dataset, shape[0]) if len(shape) == 3 else None
    return ConcatSource(path, letters, shape, numpy_dtype(dataset), dataset.id.get_type().copy(), names)


def _has_axis(d: int, ndim: int) -> bool:
    return -ndim <= d < ndim


def axes_shown(pair: tuple[int | None, int]) -> str:
    return str(pair[1] if pair[0] is None else pair)


def _require_same_names(first: str, expected: set[str], path: str, found: set[str]) -> None:
    for here, there, missing in ((path, first, expected - found), (first, path, found - expected)):
        if missing:
            raise H5DataError(
                f"{describe(here, min(missing))} is missing, {there} has it; join files that hold the same datasets, "
                "or leave it out with names=[...]"
            )


def _require_same_values(
    same: dict[str, Any], dataset: h5py.Dataset, first: str, path: str, name: str, pair: tuple[int | None, int]
) -> None:
    values = dataset[()]
    if name not in same:
        same[name] = values
    elif not _equal(same[name], values):
        what = f"has no axis {axes_shown(pair)}" if holds_numbers(dataset) else "does not hold numbers"
        raise H5DataError(
            f"{describe(path, name)} {what}, so that it can only be copied, and is not the same as in {first}; "
            "put it into a group (which is copied from the first file) or leave it out with names=[...]"
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, h5py.Empty) or isinstance(b, h5py.Empty):
        return a == b
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
