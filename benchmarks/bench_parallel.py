"""How much faster several ranks train than one, and how much of a step they spend talking.

Weak scaling: each rank keeps its batchsize, so two ranks go through twice as many series per step. What counts is
series times steps per second, over that of one rank with one thread. ``DDP`` is the hand-written loop of bench_fit.py
under ``DistributedDataParallel`` with gloo; it gives each rank half of the series. Contenders run interleaved in
rounds, each in processes of their own that time the same number of epochs after a warm-up; every round gives a ratio,
the table has the median and the range. ``1 x 1 again`` is the A/A control.

Threads (``n_jobs``), and ranks that share the work of one, are in bench_fit.py.

    python benchmarks/bench_parallel.py [--rounds 5] [--shapes small large] [--epochs 2]
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Report, Table, interleaved, median, mpirun, parse, parser, ratios, spread, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import SHAPES, Shape, make, time_major

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.parallel import get_communicator
from fluxutils_py.parallel.gradient_vector import GradientVector

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
BASE = "1 rank x 1 thread"
CONTENDERS = {  # launcher, ranks, threads, program
    BASE: ("mpirun", 1, 1, "fit"),
    "1 x 1 again (A/A)": ("mpirun", 1, 1, "fit"),
    "1 rank x 2 threads of torch": ("mpirun", 1, 2, "fit"),
    "2 ranks x 1, mpirun": ("mpirun", 2, 1, "fit"),
    "2 ranks x 1, torchrun": ("torchrun", 2, 1, "fit"),
    "2 ranks x 1, DDP with gloo": ("torchrun", 2, 1, "ddp"),
}


# -- what one rank does --------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time of the collectives of training steps."""

    seconds = 0.0

    @classmethod
    def install(cls) -> None:
        reduce = GradientVector._allreduce

        def timed(self: GradientVector) -> None:
            began = time.perf_counter()
            reduce(self)
            cls.seconds += time.perf_counter() - began

        GradientVector._allreduce = timed  # type: ignore[method-assign]  # for the time that it takes


def run_fit(shape: Shape, x: np.ndarray, y: np.ndarray, model: nn.Module) -> tuple[float, torch.Tensor]:
    spec = Spec(epochs=shape.epochs, batchsize=shape.batchsize, seqsize=shape.seqsize, rebatch=False)
    est = Estimator(model, F.mse_loss, None, spec, verbose=False)
    est.fit(x[:, :, : shape.seqsize], y[:, :, : shape.seqsize], epochs=1)  # warms up
    Stopwatch.seconds = 0.0
    get_communicator("auto").barrier()
    began = time.perf_counter()
    est.fit(x, y)
    return time.perf_counter() - began, net2vec(est)


def run_ddp(shape: Shape, x: np.ndarray, y: np.ndarray, model: nn.Module) -> tuple[float, torch.Tensor]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (np.array_split(a, size, 1)[rank] for a in (x, y))

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = model[0].module, model[1]

        def forward(self, xs: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
            h, state = self.lstm(xs, state)
            return self.head(h), state

    net = DistributedDataParallel(Windows())
    opt = torch.optim.AdamW(net.parameters(), fused=True)
    xs, ys = time_major(x, y)

    def epoch(n_steps: int) -> None:
        for n in range(0, x.shape[1], shape.batchsize):
            state = None
            for t in range(0, n_steps, shape.seqsize):
                rows, steps = slice(n, n + shape.batchsize), slice(t, t + shape.seqsize)
                out, state = net(xs[steps, rows], state)
                loss = F.mse_loss(out, ys[steps, rows])
                opt.zero_grad()
                loss.backward()
                opt.step()
                state = (state[0].detach(), state[1].detach())

    epoch(shape.seqsize)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(shape.epochs):
        epoch(shape.n_steps)
    taken = time.perf_counter() - began
    vector = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    dist.destroy_process_group()
    return taken, vector


def shape_of(name: str, epochs: int, size: int, quick: bool) -> Shape:
    shape = SHAPES[name].quick() if quick else SHAPES[name]
    return dataclasses.replace(shape, epochs=epochs, n_series=shape.n_series * size)


def one_rank(program: str, name: str, epochs: int, size: int, threads: int, quick: bool, path: str) -> None:
    torch.set_num_threads(threads)
    shape = shape_of(name, epochs, size, quick)
    Stopwatch.install()
    taken, vector = (run_fit if program == "fit" else run_ddp)(shape, *make(shape))
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == 0:
        found = {
            "seconds each": taken / (shape.n_series * shape.n_steps * epochs),  # a step of a series
            "talking": Stopwatch.seconds / taken,
            "finite": bool(torch.isfinite(vector).all()),
        }
        Path(path).write_text(json.dumps(found))


# -- all of them ---------------------------------------------------------------------------------------


def measure(contender: str, name: str, epochs: int, quick: bool) -> dict[str, float]:
    launcher, size, threads, program = CONTENDERS[contender]
    launch = [*(mpirun() or []), "-n", size, sys.executable] if launcher == "mpirun" else [*TORCHRUN, size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        start(
            [*launch, __file__, "--rank", program, name, epochs, size, threads, int(quick), path],
            OMP_NUM_THREADS=str(threads),
        )
        found = json.loads(path.read_text())
    assert found["finite"]
    return found


def compare(name: str, report: Report, rounds: int, epochs: int, quick: bool) -> None:
    talking: dict[str, list[float]] = {c: [] for c in CONTENDERS}

    def turn(contender: str) -> float:
        found = measure(contender, name, epochs, quick)
        talking[contender].append(found["talking"])
        return found["seconds each"]

    seconds = interleaved({c: partial(turn, c) for c in CONTENDERS}, rounds)
    table = Table(
        f"{name}: {shape_of(name, epochs, 1, quick).training}; batchsize and series per rank",
        ["contender", "speed (range)", "share of the time in collectives"],
    )
    for contender, taken in seconds.items():
        share = "not measured" if "DDP" in contender else f"{median(talking[contender]):.1%}"
        table.rows.append([contender, spread(ratios(seconds[BASE], taken)), share])
    table.notes.append(f"Aim of 2 ranks under mpirun: {1.85 if name == 'small' else 1.93}.")
    report.add(table)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        program, name, epochs, size, n_threads, quick, path = sys.argv[2:]
        return one_rank(program, name, int(epochs), int(size), int(n_threads), bool(int(quick)), path)
    made = parser(__doc__, rounds=5)
    made.add_argument("--epochs", type=int, default=2)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parse(made)
    report = Report(__doc__, args, threads=False)
    if mpirun() is None:
        return report.leave_out("ranks", "there is no mpirun with mpi4py that can start programs")
    for name in args.shapes:
        compare(name, report, args.rounds, args.epochs, args.quick)


if __name__ == "__main__":
    main()
