"""How long ``predict`` takes beside a bare loop over windows.

The loop brings x to time-major memory, carries the state from window to window, and writes into an
array; windows are of ``seqsize`` steps. ``in one call`` gives the recurrent layer all steps of a
group at once, which needs the memory. ``predict`` chooses its windows itself, in bounded memory.
All take turns and must give the same numbers to rounding; ratios are to the loop, with its A/A
control.

    python benchmarks/bench_predict.py [--rounds 9] [--shapes small "one series"]
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, Table, interleaved, median, parse, parser, ratios, spread, stopwatch
from torch import nn
from work import ONE_SERIES, SHAPES, Shape, by_window, make, time_major

from fluxutils_py import Estimator, Spec

BASE = "loop over windows"
ALL_SHAPES = {**SHAPES, "one series": ONE_SERIES, "long": Shape(10, 1, 200_000, 10, 1, 1000, 1)}


def by_hand(x: np.ndarray, model: nn.Module, shape: Shape) -> np.ndarray:
    lstm, head = model[0].module, model[1]
    (xs,) = time_major(x)
    out = np.empty((xs.shape[0], xs.shape[1], 1), np.float32)
    state = None
    with torch.inference_mode():
        for rows, steps in shape.places:
            y, state = by_window(lstm, head, xs[steps, rows], None if steps.start == 0 else state)
            out[steps, rows] = y.numpy()
    return out.transpose(2, 1, 0)


def compare(name: str, report: Report, rounds: int, quick: bool) -> None:
    shape = ALL_SHAPES[name].quick() if quick else ALL_SHAPES[name]
    x, y, model = make(shape)
    part = np.s_[:, : shape.batchsize, : shape.seqsize]
    spec = Spec(epochs=1, batchsize=shape.batchsize, seqsize=shape.seqsize)
    est = Estimator(model, F.mse_loss, None, spec, verbose=False).fit(x[part], y[part])
    whole = Shape(**vars(shape) | {"seqsize": shape.n_steps})
    contenders = {
        BASE: partial(by_hand, x, est.model_, shape),
        "loop again (A/A)": partial(by_hand, x, est.model_, shape),
        "loop, in one call": partial(by_hand, x, est.model_, whole),
        "Estimator.predict": partial(est.predict, x),
    }
    expected = contenders[BASE]()
    # and all are warm
    apart = {c: float(np.abs(run() - expected).max()) for c, run in contenders.items()}
    assert max(apart.values()) < 1e-5, apart
    seconds = interleaved({c: partial(stopwatch, run) for c, run in contenders.items()}, rounds)
    table = Table(
        f"{name}: {shape}", ["contender", f"ratio to {BASE} (range)", "seconds", "outputs apart"]
    )
    for contender, taken in seconds.items():
        cells = [
            spread(ratios(taken, seconds[BASE])),
            f"{median(taken):.3f}",
            f"{apart[contender]:.1e}",
        ]
        table.rows.append([contender, *cells])
    report.add(table)


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--shapes", nargs="+", choices=ALL_SHAPES, default=list(ALL_SHAPES))
    args = parse(made)
    report = Report(__doc__, args)
    for name in args.shapes:
        compare(name, report, args.rounds, args.quick)


if __name__ == "__main__":
    main()
