"""Metrics over steps: means, moving averages, accuracies; weights of the elements of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.losses import needs_equal_shapes, require_equal_shapes, unreduced

# Called with a prediction and a target, or with the arguments of update(); returns a number.
Measure = Callable[..., Any]


class MeanMetric:
    """Mean of a number over steps, each weighted: by a :class:`Trainer` by its amount of data.

    Parameters
    ----------
    measure : callable, optional
        ``measure(prediction, target)`` returns a number, or a tensor whose mean is taken. None:
        :meth:`update` takes the number itself. With weights of the elements it must return one
        value for each of them, or have an argument ``weights`` and return their weighted mean, as
        :func:`binary_accuracy` does.
    name, short_name : str, optional
        By default the name of the measure.
    metric_type : str
        Kind of number, such as ``"loss"`` or ``"accuracy"``. Metrics of one kind share a plot.

    Notes
    -----
    Instead of a MeanMetric you can use any object with ``update(prediction, target)``,
    ``compute()`` and ``reset()``, such as a torchmetrics metric, which applies different weights.
    Source: ``NewMeanMetric`` of gomlx.

    Examples
    --------
    >>> loss = MeanMetric(name="loss")
    >>> loss.update(1.0, weight=100)
    >>> loss.update(9.0, weight=25)
    >>> loss.compute()
    2.6
    """

    memory: Sequence[str] = ("sum", "weight")  # attributes that a checkpoint holds

    def __init__(
        self,
        measure: Measure | None = None,
        name: str | None = None,
        short_name: str | None = None,
        *,
        metric_type: str = "metric",
    ) -> None:
        self.measure = measure
        self.metric_type = metric_type
        self.name = name or getattr(measure, "__name__", None) or type(self).__name__
        self.short_name = short_name or self.name
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.sum = self.weight = 0.0

    @torch.no_grad()
    def update(self, *values: Any, weight: float | Tensor = 1.0) -> None:
        """Add one step, a mean over ``weight`` data. A step of weight 0 has no effect, whatever its
        value.

        A tensor holds the weights of the elements, and the value is their weighted mean; elements
        of weight 0 may be NaN.

        Raises
        ------
        DataError
            If elements weigh differently, and the measure returns a mean.
        """
        values, weight = self.without_extras(values, weight)
        total = float(weight.double().sum() if isinstance(weight, Tensor) else weight)
        if not total:  # do not measure: the value may be NaN
            return
        measure = self.measure
        if measure is None:
            measured = values[0]
        elif weights_differ(weight) and "weights" in argument_names(measure):
            measured = measure(*values, weights=weight)
        else:
            require_equal_shapes(measure, *values[:2])
            measured = measure(*values)
            if weights_differ(weight):
                each = torch.as_tensor(measured).double()
                weighted, weight = weigh(each, weight, f"metric {self.name!r}")
                total = float(weight.sum())
                measured = weighted.sum() / total
        self.add(float(torch.as_tensor(measured, dtype=torch.float64).mean()), total)

    def without_extras(self, values: Any, weight: Any) -> tuple[Any, Any]:
        """Move weights and mask from the labels to the weight, for measures that take one label."""
        takes_one = needs_equal_shapes(self.measure) or "weights" in argument_names(self.measure)
        if len(values) != 2 or not isinstance(values[0], Tensor) or not takes_one:
            return values, weight
        target, among_labels = target_and_weight(values[1])
        if among_labels is not None:
            weight = among_labels.double() * (weight if isinstance(weight, Tensor) else 1)
        return (values[0], target), weight

    def pretty_print(self, value: float) -> str:
        """Format a value as text; an accuracy as a percentage."""
        return f"{value:.2%}" if self.metric_type == "accuracy" else f"{value:.4g}"

    def add(self, value: float, weight: float) -> None:
        self.sum += value * weight
        self.weight += weight

    def compute(self) -> float | None:
        """Return the value so far; None before the first step."""
        return self.sum / self.weight if self.weight else None

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers as plain data."""
        return {name: getattr(self, name) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        vars(self).update(state)


class EMAMetric(MeanMetric):
    """Exponential moving average of a number over steps, for numbers that change while they are
    measured.

    The ``n``-th step has weight ``max(new_example_weight, 1 / n)``, and all earlier steps share the
    rest, so it starts as the plain mean. The amount of data in a step does not matter.

    Parameters
    ----------
    measure, name, short_name, metric_type
        See :class:`MeanMetric`.
    new_example_weight : float
        Weight of a new step, in (0, 1].

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

    memory = ("value", "count")

    def __init__(self, *args: Any, new_example_weight: float = 0.01, **options: Any) -> None:
        if not 0 < new_example_weight <= 1:
            raise ValueError(
                f"new_example_weight must be above 0 and at most 1, got {new_example_weight!r}"
            )
        self.new_example_weight = new_example_weight
        super().__init__(*args, **options)

    def reset(self) -> None:
        """Forget all steps."""
        self.value = 0.0
        self.count = 0

    def add(self, value: float, weight: float) -> None:
        self.count += 1
        new = max(self.new_example_weight, 1 / self.count)  # at first the plain mean
        self.value = (1 - new) * self.value + new * value

    def compute(self) -> float | None:
        """Return the value so far; None before the first step."""
        return self.value if self.count else None


# -- several metrics, and means over a batch -------------------------------------------------------


def compute_all(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return the values of metrics by name; scalars as numbers."""
    values = {metric_name(metric): metric.compute() for metric in metrics}
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in values.items()
    }


def n_elements(prediction: object, weight: float | Tensor | None) -> float:
    """Return the amount of data in a batch: by its weight, else the prediction's size over all axes
    but the last.
    """
    if isinstance(weight, Tensor):
        return int((weight != 0).sum())
    if weight is not None:
        return weight
    first = prediction[0] if isinstance(prediction, tuple | list) else prediction
    if not isinstance(first, Tensor):
        return 1
    if first.ndim < 2 or not first.shape[-1]:
        return first.numel()
    return first.numel() // first.shape[-1]


def weighted_mean(loss: object, weight: float | Tensor | None) -> Tensor:
    """Return the mean of a loss as a scalar, weighted if there is a weight."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if not isinstance(weight, Tensor):
        return loss.mean()
    weighted, weight = weigh(loss, weight, "the loss of the Trainer")
    # without any element that counts the loss is 0
    return weighted.sum() / (weight != 0).sum().clamp(min=1)


# -- measures --------------------------------------------------------------------------------------


def binary_accuracy(
    prediction: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Share of probabilities on the side of their label, 0 or 1. Exactly 0.5 is a miss, as in
    gomlx.

    ``weights`` and ``mask`` are those of :func:`sparse_categorical_accuracy`.

    >>> binary_accuracy(torch.tensor([0.9, 0.6, 0.5, 0.1]), torch.tensor([1, 0, 1, 0])).item()
    0.5
    """
    return binary_logits_accuracy(prediction - 0.5, target, weights, mask)


def binary_logits_accuracy(
    prediction: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Accuracy of logits, see :func:`binary_accuracy`; a logit of exactly 0 is a miss."""
    if prediction.squeeze().shape != target.squeeze().shape:
        raise ShapeError(
            f"predictions {tuple(prediction.shape)} and labels {tuple(target.shape)} differ in "
            "shape"
        )
    target = target.reshape(prediction.shape)  # (B,) with (B, 1), as gomlx
    right = torch.where(target > 0.5, prediction > 0, prediction < 0)
    return _share_of(right, weights, mask)


def sparse_categorical_accuracy(
    prediction: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Share of labels that have the largest score. A label that ties with another class is a miss.

    Parameters
    ----------
    prediction : Tensor of shape (..., classes)
    target : Tensor of int, shape (...) or (..., 1)
    weights : Tensor, optional
        Weights of the labels; the result is the weighted mean.
    mask : Tensor of bool, optional
        Labels where it is False do not count.
    """
    target = target.reshape(prediction.shape[:-1])  # (..., 1) too
    if target.is_floating_point():  # labels that do not count may be NaN
        target = target.nan_to_num(0.0)
    score = prediction.gather(-1, target.long().unsqueeze(-1))
    n_as_large = (prediction >= score).sum(-1)  # the label itself included
    return _share_of(n_as_large == 1, weights, mask)


def _share_of(right: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the weighted share of the labels that are right."""
    counts = torch.ones(right.shape, dtype=torch.float64, device=right.device)
    for factor in (weights, mask):
        if factor is not None:
            counts = counts * factor.reshape(right.shape)
    return (right * counts).sum() / counts.sum()


# -- weights and masks of elements -----------------------------------------------------------------


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


class WeightedLoss:
    """Adapt a torch criterion to a :class:`Trainer` whose batches have weights or a mask among the
    labels.

    Parameters
    ----------
    loss : callable
        ``loss(prediction, target)``: a loss of ``torch.nn`` or ``torch.nn.functional`` with any
        reduction, or a function that returns one value per element.

    Returns
    -------
    Tensor
        When called with a prediction and a target, or a tuple of a target and extras: the loss of
        each element times its weight, and 0 where the mask is False. A bool extra is the mask, a
        float extra the weights. Both must have the shape of the unreduced loss, which is the shape
        of the target (for cross-entropy, of the class indices).

    Raises
    ------
    DataError
        When called, if an extra is neither bool nor float, or there are two masks or two weights.
    ShapeError
        When called, if the shape of an extra differs from the shape of the loss.

    Notes
    -----
    The trainer takes the mean over **all** elements, masked ones included, as gomlx did before
    0.17.1: a mask that is half False halves a constant loss. Weights never change the divisor. With
    the weights of a :class:`Minibatch` it divides by the number of nonzero weights instead:
    ``Minibatch((x,), (y, mask), weight=mask)`` gives the masked mean of later gomlx. A float target
    may be NaN where the mask is False or the weight 0; no gradient comes from there. Metrics of the
    trainer get the first label as target and take weighted means, divided by the sum of the
    weights. Source: ``losses`` of gomlx.

    Examples
    --------
    >>> prediction, target = torch.tensor([1.0, 3.0]), torch.tensor([0.0, torch.nan])
    >>> WeightedLoss(torch.nn.MSELoss())(prediction, (target, torch.tensor([True, False])))
    tensor([1., 0.])
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        if isinstance(loss, type) or not callable(loss):
            raise TypeError(f"WeightedLoss needs a loss(prediction, target), not {loss!r}")
        self.loss = loss
        # the name of a metric of this loss
        self.__name__ = getattr(loss, "__name__", None) or type(loss).__name__

    def __call__(self, prediction: Any, labels: object) -> Tensor:
        target, share = target_and_weight(labels)
        require_equal_shapes(self.loss, prediction, target)
        if share is None:
            return unreduced(self.loss)(prediction, target)
        if target.is_floating_point() and target.shape == share.shape:
            # a NaN would come back in the gradient, as 0 times NaN
            target = torch.where(share != 0, target, 0)
        each = unreduced(self.loss)(prediction, target)
        if each.shape != share.shape:
            raise ShapeError(
                f"weights and mask have shape {tuple(share.shape)}, the loss has "
                f"{tuple(each.shape)}; give them one value for each of its elements, and a loss "
                "that can do without reduction"
            )
        return torch.where(share != 0, each * share, 0)
