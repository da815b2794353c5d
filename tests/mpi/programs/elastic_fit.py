"""A fit that is killed and called again on another number of ranks.

    python elastic_fit.py FOLDER [KILLS [SEED [float64|float32]]]

Starts the fit on a random number of ranks, 1 to 4, kills it with SIGKILL at a random moment, and
goes on with another random number, KILLS times (20 by default); then it lets the fit end, and
compares with one that was never stopped. On each rank that it starts, this file is called with
``FOLDER fit float64``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Adam, lr_scheduler

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import Checkpointer, EveryNSteps

N, T = 37, 43
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
LIMIT = 180  # seconds


class Slowly:
    """Gives the one who kills time to do it between two steps."""

    def on_step(self, loop):
        time.sleep(0.002)


def fit(*callbacks, comm, dtype="float64"):
    """A fit with all that is carried from step to step and does not depend on the number of ranks."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, N, T)).astype(dtype)
    y = np.where(rng.random((1, N, T)) < 0.1, np.nan, x.cumsum(2).mean(0, keepdims=True)).astype(
        dtype
    )
    torch.manual_seed(1)
    model = nn.Sequential(LSTM(2, 4, num_layers=2), nn.Linear(4, 1))
    spec = Spec(
        epochs=6, batchsize=8, seqsize=10, shuffle=True, overlap=2, accumulate=3, clip=0.5, patience=100,
        lr_schedule=("step", partial(lr_scheduler.StepLR, step_size=7)),
    )  # fmt: skip
    est = Estimator(
        model, None, partial(Adam, lr=0.01), spec, comm=comm, scaling="strong", callbacks=list(callbacks),
        random_state=0, verbose=False,
    )  # fmt: skip
    est.fit(x, y, validation_data=(x[:, :9] + x.dtype.type(0.1), y[:, :9]))
    losses = [est.loss_, *est.loss_curve_, *est.validation_loss_curve_]
    moments = [
        v.double().flatten()
        for s in est.optimizer_.state_dict()["state"].values()
        for v in s.values()
    ]
    vectors = net2vec(est).double(), est.grad_.double()
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *vectors, *moments]).numpy(), est


def rank_of_fit(folder, dtype):
    os.fsync = lambda handle: None  # slow, and against power cuts only
    comm = get_communicator("auto")
    (folder / f"process-{comm.rank}").write_text(str(os.getpid()))
    found, _ = fit(
        Slowly(),
        Checkpointer(folder / "killed", keep=2, trigger=EveryNSteps(1)),
        comm=comm,
        dtype=dtype,
    )
    if comm.rank == 0:
        np.save(folder / "found.npy", found)


def start(folder, n, mpirun, dtype, python):
    for old in folder.glob("process-*"):
        old.unlink()
    launch = [*mpirun, "-n", n] if n > 1 else []
    command = [*launch, python, __file__, folder, "fit", dtype]
    ours = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=log,
            stderr=log,
            env={**os.environ, **ours},
            start_new_session=True,
        )


def kill(folder, n, process, rng, until):
    """Kill all ranks as soon as there are so many checkpoints, and a little later."""
    saves, deadline = Checkpointer(folder / "killed"), time.monotonic() + LIMIT
    while saves.latest_step() < until:
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.03))
    for rank in rng.permutation(n):
        os.kill(int((folder / f"process-{rank}").read_text()), signal.SIGKILL)
    try:
        assert process.wait(timeout=300) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return saves.latest_step()


def kills(
    folder,
    n_kills=20,
    seed=0,
    dtype="float64",
    mpirun=MPIRUN,
    numbers=(1, 2, 3, 4),
    python=sys.executable,
):
    """Return what was found; ``reached`` has the number of ranks and the step of the newest
    checkpoint at each kill.
    """
    whole, est = fit(comm=None, dtype=dtype)
    n_steps = est.fitted_parts_.n_steps
    rng, reached, step = np.random.default_rng(seed), [], 0
    ranks = int(rng.choice(numbers))
    for i in range(n_kills):
        until = step + 1 + int(rng.integers(0, (n_steps - 20 - step) // (n_kills - i)))
        step = kill(folder, ranks, start(folder, ranks, mpirun, dtype, python), rng, until)
        reached.append((ranks, step))
        ranks = int(rng.choice([n for n in numbers if n != ranks]))
    status = start(folder, ranks, mpirun, dtype, python).wait(timeout=LIMIT)
    assert status == 0, (folder / "log").read_text()[-3000:]
    found = np.load(folder / "found.npy")
    apart = float(np.max(np.abs(found - whole) / np.maximum(1, np.abs(whole))))
    return {"reached": [*reached, (ranks, n_steps)], "apart": apart, "steps": n_steps}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2:3] == ["fit"]:
        rank_of_fit(folder, sys.argv[3])
    else:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "killed", ignore_errors=True)
        print(json.dumps(kills(folder, *map(int, sys.argv[2:4]), *sys.argv[4:]), indent=1))
