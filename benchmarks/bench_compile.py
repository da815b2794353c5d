"""What ``Estimator(compile=True)`` gains, for models of several kinds.

Each fit has three epochs. The ratio compares the last epochs of a compiled and a plain fit, in
turns; the column for compiling is the first compiled fit less three times its last epoch, without
torch's cache on disk. The recurrent layers of the package run as native kernels: in a model with an
LSTM, only the layers around it are compiled.

    python benchmarks/bench_compile.py [--rounds 3] [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Report, Table, interleaved, parse, parser, ratios, spread
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM, Recur

N_FEATURES, HIDDEN = 8, 64


class Cell(nn.Module):
    """A gated cell, one step at a time."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.gate, self.new, self.n_out = (
            nn.Linear(n_in + n_out, n_out),
            nn.Linear(n_in + n_out, n_out),
            n_out,
        )

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if state is None:
            state = x.new_zeros(x.shape[0], self.n_out)
        z = torch.cat([x, state], -1)
        gate, new = self.gate(z).sigmoid(), self.new(z).tanh()
        state = gate * state + (1 - gate) * new
        return state, state


def head(n_in: int, depth: int) -> nn.Sequential:
    """Layers with normalisation and activation, which compiling fuses."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(n_in, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()]
        n_in = HIDDEN
    return nn.Sequential(*layers, nn.Linear(n_in, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a cell of one's own, step by step": lambda: nn.Sequential(
        Recur(Cell(N_FEATURES, HIDDEN)), nn.Linear(HIDDEN, 1)
    ),
    "an LSTM and 4 layers": lambda: nn.Sequential(LSTM(N_FEATURES, HIDDEN), head(HIDDEN, 4)),
    "8 layers, no state": lambda: head(N_FEATURES, 8),
}


def main() -> None:
    args = parse(parser(__doc__, rounds=3))
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    report = Report(__doc__, args)
    n_series, n_steps = (8, 40) if args.quick else (64, 400)
    x = np.random.default_rng(0).standard_normal((N_FEATURES, n_series, n_steps), dtype=np.float32)
    compile_seconds: list[float] = []

    def fit(model: nn.Module, compile: Any) -> float:
        began, spec = time.perf_counter(), Spec(epochs=3, batchsize=32, seqsize=20)
        est = Estimator(model, spec=spec, compile=compile, random_state=0, verbose=False).fit(
            x, x[:1]
        )
        last: float = est.history_[-1]["seconds"]
        if compile is not False:
            compile_seconds.append(time.perf_counter() - began - 3 * last)
        return last

    table = Table(
        f"{n_series} series of {n_steps} steps, windows of 32 series and 20 steps, hidden {HIDDEN}",
        ["model", "compiled to plain (range)", "plain again (A/A)", "seconds to compile"],
    )
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        compile_seconds.clear()
        contenders = {
            "plain": partial(fit, model, False),
            "again": partial(fit, model, False),
            "compiled": partial(fit, model, {"backend": "eager"} if args.quick else True),
        }
        seconds = interleaved(contenders, args.rounds)
        cells = [spread(ratios(seconds[kind], seconds["plain"])) for kind in ("compiled", "again")]
        table.rows.append([name, *cells, f"{max(compile_seconds):.0f}"])
    report.add(table)


if __name__ == "__main__":
    main()
