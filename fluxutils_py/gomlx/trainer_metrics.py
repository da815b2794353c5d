"""The metrics of a Trainer, weighted as its loss is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fluxutils_py.gomlx.median_metric import MedianMetric
from fluxutils_py.gomlx.weighted_loss import WeightedLoss
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.element_weights import (
    require_weighable,
    target_and_weight,
    update_metric,
)
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.running_metrics import (
    EMAMetric,
    MeanMetric,
    n_elements,
    require_different_names,
)

LossFn = Callable[..., Tensor]


class MetricMean(NamedTuple):
    """The mean of a metric over one batch.

    Ranks average numbers by their amounts of data, but a metric may have other weights than the
    loss. Scaled by its share, the mean of a batch comes out right all the same: the quotient of the
    two averages is the mean over all ranks.
    """

    scaled: float  # mean of the metric times its share
    share: float  # weight of the metric per datum of the loss


class BatchNumbers(NamedTuple):
    """Numbers of one training step: means over its data on this rank, or on all ranks."""

    own_loss: float | None  # of loss_fn alone; None without one
    means: list[MetricMean]  # one for each MeanMetric

    def pack(self) -> list[float]:
        """Return the numbers as a flat list, for the vector that ranks sum."""
        own_loss = [] if self.own_loss is None else [self.own_loss]
        return [*own_loss, *(number for mean in self.means for number in mean)]

    @classmethod
    def unpack(
        cls,
        numbers: Sequence[float],
        has_own_loss: bool,
    ) -> BatchNumbers:
        """Return the numbers that :meth:`pack` wrote."""
        own_loss = None
        if has_own_loss:
            own_loss, *numbers = numbers
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return cls(own_loss, [MetricMean(*pair) for pair in pairs])


class Predictions(NamedTuple):
    """Predictions of one batch, with the targets and the weights of their elements."""

    prediction: Any
    target: Any
    weight: Tensor | None


class TrainMetrics:
    """The training metrics of a Trainer.

    Each :class:`MeanMetric` needs only numbers, which ranks exchange with the gradient. Any other
    object, such as a torchmetrics metric, needs predictions; it covers those of this rank.

    Attributes
    ----------
    all : list
        The metrics of the loss, then the given ones.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        given: Sequence[Any],
    ) -> None:
        self.loss_fn = loss_fn
        self.batch_loss = MeanMetric(name="batch_loss", short_name="loss+", metric_type="loss")
        self.ema_loss = EMAMetric(name="ema_loss", short_name="~loss+", metric_type="loss")
        self.all: list[Any] = [self.batch_loss, self.ema_loss]
        if loss_fn is not None:
            self.ema_loss_fn = EMAMetric(name="ema_loss_fn", short_name="~loss", metric_type="loss")
            self.all.append(self.ema_loss_fn)
        self.all += given
        require_different_names(self.all)  # results are by name
        # ranks average the numbers of these; the others need predictions
        self.means = [metric for metric in given if _is_mean(metric)]
        self.others = [metric for metric in given if not _is_mean(metric)]

    @property
    def n_numbers(self) -> int:
        """Length of :meth:`BatchNumbers.pack`."""
        return 2 * len(self.means) + (self.loss_fn is not None)

    def measure(
        self,
        prediction: object,
        batch: Minibatch,
        own_loss: float | None,
    ) -> BatchNumbers:
        """Return the numbers of a batch, without adding them."""
        n = n_elements(prediction, batch.weight)
        means = [self._measure_mean(metric, prediction, batch, n) for metric in self.means]
        return BatchNumbers(own_loss, means)

    def _measure_mean(
        self,
        metric: MeanMetric,
        prediction: object,
        batch: Minibatch,
        n: float,
    ) -> MetricMean:
        target, weight = _target_and_weight(metric, self.loss_fn, batch)
        weighting = n if weight is None else weight
        value, amount = metric.weighed(prediction, target, weight=weighting)
        if not n:  # no data on this rank; others may have some
            return MetricMean(0.0, 0.0)
        share = amount / n
        return MetricMean(value * share, share)

    def predictions_of(
        self,
        prediction: object,
        batch: Minibatch,
    ) -> Predictions:
        """Return what :meth:`add_predictions` needs of a batch; raise DataError if a metric cannot
        weigh its elements.
        """
        target, weight = target_for_metrics(self.loss_fn, batch)
        require_weighable(self.others, weight)
        return Predictions(prediction, target, weight)

    def add_numbers(
        self,
        loss: float,
        numbers: BatchNumbers,
        n_live: float,
    ) -> None:
        """Add a step over ``n_live`` data of all ranks."""
        self.batch_loss.reset()  # it shows the loss of this step alone
        self.batch_loss.add(loss, n_live)
        self.ema_loss.add(loss, n_live)
        if numbers.own_loss is not None:
            self.ema_loss_fn.add(numbers.own_loss, n_live)
        for metric, mean in zip(self.means, numbers.means, strict=True):
            if mean.share:  # else no rank had data for the metric
                metric.add(mean.scaled / mean.share, mean.share * n_live)

    def add_predictions(self, predictions: Predictions | None) -> None:
        """Add the predictions of this rank's part of a batch; None if it had none."""
        if predictions is None:
            return
        for metric in self.others:
            update_metric(metric, *predictions)


class EvalMetrics:
    """The evaluation metrics of a Trainer, which add batches one by one.

    Attributes
    ----------
    all : list
        The metrics of the loss, then the given ones.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        given: Sequence[Any],
    ) -> None:
        self.loss_fn = loss_fn
        self.loss = MeanMetric(name="loss", short_name="#loss+", metric_type="loss")
        self.all: list[Any] = [self.loss]
        if loss_fn is not None:
            self.own_loss = MeanMetric(name="loss_fn", short_name="#loss", metric_type="loss")
            self.all.append(self.own_loss)
        self._n_built_in = len(self.all)
        self.all += given
        require_different_names(self.all)

    def add_batch(
        self,
        loss: float,
        own_loss: float | None,
        prediction: object,
        batch: Minibatch,
    ) -> None:
        """Add a batch, the part of its loss that ``loss_fn`` gave included."""
        given = self.all[self._n_built_in :]
        # before any update, so that an error leaves all metrics alike
        require_weighable(given, target_for_metrics(self.loss_fn, batch)[1])
        n = n_elements(prediction, batch.weight)
        self.loss.update(loss, weight=n)
        if own_loss is not None:
            self.own_loss.update(own_loss, weight=n)
        for metric in given:
            update_from_batch(metric, self.loss_fn, prediction, batch)

    def add_up_ranks(self, ranks: RankGroup) -> None:
        """Let each :class:`MeanMetric` cover the data of all ranks.

        Subclasses have other states, which sums do not combine: they cover this rank's data.
        """
        for metric in self.all:
            if type(metric) is MeanMetric:
                states = ranks.allgather(metric.state_dict())
                total = {name: sum(state[name] for state in states) for name in states[0]}
                metric.load_state_dict(total)


def target_for_metrics(loss_fn: object, batch: Minibatch) -> tuple[Any, Tensor | None]:
    """Return the target of a batch and the weights of its elements, those among the labels of a
    WeightedLoss too.
    """
    weight = batch.weight if isinstance(batch.weight, Tensor) else None
    if not isinstance(loss_fn, WeightedLoss):
        return batch.y, weight
    target, among_labels = target_and_weight(batch.labels)
    if among_labels is None:
        return target, weight
    if weight is None:  # in float64, in which metrics sum
        return target, among_labels.double()
    return target, among_labels * weight


def update_from_batch(
    metric: Any,
    loss_fn: object,
    prediction: object,
    batch: Minibatch,
) -> None:
    """Add a batch to a metric of any kind."""
    target, weight = _target_and_weight(metric, loss_fn, batch)
    if not isinstance(metric, MeanMetric):
        update_metric(metric, prediction, target, weight)
        return
    weighting = n_elements(prediction, batch.weight) if weight is None else weight
    metric.update(prediction, target, weight=weighting)


def _is_mean(metric: object) -> bool:
    """Return whether a metric is a mean of numbers, which can be averaged over ranks."""
    # a median has the methods of a mean, but no sum that ranks could exchange
    return isinstance(metric, MeanMetric) and not isinstance(metric, MedianMetric)


def _target_and_weight(
    metric: object,
    loss_fn: object,
    batch: Minibatch,
) -> tuple[Any, Tensor | None]:
    """Return target and weights for a metric; one whose measure is a :class:`WeightedLoss` reads
    the weights among the labels itself.
    """
    if isinstance(getattr(metric, "measure", None), WeightedLoss):
        return batch.y, batch.weight if isinstance(batch.weight, Tensor) else None
    return target_for_metrics(loss_fn, batch)
