"""How ``LSTM`` and ``GRU`` compare with torch's layers over a grid of 200 shapes, for training and
prediction.

The shapes are a fixed sample, spread evenly over the logarithms of the features F (1 to 64), the
units H (8 to 256), the series B (1 to 200) and the steps S (1 to 1000), LSTM and GRU by turns;
those that would take torch long are passed over. A ratio is the time of the package's layer over
that of torch's, the better of one and two threads of torch, round by round: the median counts. All
contenders take turns; ``A/A`` is torch's layer with one thread a second time: where it is far from
1, the ratio means nothing. Training is a forward and a backward pass over a window, without an
input gradient. Before anything is timed, the outputs of both layers must be equal to rounding.

A processor with AVX-512 measures all of it twice: with what it has, and with torch and the kernels
held to AVX2, in a process of its own.

    python benchmarks/bench_grid.py [--rounds 5] [--measured docs/grid.json]

``--measured`` writes every cell, for ``docs/grid.py``, which draws them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_few_series import LAYERS, Contender, Shape
from common import Report, Table, interleaved, machine, parse, parser, ratios, start

from fluxutils_py.nn.kernels.library import library_in_use

N_SHAPES = 200
TASKS = ("train", "predict")
LEAST_TURN = 0.002  # seconds; more calls are timed together until it is over
LONGEST = 0.06  # seconds that torch may take to predict, roughly
STEP_SECONDS = {"LSTM": 15e-6, "GRU": 60e-6}  # of torch, besides its products
FLOPS = {"LSTM": 50e9, "GRU": 30e9}  # of torch, a second, roughly
BEHIND = 1.1  # times torch's; also how far from 1 the control may be
# Holds oneDNN, torch's own loops and the kernels to it; they read it once.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "FLUXUTILS_KERNELS": "avx2"}
# of F, H, B and S
SMALLEST = (1, 8, 1, 1)
LARGEST = (64, 256, 200, 1000)


def points() -> Iterator[tuple[float, ...]]:
    """Points of the unit cube that fill it evenly, however many are taken.

    Source: M. Roberts, The unreasonable effectiveness of quasirandom sequences, 2018: multiples of
    the powers of the number g with g**5 = g + 1.

    >>> len(next(points()))
    4
    """
    g = 1.0
    for _ in range(60):  # converges by a factor of six each time
        g = (1 + g) ** (1 / (len(LARGEST) + 1))
    for k in itertools.count(1):
        yield tuple((0.5 + k * g**-axis) % 1 for axis in range(1, len(LARGEST) + 1))


def expected_seconds(shape: Shape) -> float:
    """That torch takes to predict, roughly."""
    gates = 4 if shape.layer == "LSTM" else 3
    products = 2 * gates * shape.n_hidden * (shape.n_features + shape.n_hidden)
    work = products * shape.n_series * shape.n_steps
    return work / FLOPS[shape.layer] + shape.n_steps * STEP_SECONDS[shape.layer]


def sample(n: int) -> list[Shape]:
    """The first n shapes that do not take too long."""
    found: list[Shape] = []
    layers = itertools.cycle(LAYERS)
    for point in points():
        sizes = [round(a * (b / a) ** p) for a, b, p in zip(SMALLEST, LARGEST, point, strict=True)]
        shape = Shape(next(layers), *sizes)
        if expected_seconds(shape) <= LONGEST:
            found.append(shape)
        if len(found) == n:
            return found
    raise AssertionError("the points never end")


def contenders(shape: Shape) -> dict[str, Contender]:
    """Torch's layer thrice and ours, with equal weights, whose outputs were seen to agree."""
    ours, torchs = LAYERS[shape.layer]
    torch.manual_seed(0)
    x = torch.randn(shape.n_steps, shape.n_series, shape.n_features)
    dy = torch.randn(shape.n_steps, shape.n_series, shape.n_hidden)
    plain = torchs(shape.n_features, shape.n_hidden)
    layer = ours(shape.n_features, shape.n_hidden)
    layer.module.load_state_dict(plain.state_dict())
    found = {
        "one thread": Contender(plain, 1, x, dy),
        "two threads": Contender(plain, 2, x, dy),
        "again": Contender(plain, 1, x, dy),
        "ours": Contender(layer, 2, x, dy),
    }
    # a thousand steps add up what each rounds
    outputs = [found[name].outputs() for name in ("ours", "one thread")]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    return found


def seconds_per_call(contender: Contender, task: str) -> float:
    """The less of two turns, each of as many calls as a clock can measure well."""
    torch.set_num_threads(contender.threads)
    run: Callable[[], None] = getattr(contender, task)
    return min(_turn(run), _turn(run))


def _turn(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    for calls in itertools.count(1):
        run()
        taken = time.perf_counter() - began
        if taken >= LEAST_TURN:
            return taken / calls
    raise AssertionError("time has stopped")


def compare(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """The cells of a shape, one for each task."""
    found = contenders(shape)
    runs = {
        f"{task}, {name}": partial(seconds_per_call, contender, task)
        for task in TASKS
        for name, contender in found.items()
    }
    for run in runs.values():  # so that all are warm
        run()
    taken = interleaved(runs, rounds)
    cells = []
    for task in TASKS:
        one, two, again, ours = (taken[f"{task}, {name}"] for name in found)
        better = list(map(min, one, two))
        cells.append(
            {
                "layer": shape.layer,
                "task": task,
                **dict(zip("FHBS", shape[1:], strict=True)),
                "ratio": round(statistics.median(ratios(ours, better)), 4),
                "control": round(statistics.median(ratios(again, one)), 4),
                "microseconds": round(1e6 * statistics.median(better), 1),
            }
        )
    return cells


def instructions() -> str:
    """The set that the kernels use here."""
    library = library_in_use()
    return "none" if library is None else library.isa_name


def held_to_avx2(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of a process that has only AVX2."""
    command = [sys.executable, __file__, "--cells", "--rounds", args.rounds]
    return json.loads(start([*command, *(["--quick"] if args.quick else [])], **AVX2))


def is_behind(cell: dict[str, Any]) -> bool:
    """Whether a cell is slower than torch by more than chance, as its control tells it."""
    return cell["ratio"] > BEHIND and 1 / BEHIND <= cell["control"] <= BEHIND


def summary(cells: Sequence[dict[str, Any]], isa: str = "") -> Table:
    """How many cells are ahead, of each layer and task."""
    columns = ["layer", "task", "shapes", "ahead", "behind by more than 1.1", "median", "largest"]
    title = "time over that of torch's layer, the better of its one and two threads"
    table = Table(f"{isa}: {title}" if isa else title, columns)
    for layer, task in itertools.product(LAYERS, TASKS):
        part = [c for c in cells if (c["layer"], c["task"]) == (layer, task)]
        if not part:
            continue
        found = [c["ratio"] for c in part]
        counts = [len(part), sum(r < 1 for r in found), sum(map(is_behind, part))]
        middle = statistics.median(found)
        table.rows.append([layer, task, *map(str, counts), f"{middle:.2f}", f"{max(found):.2f}"])
    return table


def worst(cells: Sequence[dict[str, Any]], n: int = 12, isa: str = "") -> Table:
    """The cells with the largest ratios."""
    columns = ["layer", "task", "F", "H", "B", "S", "ratio", "A/A", "torch, microseconds"]
    table = Table(f"{isa}: the {n} largest ratios" if isa else f"the {n} largest ratios", columns)
    for cell in sorted(cells, key=lambda c: -c["ratio"])[:n]:
        sizes = [str(cell[name]) for name in "FHBS"]
        numbers = [f"{cell[name]:.2f}" for name in ("ratio", "control")]
        table.rows.append(
            [cell["layer"], cell["task"], *sizes, *numbers, f"{cell['microseconds']:.0f}"]
        )
    return table


def main() -> None:
    made = parser(__doc__, rounds=5)
    made.add_argument("--measured", type=Path, metavar="FILE", help="write every cell there")
    made.add_argument("--cells", action="store_true", help="only print the cells of one set")
    args = parse(made)
    report = None if args.cells else Report(__doc__, args, threads=False)
    shapes = sample(N_SHAPES)
    if args.quick:
        shapes = [shape._replace(n_steps=min(shape.n_steps, 5)) for shape in shapes[::40]]
    cells: list[dict[str, Any]] = []

    def keep() -> None:
        # after each, so that a run cut short leaves something
        if args.measured is not None and not args.quick:
            content = {"machine": machine(), "cells": cells}
            args.measured.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    for shape in shapes:
        cells += [{"set": instructions(), **cell} for cell in compare(shape, args.rounds)]
        keep()
    if report is None:
        print(json.dumps(cells))
        return
    if instructions() == "avx512":
        cells += held_to_avx2(args)
        keep()
    for isa in dict.fromkeys(cell["set"] for cell in cells):
        part = [cell for cell in cells if cell["set"] == isa]
        report.add(summary(part, isa))
        report.add(worst(part, isa=isa))


if __name__ == "__main__":
    main()
