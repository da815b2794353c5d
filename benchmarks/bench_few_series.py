"""How long few series take through ``LSTM`` and ``GRU``, for training and prediction, beside torch.

A ratio is the time of the package's layer over that of torch's, the better of one and two threads of
torch, round by round: median and range. All contenders take turns; ``A/A`` is torch's layer with one
thread a second time. Training is a forward and a backward pass over a window, without an input
gradient. Before anything is timed, the outputs of both layers must be equal to rounding.

    python benchmarks/bench_few_series.py [--rounds 9]
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from common import Report, Table, interleaved, parse, parser, ratios, spread, stopwatch
from torch import Tensor, nn

from fluxutils_py.nn import GRU, LSTM

LAYERS = {"LSTM": (LSTM, nn.LSTM), "GRU": (GRU, nn.GRU)}


class Shape(NamedTuple):
    layer: str
    n_features: int
    n_hidden: int
    n_series: int
    n_steps: int


SHAPES = [
    *(Shape("LSTM", 10, h, b, 1000) for h in (16, 32, 64, 128) for b in (1, 4, 8)),
    *(Shape("LSTM", 10, 256, b, 200) for b in (1, 4, 8)),
    Shape("LSTM", 10, 64, 1, 100),
    Shape("LSTM", 32, 256, 32, 64),
    Shape("LSTM", 32, 128, 64, 64),
    *(Shape("GRU", 10, h, b, 300) for h in (16, 64, 128) for b in (1, 8)),
]


class Contender:
    """A layer, and how it is called on a window of zero state."""

    def __init__(self, layer: nn.Module, threads: int, x: Tensor, dy: Tensor) -> None:
        self.layer = layer
        self.threads = threads
        self.x = x
        self.dy = dy

    def outputs(self) -> Tensor:
        if hasattr(self.layer, "reset"):
            self.layer.reset()
            return self.layer(self.x)
        return self.layer(self.x)[0]

    def train(self) -> None:
        self.layer.zero_grad()
        self.outputs().backward(self.dy)

    def predict(self) -> None:
        with torch.no_grad():
            self.outputs()

    def time(self, task: str) -> float:
        torch.set_num_threads(self.threads)
        run = getattr(self, task)
        return min(stopwatch(run), stopwatch(run))


def contenders(shape: Shape) -> dict[str, Contender]:
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
    torch.testing.assert_close(found["ours"].outputs(), found["one thread"].outputs())
    return found


def compare(shape: Shape, task: str, rounds: int) -> tuple[list[float], list[float]]:
    """The ratios of our layer, and those of the control."""
    found = contenders(shape)
    taken = interleaved({name: partial(c.time, task) for name, c in found.items()}, rounds)
    better = [min(pair) for pair in zip(taken["one thread"], taken["two threads"], strict=True)]
    return ratios(taken["ours"], better), ratios(taken["again"], taken["one thread"])


def main() -> None:
    args = parse(parser(__doc__, rounds=9))
    report = Report(__doc__, args)
    shapes = SHAPES[::5] if args.quick else SHAPES
    title = "time over that of torch's layer, the better of its one and two threads"
    columns = ["layer", "F", "H", "B", "S", "training", "A/A", "prediction", "A/A"]
    table = Table(title, columns)
    for shape in shapes:
        if args.quick:
            shape = shape._replace(n_steps=5)
        cells = [
            spread(r) for task in ("train", "predict") for r in compare(shape, task, args.rounds)
        ]
        table.rows.append([*map(str, shape), *cells])
    report.add(table)


if __name__ == "__main__":
    main()
