"""What two ranks write for TensorBoard: rank 0 for both; every check raises where it fails."""

from pathlib import Path

import numpy as np
from mpi4py import MPI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fluxutils_py import Estimator, Spec
from fluxutils_py.bobbin import (
    CronTab,
    MultiDirectorySummaryWriter,
    NullSummaryWriter,
    PublishTrainingProgress,
    ThreadedSummaryWriter,
    gather_from_processes,
    publish_trainer_env_info,
)
from fluxutils_py.reporting import TensorBoard

folder = Path()
world = MPI.COMM_WORLD
rank = world.rank
x = np.random.default_rng(0).standard_normal((3, 7, 40))
y = x.mean(0, keepdims=True)


def est(*callbacks):
    return Estimator(spec=Spec(2, 2, 20), callbacks=list(callbacks), random_state=0, verbose=False)


def scalars(path):
    found = EventAccumulator(str(path)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def the_first_writes_the_curves_of_all():
    losses = []
    e = est(
        TensorBoard(folder / "fit", trigger=1),
        lambda loop: losses.append(np.float32(loop.batch_loss)),
    ).fit(x, y)
    world.Barrier()
    found = scalars(folder / "fit")
    assert [value for _, value in found["train/loss"]] == [np.float32(v) for v in e.loss_curve_]
    assert found["train/batch_loss"] == list(enumerate(losses, 1))
    assert len(list((folder / "fit").iterdir())) == 1


def by_directory_the_others_write_nothing():
    with MultiDirectorySummaryWriter(folder / "by key", keys=["dev"]) as writer:
        assert type(writer.subwriter("dev")) is (
            NullSummaryWriter if rank else ThreadedSummaryWriter
        )
        sub = writer.subwriter("train")
        cron = CronTab().schedule(PublishTrainingProgress(sub), step_interval=2)
        cron.schedule(
            lambda loop: publish_trainer_env_info(sub, loop, also_do_logging=False), at_step=1
        )
        est(cron).fit(x, y)
        writer.scalar("dev/rank", rank, 1)
    told = gather_from_processes(sorted(p.name for p in (folder / "by key").iterdir()))
    assert told == [["dev", "train"]] * 2
    assert scalars(folder / "by key" / "dev") == {"rank": [(1, 0.0)]}
    assert [step for step, _ in scalars(folder / "by key" / "train")["train/batch_loss"]] == [
        2,
        4,
        6,
        8,
    ]
    (text,) = (
        EventAccumulator(str(folder / "by key" / "train"))
        .Reload()
        .Tensors("trainer/diagnosis/process/text_summary")
    )
    assert text.tensor_proto.string_val[0].startswith(b"    rank 0 of 2, pid ")


def main(to):
    global folder
    folder = to
    for check in (
        the_first_writes_the_curves_of_all,
        by_directory_the_others_write_nothing,
    ):
        check()
        world.Barrier()
