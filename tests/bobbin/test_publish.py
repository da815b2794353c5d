"""The progress of training, in loops of this package and by hand; and where it runs."""

import logging
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import (
    CronTab,
    NullSummaryWriter,
    PublishTrainingProgress,
    ScalarSummary,
    SummaryWriter,
    collected_summaries,
    publish_trainer_env_info,
    sow,
)
from fluxutils_py.bobbin.summaries import active_collector
from fluxutils_py.gomlx import Trainer
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.training import EveryNSteps, InMemory, Loop, StepInfo


class Written(NullSummaryWriter):
    """Remembers what is written, by tag."""

    def __init__(self):
        self.found = {}

    def _call(self, method, tag, value, step, **options):
        self.found.setdefault(tag, []).append((step, value))


class Loud(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        sow(self, "mean_output", lambda: ScalarSummary(y.mean()))
        return y


def clock(*times):
    return iter(times).__next__


def test_speed_is_since_the_last_time():
    publish = PublishTrainingProgress(writer := Written(), clock=clock(1000.0, 1010.0, 1010.5))
    for step in (10, 133, 134):
        publish(SimpleNamespace(step=step, model=None))
    assert writer.found == {"trainer/steps_per_sec": [(133, 12.3), (134, 2.0)]}


def test_there_is_no_speed_without_steps_or_time():
    publish = PublishTrainingProgress(writer := Written(), clock=clock(1.0, 2.0, 2.0, 3.0))
    for step in (5, 5, 6, 4):
        publish(SimpleNamespace(step=step, model=None))
    assert writer.found == {}


def test_loss_and_metrics_of_the_step_are_written_where_they_are_numbers():
    publish, state = (
        PublishTrainingProgress(writer := Written()),
        SimpleNamespace(step=3, model=None),
    )
    metrics = {
        "accuracy": torch.tensor(0.5),
        "table": {"a": 1},
        "none": None,
        "many": torch.ones(2),
    }
    publish(state, StepInfo(0.25, 1, metrics))
    state.step = 4
    publish(state, StepInfo(None, 0))
    del writer.found["trainer/steps_per_sec"]
    assert writer.found == {"train/batch_loss": [(3, 0.25)], "train/accuracy": [(3, 0.5)]}


def test_in_a_table_of_actions_it_takes_what_is_collected_around_it():
    model, x = nn.Sequential(nn.Tanh(), Loud(3, 2)), torch.randn(7, 3)
    state, expected = SimpleNamespace(step=0, model=model), []
    cron = CronTab().schedule(PublishTrainingProgress(writer := Written()), step_interval=3)
    with collected_summaries():
        for state.step in range(1, 8):
            expected.append((state.step, model(x * state.step).mean().item()))
            cron.run(state, StepInfo(0.5))
    state.step = 9
    cron.run(state, StepInfo(0.5))  # nobody collects
    assert writer.found["summary/1/mean_output"] == [expected[2], expected[5]]
    assert writer.found["train/batch_loss"] == [(3, 0.5), (6, 0.5), (9, 0.5)]


def data():
    x = torch.randn(20, 3)
    return InMemory(x, x.sum(1, keepdim=True), batchsize=8)


def test_attached_to_a_loop_it_collects_by_itself():
    trainer, means = (
        Trainer(nn.Sequential(nn.Tanh(), Loud(3, 1)), nn.MSELoss(), torch.optim.SGD),
        [],
    )
    trainer.model[1].register_forward_hook(
        lambda module, inputs, output: means.append(output.mean().item())
    )
    loop, times = Loop(trainer), iter(range(100))
    losses = []
    loop.on_step("losses", lambda loop: losses.append(loop.batch_loss))
    publish = PublishTrainingProgress(
        writer := Written(), trigger=EveryNSteps(2), clock=lambda: next(times) / 4
    )
    loop.hooks.attach(publish)
    loop.run_epochs(data(), 3)
    assert writer.found["train/batch_loss"] == [(step, losses[step - 1]) for step in (2, 4, 6, 8)]
    assert writer.found["summary/1/mean_output"] == [
        (s, pytest.approx(means[s - 1], rel=1e-6)) for s in (2, 4, 6, 8)
    ]
    assert writer.found["trainer/steps_per_sec"] == [(4, 8.0), (6, 8.0), (8, 8.0)]
    assert [step for step, _ in writer.found["train/ema_loss"]] == [2, 4, 6, 8]
    loop.run_epochs(data(), 1)  # the time between two runs does not count
    assert writer.found["trainer/steps_per_sec"][3:] == [(12, 8.0)]
    with collected_summaries() as found:  # nobody else collects any more
        pass
    trainer.model(torch.randn(5, 3))
    assert found.take(trainer.model) == {}


def test_an_error_in_training_ends_the_collecting():
    def fail(loop):
        raise ZeroDivisionError

    loop = Loop(Trainer(Loud(3, 1), nn.MSELoss(), torch.optim.SGD))
    loop.hooks.attach(PublishTrainingProgress(Written()))
    loop.on_step("fail", fail)
    with pytest.raises(ZeroDivisionError):
        loop.run_epochs(data(), 1)
    assert active_collector.get() is None


def test_other_ranks_publish_nothing():
    publish = PublishTrainingProgress(writer := Written())
    publish(
        SimpleNamespace(step=3, ranks=SimpleNamespace(rank=1), model=None, step_info=StepInfo(0.5))
    )
    assert writer.found == {}


# -- where it runs ---------------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))


def test_what_is_trained_and_where_is_told(tmp_path, monkeypatch, accumulated, caplog):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    with SummaryWriter(tmp_path) as writer, caplog.at_level(logging.INFO, "fluxutils_py"):
        publish_trainer_env_info(writer, SimpleNamespace(step=7, model=MODEL))
    found = accumulated(tmp_path)
    texts = {}
    for tag in found.Tags()["tensors"]:
        (event,) = found.Tensors(tag)
        assert event.step == 7
        texts[tag.removesuffix("/text_summary")] = event.tensor_proto.string_val[0].decode()
    lines = {
        tag: [line.removeprefix("    ") for line in text.splitlines()]
        for tag, text in texts.items()
    }
    assert lines == {
        "trainer/diagnosis/total_num_params": [NUMBERS],
        "trainer/diagnosis/param_shape": SHAPES,
        "trainer/diagnosis/local_device": ["cpu"],
        "trainer/diagnosis/trainer_argv": ["train.py", "--lr", "0.1"],
        "trainer/diagnosis/process": [f"rank 0 of 1, pid {os.getpid()} on {socket.gethostname()}"],
    }
    logged = [record.getMessage() for record in caplog.records]
    assert logged[0] == f"total_num_params: {NUMBERS}"
    assert len(logged) == 5
    assert {record.levelno for record in caplog.records} == {logging.INFO}


NUMBERS = "Number of parameters = 30, number of extra variables = 0"  # as in bobbin
SHAPES = [
    "0.weight: (5, 3) dtype=float32",
    "0.bias: (5,) dtype=float32",
    "1.weight: (2, 5) dtype=float32",
]


def test_prefix_and_logging_are_as_told(caplog):
    writer, state = Written(), SimpleNamespace(step=1, model=MODEL)
    with caplog.at_level(1):
        publish_trainer_env_info(writer, state, prefix="env/", also_do_logging=False)
        assert not caplog.records
        publish_trainer_env_info(writer, state, prefix="env/", loglevel=logging.DEBUG)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    names = ("total_num_params", "param_shape", "local_device", "trainer_argv", "process")
    assert list(writer.found) == [f"env/{name}" for name in names]


def test_in_a_loop_of_several_ranks_the_first_tells():
    class Ranks(SingleProcessComm):
        rank, size = 0, 3

    writer, comm = Written(), Ranks()
    for comm.rank in (0, 1, 2):
        publish_trainer_env_info(
            writer, SimpleNamespace(step=1, model=MODEL, ranks=RankGroup(comm))
        )
    ((_, text),) = writer.found["trainer/diagnosis/process"]
    assert text.startswith("    rank 0 of 3, pid ")
