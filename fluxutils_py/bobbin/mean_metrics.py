"""Evaluate the means of losses and accuracies over a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fluxutils_py.bobbin.evaluation import EvalTask
from fluxutils_py.bobbin.results import EvalResults
from fluxutils_py.bobbin.writers import NullSummaryWriter, with_flax_names
from fluxutils_py.nn.states import module_of
from fluxutils_py.training.minibatch import as_minibatch
from fluxutils_py.training.running_metrics import MeanMetric, n_elements
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.tree import tree_map

if TYPE_CHECKING:
    from fluxutils_py.training.loop import Loop


@dataclass(frozen=True)
class Means(EvalResults):
    """Weighted means of several measures, as :class:`MetricsEval` returns; the first measure
    decides which is better.

    Attributes
    ----------
    sums : dict of str to float
        Sum over batches of the batch mean times the batch weight.
    weight : float
        Total weight of the batches.
    higher_is_better : bool
    """

    sums: dict[str, float]
    weight: float = 0.0
    higher_is_better: bool = False

    @property
    def means(self) -> dict[str, float]:
        """The means by name; NaN if there were no data."""
        return {
            name: total / self.weight if self.weight else math.nan
            for name, total in self.sums.items()
        }

    def reduce(self, other: Means) -> Means:
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Means(sums, self.weight + other.weight, self.higher_is_better)

    def is_better_than(self, other: Means) -> bool:
        """Compare the first measure: a number is better than NaN, NaN is never better."""
        # of the measures, in the order in which they were given
        mine = next(iter(self.means.values()))
        best = next(iter(other.means.values()))
        if math.isnan(mine) or math.isnan(best):
            return not math.isnan(mine)
        return mine > best if self.higher_is_better else mine < best

    def to_log_message(self) -> str:
        return ", ".join(f"{name} {mean:.6g}" for name, mean in self.means.items())

    def write_to_tensorboard(
        self,
        state: Loop | TrainState,
        writer: NullSummaryWriter,
    ) -> None:
        for name, mean in self.means.items():
            with_flax_names(writer).scalar(name, mean, state.step)


class MetricsEval(EvalTask):
    """Evaluate weighted means of measures, functions of predictions and labels.

    Batches have the forms and weights of a :class:`Trainer`
    (:func:`fluxutils_py.training.minibatch.as_minibatch`); the default weight is the number of
    predictions. ``evaluate`` takes the model or an object that has one.

    Parameters
    ----------
    measures : mapping of str to callable
        ``measure(prediction, label)`` returns the mean over a batch, or a tensor to average. It
        receives tuples if there are several predictions or labels. With weights of the elements it
        must return one value for each of them, or have an argument ``weights``. The first measure
        decides which result is better.
    higher_is_better : bool

    Examples
    --------
    >>> import torch
    >>> from fluxutils_py.bobbin import eval_batches
    >>> task = MetricsEval({"mse": torch.nn.MSELoss(), "mae": torch.nn.L1Loss()})
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> eval_batches(
    ...     task, "dev", [(x[:2], x[:2] + 1), (x[2:], x[2:] + 4)], torch.nn.Identity()
    ... ).means
    {'mse': 6.0, 'mae': 2.0}
    """

    def __init__(
        self,
        measures: Mapping[str, Callable[..., Any]],
        *,
        higher_is_better: bool = False,
    ) -> None:
        if not measures:
            raise ValueError(
                "there is nothing to measure: give a mapping such as {'loss': torch.nn.MSELoss()}"
            )
        self.measures = dict(measures)
        self.higher_is_better = higher_is_better

    def create_eval_results(self, dataset_name: str) -> Means:
        return Means(dict.fromkeys(self.measures, 0.0), 0.0, self.higher_is_better)

    def evaluate(
        self,
        batch: Any,
        state: object,
    ) -> Means:
        batch = as_minibatch(batch)
        model = module_of(state)
        device = next((p.device for p in model.parameters()), None)
        # batches of any structure, such as a dict as input
        to_device = partial(_move_tensor, device=device)
        prediction = model(*tree_map(to_device, batch.inputs))
        labels = tree_map(to_device, batch.labels)
        label = labels[0] if len(labels) == 1 else labels
        weight = to_device(batch.weight)  # of each element, or one for the batch
        if isinstance(weight, Tensor):
            total = float(weight.double().sum())  # float32 could not count beyond 2**24
        else:
            # without a weight in the batch, its number of predictions
            weight = total = n_elements(prediction, weight)
        sums = {}
        for name, measure in self.measures.items():
            value, amount = MeanMetric(measure, name).weighed(prediction, label, weight=weight)
            # a batch without data has no mean, which would make the sum NaN
            sums[name] = value * total if amount else 0.0
        return Means(sums, total, self.higher_is_better)


def _move_tensor(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
