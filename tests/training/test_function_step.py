"""A gradient step from functions; tests/training/test_gradient_step.py has the ways to train."""

import math

import pytest
import torch
from torch import nn

from fluxutils_py.parallel import Threads
from fluxutils_py.training.function_step import FunctionStep
from fluxutils_py.training.step_info import BatchLoss
from fluxutils_py.training.threaded_loss import ThreadedLoss


def halves(batch, n):
    return torch.chunk(batch, n)


def test_a_loss_in_threads_is_that_of_a_function_and_is_never_deferred():
    found = []
    for threaded in (False, True):
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = torch.optim.SGD([p], lr=0.5)
        with Threads(2) as threads:
            compute = lambda part, *_, p=p: BatchLoss((p * part).sum() / len(part), len(part))  # noqa: E731
            if threaded:
                compute = ThreadedLoss(compute, None, threads, halves)
            step = FunctionStep(compute, opt, params=[p], defer=True)
            info = step(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            found.append((info.batch_loss, p.tolist()))
            assert not step.defer
    assert found[0] == found[1] == (8.0, [0.0, 0.5])


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
