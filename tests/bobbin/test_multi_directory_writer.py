"""Tags say where to write."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import (
    CronTab,
    EvalResults,
    EvalTask,
    MultiDirectorySummaryWriter,
    NullSummaryWriter,
    SummaryWriter,
    ThreadedSummaryWriter,
)
from fluxutils_py.gomlx import Trainer
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.training import InMemory, Loop


class Second(SingleProcessComm):
    rank, size = 1, 2


@pytest.mark.parametrize("threaded", [True, False])
def test_keys_are_directories_and_the_rest_is_the_tag(tmp_path, scalars, accumulated, threaded):
    with MultiDirectorySummaryWriter(
        tmp_path / "new", keys=["dev"], use_threaded_writer=threaded
    ) as writer:
        value = torch.tensor(0.75)
        writer.scalar("dev/acc", value, 100)
        value += 1
        writer.scalar("dev/by label/a", 0.25, 100)
        writer.histogram("test/weights", np.arange(7.0), 101)
        writer.subwriter("test").scalar("acc", 0.5, 101)
        kind = ThreadedSummaryWriter if threaded else SummaryWriter
        assert type(writer.subwriter("dev")) is kind
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dev", "test"]
    assert scalars(tmp_path / "new" / "dev") == {"acc": [(100, 0.75)], "by label/a": [(100, 0.25)]}
    assert scalars(tmp_path / "new" / "test") == {"acc": [(101, 0.5)]}
    assert accumulated(tmp_path / "new" / "test").Histograms("weights")[0].histogram_value.num == 7


def test_keys_that_are_not_known_are_refused_if_so_wished(tmp_path):
    with MultiDirectorySummaryWriter(
        tmp_path, keys=["dev", "test"], allow_new_keys=False
    ) as writer:
        writer.scalar("dev/acc", 1, 1)
        for call in (
            lambda: writer.scalar("train/acc", 1, 1),
            lambda: writer.subwriter("train"),
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is compared
                call()
            assert str(caught.value) == (
                "key 'train' is not among ['dev', 'test']; set allow_new_keys=True"
            )
    assert [path.name for path in tmp_path.iterdir()] == ["dev"]
    with MultiDirectorySummaryWriter(
        tmp_path, keys=["dev"]
    ) as writer:  # by default they are welcome
        writer.scalar("train/acc", 1, 1)
    assert (tmp_path / "train").is_dir()


@pytest.mark.parametrize("tag", ["acc", "/acc", "acc/", ""])
@pytest.mark.parametrize("comm", [None, Second()])
def test_a_tag_without_a_key_is_refused_on_every_rank(tmp_path, tag, comm):
    with (
        MultiDirectorySummaryWriter(tmp_path, comm=comm) as writer,
        pytest.raises(ValueError) as caught,  # noqa: PT011
    ):
        writer.scalar(tag, 1, 1)
    assert (
        str(caught.value)
        == f"tag {tag!r} has no directory; write it as 'key/name', such as 'dev/accuracy'"
    )


def test_how_tags_become_keys_and_keys_directories_can_be_told(tmp_path, scalars):
    options = {
        "tag_to_key": lambda tag: tuple(reversed(tag.rsplit(":", 1))),
        "dirname": lambda key: f"set-{key}",
    }
    with MultiDirectorySummaryWriter(tmp_path, **options) as writer:
        writer.scalar("mean/acc:dev", 0.5, 1)
    assert scalars(tmp_path / "set-dev") == {"mean/acc": [(1, 0.5)]}


def test_other_ranks_write_nothing_unless_they_are_to(tmp_path, scalars):
    with MultiDirectorySummaryWriter(tmp_path, comm=Second()) as writer:
        writer.scalar("dev/acc", 1, 1)
        assert type(writer.subwriter("dev")) is NullSummaryWriter
    assert list(tmp_path.iterdir()) == []
    with MultiDirectorySummaryWriter(
        tmp_path, comm=Second(), only_from_leader_process=False
    ) as writer:
        writer.scalar("dev/acc", 1, 1)
    assert scalars(tmp_path / "dev") == {"acc": [(1, 1.0)]}


@pytest.mark.parametrize("auto_flush", [True, False])
def test_summaries_are_on_disk_at_once_if_flushed_by_itself(tmp_path, scalars, auto_flush):
    writer = MultiDirectorySummaryWriter(tmp_path, auto_flush=auto_flush, use_threaded_writer=False)
    writer.scalar("dev/first", 1, 1)
    writer.scalar("dev/second", 1, 1)
    found = scalars(tmp_path / "dev")
    assert len(found) == 2 if auto_flush else len(found) <= 2  # torch's thread may have been quick
    writer.flush()
    assert len(scalars(tmp_path / "dev")) == 2
    writer.close()


@dataclass(frozen=True)
class Mse(EvalResults):
    total: float = 0.0
    n: int = 0

    @property
    def mse(self):
        return self.total / self.n

    def reduce(self, other):
        return Mse(self.total + other.total, self.n + other.n)

    def write_to_tensorboard(self, state, writer):
        writer.scalar("mse", self.mse, state.step)


class Squares(EvalTask):
    def create_eval_results(self, dataset_name):
        return Mse()

    def evaluate(self, batch, loop):
        error = loop.model(batch.x) - batch.y
        return Mse(error.square().sum().item(), len(error))


def test_evaluations_of_a_training_are_curves_of_their_datasets(tmp_path, scalars):
    x = torch.randn(20, 3)
    sets = {
        name: InMemory(part, part.sum(1, keepdim=True), batchsize=4)
        for name, part in (("dev", x[:7]), ("test", x))
    }
    loop, found = Loop(Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.SGD)), []
    with MultiDirectorySummaryWriter(tmp_path) as writer:
        evaluate = Squares().make_cron_action(sets)
        evaluate.add_result_processor(writer.as_result_processor())
        evaluate.add_result_processor(lambda results, state: found.append((state.step, results)))
        loop.hooks.attach(CronTab().schedule(evaluate, step_interval=3))
        loop.run_epochs(InMemory(x, x.sum(1, keepdim=True), batchsize=8), 4)
    for name in sets:
        expected = [(step, np.float32(results[name].mse)) for step, results in found]
        assert scalars(tmp_path / name) == {"mse": expected}
    assert [step for step, _ in found] == [3, 6, 9, 12]


def test_hyper_parameters_go_to_every_directory(tmp_path, accumulated):
    with MultiDirectorySummaryWriter(
        tmp_path, keys=("dev", "test"), use_threaded_writer=False
    ) as writer:
        writer.scalar("more/loss", 1.0, 1)
        writer.hparams({"lr": 0.1})
    for key in ("dev", "test", "more"):
        assert "_hparams_/session_start_info" in accumulated(tmp_path / key).summary_metadata
