"""Weights and masks of the elements of a batch, for losses and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fluxutils_py.errors import DataError


def target_and_weight(labels: object) -> tuple[Any, Tensor | None]:
    """Return the target among the labels, and the weights times the mask that follow it, if there
    are any.
    """
    target, *extras = labels if isinstance(labels, tuple | list) else (labels,)
    mask = weights = None
    for extra in extras:
        dtype = getattr(extra, "dtype", None)
        if dtype is torch.bool and mask is None:
            mask = extra
        elif dtype is not None and dtype.is_floating_point and weights is None:
            weights = extra
        else:
            raise DataError(
                "labels after the first must be a mask (a tensor of bool) or weights (a tensor of "
                f"floats), at most one of each; got {dtype or type(extra).__name__}"
            )
    if mask is None or weights is None:
        return target, weights if mask is None else mask
    return target, torch.where(mask, weights, 0)  # not a product: a masked weight may be NaN


def metric_name(metric: object) -> str:
    """Return the ``name`` of a metric, or the name of its class."""
    return getattr(metric, "name", None) or type(metric).__name__


def weights_differ(weight: object) -> TypeGuard[Tensor]:
    """Return whether a tensor of weights has different values."""
    return isinstance(weight, Tensor) and bool((weight != weight.flatten()[:1]).any())


def weigh(each: Tensor, weight: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return values times their weights, and the weights; what has weight 0 may be NaN."""
    if each.ndim == 0:
        raise DataError(
            f"the batch has weights, but {what} is a mean already: give it one value for each, "
            'such as nn.MSELoss(reduction="none"); a measure may have an argument weights'
        )
    weight = weight.to(each.dtype).expand_as(each)
    return torch.where(weight != 0, each * weight, 0), weight


def update_metric(metric: Any, prediction: object, target: object, weight: Tensor | None) -> None:
    """Add a batch to a metric of any kind, with the weights of its elements if it takes them.

    Raises
    ------
    DataError
        If elements weigh differently, and the metric takes no weights.
    """
    known = argument_names(metric.update)
    # torchmetrics and others call the argument differently
    name = next((n for n in ("weight", "weights", "sample_weight") if n in known), None)
    if weight is not None and name is not None:
        metric.update(prediction, target, **{name: weight})
        return
    if weights_differ(weight):  # it would count what has no weight
        raise DataError(
            f"the batch has weights, but update(prediction, target) of metric "
            f"{metric_name(metric)!r} takes none: give a MeanMetric, or an object whose update has "
            "an argument weight"
        )
    metric.update(prediction, target)


def argument_names(f: Callable[..., Any] | None) -> Iterable[str]:
    """Return the names of the arguments of a function; none for what is built in."""
    try:
        return inspect.signature(f).parameters  # type: ignore[arg-type]  # None raises, too
    except (TypeError, ValueError):
        return ()
