"""Check the sizes with which layers are built and called."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from fluxutils_py.errors import ShapeError


def check_size(layer: nn.Module, name: str, value: Any, minimum: int = 1) -> int:
    """``value`` as an int of at least ``minimum``; the error names the layer and the argument."""
    message = f"{type(layer).__name__}: {name} must be an integer of {minimum} or more, got {value!r}"
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        size = operator.index(value)  # NumPy's integers too
    except TypeError:
        raise TypeError(message) from None
    if size < minimum:
        raise ValueError(message)
    return size


def check_probability(layer: nn.Module, name: str, value: Any) -> float:
    """``value`` as a float from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{type(layer).__name__}: {name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def check_features(layer: str, x: Tensor, n_in: int) -> None:
    """Raise ShapeError unless the last axis of ``x`` has ``n_in`` features."""
    if x.shape[-1] != n_in:
        raise ShapeError(f"{layer} takes {n_in} features (n_in), got a tensor of shape {tuple(x.shape)}")
