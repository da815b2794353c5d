"""Weights and masks of the elements of a batch, for losses and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError


def target_and_weight(labels: Any) -> tuple[Any, Tensor | None]:
    """Return the target among the labels, and the weights times the mask that follow it, if there
    are any.
    """
    target, *extras = labels if isinstance(labels, tuple | list) else (labels,)
    return target, _weights_times_mask(extras)


def _weights_times_mask(extras: list[Any]) -> Tensor | None:
    """Return weight times mask, from the labels after the first."""
    found: dict[str, Tensor] = {}
    for extra in extras:
        dtype = getattr(extra, "dtype", None)
        kind = (
            "mask"
            if dtype is torch.bool
            else "weights"
            if dtype is not None and dtype.is_floating_point
            else None
        )
        if kind is None or kind in found:
            came = f"a second {kind}" if kind else str(dtype or type(extra).__name__)
            raise DataError(
                "labels after the first must be a mask (a tensor of bool) or weights (a tensor of "
                f"floats), at most one of each; got {came}"
            )
        found[kind] = extra
    shapes = {tuple(t.shape) for t in found.values()}
    if len(shapes) > 1:
        mask, weights = tuple(found["mask"].shape), tuple(found["weights"].shape)
        raise ShapeError(
            f"the mask has shape {mask}, the weights have {weights}; give both the shape of the "
            "loss"
        )
    if "weights" not in found:
        return found.get("mask")
    return torch.where(found["mask"], found["weights"], 0) if "mask" in found else found["weights"]


def weights_differ(weight: Any) -> bool:
    """Return whether a tensor of weights has different values."""
    return (
        isinstance(weight, Tensor)
        and weight.numel() > 1
        and bool((weight != weight.reshape(-1)[0]).any())
    )


def takes_weights(measure: Any) -> bool:
    """Return whether a measure has an argument ``weights``."""
    try:
        return "weights" in inspect.signature(measure).parameters
    except (TypeError, ValueError):  # built-in
        return False


def update_metric(metric: Any, prediction: Any, target: Any, weight: Tensor | None) -> None:
    """Add a batch to a metric of any kind, with the weights of its elements if it takes them."""
    name = _weight_argument(metric)
    if weight is None or name is None:
        metric.update(prediction, target)
    else:
        metric.update(prediction, target, **{name: weight})


def require_weighable(metrics: Iterable[Any], weight: Tensor | None) -> None:
    """Raise :class:`DataError` if elements weigh differently, and the update of a metric takes no
    weights.
    """
    if weight is None or not weights_differ(weight):
        return
    for metric in metrics:
        if _weight_argument(metric) is None:
            name = getattr(metric, "name", None) or type(metric).__name__
            raise DataError(
                f"the batch has weights, but update(prediction, target) of metric {name!r} takes "
                "none: leave it out, or give a MeanMetric, or an object whose update has an "
                "argument weight"
            )


def _weight_argument(metric: Any) -> str | None:
    try:
        parameters = inspect.signature(metric.update).parameters
    except (TypeError, ValueError):  # built-in
        return None
    return next(
        (name for name in ("weight", "weights", "sample_weight") if name in parameters), None
    )
