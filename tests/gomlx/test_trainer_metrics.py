"""Metrics of a trainer (trainer_metrics) obey the weights and masks that its loss obeys; against
NumPy.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx import Trainer, WeightedLoss
from fluxutils_py.gomlx.running_metrics import (
    MeanMetric,
    binary_accuracy,
)

NONE = nn.MSELoss(reduction="none")
X = torch.tensor([[0.0], [100.0], [2.0], [0.3], [0.9]])
Y = torch.tensor([[1.0], [torch.nan], [5.0], [0.0], [1.0]])
W = torch.tensor([[1.0], [0.0], [0.5], [2.0], [1.5]])
MSE = np.average((X - Y.nan_to_num()) ** 2, weights=W)


class Same(nn.Module):
    """Gives its input, plus a parameter of 0."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.shift


def test_the_weights_of_a_batch_are_those_of_its_metrics_in_evaluation():
    trainer = Trainer(Same(), NONE, eval_metrics=[MeanMetric(NONE, "mse")])
    batches = [((X[:2],), (Y[:2],), W[:2]), ((X[2:],), (Y[2:],), W[2:])]
    assert trainer.eval(batches)["mse"] == pytest.approx(MSE)
    assert trainer.eval([((X,), (Y,), W)])["mse"] == pytest.approx(MSE)


def test_a_mean_is_refused_where_elements_weigh_differently():
    trainer = Trainer(Same(), NONE, torch.optim.SGD, [MeanMetric(nn.MSELoss(), "mse")])
    with pytest.raises(DataError, match="mse"):
        trainer.train_step(((X,), (Y.nan_to_num(),), W))
    assert trainer.model.shift.item() == 0.0


class Counter:
    """A metric of another library that knows no weights."""

    name = "counter"

    def __init__(self):
        self.n = 0

    def update(self, prediction, target):
        self.n += len(prediction)

    def compute(self):
        return self.n

    def reset(self):
        self.n = 0


class WeightedCounter(Counter):
    def update(self, prediction, target, sample_weight=None):
        self.n += float(sample_weight.sum())


def test_a_metric_of_another_library_gets_the_weights_or_is_refused():
    for make in (
        lambda metric: Trainer(Same(), NONE, eval_metrics=[metric]).eval,
        lambda metric: (
            lambda data: (
                Trainer(Same(), NONE, torch.optim.SGD, [metric]).train_step(data[0]).metrics
            )
        ),
    ):
        batches = [((X,), (Y.nan_to_num(),), W)]
        assert make(WeightedCounter())(batches)["counter"] == 5.0
        with pytest.raises(DataError, match="counter"):
            make(Counter())(batches)
        assert make(Counter())([((X,), (Y.nan_to_num(),), torch.ones(5, 1))])["counter"] == 5


def test_masks_and_weights_among_the_labels_reach_all_metrics():
    probability, mask = (
        torch.tensor([[0.9], [0.2], [0.7], [0.6]]),
        torch.tensor([[True], [True], [False], [True]]),
    )
    label, weight = (
        torch.tensor([[1.0], [1.0], [torch.nan], [0.0]]),
        torch.tensor([[3.0], [1.0], [9.0], [1.0]]),
    )
    metrics = [
        MeanMetric(binary_accuracy, "accuracy"),
        MeanMetric(nn.L1Loss(reduction="none"), "mae"),
    ]
    metrics.append(MeanMetric(WeightedLoss(nn.MSELoss()), "as the loss"))
    trainer = Trainer(Same(), WeightedLoss(nn.MSELoss()), torch.optim.SGD, metrics, metrics)
    for found in (
        trainer.eval([((probability,), (label, mask, weight))]),
        trainer.train_step(((probability,), (label, mask, weight))).metrics,
    ):
        assert found["accuracy"] == pytest.approx(3 / 5)
        assert found["mae"] == pytest.approx((3 * 0.1 + 0.8 + 0.6) / 5)
        # gomlx: over all elements
        assert found["as the loss"] == pytest.approx((3 * 0.1**2 + 0.8**2 + 0.6**2) / 4)
