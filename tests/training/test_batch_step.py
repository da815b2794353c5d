"""A step on batches of any kind, against a loop by hand; what the ways to train have in common is in
test_gradient_step.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, InMemory, Loop
from fluxutils_py.training.batch_step import BatchStep


def test_a_step_that_fails_names_the_place_and_computes_again():
    model, seen = nn.Linear(1, 1), []
    step = BatchStep(
        lambda model, batch: model(batch).mean() * math.nan,
        model,
        params=model.parameters(),
        compute_again=seen.append,
        describe=lambda batch: " at the first batch",
    )
    batch = torch.ones(1, 1)
    with pytest.raises(FloatingPointError, match=r"^loss is nan at the first batch"):
        step(batch)
    assert len(seen) == 1
    assert seen[0] is batch


X = torch.randn(37, 3, generator=torch.Generator().manual_seed(0))


def square(model, batch):
    return (model(batch.x) - batch.y).square().mean()


def data():
    return InMemory(X, X.sum(1, keepdim=True), batchsize=8)


def test_training_is_that_of_a_loop_by_hand():
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(plain.parameters())
    losses = []
    for _ in range(3):
        for batch in data():
            optimizer.zero_grad()
            loss = square(plain, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = []
    loop = Loop(BatchStep(square, model, torch.optim.Adam))
    loop.on_step("losses", lambda loop: found.append(loop.batch_loss))
    loop.run_epochs(data(), 3)
    assert found == losses
    assert torch.equal(model.weight, plain.weight)
    # the last batch has 5 of 37 rows
    assert loop.history[0]["loss"] == pytest.approx(np.average(losses[:5], weights=[8] * 4 + [5]))


def test_other_values_are_metrics_and_batches_without_data_are_left_out():
    def loss(model, batch):
        out = model(batch)
        return out.square().mean(), {"largest": out.max(), "n": len(batch)}

    seen = []
    loop = Loop(BatchStep(loss, nn.Linear(3, 1), torch.optim.SGD))
    loop.on_step("note", lambda loop: seen.append((loop.batch_loss, dict(loop.metrics))))
    loop.run_epochs([X[:4], X[4:9]], 1)
    assert [metrics.get("n") for _, metrics in seen] == [4, 5]
    assert not seen[0][1]["largest"].requires_grad
    skipping = BatchStep(square, nn.Linear(3, 1), torch.optim.SGD, weigh=lambda batch: 0)
    assert skipping.train_step(X).batch_loss is None


def test_a_resumed_loop_ends_with_the_same_bits(tmp_path):
    def series(model, batch):  # (S, B, F): goes on with the state of the batch before
        return model(batch).square().mean()

    batches = [torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(n)) for n in range(6)]

    def run(until, folder):
        def end(loop):
            if loop.step == until:
                raise KeyboardInterrupt

        torch.manual_seed(0)
        model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
        step = BatchStep(series, model, torch.optim.Adam, axis=1, stateful=True, accumulate=2)
        loop = Loop(step)
        saves = Checkpointer(folder).track(model=model, optimizer=step.optimizer, loop=loop)
        saves.restore()
        loop.on_step("save", saves.save)
        loop.on_step("end", end, priority=9)
        loop.run_epochs(batches, 2)
        return model[0].module.weight_ih_l0

    whole = run(99, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(3, tmp_path / "cut")
    assert torch.equal(run(99, tmp_path / "cut"), whole)
