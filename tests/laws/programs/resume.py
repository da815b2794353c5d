"""Fits that are killed and called again, in children that are forked once everything is imported.

``resume.py FOLDER kills RANKS KILLS`` kills one fit over and over, and prints what was found as
JSON; ``elastic KILLS`` does so with another random number of ranks, 1 to 4, each time. ``resume.py
FOLDER faults`` has two ranks fail in several ways, and prints what each of them saw. ``resume.py
FOLDER mpi`` under mpirun is an attempt at the fit, and then the fit without checkpoints.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, lr_scheduler

from fluxutils_py import Estimator, Spec
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import Checkpointer, EveryNSteps, Loop
from fluxutils_py.training.plain_files import read_file, write_file

FOLDER = Path(sys.argv[1])
N, T = 7, 11
X = np.random.default_rng(3).normal(size=(2, N, T))
Y = np.cumsum(X.mean(0, keepdims=True), 2)


class Moving(nn.Module):
    """Has a buffer that each rank moves by what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return x * (1 + 0.1 * self.mean)


def estimator(*callbacks, comm=None, epochs=12, batchsize=1, elastic=False, **spec):
    """A fit with everything that is carried from step to step; ``elastic``: and does not depend on
    ranks.
    """
    torch.manual_seed(1)
    first = nn.Identity() if elastic else Moving()
    model = nn.Sequential(
        first, LSTM(2, 4, num_layers=2, dropout=0.0 if elastic else 0.3), nn.Linear(4, 1)
    ).double()
    batchsize = 3 if elastic else batchsize  # fewer series than ranks
    defaults = {
        "shuffle": True,
        "overlap": 1,
        "accumulate": 4,
        "clip": 1.0,
        "patience": 100,
        "rebatch": False,
    }
    schedule = {"lr_schedule": ("step", partial(lr_scheduler.StepLR, step_size=7))}
    spec = Spec(epochs=epochs, batchsize=batchsize, seqsize=4, **{**defaults, **schedule, **spec})
    settings = {"callbacks": list(callbacks), "comm": comm, "random_state": 0, "verbose": False}
    settings["scaling"] = "strong" if elastic else "weak"
    return Estimator(model, None, partial(Adam, lr=0.01), spec, **settings)


def fit(est):
    return est.fit(X, Y, validation_data=(X[:, :3] + 0.1, Y[:, :3]))


def outcome(est):
    """All that a fit leaves behind, as plain data."""
    return {
        "kind": "outcome",
        "model": est.model_.state_dict(),
        "optimizer": est.optimizer_.state_dict(),
        "grad": est.grad_,
        "losses": [est.loss_, *est.loss_curve_, *est.validation_loss_curve_],
        "history": [{k: v for k, v in record.items() if k != "seconds"} for record in est.history_],
        "steps": est.fitted_parts_.n_steps,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def start(size, body, *args):
    """Fork ``size`` ranks that call ``body(rank, comm, *args)``; their process numbers."""
    start.number += 1
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if size > 1:
                    meeting = f"file://{FOLDER}/meeting-{start.number}"
                    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
                body(rank, "torch" if size > 1 else None, *args)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return children


start.number = 0


def apart(a, b):
    """The largest difference of two outcomes, relative to values above 1."""
    if isinstance(a, dict):
        return max((apart(a[k], b[k]) for k in a | b), default=0.0)
    if isinstance(a, list | tuple):
        return max((apart(*pair) for pair in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, str | bool | type(None)):
        return 0.0 if a == b else float("inf")
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0


def attempt(rank, comm, folder, every, out, epochs=12, elastic=False):
    saves = [] if folder is None else [Checkpointer(folder, keep=2, trigger=EveryNSteps(every))]
    est = fit(estimator(*saves, comm=comm, epochs=epochs, elastic=elastic))
    write_file(FOLDER / f"{out}-{rank}", outcome(est))


def wait(children):
    return [os.waitpid(child, 0)[1] for child in children]


def newest(folder):
    path = folder.latest()
    return 0 if path is None else int(path.name.split("-")[1][1:])


def kills(size, n):
    """Kill a fit of ``size`` ranks ``n`` times, or of another number each time (None), then let it
    come to its end.
    """
    elastic, size = size is None, size or 1
    how = (12, elastic)
    assert wait(start(size, attempt, None, 1, "whole", *how)) == [0] * size
    folder, rng = Checkpointer(FOLDER / "killed"), np.random.default_rng(size)
    steps, sizes, saving, read = [], [size], 0, 0
    for i in range(n):
        until = newest(folder) + int(rng.integers(0, 4))
        children = start(size, attempt, folder.dir, 1 + i % 3, "resumed", *how)
        while newest(folder) < until:
            assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "ended before it was killed"
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.02))
        while i % 4 == 0 and not any(folder.dir.glob(".*.part")):  # in the middle of writing
            assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "ended before it was killed"
        for child in rng.permutation(children):
            os.kill(int(child), signal.SIGKILL)
        assert wait(children) == [signal.SIGKILL] * size
        saving += any(folder.dir.glob(".*.part")) if folder.dir.exists() else 0
        for path in folder.paths():
            folder.read(path)  # never unreadable
            read += 1
        steps.append(folder.latest_step())
        if elastic:
            size = int(rng.choice([k for k in (1, 2, 3, 4) if k != size]))
            sizes.append(size)
    assert wait(start(size, attempt, folder.dir, 2, "resumed", *how)) == [0] * size
    resumed = [read_file(FOLDER / f"resumed-{r}", "outcome") for r in range(size)]
    whole = [read_file(FOLDER / f"whole-{0 if elastic else r}", "outcome") for r in range(size)]
    found = {"same": same(resumed, whole), "apart": apart(resumed, whole), "sizes": sizes}
    print(
        json.dumps(
            {**found, "steps": steps, "whole": whole[0]["steps"], "saving": saving, "read": read}
        )
    )


class On:
    """Does something after a step, or (step 0) after an epoch."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, loop):
        if loop.step == self.step:
            self.action(loop)

    def on_epoch(self, loop):
        if self.step == 0:
            self.action(loop)


def boom(loop):
    raise ZeroDivisionError("boom")


def unreadable(*args):
    raise LoadError("not here")


def fails(rank, comm, case):
    """What a rank saw of a fit: its error, the steps of its complete epochs, and those of the
    checkpoints.
    """
    actions = {"hook": boom, "last hook": boom, "stop": Loop.stop, "stop between epochs": Loop.stop}
    action, step = actions.get(case), {"last hook": 24, "stop between epochs": 0}.get(case, 6)
    hooks = [On(step, action)] if rank == 1 and action else []
    trigger = EveryNSteps(6 if action else 3)
    saves = Checkpointer(
        FOLDER / ("in the way/folder" if case == "writing" else case), keep=-1, trigger=trigger
    )
    if case == "reading" and rank == 1:
        saves._read_files = unreadable
    est, error = estimator(*hooks, saves, comm=comm, epochs=2), None
    try:
        fit(est)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    n_steps = est.fitted_parts_.n_steps if hasattr(est, "fitted_parts_") else None
    return [error, n_steps, [int(path.stem[-8:]) for path in saves.paths()]]


def report(rank, comm, case):
    (FOLDER / f"{case} of {rank}.json").write_text(json.dumps(fails(rank, comm, case)))


def faults():
    """What two ranks see of each kind of failure; and whether what stopped goes on, with how many
    ranks it may.
    """
    (FOLDER / "in the way").write_text("a file")
    found = {}
    for case in ("hook", "last hook", "stop", "stop between epochs", "writing", "fine", "reading"):
        if case == "reading":  # what "fine" has written
            os.rename(FOLDER / "fine", FOLDER / "reading")
        assert wait(start(2, report, case)) == [0, 0]
        found[case] = [
            json.loads((FOLDER / f"{case} of {rank}.json").read_text()) for rank in range(2)
        ]
    assert wait(start(1, report, "reading")) == [0]
    found["one process"] = json.loads((FOLDER / "reading of 0.json").read_text())
    wait(start(2, attempt, None, 1, "whole", 2))
    for case in ("hook", "last hook", "stop", "stop between epochs"):
        wait(start(2, attempt, FOLDER / case, 3, "resumed", 2))
        ends = [
            [read_file(FOLDER / f"{out}-{r}", "outcome") for r in range(2)]
            for out in ("whole", "resumed")
        ]
        found[f"after {case}"] = [same(*ends), ends[1][0]["steps"], len(ends[1][0]["history"])]
    print(json.dumps(found))


if __name__ == "__main__":
    # the real one is slower; time enough to be killed while writing
    os.fsync = lambda handle: time.sleep(0.002)
    torch.set_num_threads(1)
    if sys.argv[2] == "mpi":
        comm = get_communicator("mpi")
        (FOLDER / f"process-{comm.rank}").write_text(str(os.getpid()))
        attempt(comm.rank, comm, FOLDER / "killed", 1, "resumed", 6)
        attempt(comm.rank, comm, None, 1, "whole", 6)
        resumed, whole = (
            read_file(FOLDER / f"{out}-{comm.rank}", "outcome") for out in ("resumed", "whole")
        )
        found = {"same": same(resumed, whole), "steps": whole["steps"]}
        (FOLDER / f"found-{comm.rank}.json").write_text(json.dumps(found))
    else:
        fit(estimator(epochs=1))  # imports what is not imported yet, so that the children need not
        if sys.argv[2] == "faults":
            faults()
        else:
            kills(int(sys.argv[3]) if sys.argv[2] == "kills" else None, int(sys.argv[-1]))
