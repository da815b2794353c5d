"""How long ``Estimator(device="cuda").fit`` takes on arrays of the host, beside hand-written loops.

The base is the loop that sends each window to the device when its turn comes, as ``fit`` must where
data do not fit on it; the other loop has everything there from the start. Contenders start from the
same weights, see the same windows in the same order, take turns, and must end with the same MSE
(found by a NumPy LSTM; products on a device round differently, so that the weights agree less than
on one kind of hardware). Bringing data to time-major, sending them and fetching the weights is in
the time. ``clip, accumulate, validation`` does more work than the loop: it shows what late reading
is worth. Memory is the peak of torch's allocator on the device. Low precision is not held to the
MSE.

    python benchmarks/bench_cuda.py [--rounds 5] [--shapes small large wide many] [--device cuda]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, Table, interleaved, parse, parser
from torch import Tensor, nn
from work import COLUMNS, SHAPES, Data, Shape, by_fit, by_hand, make, outcome, turns, two_windows

from fluxutils_py import Estimator, Spec, net2vec

BASE = "loop, windows sent"
ALL_SHAPES = {
    **SHAPES,
    "wide": Shape(32, 1024, 1024, 512, 256, 128, 2),
    "many": Shape(8, 10_000, 512, 64, 10_000, 64, 2),
}
LOW = "Estimator.fit, bfloat16"
GRAPHS = "Estimator.fit, CUDA graphs"
MORE = "Estimator.fit, clip, accumulate, validation"
OTHER_WORK = 1e-2  # relative difference of the MSE


def by_spec(
    x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape, device: str, **settings: Any
) -> Tensor:
    """``Estimator.fit`` with more settings; with ``clip``, also with validation on the first
    series.
    """
    spec = Spec(epochs=shape.epochs, batchsize=shape.batchsize, seqsize=shape.seqsize, **settings)
    est = Estimator(model, F.mse_loss, None, spec, device=device, verbose=False)
    held_out = (x[:, : shape.batchsize], y[:, : shape.batchsize]) if "clip" in settings else None
    return net2vec(est.fit(x, y, validation_data=held_out)).cpu()


def by_graphs(x: np.ndarray, y: np.ndarray, model: nn.Module, shape: Shape, device: str) -> Tensor:
    """``Estimator.fit`` with ``FLUXUTILS_CUDA_GRAPHS=1``."""
    os.environ["FLUXUTILS_CUDA_GRAPHS"] = "1"
    try:
        return by_fit(x, y, model, shape, device=device)
    finally:
        del os.environ["FLUXUTILS_CUDA_GRAPHS"]


def peak_memory(train: Callable[..., Tensor], data: Data, shape: Shape) -> str:
    """MiB that a contender takes on the device at its peak, in one epoch."""
    if not torch.cuda.is_available():
        return ""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(*data, replace(shape, epochs=1))
    return f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"


def compare(name: str, report: Report, rounds: int, quick: bool, device: str) -> None:
    shape = ALL_SHAPES[name].quick() if quick else ALL_SHAPES[name]
    data = make(shape)
    small, part = two_windows(data, shape)
    contenders = {
        BASE: partial(by_hand, device=device, upfront=False),
        "windows sent, again (A/A)": partial(by_hand, device=device, upfront=False),
        "loop, data on the device": partial(by_hand, device=device),
        "Estimator.fit": partial(by_fit, device=device),
        GRAPHS: partial(by_graphs, device=device),
        LOW: partial(by_spec, device=device, precision="bfloat16"),
        MORE: partial(by_spec, device=device, clip=1.0, accumulate=2),
    }
    for train in contenders.values():
        train(*small, part)  # everything is loaded
    vectors: dict[str, Tensor] = {}
    seconds = interleaved(turns(contenders, data, shape, vectors), rounds)
    rows, off = outcome(seconds, vectors, BASE, data, shape)
    rows = [[*row, peak_memory(contenders[row[0]], data, shape)] for row in rows]
    report.add(Table(f"{name}: {shape.training}", [*COLUMNS, "memory on the device, MiB"], rows))
    others = [c for c in off if off[c] > OTHER_WORK and c not in (LOW, MORE)]
    if others:
        raise SystemExit(f"{name}: not the same work as {BASE}, by the MSE: {', '.join(others)}")


def main() -> None:
    made = parser(__doc__, rounds=5)
    made.add_argument(
        "--shapes", nargs="+", choices=ALL_SHAPES, default=["small", "large", "wide", "many"]
    )
    made.add_argument("--device", default="cuda")
    args = parse(made)
    report = Report(__doc__, args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return report.leave_out("all of it", "there is no CUDA device, or torch was built without")
    for name in args.shapes:
        compare(name, report, args.rounds, args.quick, args.device)


if __name__ == "__main__":
    main()
