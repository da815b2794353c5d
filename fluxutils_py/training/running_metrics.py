"""Metrics over steps: means, moving averages, accuracies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.losses import require_equal_shapes

__all__ = ["EMAMetric", "MeanMetric", "binary_accuracy", "binary_logits_accuracy", "sparse_categorical_accuracy"]

Measure = Callable[..., Any]  # of a prediction and a target, or of whatever update() is given; returns a number


class MeanMetric:
    """The mean of a number over steps, each weighed by how many data it is of.

    Parameters
    ----------
    measure : callable, optional
        ``measure(prediction, target)`` returns a number or a tensor, whose mean is taken. None: :meth:`update` is given
        the number itself.
    name, short_name : str, optional
        By default that of the measure.
    metric_type : str
        What kind of number it is, such as ``"loss"`` or ``"accuracy"``: metrics of one kind share a plot.

    Notes
    -----
    Anything with ``update(prediction, target)``, ``compute()`` and ``reset()``, such as a metric of torchmetrics, does
    where this does, and weighs by rules of its own. Source: ``NewMeanMetric`` of gomlx.

    Examples
    --------
    >>> loss = MeanMetric(name="loss")
    >>> loss.update(1.0, weight=100)
    >>> loss.update(9.0, weight=25)
    >>> loss.compute()
    2.6
    """

    def __init__(
        self,
        measure: Measure | None = None,
        name: str | None = None,
        short_name: str | None = None,
        *,
        metric_type: str = "metric",
    ) -> None:
        self.measure, self.metric_type = measure, metric_type
        self.name = name or getattr(measure, "__name__", None) or type(self).__name__
        self.short_name = short_name or self.name
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.sum = self.weight = 0.0

    def update(self, *values: Any, weight: float = 1.0) -> None:
        """Take in one step, a mean over ``weight`` data. One of weight 0 leaves no trace, whatever its value."""
        if weight:
            self.add(self.measured(*values), float(weight))

    @torch.no_grad()
    def measured(self, *values: Any) -> float:
        """What the measure comes to, without taking it in."""
        if self.measure is None:
            return _number(values[0])
        require_equal_shapes(self.measure, *values[:2])
        return _number(self.measure(*values))

    def pretty_print(self, value: float) -> str:
        """A value as text, a share of hits as a percentage."""
        return f"{value:.2%}" if self.metric_type == "accuracy" else f"{value:.4g}"

    def add(self, value: float, weight: float) -> None:
        self.sum += value * weight
        self.weight += weight

    def compute(self) -> float | None:
        """The number so far; None before the first step."""
        return self.sum / self.weight if self.weight else None

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"sum": self.sum, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.sum, self.weight = state["sum"], state["weight"]


class EMAMetric(MeanMetric):
    """An exponential moving average of a number over steps, for what changes while it is measured.

    The ``n``-th step counts ``max(new_example_weight, 1 / n)``, all before it the rest: the plain mean at first. Steps
    count alike, however many data they are of.

    Parameters
    ----------
    measure, name, short_name, metric_type
        As for :class:`MeanMetric`.
    new_example_weight : float
        In (0, 1].

    Notes
    -----
    Source: ``NewExponentialMovingAverageMetric`` of gomlx.

    Examples
    --------
    >>> loss = EMAMetric(name="loss", new_example_weight=0.5)
    >>> for value in (1.0, 2.0, 4.0):
    ...     loss.update(value)
    >>> loss.compute()
    2.75
    """

    def __init__(
        self,
        measure: Measure | None = None,
        name: str | None = None,
        short_name: str | None = None,
        *,
        new_example_weight: float = 0.01,
        metric_type: str = "metric",
    ) -> None:
        if not 0 < new_example_weight <= 1:
            raise ValueError(f"new_example_weight must be above 0 and at most 1, got {new_example_weight!r}")
        self.new_example_weight = new_example_weight
        super().__init__(measure, name, short_name, metric_type=metric_type)

    def reset(self) -> None:
        """Begin anew."""
        self.value, self.count = 0.0, 0

    def add(self, value: float, weight: float) -> None:
        self.count += 1
        new = max(self.new_example_weight, 1 / self.count)
        self.value = (1 - new) * self.value + new * value

    def compute(self) -> float | None:
        """The number so far; None before the first step."""
        return self.value if self.count else None

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.value, self.count = state["value"], state["count"]


def _number(value: Any) -> float:
    return float(value.detach().double().mean()) if isinstance(value, Tensor) else float(value)


# -- several metrics, and means over a batch -----------------------------------------------------------


def metric_name(metric: Any) -> str:
    """What a metric is called: its ``name``, or that of its class."""
    return getattr(metric, "name", None) or type(metric).__name__


def compute_all(metrics: Iterable[Any]) -> dict[str, Any]:
    """What metrics come to, by name; scalars as numbers."""
    values = {metric_name(metric): metric.compute() for metric in metrics}
    return {name: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for name, v in values.items()}


def n_elements(prediction: Any, weight: float | Tensor | None) -> float:
    """How many data the mean over a batch is of: as its weight says, else all but the last axis of the prediction."""
    if isinstance(weight, Tensor):
        return int((weight != 0).sum())
    if weight is not None:
        return weight
    first = prediction[0] if isinstance(prediction, tuple | list) else prediction
    if not isinstance(first, Tensor):
        return 1
    return first.numel() // first.shape[-1] if first.ndim > 1 and first.shape[-1] else first.numel()


def weighted_mean(loss: Any, weight: float | Tensor | None) -> Tensor:
    """A loss as a scalar."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if not isinstance(weight, Tensor):
        return loss.mean()
    if loss.ndim == 0:
        raise ValueError(
            "the batch has weights, but the loss is a mean already: give the Trainer one that is not reduced, such as "
            'nn.MSELoss(reduction="none")'
        )
    weight = weight.to(loss.dtype).expand_as(loss)
    return torch.where(weight != 0, loss * weight, 0).sum() / (weight != 0).sum().clamp(min=1)


# -- measures ------------------------------------------------------------------------------------------


def binary_accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """How often a probability is on the side of its label, 0 or 1. One of exactly 0.5 is a miss, as in gomlx.

    >>> binary_accuracy(torch.tensor([0.9, 0.6, 0.5, 0.1]), torch.tensor([1, 0, 1, 0])).item()
    0.5
    """
    return binary_logits_accuracy(prediction - 0.5, target)


def binary_logits_accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """:func:`binary_accuracy` of logits; one of exactly 0 is a miss."""
    if prediction.squeeze().shape != target.squeeze().shape:
        raise ShapeError(f"predictions {tuple(prediction.shape)} and labels {tuple(target.shape)} differ in shape")
    target = target.reshape(prediction.shape)  # (B,) with (B, 1), as gomlx
    return torch.where(target > 0.5, prediction > 0, prediction < 0).double().mean()


def sparse_categorical_accuracy(
    prediction: Tensor, target: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """How often the largest score is that of the label. A label that shares the largest with another is a miss.

    Parameters
    ----------
    prediction : Tensor of shape (..., classes)
    target : Tensor of int, shape (...) or (..., 1)
    weights : Tensor, optional
        What each counts: the result is the weighted mean.
    mask : Tensor of bool, optional
        False: does not count.
    """
    target = target.reshape(prediction.shape[:-1]).long()
    score = prediction.gather(-1, target.unsqueeze(-1))
    right = ((prediction >= score).sum(-1) == 1).double()
    counts = torch.ones_like(right) if weights is None else weights.reshape(right.shape).double()
    if mask is not None:
        counts = counts * mask.reshape(right.shape)
    return (right * counts).sum() / counts.sum()
