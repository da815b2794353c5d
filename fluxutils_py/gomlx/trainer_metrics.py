"""The metrics of a Trainer, weighted as its loss is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fluxutils_py.gomlx.weighted_loss import WeightedLoss
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.element_weights import (
    require_weighable,
    target_and_weight,
    update_metric,
)
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.running_metrics import MeanMetric, n_elements, require_different_names

LossFn = Callable[..., Tensor]


class TrainerMetrics:
    """The metrics of a Trainer in training, or in evaluation.

    Each :class:`MeanMetric` needs only numbers, which ranks exchange with the gradient. Any other
    object, such as a torchmetrics metric, needs predictions; it covers those of this rank.

    Parameters
    ----------
    loss_fn : callable or None
    of_loss : sequence of MeanMetric
        Those of the whole loss.
    of_loss_fn : MeanMetric
        That of the part of the loss that ``loss_fn`` gives; left out without one.
    given : sequence of metrics

    Attributes
    ----------
    all : list
        All of these, in this order.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        of_loss: Sequence[MeanMetric],
        of_loss_fn: MeanMetric,
        given: Sequence[Any],
    ) -> None:
        self.loss_fn = loss_fn
        self.of_loss = of_loss
        self.of_loss_fn = [] if loss_fn is None else [of_loss_fn]
        self.all: list[Any] = [*of_loss, *self.of_loss_fn, *given]
        require_different_names(self.all)  # results are by name
        # ranks average the numbers of these; the others need predictions
        self.means = [metric for metric in given if _is_mean(metric)]
        self.others = [metric for metric in given if not _is_mean(metric)]

    @property
    def n_numbers(self) -> int:
        """Length of the result of :meth:`measure`."""
        return len(self.of_loss_fn) + 2 * len(self.means)

    def measure(self, prediction: object, batch: Minibatch, own_loss: float | None) -> list[float]:
        """Return the numbers of a batch, without adding them: the part of the loss that ``loss_fn``
        gave, then two for each mean.

        Ranks average numbers by their amounts of data, but a metric may have other weights than the
        loss. The second number is this share, its weight per datum of the loss; the first is the
        mean times the share. The quotient of the averages is then the mean over all ranks.

        Raises
        ------
        DataError
            If a metric cannot weigh the elements of the batch.
        """
        require_weighable(self.others, _target_and_weight(None, self.loss_fn, batch)[1])
        n = n_elements(prediction, batch.weight)
        numbers = [] if own_loss is None else [own_loss]
        for metric in self.means:
            target, weight = _target_and_weight(metric, self.loss_fn, batch)
            weighting = n if weight is None else weight
            value, amount = metric.weighed(prediction, target, weight=weighting)
            share = amount / n if n else 0.0  # without data on this rank, others may have some
            numbers += [value * share, share]
        return numbers

    def add(self, loss: float, numbers: Sequence[float], n: float) -> None:
        """Add a batch of ``n`` data by its loss and its numbers, perhaps averaged over ranks."""
        if not n:  # the loss may be NaN
            return
        for metric in self.of_loss:
            metric.add(loss, n)
        for metric in self.of_loss_fn:
            own_loss, *numbers = numbers
            metric.add(own_loss, n)
        for metric, scaled, share in zip(self.means, numbers[::2], numbers[1::2], strict=True):
            if share:  # else no rank had data for the metric
                metric.add(scaled / share, share * n)

    def add_predictions(self, prediction: object, batch: Minibatch) -> None:
        """Add the predictions of this rank's part of a batch to the metrics that need them."""
        if n_elements(prediction, batch.weight):
            for metric in self.others:
                target, weight = _target_and_weight(metric, self.loss_fn, batch)
                update_metric(metric, prediction, target, weight)

    def add_up_ranks(self, ranks: RankGroup) -> None:
        """Let each :class:`MeanMetric` cover the data of all ranks.

        Subclasses have other states, which sums do not combine: they cover this rank's data.
        """
        for metric in self.all:
            if type(metric) is MeanMetric:
                states = ranks.allgather(metric.state_dict())
                total = {name: sum(state[name] for state in states) for name in states[0]}
                metric.load_state_dict(total)


def _is_mean(metric: object) -> bool:
    """Return whether a metric is a mean of numbers, which can be averaged over ranks."""
    # a median has the methods of a mean, but no sum that ranks could exchange
    return isinstance(metric, MeanMetric) and type(metric).update is MeanMetric.update


def _target_and_weight(
    metric: object, loss_fn: object, batch: Minibatch
) -> tuple[Any, Tensor | None]:
    """Return the target of a batch and the weights of its elements, those among the labels of a
    WeightedLoss too; a metric whose measure is one reads these itself.
    """
    weight = batch.weight if isinstance(batch.weight, Tensor) else None
    reads_labels = isinstance(getattr(metric, "measure", None), WeightedLoss)
    if reads_labels or not isinstance(loss_fn, WeightedLoss):
        return batch.y, weight
    target, among_labels = target_and_weight(batch.labels)
    if among_labels is None:
        return target, weight
    if weight is None:  # in float64, in which metrics sum
        return target, among_labels.double()
    return target, among_labels * weight
