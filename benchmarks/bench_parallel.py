"""How much faster several ranks train than one, and how much of a step they spend talking.

Weak scaling: each rank keeps its batchsize, so two ranks go through twice as many series per step.
What counts is series times steps per second, over that of one rank with one thread. ``DDP`` is the
hand-written loop of bench_fit.py under ``DistributedDataParallel`` with gloo; it gives each rank
half of the series. Contenders run interleaved in rounds, each in processes of their own that time
the same number of epochs after a warm-up; every round gives a ratio, the table has the median and
the range. ``1 x 1 again`` is the A/A control.

Two unconnected processes train a model each at the same time, without a word between them: what the
machine allows two ranks at most. The processes of one ``mpirun`` take turns at both: separate runs
differ by more than ranks cost. Ranks wait at each step for the slower of them, which changes from
step to step: the row "each step as long as the slower's" is what the unconnected processes would
have reached, had they waited so, and talked in no time.

Beside other work, every core is shared with a process that computes all the time. Linux shares
cores between sessions first, and ``torchrun`` gives each rank a session of its own: each launcher
has a base of its own. Over a link, the ranks run in two network namespaces, joined by a link with
the rate and the delay that the table says (gloo over TCP; tbf or netem).

Ranks that share the work of one are in bench_fit.py.

    python benchmarks/bench_parallel.py [--rounds 5] [--shapes small large] [--epochs 2] [--only
    alone beside links]
        [--measured FILE]

``--measured`` writes what the links took, for ``docs/scaling.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import subprocess
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
from common import (
    Report,
    Table,
    cores,
    interleaved,
    median,
    mpirun,
    parse,
    parser,
    ratios,
    spread,
    start,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_hosts import Link, Unavailable, set_link, start_pair, two_hosts
from work import SHAPES, Shape, make, time_major

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.parallel import RankGroup, get_communicator

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
BASE = "1 rank x 1 thread"
DDP, RANKS = "2 ranks x 1, DDP with gloo", "2 ranks x 1, mpirun"
CONTENDERS = {  # launcher, ranks, threads, program
    BASE: ("mpirun", 1, 1, "fit"),
    "1 x 1 again (A/A)": ("mpirun", 1, 1, "fit"),
    "1 rank x 2 threads of torch": ("mpirun", 1, 2, "fit"),
    RANKS: ("mpirun", 2, 1, "fit"),
    "2 ranks x 1, torchrun": ("torchrun", 2, 1, "fit"),
    DDP: ("torchrun", 2, 1, "ddp"),
}
BESIDE = {  # of each launcher, the first is the base
    "torchrun": {"DDP with gloo": "ddp", "DDP again (A/A)": "ddp", "fit": "fit"},
    "mpirun": {"DDP with gloo": "ddp", "fit": "fit"},
}
APART, TOGETHER = "2 unconnected processes", "2 ranks, mpirun"
# which communicator each has
TURNS = {
    APART: None,
    TOGETHER: "auto",
    "2 unconnected again (A/A)": None,
}
WAITING = "2 unconnected, each step as long as the slower's"
LINKS = [Link(1), Link(10), Link(1, 0.1), Link(1, 1), Link(10, 0.1), Link(10, 1)]
ACCUMULATE = [1, 2, 4, 8]


# -- what one rank does --------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time of collectives."""

    seconds = 0.0

    @classmethod
    def install(cls) -> None:
        call_comm = RankGroup.call_comm

        def timed(self: RankGroup, *args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call_comm(self, *args)
            finally:
                cls.seconds += time.perf_counter() - began

        RankGroup.call_comm = timed  # type: ignore[method-assign]  # for the time that it takes


def run_fit(
    shape: Shape,
    x: np.ndarray,
    y: np.ndarray,
    model: nn.Module,
    comm: Any = "auto",
    accumulate: int = 1,
    **others: Any,
) -> tuple[float, torch.Tensor]:
    spec = Spec(
        epochs=shape.epochs,
        batchsize=shape.batchsize,
        seqsize=shape.seqsize,
        rebatch=False,
        accumulate=accumulate,
    )
    est = Estimator(model, F.mse_loss, None, spec, comm=comm, verbose=False, **others)
    est.fit(x[:, :, : shape.seqsize], y[:, :, : shape.seqsize], epochs=1)  # warms up
    Stopwatch.seconds = 0.0
    get_communicator("auto").barrier()
    began = time.perf_counter()
    est.fit(x, y)
    return time.perf_counter() - began, net2vec(est)


def note_time(times: list[float], loop: Any) -> None:
    """A callback."""
    times.append(time.perf_counter())


def take_turns(shape: Shape, rounds: int, path: str) -> None:
    """Train by turns as two ranks and as two unconnected processes; rank 0 writes the seconds of
    each round.

    The seconds of unconnected processes are those of both speeds together.
    """
    ranks = get_communicator("auto")
    x, y, model = make(shape)
    half = np.array_split(np.arange(x.shape[1]), ranks.size)[ranks.rank]
    own = slice(half[0], half[-1] + 1)
    found: dict[str, list[float]] = {turn: [] for turn in [*TURNS, WAITING, "talking"]}
    n_steps = shape.epochs * len(shape.places) // ranks.size
    for n in range(rounds):
        for turn in list(TURNS)[:: -1 if n % 2 else 1]:
            comm = TURNS[turn]
            ends: list[float] = []
            data = (x, y) if comm else (x[:, own], y[:, own])
            taken, _ = run_fit(shape, *data, model, comm, callbacks=partial(note_time, ends))
            found[turn].append(ranks.size / sum(1 / t for t in ranks.allgather(taken)))
            if comm:
                found["talking"].append(Stopwatch.seconds / taken)
            elif turn == APART:
                of_steps = np.diff(ends[-n_steps:])
                slower = np.max(ranks.allgather(of_steps), 0)
                found[WAITING].append(taken - of_steps.sum() + slower.sum())
    if ranks.rank == 0:
        Path(path).write_text(json.dumps(found))


def run_ddp(
    shape: Shape, x: np.ndarray, y: np.ndarray, model: nn.Module
) -> tuple[float, torch.Tensor]:
    if "RANK" not in os.environ:  # under mpirun
        os.environ.update(
            {name: os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE")}
        )
        os.environ.update(WORLD_SIZE=os.environ["SIZE"], MASTER_ADDR="127.0.0.1")
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


def one_rank(
    program: str, name: str, epochs: int, size: int, threads: int, quick: bool, path: str
) -> None:
    torch.set_num_threads(threads)
    Stopwatch.install()
    if program == "links":
        return over_link(name.split(), quick, path)
    if program == "turns":
        name, rounds = name.split()
        return take_turns(shape_of(name, epochs, size, quick), int(rounds), path)
    shape = shape_of(name, epochs, size, quick)
    taken, vector = {"fit": run_fit, "ddp": run_ddp}[program](shape, *make(shape))
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == 0:
        found = {
            "seconds each": taken / (shape.n_series * shape.n_steps * epochs),  # a step of a series
            "talking": Stopwatch.seconds / taken,
            "finite": bool(torch.isfinite(vector).all()),
        }
        Path(path).write_text(json.dumps(found))


def over_link(names: list[str], quick: bool, path: str) -> None:
    """Train with several numbers of batches per update; rank 0 writes the seconds of a batch."""
    found = []
    for name in names:
        shape = shape_of(name, 1, 2, quick)
        shape = dataclasses.replace(shape, n_series=4 * shape.batchsize, n_steps=8 * shape.seqsize)
        n_batches = len(shape.places) // 2  # of two ranks, each with its own series
        x, y, model = make(shape)
        for accumulate in ACCUMULATE:
            best = math.inf, 0.0
            for _ in range(3):
                taken, vector = run_fit(shape, x, y, model, accumulate=accumulate)
                best = min(best, (taken / n_batches, Stopwatch.seconds / n_batches))
            numbers = {
                "accumulate": accumulate,
                "seconds": best[0],
                "talking": best[1],
                "n_params": len(vector),
            }
            found.append({"shape": name, **numbers})
    if get_communicator("auto").rank == 0:
        Path(path).write_text(json.dumps(found))


# -- all of them ---------------------------------------------------------------------------------------


def measure(contender: str, name: str, epochs: int, quick: bool) -> dict[str, float]:
    found = run_ranks(*CONTENDERS[contender], name, epochs, quick)
    assert found["finite"]
    return found


def run_ranks(
    launcher: str, size: int, threads: int, program: str, name: str, epochs: int, quick: bool
) -> Any:
    """Start a program on ranks; returns what rank 0 has found."""
    launch = (
        [*(mpirun() or []), "-n", size, sys.executable]
        if launcher == "mpirun"
        else [*TORCHRUN, size]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        start(
            [*launch, __file__, "--rank", program, name, epochs, size, threads, int(quick), path],
            OMP_NUM_THREADS=str(threads),
            MASTER_PORT=str(free_port()),  # of DDP under mpirun; torchrun finds its own
        )
        return json.loads(path.read_text())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
        share = "not measured" if contender == DDP else f"{median(talking[contender]):.1%}"
        table.rows.append([contender, spread(ratios(seconds[BASE], taken)), share])
    report.add(table)
    by_turns(name, report, 6 * rounds, epochs, quick)


def by_turns(name: str, report: Report, rounds: int, epochs: int, quick: bool) -> None:
    found = run_ranks("mpirun", 2, 1, "turns", f"{name} {rounds}", epochs, quick)
    talking = median(found.pop("talking"))
    table = Table(
        f"{name}: 2 ranks and 2 unconnected processes by turns, {rounds} rounds",
        ["contender", "speed (range), of 2 unconnected", "of their fastest"],
    )
    for turn, taken in found.items():
        table.rows.append(
            [turn, spread(ratios(found[APART], taken)), f"{min(found[APART]) / min(taken):.2f}"]
        )
    waiting = spread(ratios(found[WAITING], found[TOGETHER]))
    table.notes.append(
        f"2 ranks: {waiting} of {WAITING}. In collectives: {talking:.1%} of the time. Aim: .95 of "
        "2 unconnected."
    )
    report.add(table)


def beside(name: str, report: Report, rounds: int, epochs: int, quick: bool) -> None:
    def turn(launcher: str, program: str) -> float:
        return float(run_ranks(launcher, 2, 1, program, name, epochs, quick)["seconds each"])

    turns = {
        f"{launcher}: {contender}": partial(turn, launcher, program)
        for launcher, programs in BESIDE.items()
        for contender, program in programs.items()
    }
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())]
    try:
        seconds = interleaved(turns, rounds)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    table = Table(
        f"{name}: 2 ranks beside a busy process per core",
        ["contender", "speed (range), of DDP by the same launcher"],
    )
    for launcher, programs in BESIDE.items():
        first, *_ = names = [f"{launcher}: {contender}" for contender in programs]
        table.rows += [
            [contender, spread(ratios(seconds[first], seconds[contender]))] for contender in names
        ]
    table.notes.append("Aim of fit: never behind DDP.")
    report.add(table)


def links(
    names: list[str], report: Report, rounds: int, quick: bool, measured: Path | None
) -> None:
    table = Table(
        "over a link: 2 ranks, one on each host",
        ["shape", "link", "batches per update", "ms per batch", "talking"],
    )
    every: list[dict[str, Any]] = []
    try:
        with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.json")
            for link in LINKS:
                try:
                    set_link(hosts, link)
                except Unavailable as error:
                    report.leave_out(str(link), str(error))
                    continue
                found = []
                for _ in range(rounds):
                    rank = [
                        sys.executable,
                        __file__,
                        "--rank",
                        "links",
                        " ".join(names),
                        1,
                        2,
                        1,
                        int(quick),
                        path,
                    ]
                    start_pair(hosts, rank)
                    found.append(json.loads(path.read_text()))
                for of_one in zip(*found, strict=True):
                    best = min(of_one, key=lambda f: f["seconds"])
                    every.append({"rate": link.rate, "delay": link.delay, **best})
                    share = f"{best['talking'] / best['seconds']:.0%}"
                    row = [
                        best["shape"],
                        str(link),
                        str(best["accumulate"]),
                        f"{best['seconds'] * 1e3:.2f}",
                        share,
                    ]
                    table.rows.append(row)
                if measured is not None:
                    measured.write_text(json.dumps(every, indent=1) + "\n")
    except Unavailable as error:
        return report.leave_out("links", str(error))
    report.add(table)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        program, name, epochs, size, n_threads, quick, path = sys.argv[2:]
        return one_rank(
            program, name, int(epochs), int(size), int(n_threads), bool(int(quick)), path
        )
    made = parser(__doc__, rounds=5)
    made.add_argument("--epochs", type=int, default=2)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    made.add_argument(
        "--only",
        nargs="+",
        choices=["alone", "beside", "links"],
        default=["alone", "beside", "links"],
    )
    made.add_argument("--measured", type=Path, metavar="FILE")
    args = parse(made)
    report = Report(__doc__, args, threads=False)
    if mpirun() is None:
        return report.leave_out("ranks", "there is no mpirun with mpi4py that can start programs")
    for name in args.shapes:
        if "alone" in args.only:
            compare(name, report, args.rounds, args.epochs, args.quick)
        if "beside" in args.only:
            beside(name, report, args.rounds, args.epochs, args.quick)
    if "links" in args.only:
        links(args.shapes, report, min(args.rounds, 2), args.quick, args.measured)


if __name__ == "__main__":
    main()
