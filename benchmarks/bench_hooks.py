"""What hooks cost per step.

``fit`` of a model so small that what is around it shows, LSTM(4) on windows of 8 series x 10 steps,
with callbacks that do nothing, called after every step, or by a trigger at every tenth. Contenders
take turns; the base has none, and an A/A control. ``us per hook and step`` is the difference of the
medians, over hooks and steps.

    python benchmarks/bench_hooks.py [--rounds 9]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, Table, interleaved, median, parse, parser, ratios, spread, stopwatch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM
from fluxutils_py.training import EveryNSteps

BASE = "no hooks"


class AtTenth:
    trigger = EveryNSteps(10)

    def on_step(self, loop: Any) -> None:
        pass


def nothing(loop: Any) -> None:
    pass


def main() -> None:
    args = parse(parser(__doc__, rounds=9))
    torch.set_num_threads(1)  # the model is too small for two
    report = Report(__doc__, args)
    n_steps = 20 if args.quick else 1000
    x = np.random.default_rng(0).standard_normal((3, 8, 10 * n_steps), dtype=np.float32)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))

    def fit(callbacks: list[Any]) -> None:
        spec = Spec(epochs=1, batchsize=8, seqsize=10)
        Estimator(model, F.mse_loss, None, spec, callbacks=callbacks, verbose=False).fit(x, x[:1])

    hooks: dict[str, list[Callable[[Any], None] | AtTenth]] = {
        BASE: [],
        "no hooks again (A/A)": [],
        "1 hook": [nothing],
        "10 hooks": [nothing] * 10,
        "100 hooks": [nothing] * 100,
        "100 hooks at every 10th step": [AtTenth() for _ in range(100)],
    }
    fit([])
    seconds = interleaved(
        {name: partial(stopwatch, fit, found) for name, found in hooks.items()}, args.rounds
    )
    table = Table(
        f"{n_steps} steps",
        ["contender", "ratio to no hooks (range)", "us per step", "us per hook and step"],
    )
    for name, taken in seconds.items():
        more = 1e6 * (median(taken) - median(seconds[BASE])) / n_steps
        each = f"{more / len(hooks[name]):.2f}" if hooks[name] else ""
        cells = [spread(ratios(taken, seconds[BASE])), f"{1e6 * median(taken) / n_steps:.0f}", each]
        table.rows.append([name, *cells])
    report.add(table)


if __name__ == "__main__":
    main()
