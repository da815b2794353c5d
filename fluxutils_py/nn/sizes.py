"""Check the sizes of layers and of their inputs."""

from __future__ import annotations

from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.validation import check_integer


def set_sizes(layer: nn.Module, **sizes: object) -> None:
    """Set each size, an integer of at least 1, as an attribute of the layer; errors name the layer
    and the size.
    """
    for name, value in sizes.items():
        setattr(layer, name, check_integer(f"{type(layer).__name__}: {name}", value, 1))


def check_probability(layer: nn.Module, name: str, value: float) -> float:
    """Return ``value`` as a float; raise ValueError unless it is between 0 and 1."""
    if not 0 <= value <= 1:  # NaN is neither
        raise ValueError(
            f"{type(layer).__name__}: {name} must be a number from 0 to 1, got {value!r}"
        )
    return float(value)


def check_features(layer: str, x: Tensor, n_in: int) -> None:
    """Raise ShapeError unless the last axis of ``x`` has ``n_in`` features."""
    if x.shape[-1] != n_in:
        raise ShapeError(
            f"{layer} takes {n_in} features (n_in), got a tensor of shape {tuple(x.shape)}"
        )
