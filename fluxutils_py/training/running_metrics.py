"""Numbers gathered over steps: means, moving averages, and how often a prediction is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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

    def __init__(self, measure: Measure | None = None, name: str | None = None, short_name: str | None = None) -> None:
        self.measure = measure
        self.name = name or getattr(measure, "__name__", None) or type(self).__name__
        self.short_name = short_name or self.name
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.sum = self.weight = 0.0

    @torch.no_grad()
    def update(self, *values: Any, weight: float = 1.0) -> None:
        """Take in one step, a mean over ``weight`` data. One of weight 0 leaves no trace, whatever its value."""
        if weight:
            self._add(_number(values[0] if self.measure is None else self.measure(*values)), float(weight))

    def _add(self, value: float, weight: float) -> None:
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
    measure, name, short_name
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
    ) -> None:
        if not 0 < new_example_weight <= 1:
            raise ValueError(f"new_example_weight must be above 0 and at most 1, got {new_example_weight!r}")
        self.new_example_weight = new_example_weight
        super().__init__(measure, name, short_name)

    def reset(self) -> None:
        """Begin anew."""
        self.value, self.count = 0.0, 0

    def _add(self, value: float, weight: float) -> None:
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


# -- measures ------------------------------------------------------------------------------------------


def binary_accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """How often a probability is on the side of its label, 0 or 1. One of exactly 0.5 is a miss, as in gomlx.

    >>> binary_accuracy(torch.tensor([0.9, 0.6, 0.5, 0.1]), torch.tensor([1, 0, 1, 0])).item()
    0.5
    """
    return binary_logits_accuracy(prediction - 0.5, target)


def binary_logits_accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """:func:`binary_accuracy` of logits; one of exactly 0 is a miss."""
    if prediction.shape != target.shape:
        raise ValueError(f"predictions {tuple(prediction.shape)} and labels {tuple(target.shape)} differ in shape")
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
