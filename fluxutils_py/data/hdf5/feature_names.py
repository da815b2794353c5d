"""Read and write names of features, of arrays and in HDF5 files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.hdf5.damage import read_attribute
from fluxutils_py.data.hdf5.opening import describe, wrap_h5_errors
from fluxutils_py.errors import H5DataError, warn

Names = tuple[str, ...]


def get_feature_names(array: Any) -> Names | None:
    """Return the names of the F features of an (F, N, T) array; None where it has none."""
    if isinstance(array, h5py.Dataset):
        if not array or array.ndim != 3:  # false: its file was closed
            return None
        # the first axis of a dataset in another order holds no features: no reason to warn
        return _stored_names(array, array.shape[0])
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


def read_names(dataset: h5py.Dataset, n_features: int) -> Names | None:
    """Return the feature names that a dataset has as an attribute.

    Warns, and returns None, if the attribute is something else.
    """
    names = _stored_names(dataset, n_features)
    if names is None and h5py.h5a.exists(dataset.id, b"feature_names"):
        warn(
            f"{describe(dataset.file.filename, dataset.name)} has an attribute 'feature_names' "
            f"that does not hold {n_features} texts: the features have no names; write the "
            "attribute again, as with h5save"
        )
    return names


def _stored_names(dataset: h5py.Dataset, n_features: int) -> Names | None:
    with wrap_h5_errors(describe(dataset.file.filename, dataset.name)):
        stored = read_attribute(dataset, "feature_names")
    if not isinstance(stored, np.ndarray) or stored.shape != (n_features,):
        return None
    names = [
        name.decode(errors="replace") if isinstance(name, bytes) else name
        for name in stored.tolist()
    ]
    # a name of zero bytes only is a string that was never written
    if not names or not all(isinstance(name, str) and name.strip("\0") for name in names):
        return None
    return tuple(names)


def write_names(dataset: h5py.Dataset, names: Names, where: str) -> None:
    """Store names as an attribute ``feature_names``: a vector of F strings, in UTF-8."""
    # an attribute holds 64 KiB at most
    sentence = (
        f"has {len(names)} feature_names, which do not fit into an HDF5 attribute ({{}}); save "
        "without them"
    )
    with wrap_h5_errors(where, sentence):
        dataset.attrs.create("feature_names", list(names), dtype=h5py.string_dtype())
