"""How one epoch of ``Estimator.fit`` compares with a loop by hand over a grid of 108 shapes.

Kinds are an LSTM, a GRU and two LSTMs, with 8, 32 and 128 units and a linear head on 8 features, for 1,
10 and 64 series in windows of 1, 10, 50 and 200 steps. The loop has torch's layers, the state carried
and detached, and fused AdamW; it is given time-major tensors. A ratio is the processor time of the fit,
with all that a call costs, over that of the loop, round by round in turns on one thread: the median
counts. ``A/A`` is the loop a second time.

A processor with AVX-512 measures all of it twice: with what it has, and with torch and the kernels
held to AVX2, in a process of its own.

    python benchmarks/bench_fit_grid.py [--rounds 3]
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_grid import AVX2, instructions
from common import Report, Table, interleaved, parse, parser, ratios, start
from torch import Tensor, nn
from torch.nn import functional

from fluxutils_py import Estimator
from fluxutils_py.nn import GRU, LSTM

KINDS = {"LSTM": (LSTM, nn.LSTM, 1), "GRU": (GRU, nn.GRU, 1), "two LSTMs": (LSTM, nn.LSTM, 2)}
N_FEATURES = 8
MOST_UPDATES = 150
SECONDS = 0.5  # of a fit, roughly
FLOPS = 1e8  # products of a unit with a unit, a second, roughly
MOST_VALUES = 4e7


class Shape(NamedTuple):
    kind: str
    n_hidden: int
    n_series: int
    n_steps: int  # of a window

    @property
    def n_updates(self) -> int:
        B, S, H = self.n_series, self.n_steps, self.n_hidden
        wanted = SECONDS / (0.0009 + B * S * H * (H + N_FEATURES) / FLOPS)
        fit_in = MOST_VALUES / (S * B * N_FEATURES)
        return max(4, min(max(8, min(MOST_UPDATES, int(wanted))), int(fit_in)))


def shapes() -> list[Shape]:
    return [
        Shape(*s) for s in itertools.product(KINDS, (8, 32, 128), (1, 10, 64), (1, 10, 50, 200))
    ]


def make(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    n = shape.n_steps * shape.n_updates
    x = rng.standard_normal((n, shape.n_series, N_FEATURES), dtype=np.float32).transpose(2, 1, 0)
    return x, (0.1 * x[:1].cumsum(2)).copy()


def by_fit(shape: Shape, x: np.ndarray, y: np.ndarray) -> None:
    layer, _, n_layers = KINDS[shape.kind]
    sizes = [N_FEATURES, *[shape.n_hidden] * n_layers]
    layers = [layer(*pair) for pair in itertools.pairwise(sizes)]
    spec = {
        "epochs": 1,
        "batchsize": shape.n_series,
        "seqsize": shape.n_steps,
        "rebatch": False,
    }
    model = nn.Sequential(*layers, nn.Linear(shape.n_hidden, 1))
    Estimator(model, nn.MSELoss(), None, spec, random_state=0, verbose=False).fit(x, y)


def by_hand(shape: Shape, x: Tensor, y: Tensor) -> None:
    _, layer, n_layers = KINDS[shape.kind]
    recurrent = layer(N_FEATURES, shape.n_hidden, n_layers)
    head = nn.Linear(shape.n_hidden, 1)
    opt = torch.optim.AdamW([*recurrent.parameters(), *head.parameters()], fused=True)
    state: Any = None
    for start_step in range(0, len(x), shape.n_steps):
        window = slice(start_step, start_step + shape.n_steps)
        h, state = recurrent(x[window], state)
        loss = functional.mse_loss(head(h), y[window])
        opt.zero_grad()
        loss.backward()
        opt.step()
        state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()


def seconds(train: Any, *arguments: Any) -> float:
    """Processor time of a call."""
    began = time.process_time()
    train(*arguments)
    return time.process_time() - began


def compare(shape: Shape, rounds: int) -> dict[str, Any]:
    x, y = make(shape)
    tensors = [torch.from_numpy(np.ascontiguousarray(a.transpose(2, 1, 0))) for a in (x, y)]
    runs = {
        "loop": partial(seconds, by_hand, shape, *tensors),
        "again": partial(seconds, by_hand, shape, *tensors),
        "fit": partial(seconds, by_fit, shape, x, y),
    }
    for run in runs.values():  # so that all are warm
        run()
    taken = interleaved(runs, rounds)
    return {
        **shape._asdict(),
        "ratio": statistics.median(ratios(taken["fit"], taken["loop"])),
        "control": statistics.median(ratios(taken["again"], taken["loop"])),
        "microseconds": 1e6 * statistics.median(taken["loop"]) / shape.n_updates,
    }


def summary(cells: list[dict[str, Any]], isa: str) -> Table:
    """How many shapes are behind the loop, and the middle, of each kind."""
    columns = ["kind", "shapes", "above 1", "median", "largest", "A/A"]
    table = Table(f"{isa}: one epoch of a fit, processor time over that of a loop", columns)
    for kind in [*KINDS, "all"]:
        part = [cell for cell in cells if kind in (cell["kind"], "all")]
        if not part:
            continue
        found = [cell["ratio"] for cell in part]
        middle = f"{statistics.median(found):.2f}"
        control = f"{statistics.median(cell['control'] for cell in part):.2f}"
        n_above = str(sum(ratio > 1 for ratio in found))
        table.rows.append([kind, str(len(part)), n_above, middle, f"{max(found):.2f}", control])
    return table


def worst(cells: list[dict[str, Any]], isa: str, n: int = 8) -> Table:
    """The shapes with the largest ratios."""
    columns = ["kind", "units", "series", "steps", "ratio", "A/A", "loop, microseconds an update"]
    table = Table(f"{isa}: the {n} largest ratios", columns)
    for cell in sorted(cells, key=lambda c: -c["ratio"])[:n]:
        sizes = [str(cell[name]) for name in Shape._fields]
        numbers = [f"{cell['ratio']:.2f}", f"{cell['control']:.2f}", f"{cell['microseconds']:.0f}"]
        table.rows.append([*sizes, *numbers])
    return table


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--cells", action="store_true", help="only print the cells of one set")
    args = parse(made)
    report = None if args.cells else Report(__doc__, args, threads=False)
    torch.set_num_threads(1)
    grid = shapes()[::20] if args.quick else shapes()
    cells = [compare(shape, args.rounds) for shape in grid]
    if report is None:
        print(json.dumps(cells))
        return
    by_set = {instructions(): cells}
    if instructions() == "avx512":
        command = [sys.executable, __file__, "--cells", "--rounds", args.rounds]
        command += ["--quick"] * args.quick
        by_set["avx2"] = json.loads(start(command, **AVX2))
    for isa, part in by_set.items():
        report.add(summary(part, isa))
        report.add(worst(part, isa))


if __name__ == "__main__":
    main()
