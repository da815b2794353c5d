"""How long a training step takes with each layer of ``fluxutils_py.nn``, beside torch's
``nn.LSTM``.

A step is a window through the layer and a linear head, mean squared error, backwards, and Adam; all
contenders run by turns in one process, on the same windows. Every round gives a ratio to
``nn.LSTM``; tables show their median and range. The benchmark fails unless the layers of linear
recurrences take at most LIMIT of the time of ``nn.LSTM`` on W1 and W2, and their time is linear in
the steps of a window.

    python benchmarks/bench_layers.py [--rounds 7]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from common import Report, Table, interleaved, median, parse, parser, ratios, spread
from torch import nn

from fluxutils_py import truncate
from fluxutils_py.nn import (
    GRU,
    LRU,
    LSTM,
    TCN,
    CausalConv1d,
    MinGRU,
    MinLSTM,
    SequenceStack,
    SlidingWindowAttention,
)

LIMIT = 0.7
LINEAR = ["MinGRU", "MinLSTM", "LRU"]
BASE = "nn.LSTM"
SHAPES = {  # F, B, S, H
    "W1: F=10, B=100, S=100, H=10": (10, 100, 100, 10),
    "W2: F=32, B=64, S=64, H=128": (32, 64, 64, 128),
    "F=32, B=64, S=64, H=64": (32, 64, 64, 64),
}
LONG = (10, 4, 64)  # F, B, H of long windows


def attention(n_in: int, n_out: int) -> SlidingWindowAttention:
    return SlidingWindowAttention(n_in, n_out, n_heads=math.gcd(n_out, 4))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    BASE: nn.LSTM,
    "nn.LSTM again (A/A)": nn.LSTM,
    "LSTM": LSTM,
    "GRU": GRU,
    "MinGRU": MinGRU,
    "MinLSTM": MinLSTM,
    "LRU": LRU,
    "CausalConv1d, 3 steps": partial(CausalConv1d, kernel_size=3),
    "TCN, 6 levels": TCN,
    "SlidingWindowAttention, 64 steps": attention,
    "SequenceStack of 2 MinGRU": partial(SequenceStack, MinGRU),
    "SequenceStack of 2 LSTM": partial(SequenceStack, LSTM),
}


class Training:
    """One layer at work on one window."""

    def __init__(
        self, make: Callable[[int, int], nn.Module], F: int, B: int, S: int, H: int
    ) -> None:
        torch.manual_seed(0)
        self.layer, self.head = make(F, H), nn.Linear(H, 1)
        self.x, self.y = torch.randn(S, B, F), torch.randn(S, B, 1)
        self.optimizer = torch.optim.Adam(
            [*self.layer.parameters(), *self.head.parameters()], fused=True
        )

    def step(self) -> None:
        truncate(self.layer)
        h = self.layer(self.x)
        loss = nn.functional.mse_loss(self.head(h[0] if isinstance(h, tuple) else h), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def seconds(self, repeats: int) -> float:
        """Of the fastest of some steps: what else the machine does only ever adds."""
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - began)
        return min(taken)


def measure(F: int, B: int, S: int, H: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    trainings = {name: Training(make, F, B, S, H) for name, make in LAYERS.items()}
    for training in trainings.values():
        training.step()
    return interleaved({name: partial(t.seconds, repeats) for name, t in trainings.items()}, rounds)


def short_windows(report: Report, rounds: int) -> dict[str, float]:
    """Prints one table per shape; the median ratios of the linear layers on W1 and W2."""
    found = {}
    for title, shape in SHAPES.items():
        taken = measure(*shape, rounds, repeats=5)
        table = Table(f"A training step, {title}", ["layer", "ms", f"of {BASE}'s time"])
        for name, seconds in taken.items():
            of_base = ratios(seconds, taken[BASE])
            table.rows.append([name, f"{1e3 * median(seconds):.2f}", spread(of_base)])
            if name in LINEAR and title.startswith("W"):
                found[f"{name} on {title[:2]}"] = statistics.median(of_base)
        report.add(table)
    return found


def long_windows(report: Report, lengths: list[int], rounds: int) -> dict[str, float]:
    """Time by the length of the window; how much longer the longest takes, per step, than the one
    before.
    """
    F, B, H = LONG
    taken = {S: measure(F, B, S, H, rounds, repeats=2) for S in lengths}
    table = Table(
        f"A training step on long windows, F={F}, B={B}, H={H}: milliseconds, and of {BASE}'s time",
        ["layer", *(f"S={S}" for S in lengths)],
    )
    for name in LAYERS:
        cells = [
            f"{1e3 * median(t[name]):.1f}, {median(ratios(t[name], t[BASE])):.2f}"
            for t in taken.values()
        ]
        table.rows.append([name, *cells])
    report.add(table)
    before, last = lengths[-2:]
    return {
        name: median(taken[last][name]) / median(taken[before][name]) * before / last
        for name in LINEAR
    }


def kept_mib(training: Training) -> float:
    """What a forward pass keeps for the backward pass, in MiB; parameters and inputs not counted."""
    given = {t.untyped_storage().data_ptr() for t in (*training.layer.parameters(), training.x)}
    sizes: dict[int, int] = {}
    kept = []  # so that no memory is used twice

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    truncate(training.layer)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        training.layer(training.x)
    return sum(size for place, size in sizes.items() if place not in given) / 2**20


def memory(report: Report, S: int) -> None:
    F, B, H = LONG
    table = Table(
        f"Memory that a window keeps for its backward pass, F={F}, B={B}, S={S}, H={H}",
        ["layer", "MiB"],
    )
    for name, make in LAYERS.items():
        if "A/A" not in name:
            table.rows.append([name, f"{kept_mib(Training(make, F, B, S, H)):.0f}"])
    report.add(table)


def main() -> None:
    args = parse(parser(__doc__, rounds=7))
    report = Report(__doc__, args)
    lengths = [10, 20, 40] if args.quick else [100, 1000, 10000]
    memory(report, lengths[-1])
    of_base = short_windows(report, args.rounds)
    growth_per_step = long_windows(report, lengths, max(1, args.rounds // 3))
    if args.quick:
        return
    slow = [f"{name}: {ratio:.2f}" for name, ratio in of_base.items() if ratio > LIMIT]
    steep = [
        f"{name}: {g:.2f} times as much per step" for name, g in growth_per_step.items() if g > 1.3
    ]
    if slow or steep:
        sys.exit(f"above {LIMIT} of {BASE}: {slow or 'none'}; more than linear: {steep or 'none'}")


if __name__ == "__main__":
    main()
