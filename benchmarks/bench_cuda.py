"""How long ``Estimator(device="cuda").fit`` takes on arrays of the host, beside hand-written loops.

The base is the loop that sends each window to the device when its turn comes, as ``fit`` must where data do not fit on
it; the other loop has everything there from the start. Contenders start from the same weights, see the same windows in
the same order, take turns, and must end with the same MSE (found by a NumPy LSTM; products on a device round
differently, so that the weights agree less than on one kind of hardware). Bringing data to time-major, sending them and
fetching the weights is in the time.

    python benchmarks/bench_cuda.py [--rounds 7] [--shapes large wide] [--device cuda]
"""

from __future__ import annotations

from functools import partial

import torch
from common import Report, Table, interleaved, parse, parser
from torch import Tensor
from work import COLUMNS, SHAPES, Shape, by_fit, by_hand, make, outcome, turns, two_windows

BASE = "loop, windows sent"
ALL_SHAPES = {**SHAPES, "wide": Shape(32, 1024, 1024, 512, 256, 128, 2)}
OTHER_WORK = 1e-2  # relative difference of the MSE


def compare(name: str, report: Report, rounds: int, quick: bool, device: str) -> None:
    shape = ALL_SHAPES[name].quick() if quick else ALL_SHAPES[name]
    data = make(shape)
    small, part = two_windows(data, shape)
    contenders = {
        BASE: partial(by_hand, device=device, upfront=False),
        "windows sent, again (A/A)": partial(by_hand, device=device, upfront=False),
        "loop, data on the device": partial(by_hand, device=device),
        "Estimator.fit": partial(by_fit, device=device),
    }
    for train in contenders.values():
        train(*small, part)  # everything is loaded
    vectors: dict[str, Tensor] = {}
    seconds = interleaved(turns(contenders, data, shape, vectors), rounds)
    rows, off = outcome(seconds, vectors, BASE, data, shape)
    report.add(Table(f"{name}: {shape.training}", COLUMNS, rows))
    others = [c for c in off if off[c] > OTHER_WORK]
    if others:
        raise SystemExit(f"{name}: not the same work as {BASE}, by the MSE: {', '.join(others)}")


def main() -> None:
    made = parser(__doc__, rounds=7)
    made.add_argument("--shapes", nargs="+", choices=ALL_SHAPES, default=["large", "wide"])
    made.add_argument("--device", default="cuda")
    args = parse(made)
    report = Report(__doc__, args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return report.leave_out("all of it", "there is no CUDA device, or torch was built without")
    for name in args.shapes:
        compare(name, report, args.rounds, args.quick, args.device)


if __name__ == "__main__":
    main()
