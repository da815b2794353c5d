"""A gradient step from functions; tests/training/test_gradient_step.py has the ways to train."""

import math

import pytest
import torch
from torch import nn

from fluxutils_py.training.function_step import FunctionStep
from fluxutils_py.training.step_info import BatchLoss


def test_a_step_that_fails_names_the_place_and_computes_again():
    model, seen = nn.Linear(1, 1), []
    step = FunctionStep(
        lambda batch: BatchLoss(model(batch).mean() * math.nan),
        None,
        model,
        model.parameters(),
        compute_again=seen.append,
        describe=lambda batch: " at the first batch",
    )
    batch = torch.ones(1, 1)
    with pytest.raises(FloatingPointError, match=r"^loss is nan at the first batch"):
        step(batch)
    assert len(seen) == 1
    assert seen[0] is batch
