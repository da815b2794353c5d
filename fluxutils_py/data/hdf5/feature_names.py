"""Read and write names of features, of arrays and in HDF5 files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py import errors
from fluxutils_py.data.hdf5.damage import read_attribute
from fluxutils_py.data.hdf5.opening import describe, wrap_h5_errors
from fluxutils_py.errors import H5DataError

Names = tuple[str, ...]


def get_feature_names(array: Any) -> Names | None:
    """The names of the F features of an (F, N, T) array; None where it has none."""
    if isinstance(array, h5py.Dataset):
        return read_names(array, array.shape[0], warn=False) if array and array.ndim == 3 else None
    names = getattr(array, "feature_names", None)
    if names is None or len(array.shape) != 3 or len(names) != array.shape[0]:
        return None
    return tuple(str(name) for name in names)


def check_names(names: Any, shape: Sequence[int], where: str) -> Names:
    """Check that there is one name for each feature of an array of a shape (F, N, T).

    Raises
    ------
    H5DataError
    """
    checked = names.tolist() if isinstance(names, np.ndarray) else names
    if (
        isinstance(checked, str)
        or not isinstance(checked, Iterable)
        or not all(isinstance(n, str) for n in checked)
    ):
        raise H5DataError(f"{where}: feature_names must be a list of strings, got {names!r}")
    checked = tuple(checked)
    if len(shape) != 3 or len(checked) != shape[0]:
        raise H5DataError(
            f"{where}: {len(checked)} feature_names for an array of shape {tuple(shape)}; expected "
            "three axes (F, N, T) and F names"
        )
    if any("\0" in name for name in checked):
        raise H5DataError(f"{where}: feature_names must not hold a zero byte, got {names!r}")
    return checked


def index_names(names: Names | None, key: Any, ndim: int) -> Names | None:
    """Names of what an index of an (F, N, T) array parse_index, if that has three axes again."""
    keys = key if isinstance(key, tuple) else (key,)
    if names is None or ndim != 3 or any(k is None for k in keys):
        return None
    first = keys[0] if keys else slice(None)
    if first is Ellipsis and len(keys) < 4:  # more keys: it stands for no axis
        return names
    return names[first] if isinstance(first, slice) else None


def read_names(dataset: h5py.Dataset, n_features: int, warn: bool = True) -> Names | None:
    """The names that stand beside a dataset; None, with a warning, for an attribute that is
    something else.

    No warning where the first axis may hold something else than features.
    """
    with wrap_h5_errors(describe(dataset.file.filename, dataset.name)):
        stored = read_attribute(dataset, "feature_names")
    names: list[Any] = []
    if isinstance(stored, np.ndarray) and stored.shape == (n_features,):
        names = [
            name.decode(errors="replace") if isinstance(name, bytes) else name
            for name in stored.tolist()
        ]
    if names and all(isinstance(name, str) and name.strip("\0") for name in names):
        return tuple(names)
    if warn and h5py.h5a.exists(dataset.id, b"feature_names"):
        errors.warn(
            f"{describe(dataset.file.filename, dataset.name)} has an attribute 'feature_names' "
            f"that does not hold {n_features} texts: the features have no names; write the "
            "attribute again, as with h5save",
        )
    return None


def write_names(dataset: h5py.Dataset, names: Names, where: str) -> None:
    """Note names beside a dataset, as an attribute ``feature_names``: a vector of F strings, in
    UTF-8.
    """
    try:
        dataset.attrs.create("feature_names", list(names), dtype=h5py.string_dtype())
    except (OSError, RuntimeError, ValueError) as error:
        raise H5DataError(
            f"{where}: {len(names)} feature_names do not fit into an HDF5 attribute ({error}); "
            "save without them"
        ) from error
