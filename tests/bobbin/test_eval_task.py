"""A task as bobbin's programs write it."""

import time
from dataclasses import dataclass

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fluxutils_py.bobbin import EvalResults, EvalTask, RunEval, TrainTask


@dataclass(frozen=True)
class Loss(EvalResults):
    total: float = 0.0
    n: int = 0

    def reduce(self, other):
        return Loss(self.total + other.total, self.n + other.n)

    def is_better_than(self, other):
        return self.total * other.n < other.total * self.n

    def write_to_tensorboard(self, train_state, writer):
        writer.scalar("loss", self.total / self.n, step=train_state.step)


class SquaredOutput(EvalTask):
    def create_eval_results(self, dataset_name):
        return Loss()

    def evaluate(self, batch, train_state):
        y = train_state.model(batch)
        return Loss(y.square().sum().item(), y.numel())


class Task(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return model(batch).square().mean()


BATCHES = {"dev": [torch.ones(3, 1), 2 * torch.ones(2, 1)]}


def test_results_go_to_a_directory_for_each_dataset(tmp_path):
    state = Task(lambda: nn.Linear(1, 1)).initialize_train_state(0, torch.optim.Adam)
    action = SquaredOutput().make_cron_action(BATCHES, tensorboard_root_path=tmp_path)
    assert isinstance(action, RunEval)
    result = action(state, step_info=None)["dev"]
    deadline = time.monotonic() + 30  # a thread of its own writes the file
    while (
        "loss" not in (events := EventAccumulator(str(tmp_path / "dev")).Reload()).Tags()["scalars"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (event,) = events.Scalars("loss")
    assert (event.step, event.value) == (0, torch.tensor(result.total / result.n).item())


def test_training_goes_on_from_the_best_checkpoint(tmp_path):
    task = Task(lambda: nn.Linear(1, 1))
    state, step = task.initialize_train_state(0, torch.optim.Adam), task.make_training_step_fn()
    keep_best = (
        SquaredOutput().make_cron_action(BATCHES).keep_best_checkpoint("dev", tmp_path / "best")
    )
    for _ in range(3):
        step(state, torch.ones(4, 1), 0)
    assert keep_best(state).saved_train_state is not None
    again = task.initialize_train_state(1, torch.optim.Adam, checkpoint_path=tmp_path / "best")
    assert again.step == 3
    for s in (state, again):
        step(s, torch.ones(4, 1), 0)
    assert torch.equal(state.model.weight, again.model.weight)
