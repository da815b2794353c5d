"""Run many cases: ``python -m tests.laws.differential --cases 5000 --seed 1``; one again: ``--only
1234``.
"""

import argparse
import json
import sys
import time
import traceback

import torch

from .cases import PLAIN, draw, settle
from .compare import run

SHOWN = 4  # differences of a case


def differences(case):
    """What differs, or how it failed."""
    try:
        return run(case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"]


def shrink(case):
    """A simpler case that differs too: settings go back to the plain ones, one by one, as long as
    it does.
    """
    again = True
    while again:
        again = False
        for name, plain in PLAIN.items():
            if name != "data" and case[name] != plain:
                simpler = settle({**case, name: plain})
                if (
                    simpler != case
                    and sum(simpler[k] != v for k, v in PLAIN.items())
                    < sum(case[k] != v for k, v in PLAIN.items())
                    and differences(simpler)
                ):
                    case, again = simpler, True
    return case


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument(
        "--seed", type=int, default=0, help="cases are numbered from seed * 10**6 on"
    )
    parser.add_argument(
        "--only", type=int, help="the number of one case, to run it again and shrink it"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--stop-after", type=int, default=20, help="failures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = arguments.seed * 10**6
    numbers = range(first, first + arguments.cases) if arguments.only is None else [arguments.only]
    began, failed = time.perf_counter(), 0
    done = 0
    for number in numbers:
        try:
            found = differences(case := draw(number))
        except KeyboardInterrupt:  # says how far it came
            break
        done += 1
        if found:
            failed += 1
            print(f"case {number}:", *found[:SHOWN], sep="\n  ")
            if not arguments.no_shrink:
                case = shrink(case)
                print(
                    "  simplest:",
                    json.dumps({k: v for k, v in case.items() if v != PLAIN[k]}, default=str),
                )
                print(" ", *differences(case)[:SHOWN], sep="\n  ", flush=True)
            if failed == arguments.stop_after:
                break
    print(f"{done} cases, {failed} differ, {time.perf_counter() - began:.0f} s")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
