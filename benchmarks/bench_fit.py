"""How long ``Estimator.fit`` takes beside a hand-written PyTorch loop that does the same work.

Contenders start from the same weights, see the same windows in the same order, and must end with the same weights (to
rounding) and the same loss. They run interleaved in rounds; every round gives ratios to the loop with fused AdamW, and
the table shows the median and the range of those. ``fused again`` is the A/A control: how far from 1 chance alone gets.
Memory is the peak of a process of its own, less what it had before training (Linux only).

    python benchmarks/bench_fit.py [--rounds 7] [--shapes small large]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import LSTM


@dataclass(frozen=True)
class Shape:
    n_features: int
    n_series: int
    n_steps: int
    n_hidden: int
    batchsize: int
    seqsize: int
    epochs: int

    def __str__(self) -> str:
        return (
            f"F={self.n_features}, N={self.n_series}, T={self.n_steps}, LSTM({self.n_hidden}), b={self.batchsize}, "
            f"s={self.seqsize}, {self.epochs} epochs, float32, x in C order"
        )


SHAPES = {"small": Shape(10, 1000, 1000, 10, 100, 100, 2), "large": Shape(32, 256, 1024, 128, 64, 64, 2)}


def make(shape: Shape) -> tuple[np.ndarray, np.ndarray, nn.Module]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((shape.n_features, shape.n_series, shape.n_steps), dtype=np.float32)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(shape.n_features, shape.n_hidden), nn.Linear(shape.n_hidden, 1))
    return x, x.mean(0, keepdims=True), model


def by_hand(x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape, fused: bool) -> tuple[float, torch.Tensor]:
    """The loop that a careful person writes: data to time-major once, state carried and detached."""
    model = copy.deepcopy(model)
    lstm, head = model[0].module, model[1]
    opt = torch.optim.AdamW(model.parameters(), fused=fused)
    xs, ys = (torch.from_numpy(a).permute(2, 1, 0).contiguous() for a in (x, y))  # (T, N, F)
    for _ in range(shape.epochs):
        losses = []
        for n in range(0, shape.n_series, shape.batchsize):
            state = None
            for t in range(0, shape.n_steps, shape.seqsize):
                rows, steps = slice(n, n + shape.batchsize), slice(t, t + shape.seqsize)
                h, state = lstm(xs[steps, rows], state)
                loss = F.mse_loss(head(h), ys[steps, rows])
                opt.zero_grad()
                loss.backward()
                opt.step()
                state = (state[0].detach(), state[1].detach())
                losses.append(loss.detach())
    return float(torch.stack(losses).mean()), net2vec(model)


def by_fit(
    x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape, n_jobs: int | None = None
) -> tuple[float, torch.Tensor]:
    spec = Spec(epochs=shape.epochs, batchsize=shape.batchsize, seqsize=shape.seqsize)
    est = Estimator(model, F.mse_loss, None, spec, n_jobs=n_jobs, verbose=False).fit(x, y)
    return est.loss_, net2vec(est)


CONTENDERS = {
    "loop, AdamW": lambda *a: by_hand(*a, fused=False),
    "loop, fused AdamW": lambda *a: by_hand(*a, fused=True),
    "fused again (A/A)": lambda *a: by_hand(*a, fused=True),
    "Estimator.fit": by_fit,
}
BASE = "loop, fused AdamW"


def compare(shape: Shape, rounds: int, contenders: dict[str, Callable] = CONTENDERS) -> dict[str, dict[str, float]]:
    x, y, model = make(shape)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    results = {}
    for r in range(rounds + 1):  # the first round warms up
        order = list(contenders)[r % len(contenders) :] + list(contenders)[: r % len(contenders)]
        for name in order:
            began = time.perf_counter()
            results[name] = contenders[name](x, y, model, shape)
            if r:
                seconds[name].append(time.perf_counter() - began)
    loss, vector = results[BASE]
    table = {}
    for name, taken in seconds.items():
        apart = float((results[name][1] - vector).abs().max())
        if apart > 1e-3 or abs(results[name][0] - loss) > 1e-4 * loss:
            raise SystemExit(
                f"{name} did other work: weights differ by {apart:.1e}, loss {results[name][0]} and {loss}"
            )
        ratios = [a / b for a, b in zip(taken, seconds[BASE], strict=True)]
        table[name] = {
            "seconds": statistics.median(taken),
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "loss": results[name][0],
            "apart": apart,
        }
    return table


def peak_memory(shape_name: str, contender: str) -> float:
    """MiB by which a fresh process grows while it trains."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", shape_name, contender], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def show_peak(shape_name: str, contender: str) -> None:
    data = make(SHAPES[shape_name])
    by_hand(*make(Shape(2, 4, 4, 2, 2, 2, 1)), Shape(2, 4, 4, 2, 2, 2, 1), True)  # libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the preparations
    before = memory("VmRSS")
    CONTENDERS[contender](*data, SHAPES[shape_name])
    print(json.dumps(memory("VmHWM") - before))


def memory(field: str) -> float:
    """A size in MiB from the kernel's account of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        return show_peak(*args.peak)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, Python "
          f"{platform.python_version()}, {args.rounds} rounds\n")  # fmt: skip
    for name in args.shapes:
        table = compare(SHAPES[name], args.rounds)
        best = min(table["loop, AdamW"]["ratio"], table[BASE]["ratio"])
        print(f"{name}: {SHAPES[name]}\n")
        print("| contender | ratio (range) | seconds | loss of last epoch | weights apart | memory growth, MiB |")
        print("|---|---|---|---|---|---|")
        for contender, row in table.items():
            print(
                f"| {contender} | {row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f}) | {row['seconds']:.3f} "
                f"| {row['loss']:.6f} | {row['apart']:.1e} | {peak_memory(name, contender):.0f} |"
            )
        print(
            f"\nfit over the better loop: {table['Estimator.fit']['ratio'] / best:.3f} (aim: at most 1.05)\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
