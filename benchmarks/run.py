"""Run all benchmarks, one after the other, each in a process of its own, and write what they find
into RESULTS.md.

A part that fails or takes too long is reported as such and stops no other; what is not installed
here is left out and named. The file is written after each part. ``--only`` measures some parts
again and leaves the others as they are, if they are of the same machine and versions. ``--quick``
is for trying out: tiny shapes, numbers without meaning, printed and not written unless ``--out``
says where.

    python benchmarks/run.py [--only fit predict] [--quick] [--out FILE]
        [--etth1 ETTh1.csv] [--m4 DIRECTORY] [--gift DIRECTORY] [--real DIRECTORY] [--neuralforecast PYTHON]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Table, machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"


@dataclass(frozen=True)
class Part:
    """A benchmark: its file, and with what arguments and environment it runs here."""

    file: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    data: str = ""  # the option that says where its data are
    needs_data: bool = True  # whether the part is left out without them
    peers: bool = False  # whether NeuralForecast takes part, if --neuralforecast says where it is


PARTS = {
    "fit": Part("bench_fit.py"),
    "small_windows": Part("bench_fit.py", ["--small-windows", "--threads", "1"]),
    "fit_grid": Part("bench_fit_grid.py"),
    "step": Part("bench_step.py"),
    "ranks": Part("bench_parallel.py", ["--rounds", "2", "--only", "alone"]),
    "ranks_beside_others": Part("bench_parallel.py", ["--rounds", "2", "--only", "beside"]),
    "links": Part("bench_parallel.py", ["--rounds", "2", "--only", "links"]),
    "predict": Part("bench_predict.py"),
    "stream": Part("bench_stream.py", environment={"OMP_NUM_THREADS": "1"}),
    "growth": Part("bench_growth.py"),
    "windows": Part("bench_windows.py"),
    "cells": Part("bench_cells.py", environment={"OMP_NUM_THREADS": "1"}),
    "layers": Part("bench_layers.py", environment={"OMP_NUM_THREADS": "1"}),
    "layer_quality": Part(
        "bench_layer_quality.py", ["--seconds", "10"], data="etth1", needs_data=False
    ),
    "characters": Part("bench_characters.py"),
    "few_series": Part("bench_few_series.py"),
    "grid": Part("bench_grid.py", ["--measured", str(HERE.parent / "docs" / "grid.json")]),
    "exact": Part("bench_exact.py", environment={"OMP_NUM_THREADS": "1"}),
    "kernels": Part("bench_kernels.py", environment={"OMP_NUM_THREADS": "1"}),
    "hooks": Part("bench_hooks.py"),
    "import": Part("bench_import.py"),
    "precision": Part("bench_precision.py"),
    "compile": Part("bench_compile.py", environment={"OMP_NUM_THREADS": "1"}),
    "cuda": Part("bench_cuda.py"),
    "forecast": Part("bench_forecast.py"),
    "etth1": Part("bench_etth1.py", data="etth1", peers=True),
    "m4": Part("bench_m4.py", data="m4", peers=True),
    "gift": Part("bench_gift.py", data="gift", peers=True),
    "intervals": Part("bench_intervals.py", data="real"),
    "alarms": Part("bench_alarms.py", data="real"),
    "learn": Part("bench_learn.py", environment={"OMP_NUM_THREADS": "1"}, data="real"),
    # the other contenders keep their rows in docs/defaults.json
    "defaults": Part(
        "bench_defaults.py",
        ["--contenders", "ours"],
        environment={"OMP_NUM_THREADS": "1"},
        data="real",
    ),
}

DATA = {"etth1": "ETTh1.csv", "m4": "DIRECTORY", "gift": "DIRECTORY", "real": "DIRECTORY"}

HEAD = """# Results of the benchmarks

Written by `benchmarks/run.py`; do not edit. What was tried and lost is in [EXPERIMENTS.md](EXPERIMENTS.md).

**How to read it.** Contenders of a table do the same work on the same data, and take turns, round after round, each
round in another order. A ratio is that of one round; the table has the median of the rounds and, in brackets, their
range. Unless the column says otherwise it is a ratio of times: 1.10 is ten per cent slower than the base. "A/A" is the
base measured twice: differences as small as that, or ranges that overlap, mean nothing. Seconds are medians, of this
machine only. Rows that we lose are there as well.

**How to repeat it**, on a machine with nothing else to do, in about an hour and a half on two cores. In a fresh
clone, with Python 3.11 or newer:

```sh
python3 -m venv .venv && . .venv/bin/activate
pip install -c constraints.txt -e ".[all]" -r benchmarks/requirements.txt
python benchmarks/run.py
```

Without skorch, Lightning and Keras, or the extras `mpi` or `export`, their rows are left out. The forecasts of M4 and ETTh1
need the extra `forecast` and their data, and NeuralForecast an environment of its own; `python benchmarks/run.py --help` has
the options. Each `benchmarks/bench_*.py` also runs by itself; its first lines say what it measures, and are repeated
here.
`OMP_NUM_THREADS` is best left unset: each section ends with the number of threads that torch had.
"""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    made.add_argument(
        "--quick", action="store_true", help="tiny shapes, one round: whether it runs, not how fast"
    )
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="by default RESULTS.md, or with --quick none"
    )
    for name, what in DATA.items():
        made.add_argument(
            f"--{name}",
            type=Path,
            metavar=what,
            help="data of that part; without them it is left out",
        )
    made.add_argument(
        "--neuralforecast",
        metavar="PYTHON",
        help="interpreter of an environment that has NeuralForecast",
    )
    made.add_argument(
        "--limit", type=float, default=900, metavar="SECONDS", help="for each part (default 900)"
    )
    args = made.parse_args()
    out = args.out or (None if args.quick else RESULTS)
    head, of = f"{HEAD}\n{on_machine()}", commit()
    sections = read(out, head) if out and set(args.only) != set(PARTS) else {}
    for i, name in enumerate(args.only):
        print(f"--- {i + 1} of {len(args.only)}: {name}", file=sys.stderr, flush=True)
        sections[name] = measure(name, args, of)
        document = (
            "\n\n".join([head, *(sections[part] for part in PARTS if part in sections)]) + "\n"
        )
        if out:
            out.write_text(document, "utf-8")
    print(f"--- written to {out}" if out else f"\n{document}")


def on_machine() -> str:
    """What it ran on, as a table."""
    return str(
        Table("Measured with", ["", ""], [[name, found] for name, found in machine().items()])
    )


def read(path: Path, head: str) -> dict[str, str]:
    """The sections of an earlier file, which must have the same head."""
    if not path.exists():
        return {}
    start, *sections = re.split(r"^(?=## )", path.read_text("utf-8"), flags=re.MULTILINE)
    if start.strip() != head.strip():
        raise SystemExit(
            f"{path.name} is of another machine or other versions, or of an older run.py: parts of "
            "both in one file could not be told apart. Run all parts, or give another file with "
            "--out."
        )
    return {section.split()[1]: section.strip() for section in sections}


def measure(name: str, args: argparse.Namespace, of: str) -> str:
    """Run a part; returns its section. ``of`` says what is measured."""
    part = PARTS[name]
    arguments = [*part.arguments, *(["--quick"] if args.quick else [])]
    data = getattr(args, part.data) if part.data else None
    if data is not None:
        arguments += ["--data", str(data)]
    elif part.data and part.needs_data:
        remedy = f"`--{part.data} {DATA[part.data]}`"
        return section(name, {"left_out": [f"all of it: the data were not given ({remedy})"]}, "")
    if part.peers and args.neuralforecast is not None:
        arguments += ["--peers", args.neuralforecast]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        began = time.perf_counter()
        failure = run(
            [sys.executable, HERE / part.file, "--json", path, *arguments],
            part.environment,
            args.limit,
        )
        taken = time.perf_counter() - began
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    conditions = [str(datetime.date.today()), of, f"{taken:.0f} s"]
    if args.quick:
        conditions.append("a quick run, whose numbers mean nothing")
    return section(name, found, failure, conditions)


def run(command: Sequence[Any], environment: Mapping[str, str], limit: float) -> str:
    """Run a program, its output shown; returns why it failed, or nothing."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # measures the clone that it lies in
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **environment,
    }
    started = subprocess.Popen(
        [str(c) for c in command],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        stop(started)

    timer = threading.Timer(limit, end)
    timer.start()
    last = ""
    try:
        assert started.stderr is not None
        with started.stderr as lines:
            for line in lines:
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
        code = started.wait()
    finally:
        timer.cancel()
        stop(started)
    if late.is_set():
        return f"it was stopped after {limit:.0f} s"
    return f"it ended with {code}: {last.replace(str(HERE.parent), '.')}" if code else ""


def stop(started: subprocess.Popen) -> None:
    """End a program and what it started, if it still runs: mpirun needs to be asked, to end its
    ranks.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if started.poll() is None:
            os.killpg(started.pid, sent)
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                continue


def commit() -> str:
    """What is measured, as far as git knows it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=True
        ).stdout

    try:
        changed = git("status", "--porcelain", "--", "fluxutils_py", "benchmarks/*.py")
        return f"commit {git('rev-parse', '--short', 'HEAD').strip()}{', with changes' if changed else ''}"
    except (OSError, subprocess.CalledProcessError):
        return ""


def section(
    name: str, found: Mapping[str, Any], failure: str, conditions: Sequence[str] = ()
) -> str:
    """What a part has found, as text."""
    blocks = [f"## {name}", found.get("about", "")]
    blocks += [str(Table(**table)) for table in found.get("tables", [])]
    if failure:
        blocks.append(f"**Failed:** {failure}")
    blocks += [f"Left out: {what}" for what in found.get("left_out", [])]
    if conditions:
        blocks.append(f"*{'; '.join(filter(None, [found.get('conditions', ''), *conditions]))}*")
    return "\n\n".join(filter(None, blocks))


if __name__ == "__main__":
    main()
