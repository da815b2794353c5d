"""Check single steps (F, N) of series, and choose series."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.errors import ShapeError


def check_step_shape(x: np.ndarray, shape: tuple[int, int]) -> None:
    """Require one step of all series; the error says how a step of another shape fits."""
    if x.shape == shape:
        return
    n_features, n_series = shape
    ways_out = []
    if x.shape == (n_features,) and n_series == 1:
        ways_out.append("give x[:, None]")
    elif x.ndim == 2 and n_features in x.shape:
        is_transposed = x.shape[0] != n_features
        n_found = x.shape[0] if is_transposed else x.shape[1]
        ways_out += ["give x.T"] * is_transposed
        ways_out += [f"make the stream with n_series={n_found}"] * (n_found != n_series)
    hint = ": " + ", and ".join(ways_out) if ways_out else ""
    raise ShapeError(f"a step must have the shape (F, N) = {shape}, got {x.shape}{hint}")


def series_indices(series: Any, n_series: int) -> np.ndarray:
    """Return the indices of the series chosen by an index, a list, a slice, or a mask (N,)."""
    try:
        return np.atleast_1d(np.arange(n_series)[series])
    except IndexError as error:
        raise IndexError(
            f"series must be an index, a list or slice of them, or a mask, of {n_series} series; "
            f"got {series!r}"
        ) from error
