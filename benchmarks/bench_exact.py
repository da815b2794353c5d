"""How much longer a training step takes with ``gradient="exact"`` than with truncated gradients,
and what both have learnt after equal time.

A step is a window through a diagonal layer and a linear head, mean squared error, backwards, and
Adam; both kinds run by turns in one process, on the same window, one thread. Processor time; tables show the
median and range of the ratios of rounds.

The last table is of fits for as many seconds of one core: a sign that a flag marks is asked so many
steps later, by a MinGRU of 8 units whose gates begin almost closed, in windows of 10 steps or, for
truncated gradients, of the whole series. Mean squared error on other series: 1 for one that has
learnt nothing.

    python benchmarks/bench_exact.py [--rounds 9]
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Report, Table, interleaved, median, parse, parser, ratios, spread
from torch import nn

from fluxutils_py import Estimator, Spec, truncate
from fluxutils_py.nn import LRU, MinGRU, MinLSTM
from fluxutils_py.nn.states import carrying_sensitivities
from fluxutils_py.training import StopTraining

SHAPES = {  # F, B, S, H
    "W1: F=10, B=100, S=100, H=10": (10, 100, 100, 10),
    "W2: F=32, B=64, S=64, H=128": (32, 64, 64, 128),
    "F=128, B=64, S=64, H=128": (128, 64, 64, 128),
}
LAYERS = {"MinGRU": MinGRU, "MinLSTM": MinLSTM, "LRU": LRU}


# By the lag: what opens the gates at first, and the seconds.
LAGS = {50: (-4.0, 2.0), 200: (-5.0, 5.0), 1000: (-7.0, 15.0)}


class Training:
    """One layer at work on one window."""

    def __init__(self, layer: type[nn.Module], F: int, B: int, S: int, H: int) -> None:
        torch.manual_seed(0)
        self.layer, self.head = layer(F, H), nn.Linear(H, 1)
        self.x, self.y = torch.randn(S, B, F), torch.randn(S, B, 1)
        self.optimizer = torch.optim.Adam(
            [*self.layer.parameters(), *self.head.parameters()], fused=True
        )

    def step(self, exact: bool) -> None:
        truncate(self.layer)
        with carrying_sensitivities(self.layer) if exact else nullcontext():
            h = self.layer(self.x)
        loss = nn.functional.mse_loss(self.head(h), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def seconds(self, exact: bool, repeats: int = 5) -> float:
        """Of the fastest of some steps: what else the machine does only ever adds."""
        taken = []
        for _ in range(repeats):
            began = time.process_time()
            self.step(exact)
            taken.append(time.process_time() - began)
        return min(taken)


def recall(lag: int, n_series: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n_series, lag + 20))
    flags = np.zeros_like(signs)
    flags[:, 0] = 1
    y = np.full((1, n_series, lag + 20), np.nan)
    y[0, :, lag:] = signs[:, :1]
    return np.stack([signs, flags]).astype("float32"), y.astype("float32")


class Clock:
    """Stops a fit after some seconds of processor time, in the middle of an epoch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.n_updates = 0

    def on_start(self, loop: Any) -> None:
        self.began = time.process_time()

    def on_step(self, loop: Any) -> None:
        self.n_updates = loop.step
        if time.process_time() - self.began > self.seconds:
            raise StopTraining


def after(lag: int, bias: float, seconds: float, **spec: Any) -> str:
    """The error that a fit has reached, and its windows."""
    torch.manual_seed(0)
    layer = MinGRU(2, 8)
    nn.init.constant_(layer.module.linear.bias[:8], bias)
    model = nn.Sequential(layer, nn.Linear(8, 1))
    clock = Clock(seconds)
    opt = partial(torch.optim.Adam, lr=0.05)
    given = Spec(epochs=10_000, batchsize=64, clip=1.0, **spec)
    est = Estimator(model, None, opt, given, callbacks=clock, random_state=0, verbose=False)
    est.fit(*recall(lag, 256, 0))
    return f"{est.evaluate(*recall(lag, 64, 1)):.3f} ({clock.n_updates})"


def main() -> None:
    args = parse(parser(__doc__, rounds=9))
    torch.set_num_threads(1)
    report = Report(__doc__, args)
    for title, shape in SHAPES.items():
        table = Table(title, ["layer", "truncated, ms", "exact, ms", "ratio"])
        for name, layer in LAYERS.items():
            training = Training(layer, *shape)
            for exact in (False, True, True):
                training.step(exact)
            contenders = {
                "truncated": partial(training.seconds, False),
                "exact": partial(training.seconds, True),
            }
            taken = interleaved(contenders, args.rounds)
            cells = [f"{1e3 * median(seconds):.2f}" for seconds in taken.values()]
            of_base = ratios(taken["exact"], taken["truncated"])
            table.rows.append([name, *cells, spread(of_base)])
        report.add(table)
    columns = ["lag", "seconds", "exact", "truncated", "truncated, whole series"]
    reached = Table("Errors after equal time (windows)", columns)
    for lag, (bias, seconds) in LAGS.items():
        kinds: list[dict[str, Any]] = [
            {"seqsize": 10, "gradient": "exact"},
            {"seqsize": 10},
            {"seqsize": None},
        ]
        allowed = 0.2 if args.quick else seconds
        cells = [after(lag, bias, allowed, **kind) for kind in kinds]
        reached.rows.append([str(lag), f"{allowed:g}", *cells])
    report.add(reached)


if __name__ == "__main__":
    main()
