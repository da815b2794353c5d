"""Where the time of a training step goes.

``fit`` with a clock around each of its parts, two epochs, of which the second counts; and the
hand-written loop, with clocks too. The clocks add about a microsecond to a step. Microseconds per
step, and their share.

    python benchmarks/bench_step.py [--rounds 5]
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import Report, Table, median, parse, parser, spread
from work import SHAPES, Shape, make, time_major, window_loss

import fluxutils_py.training.window_step as step
from fluxutils_py import Estimator, Spec
from fluxutils_py.parallel.gradient_vector import GradientVector
from fluxutils_py.training.gradient_step import GradientStep
from fluxutils_py.training.hooks import Hooks
from fluxutils_py.training.minibatch import TensorBatches

PARTS = {
    "window cut and converted": [(TensorBatches, "_load")],
    "forward and loss": [(step, "window_loss")],
    "loss and norm read": [(torch.Tensor, "item")],
    "backward": [(torch.Tensor, "backward")],
    "gradient vector and its norm": [(GradientVector, "pack"), (torch.linalg, "vector_norm")],
    "optimizer": [(GradientStep, "_apply")],
    "hooks": [(Hooks, "run")],
}


class Clocks:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.Counter()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return timed

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """A clock around each part of the package."""
        before = [
            (owner, name, getattr(owner, name))
            for places in PARTS.values()
            for owner, name in places
        ]
        try:
            for part, places in PARTS.items():
                for owner, name in places:
                    setattr(owner, name, self.around(part, getattr(owner, name)))
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def of_fit(shape: Shape) -> dict[str, float]:
    """Microseconds per step, by part, and all together."""
    x, y, model = make(shape)
    clocks, n_steps = Clocks(), len(shape.places)

    def second_epoch(loop: Any) -> None:
        if loop.step == n_steps:
            clocks.seconds.clear()

    spec = Spec(epochs=2, batchsize=shape.batchsize, seqsize=shape.seqsize)
    with clocks.within():
        est = Estimator(model, F.mse_loss, None, spec, callbacks=second_epoch, verbose=False).fit(
            x, y
        )
    clocks.seconds["all"] = est.history_[1]["seconds"]
    return {part: 1e6 * seconds / n_steps for part, seconds in clocks.seconds.items()}


def of_loop(shape: Shape) -> dict[str, float]:
    """The same of the hand-written loop."""
    x, y, model = make(shape)
    lstm, head = model[0].module, model[1]
    opt, (xs, ys) = torch.optim.AdamW(model.parameters(), fused=True), time_major(x, y)
    for _ in range(2):
        clocks, began, state = Clocks(), time.perf_counter(), None
        forward, backward = (clocks.around(part, f) for part, f in PASSES.items())
        update = clocks.around("optimizer", opt.step)
        for rows, steps in shape.places:
            if steps.start == 0:
                state = None
            loss, state = forward(lstm, head, xs[steps, rows], ys[steps, rows], state)
            opt.zero_grad()
            backward(loss)
            update()
            state = (state[0].detach(), state[1].detach())
        clocks.seconds["all"] = time.perf_counter() - began
    return {part: 1e6 * seconds / len(shape.places) for part, seconds in clocks.seconds.items()}


PASSES: dict[str, Callable[..., Any]] = {
    "forward and loss": window_loss,
    "backward": torch.Tensor.backward,
}


def table(title: str, found: dict[str, list[dict[str, float]]]) -> Table:
    columns = [f"{who}{what}" for who in found for what in (", us (range)", ", share")]
    made = Table(title, ["part", *columns])
    for part in [*PARTS, "all else", "all"]:
        row = [part]
        for rounds in found.values():
            if part == "all else":
                each = [2 * r["all"] - sum(r.values()) for r in rounds]
            else:
                each = [r.get(part, 0.0) for r in rounds]
            share = median(each) / median([r["all"] for r in rounds])
            row += [spread(each, 0), f"{share:.1%}"] if any(each) else ["", ""]
        made.rows.append(row)
    return made


def main() -> None:
    args = parse(parser(__doc__, rounds=5))
    report = Report(__doc__, args)
    for name, shape in SHAPES.items():
        part = shape.quick() if args.quick else shape
        found: dict[str, list[dict[str, float]]] = {"fit": [], "loop by hand": []}
        for _ in range(args.rounds):
            found["fit"].append(of_fit(part))
            found["loop by hand"].append(of_loop(part))
        report.add(table(f"{name}: {part}", found))


if __name__ == "__main__":
    main()
