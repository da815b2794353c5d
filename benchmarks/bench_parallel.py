"""How much faster several ranks or threads train than one, and how much of a step they spend talking.

Weak scaling: each rank keeps its batchsize, so two ranks go through twice as many series per step. What counts is
series times steps per second, over that of one rank with one thread. ``DDP`` is the hand-written loop of bench_fit.py
under ``DistributedDataParallel`` with gloo; it gives each rank half of the series. Contenders run interleaved in
rounds, each in processes of their own that time the same number of epochs after a warm-up; every round gives a ratio,
the table has the median and the range. ``1 x 1 again`` is the A/A control.

The second table is of threads: ``n_jobs=2`` over the hand-written loop with torch's own two threads, in one process.

    python benchmarks/bench_parallel.py [--rounds 5] [--shapes small large] [--parts ranks threads] [--epochs 2]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_fit import SHAPES, Shape, by_hand, make
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.parallel import Sync, get_communicator

BESIDE = Path(sys.executable).with_name("mpirun")  # of a virtual environment that need not be activated
MPIRUN = [
    str(BESIDE) if BESIDE.exists() else "mpirun",
    "--allow-run-as-root",
    "--oversubscribe",
    "--bind-to",
    "none",
    "-n",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
BASE = "1 rank x 1 thread"
CONTENDERS = {  # launcher, ranks, threads, program
    BASE: (MPIRUN, 1, 1, "fit"),
    "1 x 1 again (A/A)": (MPIRUN, 1, 1, "fit"),
    "1 rank x 2 threads of torch": (MPIRUN, 1, 2, "fit"),
    "2 ranks x 1, mpirun": (MPIRUN, 2, 1, "fit"),
    "2 ranks x 1, torchrun": (TORCHRUN, 2, 1, "fit"),
    "2 ranks x 1, DDP with gloo": (TORCHRUN, 2, 1, "ddp"),
}


# -- what one rank does --------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time of the collectives of training steps."""

    seconds = 0.0

    @classmethod
    def install(cls) -> None:
        reduce = Sync._allreduce

        def timed(self: Sync, packed: bool) -> None:
            began = time.perf_counter()
            reduce(self, packed)
            cls.seconds += time.perf_counter() - began

        Sync._allreduce = timed  # type: ignore[method-assign]


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
    xs, ys = (torch.from_numpy(a).permute(2, 1, 0).contiguous() for a in (x, y))

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


def one_rank(program: str, name: str, epochs: int, size: int, threads: int, path: str) -> None:
    torch.set_num_threads(threads)
    shape = dataclasses.replace(SHAPES[name], epochs=epochs, n_series=SHAPES[name].n_series * size)
    Stopwatch.install()
    taken, vector = (run_fit if program == "fit" else run_ddp)(shape, *make(shape))
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == 0:
        found = {
            "speed": shape.n_series * shape.n_steps * epochs / taken,
            "talking": Stopwatch.seconds / taken,
            "finite": bool(torch.isfinite(vector).all()),
        }
        Path(path).write_text(json.dumps(found))


# -- ranks -----------------------------------------------------------------------------------------------


def measure(contender: str, name: str, epochs: int) -> dict[str, float]:
    launcher, size, threads, program = CONTENDERS[contender]
    path = Path(tempfile.gettempdir()) / f"bench_parallel.{os.getpid()}.json"
    python = [sys.executable] if launcher is MPIRUN else []
    command = [*launcher, size, *python, __file__, "--rank", program, name, epochs, size, threads, path]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([str(c) for c in command], check=True, env=env, capture_output=True, timeout=1800)
    found = json.loads(path.read_text())
    path.unlink()
    assert found["finite"]
    return found


def ranks(name: str, rounds: int, epochs: int) -> None:
    results: dict[str, list[dict[str, float]]] = {c: [] for c in CONTENDERS}
    for r in range(rounds):
        for contender in list(CONTENDERS)[r % len(CONTENDERS) :] + list(CONTENDERS)[: r % len(CONTENDERS)]:
            results[contender].append(measure(contender, name, epochs))
    print(f"{name}: {SHAPES[name]}; batchsize and series per rank\n")
    print("| contender | speed (range) | share of the time in collectives |\n|---|---|---|")
    for contender, found in results.items():
        ratios = [f["speed"] / b["speed"] for f, b in zip(found, results[BASE], strict=True)]
        talking = f"{statistics.median(f['talking'] for f in found):.1%}" if "DDP" not in contender else "not measured"
        print(
            f"| {contender} | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {talking} |",
            flush=True,
        )
    print(f"\naim of 2 ranks under mpirun: {1.85 if name == 'small' else 1.93}\n")


# -- threads ---------------------------------------------------------------------------------------------


def threads(name: str, rounds: int, epochs: int) -> None:
    """``n_jobs=2`` beside the hand-written loop on torch's two threads; both start from the same weights."""
    shape = dataclasses.replace(SHAPES[name], epochs=epochs)
    x, y, model = make(shape)
    spec = Spec(epochs=epochs, batchsize=shape.batchsize, seqsize=shape.seqsize)

    def loop(n: int) -> torch.Tensor:
        torch.set_num_threads(n)
        return by_hand(x, y, model, shape, True)[1]

    def fit(n_jobs: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return net2vec(Estimator(copy.deepcopy(model), F.mse_loss, None, spec, n_jobs=n_jobs, verbose=False).fit(x, y))

    contenders = {
        "loop, torch's 2 threads": lambda: loop(2),
        "loop, 1 thread": lambda: loop(1),
        "fit, n_jobs=1": lambda: fit(1),
        "fit, n_jobs=2": lambda: fit(2),
    }
    seconds: dict[str, list[float]] = {c: [] for c in contenders}
    vectors = {}
    for r in range(rounds + 1):  # the first round warms up
        for contender in list(contenders)[r % 4 :] + list(contenders)[: r % 4]:
            began = time.perf_counter()
            vectors[contender] = contenders[contender]()
            if r:
                seconds[contender].append(time.perf_counter() - began)
    first = next(iter(contenders))
    print(
        f"{name}: {shape}\n\n| contender | time over the loop with 2 threads (range) | weights apart |\n|---|---|---|"
    )
    for contender, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds[first], strict=True)]
        apart = float((vectors[contender] - vectors[first]).abs().max())
        print(f"| {contender} | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {apart:.1e} |")
    print(flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        program, name, epochs, size, n_threads, path = sys.argv[2:]
        return one_rank(program, name, int(epochs), int(size), int(n_threads), path)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=["ranks", "threads"], default=["ranks", "threads"])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.rounds} rounds\n")
    for name in args.shapes:
        for part in args.parts:
            {"ranks": ranks, "threads": threads}[part](name, args.rounds, args.epochs)


if __name__ == "__main__":
    main()
