"""Whether a window costs the same however long the series are and however many, and what memory
that takes.

``fit`` on arrays in memory, in C order and in time-major memory, stopped after so many windows,
each time in a process of its own; the window is always of 10 series x 100 steps x 4 features,
LSTM(8), small enough to show what is around it. ``ms per window`` is the median time from one
window's end to the next one's. The shortest series have ten windows, which come round again and are
in the processor's caches; the others' are new each time, which costs something once, but not more
the longer they are. ``before the first`` is all that happens once, from the call to the first
window's end: building, and the search of arrays in memory for NaN, which goes through all of them.
``memory growth`` is that of the process at the peak of ``fit``, beside the size of the arrays
(Linux only).

    python benchmarks/bench_growth.py [--rounds 3] [--windows 300]
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, Table, growth, interleaved, parse, parser, spread, start
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM
from fluxutils_py.training import StopTraining

B, S = 10, 100
# N, T
SIZES = [
    (10, 10**3),
    (10, 10**4),
    (10, 10**5),
    (10, 10**6),
    (10**3, 100),
    (10**4, 100),
    (10**5, 100),
]
QUICK = [(10, 200), (20, 100)]
ORDERS = ["(F, N, T) in C order", "time-major"]


class Clock:
    """When each window ended; stops after so many."""

    def __init__(self, n: int) -> None:
        self.n, self.times = n, [time.perf_counter()]

    def on_step(self, loop: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > self.n:
            raise StopTraining


def one(n: int, t: int, order: str, windows: int) -> dict[str, float]:
    torch.set_num_threads(1)  # the window is too small for two
    rng = np.random.default_rng(0)
    if order == ORDERS[0]:
        x = rng.standard_normal((4, n, t), dtype=np.float32)
        y = x[:1].copy()
    else:
        x = rng.standard_normal((t, n, 4), dtype=np.float32).transpose(2, 1, 0)
        y = x[:1].transpose(2, 1, 0).copy().transpose(2, 1, 0)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(4, 8), nn.Linear(8, 1))

    def fit(x: np.ndarray, y: np.ndarray, windows: int) -> Clock:
        spec = Spec(epochs=10**6, batchsize=B, seqsize=S, rebatch=False)
        clock = Clock(windows)
        Estimator(model, F.mse_loss, None, spec, callbacks=clock, verbose=False).fit(x, y)
        return clock

    clocks = []
    fit(x[:, :B, :S], y[:, :B, :S], 10)  # libraries are loaded
    grown = growth(lambda: clocks.append(fit(x, y, windows)))
    steps = np.diff(clocks[0].times)
    return {
        "before": float(steps[0]),
        "step": float(np.median(steps[1:])),
        "grown": grown,
        "size": x.nbytes + y.nbytes,
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        n, t, order, windows = sys.argv[2:]
        return print(json.dumps(one(int(n), int(t), order, int(windows))))
    made = parser(__doc__, rounds=3)
    made.add_argument("--windows", type=int, default=300)
    args = parse(made)
    report = Report(__doc__, args, threads=False)
    sizes = QUICK if args.quick else SIZES
    for order in ORDERS[: 1 if args.quick else 2]:
        found: dict[tuple[int, int], list[dict[str, float]]] = {size: [] for size in sizes}

        def turn(size: tuple[int, int], order: str = order, found: Any = found) -> float:
            result = json.loads(
                start([sys.executable, __file__, "--one", *size, order, args.windows])
            )
            found[size].append(result)
            return result["step"]

        seconds = interleaved({str(size): partial(turn, size) for size in sizes}, args.rounds)
        base = statistics.median(seconds[str(sizes[0])])
        table = Table(
            f"x {order}, float32, 1 thread of torch",
            ["N", "T", "ms per window (range)", "ratio to the first line", "before the first, s", "memory growth, MiB",
             "arrays, MiB"],
        )  # fmt: skip
        for (n, t), results in found.items():
            taken = seconds[str((n, t))]
            grown = statistics.median(r["grown"] for r in results)
            table.rows.append(
                [
                    f"{n:,}",
                    f"{t:,}",
                    spread([1e3 * s for s in taken]),
                    f"{statistics.median(taken) / base:.2f}",
                    f"{statistics.median(r['before'] for r in results):.3f}",
                    "" if math.isnan(grown) else f"{grown:.0f}",
                    f"{results[0]['size'] / 2**20:.1f}",
                ]
            )
        report.add(table)


if __name__ == "__main__":
    main()
