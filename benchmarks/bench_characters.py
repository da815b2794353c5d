"""A character model: a stack of two blocks against single LSTMs, in the same processor time.

The texts that Python's ``help()`` shows (``pydoc_data.topics``, 465,048 characters of the language
reference, Python's licence), read in 32 parts side by side and in windows of 128 steps; bits per
character on the last tenth. Every model is an embedding, the layer and a linear head, trained with
AdamW by ``Estimator`` until its processor time is up: one LSTM of the width of the stack, one of
twice that width, and ``SequenceStack(LSTM)``. All have the same learning rates and seeds; of each
model, the learning rate with the best median counts. The benchmark fails unless the stack beats
both LSTMs.

    OMP_NUM_THREADS=1 python benchmarks/bench_characters.py [--seconds 25]
"""

from __future__ import annotations

import math
import statistics
import sys
from functools import cache, partial
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from bench_layer_quality import Make, UntilTimeIsUp
from common import Report, Table, parse, parser, spread
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM, SequenceStack

N_PARTS, SEQSIZE = 32, 128
RATES = 5e-3, 1e-2
STACK = "SequenceStack of 2 LSTM, 64 units"
MODELS: dict[str, tuple[Make, int]] = {
    "LSTM, 64 units": (LSTM, 64),
    "LSTM, 128 units": (LSTM, 128),
    STACK: (partial(SequenceStack, LSTM), 64),
}


@cache
def text() -> tuple[np.ndarray, int]:
    """The text as numbers, and how many there are: frequent characters have one each, all others
    share 0.
    """
    characters = "\n".join(topics[name] for name in sorted(topics))
    frequent = sorted(c for c in set(characters) if characters.count(c) > 20)
    number = {c: k + 1 for k, c in enumerate(frequent)}
    return np.array([number.get(c, 0) for c in characters]), len(frequent) + 1


def parts(numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Characters (1, n, T), and those that follow them."""
    T = (len(numbers) - 1) // n
    return numbers[: n * T].reshape(1, n, T), numbers[1 : n * T + 1].reshape(1, n, T)


def train(make: Make, units: int, lr: float, seed: int, seconds: float) -> tuple[float, int, int]:
    """Bits per character of new text, updates, and parameters."""
    numbers, n = text()
    n_train = len(numbers) * 9 // 10
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(n, units), nn.Flatten(-2), make(units, units), nn.Linear(units, n)
    )
    until = UntilTimeIsUp(seconds)
    spec = Spec(epochs=10**6, batchsize=N_PARTS, seqsize=SEQSIZE, clip=1.0)
    opt: Any = partial(torch.optim.AdamW, lr=lr)
    est = Estimator(
        model, nn.CrossEntropyLoss(), opt, spec, callbacks=[until], random_state=seed, verbose=False
    )
    est.fit(*parts(numbers[:n_train], N_PARTS))
    x, y = parts(numbers[n_train:], 4)
    scores = torch.from_numpy(est.predict(x))  # (V, N, T)
    loss = nn.functional.cross_entropy(scores.flatten(1).T, torch.from_numpy(y).flatten())
    return float(loss) / math.log(2), until.steps, sum(p.numel() for p in model.parameters())


def main() -> None:
    made = parser(__doc__, rounds=3)  # seeds
    made.add_argument("--seconds", type=float, default=25, help="of each fit, of processor time")
    args = parse(made)
    torch.set_num_threads(1)
    seconds = 0.2 if args.quick else args.seconds
    report = Report(__doc__, args)
    title = f"Bits per character after {seconds:g} s of training, median and range of {args.rounds} seeds"
    table = Table(title, ["model", "parameters", "updates", *(f"lr={lr:g}" for lr in RATES)])
    bits: dict[str, float] = {}
    runs: dict[tuple[str, float], list[tuple[float, int, int]]] = {}
    for seed in range(args.rounds):
        for name, (make, units) in MODELS.items():
            for lr in RATES:
                run = train(make, units, lr, seed, seconds)
                runs.setdefault((name, lr), []).append(run)
                print(
                    f"{name}, lr={lr:g}, seed {seed}: {run[0]:.3f} after {run[1]} updates",
                    file=sys.stderr,
                    flush=True,
                )
    for name in MODELS:
        by_rate = [[run[0] for run in runs[name, lr]] for lr in RATES]
        bits[name] = min(map(statistics.median, by_rate))
        updates = statistics.median(run[1] for lr in RATES for run in runs[name, lr])
        n_parameters = runs[name, RATES[0]][0][2]
        table.rows.append(
            [
                name,
                f"{n_parameters:,}",
                f"{updates:.0f}",
                *(spread(values, 3) for values in by_rate),
            ]
        )
    report.add(table)
    if not args.quick and any(bits[STACK] >= bits[name] for name in MODELS if name != STACK):
        sys.exit(f"the stack is no better than a single LSTM: {bits}")


if __name__ == "__main__":
    main()
