"""Real data with nothing set: our defaults beside what one would use instead.

Each contender of default_contenders.py is trained on the training part of each set of real_data.py and
judged on the test part: the mean of the seeds, and the seconds of one core that ``fit`` takes, which
wait for nobody beside it. A fit of aeon's
MiniRocket is not counted where it compiles. What is found goes into a file by set and contender: what
is measured again replaces what was there, all else stays, so that contenders may be measured one by
one, in environments of their own. From the file come the table in RESULTS_defaults.md and, by
``python docs/defaults.py``, the picture of the documentation.

MiniRocket needs aeon, whose versions of other packages may differ from those that we pin
(``pip install aeon torch scikit-learn`` in a new environment is all that it needs):

    OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python benchmarks/bench_defaults.py --data FOLDER
    [--contenders ours linear]
    [--sets GunPoint cmapss] [--seeds 3] [--measured docs/defaults.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Report, Table, machine, parse, parser, version
from default_contenders import CONTENDERS, Contender, Outcome
from real_data import LOADERS, RealData, load

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parent / "docs" / "defaults.json"
RESULTS = HERE / "RESULTS_defaults.md"
QUICK = ["ItalyPowerDemand", "wikipedia"]

Found = dict[str, Any]


# -- measuring ---------------------------------------------------------------------------------------


def measure(contender: Contender, data: RealData, n_seeds: int) -> Found:
    """Scores by seed, their mean, and the median seconds of a fit and a prediction."""
    if contender.compiles:
        contender.run(data, 0)
    seeds = range(n_seeds if contender.is_random else 1)
    outcomes: list[Outcome] = [contender.run(data, seed) for seed in seeds]
    return {
        "score": rounded(statistics.fmean(o.score for o in outcomes)),
        "scores": [rounded(o.score) for o in outcomes],
        "seconds": rounded(statistics.median(o.fit_seconds for o in outcomes)),
        "predict_seconds": rounded(statistics.median(o.predict_seconds for o in outcomes)),
    }


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def read(path: Path) -> Found:
    """What was measured before; nothing if the file is not there."""
    if path.exists():
        return json.loads(path.read_text("utf-8"))
    return {"contenders": {}, "sets": {}}


def write(found: Found, path: Path) -> None:
    """Sets and contenders in the order of the program, whatever was measured first."""
    ordered = {
        "contenders": in_order(found["contenders"], CONTENDERS),
        "sets": in_order(found["sets"], LOADERS),
    }
    for entry in ordered["sets"].values():
        entry["found"] = in_order(entry["found"], CONTENDERS)
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")


def in_order(found: Found, names: Mapping[str, object]) -> Found:
    return {name: found[name] for name in names if name in found}


def add(found: Found, name: str, data: RealData, outcome: Found) -> None:
    """Put an outcome where the one of an earlier run was."""
    metric = {
        "metric": data.metric.name,
        "larger_is_better": data.metric.larger_is_better,
        "kind": data.kind,
    }
    entry = found["sets"].setdefault(data.name, {"found": {}})
    entry.update(metric)
    here = machine() | {"threads": str(torch.get_num_threads())} | more_versions(name)
    contender = found["contenders"].setdefault(
        name, {"title": CONTENDERS[name].title, "machine": here}
    )
    # one set may be measured again elsewhere
    elsewhere = {} if contender["machine"] == here else {"machine": here}
    entry["found"][name] = outcome | elsewhere


def more_versions(name: str) -> dict[str, str]:
    package = CONTENDERS[name].package
    return {package: version(package)} if package else {}


# -- tables ------------------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """A table of the scores and one of the seconds of a fit."""
    names = list(found["contenders"])
    titles = [found["contenders"][name]["title"] for name in names]
    scores = Table(
        "Test scores, mean of the seeds; the best of a row in bold", ["set", "score", *titles]
    )
    seconds = Table("Seconds of one core for a fit, median of the seeds", ["set", *titles])
    for name, entry in found["sets"].items():
        outcomes = [entry["found"].get(contender) for contender in names]
        arrow = "\u2191" if entry["larger_is_better"] else "\u2193"
        scores.rows.append([name, f"{entry['metric']} {arrow}", *score_cells(entry, outcomes)])
        seconds.rows.append([name, *(f"{o['seconds']:.2g}" if o else "" for o in outcomes)])
    return [scores, seconds]


def score_cells(entry: Found, outcomes: Sequence[Found | None]) -> list[str]:
    """Scores as text, empty where a contender does not take part."""
    measured = [o["score"] for o in outcomes if o]
    if not measured:
        return [""] * len(outcomes)
    best = max(measured) if entry["larger_is_better"] else min(measured)
    cells = []
    for outcome in outcomes:
        if outcome is None:
            cells.append("")
            continue
        text = f"{outcome['score']:.3f}"
        # what cannot be told apart in the table is as good
        cells.append(f"**{text}**" if text == f"{best:.3f}" else text)
    return cells


HEAD = """# Real data with nothing set

Written by `benchmarks/bench_defaults.py` from `docs/defaults.json`; do not edit. What the sets are, how they are split and judged,
stands in [real_data.py](real_data.py), what each contender does in [default_contenders.py](default_contenders.py). Rows that we lose
are there as well.
"""


def document(found: Found) -> str:
    """The page of results."""
    blocks = [HEAD.strip(), *map(str, tables(found))]
    measured = [(entry["title"], entry["machine"]) for entry in found["contenders"].values()]
    for name, entry in found["sets"].items():
        for contender, outcome in entry["found"].items():
            if "machine" in outcome:
                title = found["contenders"][contender]["title"]
                measured.append((f"{title}: {name}", outcome["machine"]))
    rows = []
    for title, about in measured:
        versions = ", ".join(
            f"{p} {about[p]}" for p in ("torch", "scikit-learn", "aeon") if p in about
        )
        threads = f"{about['threads']} of {about['cores']} cores"
        rows.append([title, f"{about['processor']}, {threads}", versions])
    blocks.append(str(Table("Measured on", ["contender", "machine", "versions"], rows)))
    return "\n\n".join(blocks) + "\n"


# -- the program -------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=3)
    made.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--seeds", type=int, dest="rounds", help="the same as --rounds")
    for name, known in (("contenders", CONTENDERS), ("sets", LOADERS)):
        made.add_argument(
            f"--{name}",
            nargs="*",
            choices=list(known),
            default=list(known),
            metavar=name[:-1].upper(),
            help=f"{', '.join(known)}; none to write the table anew",
        )
    made.add_argument("--measured", type=Path, default=MEASURED, metavar="FILE")
    made.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="where the table is written; by default RESULTS_defaults.md for what is measured into "
        "docs/defaults.json, else nowhere",
    )
    args = parse(made)
    if args.results is None and args.measured.resolve() == MEASURED:
        args.results = RESULTS
    return args


def main() -> None:
    args = arguments()
    sets = [name for name in args.sets if not args.quick or name in QUICK]
    report = Report(__doc__, args)
    found: Found = {"contenders": {}, "sets": {}} if args.quick else read(args.measured)
    left_out = set()
    for name in sets:
        try:
            data = load(name, args.data)
        except FileNotFoundError as error:
            report.leave_out(name, f"there is no {error.filename}")
            continue
        for key in args.contenders:
            contender = CONTENDERS[key]
            reason = contender.why_not(data)
            if reason:
                left_out.add((contender.title, reason))
                continue
            outcome = measure(contender, data, args.rounds)
            print(f"{name}: {contender.title}: {outcome}", flush=True)
            if not args.quick:  # another run may have written in the meantime
                found = read(args.measured)
            add(found, key, data, outcome)
            if not args.quick:  # what is found stays, should a later one fail
                write(found, args.measured)
    for title, reason in sorted(left_out):
        report.leave_out(title, reason)
    for table in tables(found):
        report.add(table)
    if args.results is not None and not args.quick:
        args.results.write_text(document(found), "utf-8")


if __name__ == "__main__":
    main()
