"""Points in a file come back as they were."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator
from fluxutils_py.gomlx import PointsWriter, Trainer, load_points
from fluxutils_py.gomlx.points import Point
from fluxutils_py.training import InMemory, Loop, StepInfo
from fluxutils_py.training.triggers import EveryNSteps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "points.jsonl"


def run(hook, batches=(4.0, 3.0, 2.0, 1.0), epochs=1):
    loop = Loop(StepInfo)
    loop.hooks.attach(hook)
    loop.run_epochs(list(batches), epochs)


def test_points_of_a_trainer_are_its_metrics_and_those_of_evaluation(path):
    x = torch.randn(23, 3)
    data, other = (
        InMemory(v, v.sum(1, keepdim=True), batchsize=5, name=n)
        for v, n in ((x, "train"), (x[:9], "few"))
    )
    trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.Adam)
    loop, expected = Loop(trainer), []

    def note(loop):
        expected.extend((loop.step, f"Train: {k}", "loss", v) for k, v in loop.metrics.items())
        expected.extend(
            (loop.step, f"Eval on few: {k}", "loss", v) for k, v in trainer.eval(other).items()
        )

    loop.on_step("note", note, trigger=EveryNSteps(3))
    loop.hooks.attach(PointsWriter(path, trainer, other, trigger=EveryNSteps(3)))
    loop.run_epochs(data, 2)
    assert [p[0] for p in expected[::5]] == [3, 6, 9]
    assert load_points(path) == expected  # to the last bit
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        dict(zip(("step", "metric", "type", "value"), p, strict=True)) for p in expected
    ]


def test_the_points_of_an_estimator_are_the_losses_of_its_steps(path, rng):
    x, losses = rng.normal(size=(2, 5, 8)), []
    hooks = [PointsWriter(path), lambda loop: losses.append(loop.batch_loss)]
    Estimator(
        spec={"epochs": 2, "batchsize": 3, "seqsize": 4}, callbacks=hooks, random_state=0
    ).fit(x, x[:1])
    assert load_points(path) == [
        (k, "Train: batch_loss", "loss", v) for k, v in enumerate(losses, 1)
    ]
    assert len(losses) == 8


def test_what_is_no_finite_number_is_left_out(path):
    values = {
        "nan": math.nan, "inf": -math.inf, "none": None, "several": torch.zeros(2), "text": "?",
        "top5_accuracy": np.float32(0.5), "loss_fn": torch.tensor(2.0), "norm": 3,
    }  # fmt: skip
    PointsWriter(path).write(7, {"Train": values})
    assert load_points(path) == [
        (7, "Train: top5_accuracy", "accuracy", 0.5),
        (7, "Train: loss_fn", "loss", 2.0),
        (7, "Train: norm", "norm", 3.0),
    ]


def test_steps_without_a_loss_leave_no_point(path):
    run(PointsWriter(path), [None, 2.0])
    assert load_points(path) == [(2, "Train: batch_loss", "loss", 2.0)]


def test_a_run_that_goes_on_from_a_checkpoint_replaces_the_points_it_writes_again(path):
    writer = PointsWriter(path)
    for step, value in ((1, 0.5), (2, 0.25), (3, 9.0), (2, 0.125), (4, 1.0)):
        writer.write(step, {"Train": {"loss": value}})
    assert [(p.step, p.value) for p in load_points(path)] == [
        (1, 0.5),
        (2, 0.125),
        (3, 9.0),
        (4, 1.0),
    ]


@pytest.mark.parametrize("torn", ['{"step": 5, "met', "{"])
def test_a_line_that_was_broken_off_is_left_out_and_removed_by_the_next_writer(path, torn):
    run(PointsWriter(path))
    whole = load_points(path)
    path.write_text(path.read_text() + torn)
    assert load_points(path) == whole
    PointsWriter(path).write(6, {"Train": {"batch_loss": 0.5}})
    assert load_points(path) == [*whole, (6, "Train: batch_loss", "loss", 0.5)]


def test_a_file_of_nothing_but_a_broken_line_begins_anew(path):
    path.write_text('{"ste')
    assert load_points(path) == []
    run(PointsWriter(path), [2.0])
    assert load_points(path) == [Point(1, "Train: batch_loss", "loss", 2.0)]


def test_only_rank_0_writes(path):
    PointsWriter(path).on_step(
        SimpleNamespace(ranks=SimpleNamespace(rank=1), step=1, metrics={}, batch_loss=1.0)
    )
    assert not path.exists()
