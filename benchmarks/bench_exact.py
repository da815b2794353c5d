"""How much longer a training step takes with ``gradient="exact"`` than with truncated gradients.

A step is a window through a diagonal layer and a linear head, mean squared error, backwards, and
Adam; both kinds run by turns in one process, on the same window, one thread. Processor time; tables show the
median and range of the ratios of rounds.

    python benchmarks/bench_exact.py [--rounds 9]
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import torch
from common import Report, Table, interleaved, median, parse, parser, ratios, spread
from torch import nn

from fluxutils_py import truncate
from fluxutils_py.nn import LRU, MinGRU, MinLSTM
from fluxutils_py.nn.sensitivities import carrying_sensitivities

SHAPES = {  # F, B, S, H
    "W1: F=10, B=100, S=100, H=10": (10, 100, 100, 10),
    "W2: F=32, B=64, S=64, H=128": (32, 64, 64, 128),
    "F=128, B=64, S=64, H=128": (128, 64, 64, 128),
}
LAYERS = {"MinGRU": MinGRU, "MinLSTM": MinLSTM, "LRU": LRU}


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


if __name__ == "__main__":
    main()
