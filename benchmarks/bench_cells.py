"""How long a window takes through each cell, forwards and backwards, beside ``nn.LSTM`` and beside
its own steps.

Contenders see the same windows and run interleaved in rounds; every round gives ratios to
``nn.LSTM``, and the table shows the median and the range of those, and how many times longer the
steps take than the window (median over the rounds). ``LSTM again`` is the A/A control. Before
anything is timed, outputs and gradients of a layer's window must be those of its steps, to
rounding.

*FLSTM, autograd* computes the input projection of all steps in one product and leaves the steps to
autograd, *FLSTM, scripted* is the same through ``torch.jit.script``: they were tried for the layers
and lost, see EXPERIMENTS.md.

    OMP_NUM_THREADS=1 python benchmarks/bench_cells.py [--rounds 9] [--shapes small large]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from common import Report, Table, interleaved, median, parse, parser, ratios, spread, stopwatch
from torch import Tensor, nn

from fluxutils_py.nn import FLSTM, HFGRU, MGU, SGRU, SMGU
from fluxutils_py.nn.activations import psigmoid, ptanh


@dataclass(frozen=True)
class Shape:
    n_features: int
    n_hidden: int
    n_series: int
    n_steps: int

    def __str__(self) -> str:
        return (
            f"F={self.n_features}, H={self.n_hidden}, B={self.n_series}, S={self.n_steps}, float32"
        )


SHAPES = {"small": Shape(10, 10, 100, 100), "large": Shape(32, 128, 64, 64)}
LAYERS = [FLSTM, SGRU, MGU, SMGU, HFGRU]
BASE = "LSTM"
Result = tuple[Tensor, list[Tensor]]


def recorded(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor) -> Tensor:
    """FLSTM with one product for all inputs; what happens in a step is left to autograd."""
    h = c = x.new_zeros(x.shape[1], weight_hh.shape[1])
    ys = []
    for pre in F.linear(x, weight_ih, bias).unbind(0):
        i, f, g, o = torch.addmm(pre, h, weight_hh.t()).chunk(4, 1)
        c = psigmoid(f) * c + psigmoid(i) * ptanh(g)
        h = psigmoid(o) * ptanh(c)
        ys.append(h)
    return torch.stack(ys)


def sigmoid_for_script(x: Tensor) -> Tensor:
    u = (x / 4.1).clamp(-1, 1)
    return 0.5 + u * (1 - 0.5 * u.abs())


def tanh_for_script(x: Tensor) -> Tensor:
    v = x.clamp(-1.92033, 1.92033)
    return torch.where(
        x > 0,
        0.96016 - 0.26037 * (v - 1.92033).square(),
        0.26037 * (v + 1.92033).square() - 0.96016,
    )


def step_for_script(pre: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.addmm(pre, h, weight).chunk(4, 1)
    c = sigmoid_for_script(f) * c + sigmoid_for_script(i) * tanh_for_script(g)
    return sigmoid_for_script(o) * tanh_for_script(c), c


def window_for_script(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor) -> Tensor:
    h = torch.zeros(x.shape[1], weight_hh.shape[1])
    c = torch.zeros(x.shape[1], weight_hh.shape[1])
    ys: list[Tensor] = []
    for pre in torch.nn.functional.linear(x, weight_ih, bias).unbind(0):
        h, c = step_for_script(pre, h, c, weight_hh.t())
        ys.append(h)
    return torch.stack(ys)


def contenders(shape: Shape) -> dict[str, Callable[[], Result]]:
    torch.manual_seed(0)
    x = torch.randn(shape.n_steps, shape.n_series, shape.n_features)
    weight = torch.randn(shape.n_steps, shape.n_series, shape.n_hidden)

    def learn(module: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], Result]:
        def run() -> Result:
            for p in module.parameters():
                p.grad = None
            y = forward()
            y.backward(weight)
            return y.detach(), [p.grad for p in module.parameters()]

        return run

    def by_window(layer: nn.Module) -> Tensor:
        layer.reset()
        return layer(x)

    sizes = shape.n_features, shape.n_hidden
    found: dict[str, Callable[[], Result]] = {}
    for name, torchs in ((BASE, nn.LSTM), ("LSTM again (A/A)", nn.LSTM), ("GRU", nn.GRU)):
        module = torchs(*sizes)
        found[name] = learn(module, lambda module=module: module(x)[0])
    for kind in LAYERS:
        layer = kind(*sizes)
        found[kind.__name__] = learn(layer, lambda layer=layer: by_window(layer))
        steps = kind(*sizes)
        steps.load_state_dict(layer.state_dict())
        cell = steps.module.cells[0]
        found[f"{kind.__name__}, steps"] = learn(steps, lambda cell=cell: by_steps(cell, x))
        if kind is FLSTM:
            found["FLSTM, autograd"] = learn(
                steps, lambda cell=cell: recorded(x, *cell.parameters())
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                scripted = torch.jit.script(window_for_script)
            found["FLSTM, scripted"] = learn(
                steps, lambda cell=cell, f=scripted: f(x, *cell.parameters())
            )
    return found


def by_steps(cell: nn.Module, x: Tensor) -> Tensor:
    """The loop that a user writes around a cell."""
    state, ys = None, []
    for step in x:
        y, state = cell(step, state)
        ys.append(y)
    return torch.stack(ys)


def check(found: dict[str, Callable[[], Result]]) -> None:
    for name, run in found.items():
        base = name.partition(",")[0]
        if base == name:
            continue
        (y, gradients), (z, others) = found[base](), run()
        for a, b in ((y, z), *zip(gradients, others, strict=True)):
            apart = float((a - b).abs().max() / b.abs().max())
            if apart > 1e-4:
                raise SystemExit(f"{name} and {base} differ by {apart:.1e}")


def compare(shape: Shape, rounds: int) -> dict[str, list[float]]:
    found = contenders(shape)
    for _ in range(3):  # scripts are compiled on their first runs
        check(found)

    def turn(name: str) -> float:
        repeats = 1 if "," in name else 4
        return stopwatch(lambda: [found[name]() for _ in range(repeats)]) / repeats

    return interleaved({name: partial(turn, name) for name in found}, rounds)


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parse(made)
    report = Report(__doc__, args)
    for name in args.shapes:
        shape = replace(SHAPES[name], n_series=5, n_steps=7) if args.quick else SHAPES[name]
        seconds = compare(shape, args.rounds)
        table = Table(
            f"{name}: {shape}",
            ["contender", "ratio to nn.LSTM (range)", "ms", "its steps / its window"],
        )
        for contender, taken in seconds.items():
            steps = seconds.get(f"{contender}, steps")
            gain = f"{median(ratios(steps, taken)):.1f}" if steps else ""
            table.rows.append(
                [
                    contender,
                    spread(ratios(taken, seconds[BASE])),
                    f"{1e3 * median(taken):.2f}",
                    gain,
                ]
            )
        report.add(table)


if __name__ == "__main__":
    main()
