"""Metrics of a trainer's batches, with the weights that its loss obeys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fluxutils_py.gomlx.median_metric import MedianMetric
from fluxutils_py.gomlx.weighted_loss import WeightedLoss
from fluxutils_py.training.element_weights import target_and_weight, update_metric
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.running_metrics import MeanMetric, n_elements


def is_mean(metric: Any) -> bool:
    """Return whether a metric is a mean of numbers, which can be averaged over ranks."""
    return isinstance(metric, MeanMetric) and not isinstance(metric, MedianMetric)


def target_for_metrics(loss_fn: Any, batch: Minibatch) -> tuple[Any, Tensor | None]:
    """Return the target of a batch and the weights of its elements, those among the labels of a
    WeightedLoss too.
    """
    weight = batch.weight if isinstance(batch.weight, Tensor) else None
    if not isinstance(loss_fn, WeightedLoss):
        return batch.y, weight
    target, among_labels = target_and_weight(batch.labels)
    if among_labels is None:
        return target, weight
    return target, among_labels.double() if weight is None else among_labels * weight


def weigh_metrics(
    metrics: Sequence[MeanMetric], loss_fn: Any, prediction: Any, batch: Minibatch
) -> list[float]:
    """Return two numbers for each metric, so that means over ranks weighted by data give
    :func:`add_weighed` all.
    """
    n, numbers = n_elements(prediction, batch.weight), []
    for metric in metrics:
        label, each = _label_and_weight(metric, loss_fn, batch)
        value, amount = metric.weighed(prediction, label, weight=n if each is None else each)
        numbers += [value * (amount / n), amount / n] if n else [0.0, 0.0]
    return numbers


def add_weighed(metrics: Sequence[MeanMetric], numbers: Sequence[float], n: float) -> None:
    """Add to each metric the step whose numbers :func:`weigh_metrics` returned, over ``n`` data."""
    for metric, total, share in zip(metrics, numbers[::2], numbers[1::2], strict=True):
        if share:
            metric.add(total / share, share * n)


def update_from_batch(metric: Any, loss_fn: Any, prediction: Any, batch: Minibatch) -> None:
    """Add a batch to a metric of any kind."""
    label, each = _label_and_weight(metric, loss_fn, batch)
    if isinstance(metric, MeanMetric):
        metric.update(
            prediction, label, weight=n_elements(prediction, batch.weight) if each is None else each
        )
    else:
        update_metric(metric, prediction, label, each)


def add_up_ranks(metrics: Sequence[Any], ranks: Any) -> None:
    """Let each :class:`MeanMetric` cover the data of all ranks."""
    for metric in metrics:
        if type(metric) is MeanMetric:
            states = ranks.allgather(metric.state_dict())
            metric.load_state_dict(
                {name: sum(state[name] for state in states) for name in states[0]}
            )


def _label_and_weight(metric: Any, loss_fn: Any, batch: Minibatch) -> tuple[Any, Tensor | None]:
    """Return label and weights for a metric; one whose measure is a :class:`WeightedLoss` finds its
    own.
    """
    if isinstance(getattr(metric, "measure", None), WeightedLoss):
        return batch.y, batch.weight if isinstance(batch.weight, Tensor) else None
    return target_for_metrics(loss_fn, batch)
