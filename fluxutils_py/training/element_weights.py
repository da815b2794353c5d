"""Weights and masks of the elements of a batch, for losses and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError


def target_and_weight(labels: object) -> tuple[Any, Tensor | None]:
    """Return the target among the labels, and the weights times the mask that follow it, if there
    are any.
    """
    target, *extras = labels if isinstance(labels, tuple | list) else (labels,)
    return target, _weights_times_mask(extras)


def _weights_times_mask(extras: list[Any]) -> Tensor | None:
    """Return weight times mask, from the labels after the first."""
    factors: dict[str, Tensor] = {}
    for extra in extras:
        name = _factor_name(extra)
        if name is None or name in factors:
            type_name = getattr(extra, "dtype", None) or type(extra).__name__
            given = f"a second {name}" if name else type_name
            raise DataError(
                "labels after the first must be a mask (a tensor of bool) or weights (a tensor of "
                f"floats), at most one of each; got {given}"
            )
        factors[name] = extra
    weights = factors.get("weights")
    mask = factors.get("mask")
    if weights is None or mask is None:
        return mask if weights is None else weights
    if weights.shape != mask.shape:
        raise ShapeError(
            f"the mask has shape {tuple(mask.shape)}, the weights have {tuple(weights.shape)}; "
            "give both the shape of the loss"
        )
    return torch.where(mask, weights, 0)  # not a product: a weight that is masked may be NaN


def _factor_name(extra: object) -> str | None:
    """Return what a label after the first is, None if it is neither a mask nor weights."""
    dtype = getattr(extra, "dtype", None)
    if dtype is torch.bool:
        return "mask"
    if dtype is not None and dtype.is_floating_point:
        return "weights"
    return None


def metric_name(metric: object) -> str:
    """Return the ``name`` of a metric, or the name of its class."""
    return getattr(metric, "name", None) or type(metric).__name__


def weights_differ(weight: object) -> bool:
    """Return whether a tensor of weights has different values."""
    if not isinstance(weight, Tensor) or weight.numel() < 2:
        return False
    return bool((weight != weight.reshape(-1)[0]).any())


def takes_weights(measure: Callable[..., Any] | None) -> bool:
    """Return whether a measure has an argument ``weights``."""
    return measure is not None and "weights" in _argument_names(measure)


def update_metric(metric: Any, prediction: object, target: object, weight: Tensor | None) -> None:
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
    # equal weights change no mean
    if weight is None or not weights_differ(weight):
        return
    for metric in metrics:
        if _weight_argument(metric) is None:  # it would count what has no weight
            name = metric_name(metric)
            raise DataError(
                f"the batch has weights, but update(prediction, target) of metric {name!r} takes "
                "none: leave it out, or give a MeanMetric, or an object whose update has an "
                "argument weight"
            )


def _weight_argument(metric: Any) -> str | None:
    # torchmetrics and others call the argument differently
    known = _argument_names(metric.update)
    names = ("weight", "weights", "sample_weight")
    return next((name for name in names if name in known), None)


def _argument_names(f: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):  # built-in
        return ()
