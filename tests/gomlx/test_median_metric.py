"""Medians of numbers over steps, against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.gomlx.median_metric import MedianMetric


def test_the_median_of_all_elements_does_not_depend_on_the_batches():
    values = torch.arange(7.0)[torch.tensor([3, 0, 6, 1, 5, 2, 4])]
    metric = MedianMetric(nn.L1Loss(reduction="none"), "error")
    for part in values.split(3):
        metric.update(part, torch.zeros_like(part))
    assert metric.compute() == np.median(values)


def test_elements_of_weight_0_do_not_count():
    metric = MedianMetric(nn.L1Loss(reduction="none"), "error")
    trainer = Trainer(nn.Identity(), nn.MSELoss(reduction="none"), eval_metrics=[metric])
    x, y = (
        torch.tensor([[1.0], [9.0], [3.0], [7.0]]),
        torch.tensor([[0.0], [torch.nan], [0.0], [0.0]]),
    )
    assert trainer.eval([((x,), (y,), (~y.isnan()).float())])["error"] == 3.0
    with pytest.raises(DataError, match="error"):
        MedianMetric(nn.L1Loss(), "error").update(x, y, weight=(~y.isnan()).float())


def test_it_goes_on_from_its_state():
    metric, copy = MedianMetric(name="value"), MedianMetric(name="value")
    assert metric.compute() is None
    metric.update(4.0)
    metric.update(9.0, weight=0)
    copy.load_state_dict(metric.state_dict())
    for value in 1.0, 2.0:
        copy.update(value)
    assert copy.compute() == 2.0
    copy.reset()
    assert copy.compute() is None


def test_a_trainer_shows_the_median_of_training():
    x, y = torch.zeros(5, 1), torch.tensor([[1.0], [2.0], [30.0], [4.0], [5.0]])
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    trainer = Trainer(
        model, nn.MSELoss(), torch.optim.SGD, [MedianMetric(nn.L1Loss(reduction="none"), "error")]
    )
    assert trainer.train_step((x, y)).metrics["error"] == 4.0
