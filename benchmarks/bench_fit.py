"""How long ``Estimator.fit`` takes beside a hand-written PyTorch loop and other libraries that do
the same work.

Contenders start from the same weights and see the same windows in the same order; data in C order
are brought to time-major inside the time. They take turns; every round gives ratios to the loop
with fused AdamW, and the table shows the median and the range of those. ``fused again`` is the A/A
control: how far from 1 chance alone gets. The MSE is that of the final weights, found by a NumPy
LSTM over a group of series from start to end: equal MSE, equal work. Memory is the growth of a
process of its own while it trains, at its peak (Linux only).

The peers (skorch, Lightning, Keras; see peers.py) are given whole windows, fused AdamW and neither
logger nor progress bar, and what carries the state was written for them. Keras has one bias where
torch has two, so that its weights are not quite the others'. ``2 ranks`` share each minibatch under
mpirun, so that the work is the same; starting them is not in the time. The loop is torch's layers;
``fit`` uses the native kernels where there are any. In the shape ``steps`` the loss is one of the
user's own that calls the model once per step.

    python benchmarks/bench_fit.py [--rounds 7] [--shapes small "64 units" GRU ...] [--no-memory]
    python benchmarks/bench_fit.py --small-windows --threads 1      # one epoch of small windows
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import (
    Report,
    Table,
    cores,
    growth,
    interleaved,
    median,
    mpirun,
    parse,
    parser,
    ratios,
    start,
    version,
)
from peers import KERAS, PEERS, stock_keras
from torch import Tensor
from work import (
    COLUMNS,
    ONE_SERIES,
    SHAPES,
    Contender,
    Data,
    Shape,
    by_fit,
    by_hand,
    loss_by_steps,
    make,
    outcome,
    step_loss,
    turns,
    two_windows,
)

BASE = "loop, fused AdamW"
FIT = "Estimator.fit"
RANKS = "Estimator.fit, 2 ranks"
STEPS = "steps"
MORE = {  # of these only the loop and ours
    "32 units": dataclasses.replace(SHAPES["small"], n_hidden=32, n_series=400),
    "64 units": dataclasses.replace(SHAPES["large"], n_hidden=64),
    "GRU": dataclasses.replace(SHAPES["small"], cell="GRU", n_series=400),
}
SMALL_WINDOWS = {  # of one epoch, in which the fixed cost of a step and of a call shows
    "100 series in tens, 10 steps": Shape(8, 100, 300, 8, 10, 10, 1),
    "one series, 100 steps": Shape(8, 1, 20_000, 8, 1, 100, 1),
    "20 series, 100 steps": Shape(8, 20, 10_000, 8, 20, 100, 1),
    "one series, 10 steps": Shape(8, 1, 3000, 8, 1, 10, 1),
    "32 series, 50 steps, 32 units": Shape(8, 32, 5000, 32, 32, 50, 1),
    "100 series, 100 steps": Shape(8, 100, 5000, 8, 100, 100, 1),
}
ALL_SHAPES = {
    **SHAPES,
    "one series": ONE_SERIES,
    **MORE,
    **SMALL_WINDOWS,
    STEPS: dataclasses.replace(SHAPES["small"], n_series=300, epochs=1),
}
FEW_WINDOWS = [name for name in ALL_SHAPES if name not in SMALL_WINDOWS]
AIMS = {
    "small": 0.45,
    "large": 0.88,
    "one series": 0.90,
    "32 units": 0.68,
    "64 units": 0.75,
    "GRU": 0.25,
    STEPS: 1.05,
    "100 series in tens, 10 steps": 0.60,
    "one series, 100 steps": 0.60,
    "20 series, 100 steps": 0.55,
    "one series, 10 steps": 0.70,
    "32 series, 50 steps, 32 units": 0.55,
    "100 series, 100 steps": 0.45,
}
AT_MOST = {KERAS: 3}  # rounds
OTHER_WORK = 1e-4  # relative difference of the MSE that rounding does not make


def contenders(name: str) -> dict[str, Contender]:
    """What can be run here on a shape."""
    if name == STEPS:
        return {
            BASE: partial(by_hand, loss=loss_by_steps),
            "fused again (A/A)": partial(by_hand, loss=loss_by_steps),
            FIT: partial(by_fit, loss=step_loss),
            "Estimator.fit, seqloss: whole windows": by_fit,
        }
    ours: dict[str, Contender] = {
        "loop, AdamW": partial(by_hand, fused=False),
        BASE: by_hand,
        "fused again (A/A)": by_hand,
        FIT: by_fit,
    }
    if name in MORE or name in SMALL_WINDOWS:
        return {contender: ours[contender] for contender in (BASE, "fused again (A/A)", FIT)}
    return ours | {peer: train for peer, (package, train) in PEERS.items() if version(package)}


# -- ranks ---------------------------------------------------------------------------------------------


def two_ranks(launcher: list[str], shape_name: str, quick: bool) -> tuple[float, Tensor]:
    """Seconds of a fit by two ranks that share the cores, and its weights."""
    each = str(max(1, torch.get_num_threads() // 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.pt")
        command = [
            *launcher,
            "-n",
            2,
            sys.executable,
            __file__,
            "--rank",
            path,
            each,
            shape_name,
            int(quick),
        ]
        start(command, OMP_NUM_THREADS=each)
        found = torch.load(path)
    return found["seconds"], found["vector"]


def one_rank(path: str, threads: str, shape_name: str, quick: str) -> None:
    from fluxutils_py.parallel import get_communicator

    torch.set_num_threads(int(threads))  # torch takes one when it sees MPI
    whole = shape_of(shape_name, bool(int(quick)))
    shape = dataclasses.replace(whole, batchsize=whole.batchsize // 2)  # of each rank
    data = make(shape)
    small, part = two_windows(data, whole)
    by_fit(*small, dataclasses.replace(part, batchsize=shape.batchsize))
    comm = get_communicator("auto")
    comm.barrier()
    began = time.perf_counter()
    vector = by_fit(*data, shape)
    if comm.rank == 0:
        torch.save({"seconds": time.perf_counter() - began, "vector": vector}, path)


# -- one shape -----------------------------------------------------------------------------------------


def shape_of(name: str, quick: bool) -> Shape:
    return ALL_SHAPES[name].quick() if quick else ALL_SHAPES[name]


def compare(name: str, report: Report, rounds: int, quick: bool, memory: bool) -> None:
    shape = shape_of(name, quick)
    data = make(shape)
    small, part = two_windows(data, shape)
    runs = contenders(name)
    for contender in list(runs):
        try:
            runs[contender](*small, part)
        except Exception as error:
            if contender not in PEERS:
                raise
            report.leave_out(f"{name}, {contender}", f"it failed: {error}")
            del runs[contender]
    vectors: dict[str, Tensor] = {}
    by_turns = turns(runs, data, shape, vectors)
    launcher = mpirun()
    if name in SHAPES and launcher is not None:

        def turn_of_ranks() -> float:
            seconds, vectors[RANKS] = two_ranks(launcher, name, quick)
            return seconds

        by_turns[RANKS] = turn_of_ranks

    seconds = interleaved(by_turns, rounds, AT_MOST)
    rows, off = outcome(seconds, vectors, BASE, data, shape)
    calls = "; one call of the model per step" if name == STEPS else ""
    table = Table(f"{name}: {shape.training}{calls}", COLUMNS, rows)
    if memory:
        table.columns = [*COLUMNS, "memory growth, MiB"]
        table.rows = [[*row, peak_memory(name, row[0])] for row in rows]
    found = {c: median(ratios(taken, seconds[BASE])) for c, taken in seconds.items()}
    best = min(found.get("loop, AdamW", 1.0), 1.0)
    table.notes.append(
        f"`fit` over the better loop: {found[FIT] / best:.3f} (aim: at most {AIMS[name]})."
    )
    if KERAS in seconds:
        table.notes.append(stock_keras_note(small, part))
    report.add(table)
    others = [c for c in off if c != KERAS and off[c] > OTHER_WORK]
    if others:
        raise SystemExit(f"{name}: not the same work as {BASE}, by the MSE: {', '.join(others)}")


def stock_keras_note(data: Data, shape: Shape) -> str:
    """What happens without the copy of the initial state."""
    try:
        stock_keras(*data, shape)
    except RuntimeError as error:
        return f'Keras\' own `LSTM(stateful=True)`, without the copy, fails here in `fit`: "{str(error)[:120]}..."'
    return "Keras' own `LSTM(stateful=True)`, without the copy, trains with this version."


def peak_memory(name: str, contender: str) -> str:
    """MiB by which a fresh process grows while it trains for an epoch; not of ranks, nor where it
    cannot be known.
    """
    if contender == RANKS:
        return ""
    grown = json.loads(
        start([sys.executable, __file__, "--peak", name, contender]).splitlines()[-1]
    )
    return "" if math.isnan(grown) else f"{grown:.0f}"


def show_peak(name: str, contender: str) -> None:
    shape = ALL_SHAPES[name]
    data = make(shape)
    train = contenders(name)[contender]
    small, part = two_windows(data, shape)
    train(*small, part)  # libraries are loaded
    print(json.dumps(growth(train, *data, dataclasses.replace(shape, epochs=1))))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return one_rank(*sys.argv[2:])
    if sys.argv[1:2] == ["--peak"]:
        return show_peak(*sys.argv[2:])
    made = parser(__doc__, rounds=7)
    made.add_argument("--shapes", nargs="+", choices=ALL_SHAPES, default=FEW_WINDOWS)
    made.add_argument(
        "--small-windows", action="store_const", const=list(SMALL_WINDOWS), dest="shapes"
    )
    made.add_argument("--threads", type=int, default=cores(), help="of torch; ranks have their own")
    made.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    args = parse(made)
    torch.set_num_threads(args.threads)
    report = Report(__doc__, args)
    for peer, (package, _) in PEERS.items():
        if not version(package):
            report.leave_out(peer, f"{package} is not installed")
    if mpirun() is None:
        report.leave_out(RANKS, "there is no mpirun with mpi4py that can start programs")
    for name in args.shapes:
        compare(
            name, report, args.rounds, args.quick, args.memory and not args.quick and name in SHAPES
        )


if __name__ == "__main__":
    main()
