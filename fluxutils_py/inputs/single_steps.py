"""Read single steps (F, N) of series, and choose series."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.data.arrays import reject_masked, to_numpy
from fluxutils_py.data.series import require_int64
from fluxutils_py.errors import DataError, ShapeError


def read_step(x: object, shape: tuple[int, int]) -> np.ndarray:
    """Return one step of all series, checked to be numbers of shape (F, N)."""
    if type(x) is not np.ndarray:
        reject_masked(x, "x")
        x = np.asarray(to_numpy(x))
    check_step_shape(x, shape)
    if x.dtype.kind not in "fiub":
        raise DataError(f"a step must hold real numbers, got dtype {x.dtype}")
    if x.dtype == np.uint64:
        require_int64(x, "x")
    return x


def check_step_shape(x: np.ndarray, shape: tuple[int, int]) -> None:
    """Require one step of all series; the error says how a step of another shape fits."""
    if x.shape == shape:
        return
    if x.ndim == 0:
        raise ShapeError(
            f"a step must be an array of the shape (F, N) = {shape}, a row per feature and a "
            f"column per series; got {type(x.item()).__name__}"
        )
    n_features, n_series = shape
    remedies = []
    if x.shape == (n_features,) and n_series == 1:
        remedies.append("give x[:, None]")
    elif x.ndim == 2 and n_features in x.shape:
        # with as many series as features, either axis may be meant: as given is more likely
        is_transposed = x.shape[0] != n_features
        n_given = x.shape[0] if is_transposed else x.shape[1]
        if is_transposed:
            remedies.append("give x.T")
        if n_given != n_series:
            remedies.append(f"make the stream with n_series={n_given}")
    remedy = ": " + ", and ".join(remedies) if remedies else ""
    raise ShapeError(f"a step must have the shape (F, N) = {shape}, got {x.shape}{remedy}")


def series_indices(series: Any, n_series: int) -> np.ndarray:
    """Return the indices of the series chosen by an index, a list, a slice, or a mask (N,)."""
    # an index into all indices: NumPy checks it, and knows masks, slices and negative numbers
    try:
        return np.atleast_1d(np.arange(n_series)[series])
    except IndexError as error:
        raise IndexError(
            f"series must be an index, a list or slice of them, or a mask, of {n_series} series; "
            f"got {series!r}"
        ) from error
