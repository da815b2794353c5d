"""How long ``Estimator(n_jobs=k)`` takes beside a hand-written loop on as many of torch's own threads.

Same weights, windows and order for all; all must end with the same weights (to rounding) and the same loss. Contenders
run interleaved in rounds; every round gives ratios to the loop with fused AdamW, and the table shows the median and the
range of those. ``fused again`` is the A/A control.

    python benchmarks/bench_threads.py [--rounds 7] [--shapes small large] [--threads 2]
"""

from __future__ import annotations

import argparse
import platform
from functools import partial

import torch
from bench_fit import BASE, CONTENDERS, SHAPES, by_fit, compare


def contenders(threads: int) -> dict:
    """The loops of ``bench_fit.py``, and ``fit`` in one thread and in several."""
    return {**CONTENDERS, f"Estimator.fit, n_jobs={threads}": partial(by_fit, n_jobs=threads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}, Python "
          f"{platform.python_version()}, {args.rounds} rounds\n")  # fmt: skip
    for name in args.shapes:
        table = compare(SHAPES[name], args.rounds, contenders(args.threads))
        best = min(table["loop, AdamW"]["ratio"], table[BASE]["ratio"])
        print(f"{name}: {SHAPES[name]}\n\n| contender | ratio (range) | seconds | weights apart |\n|---|---|---|---|")
        for contender, row in table.items():
            print(
                f"| {contender} | {row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f}) | {row['seconds']:.3f} "
                f"| {row['apart']:.1e} |"
            )
        ratio = table[f"Estimator.fit, n_jobs={args.threads}"]["ratio"] / best
        print(f"\nthreads over the better loop: {ratio:.3f} (aim: at most 0.85)\n", flush=True)


if __name__ == "__main__":
    main()
