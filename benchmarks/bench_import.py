"""What importing the package costs beyond torch and scikit-learn.

Fresh processes, files warm. First table: seconds of ``import`` statements, one after the other in
one process: what torch takes, what scikit-learn takes after it, and what this package takes after
both. Second: the time inside the modules of each library while ``import fluxutils_py`` runs alone,
as ``python -X importtime`` counts it (which slows it down): the package itself, and what it draws
in.

    python benchmarks/bench_import.py [--rounds 7]
"""

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
import sys

from common import Report, Table, parse, parser, spread, start

PROGRAM = """
import json, sys, time
found, modules = {}, {}
for name in ("torch", "sklearn.base", "fluxutils_py"):
    before, began = len(sys.modules), time.perf_counter()
    __import__(name)
    found[name] = time.perf_counter() - began, len(sys.modules) - before
print(json.dumps(found))
"""


def by_statement(rounds: int) -> Table:
    found = [json.loads(start([sys.executable, "-c", PROGRAM])) for _ in range(rounds)]
    table = Table(
        "import, one after the other",
        ["module", "seconds (range)", "ratio to torch (range)", "modules loaded"],
    )
    for name in found[0]:
        seconds = [f[name][0] for f in found]
        of_torch = [f[name][0] / f["torch"][0] for f in found]
        table.rows.append([name, spread(seconds, 3), spread(of_torch, 3), str(found[0][name][1])])
    return table


def by_library(rounds: int) -> Table:
    rows: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        command = [sys.executable, "-X", "importtime", "-c", "import fluxutils_py"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        each: dict[str, float] = collections.Counter()
        for line in done.stderr.splitlines():
            own, _, name = line.removeprefix("import time:").split("|")
            if own.strip().isdigit():
                library = name.strip().split(".")[0]
                each["the standard library" if library in sys.stdlib_module_names else library] += (
                    float(own) / 1e6
                )
        for library, seconds in each.items():
            rows[library].append(seconds)
    table = Table("import fluxutils_py, by library", ["library", "seconds inside (range)", "share"])
    total = sum(statistics.median(taken) for taken in rows.values())
    for library, taken in sorted(rows.items(), key=lambda row: -statistics.median(row[1])):
        share = statistics.median(taken) / total
        if share > 0.005 or library == "fluxutils_py":
            table.rows.append([library, spread(taken, 3), f"{share:.1%}"])
    return table


def main() -> None:
    args = parse(parser(__doc__, rounds=7))
    report = Report(__doc__, args, threads=False)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as elsewhere
    start([sys.executable, "-c", "import fluxutils_py"])  # files are warm
    report.add(by_statement(args.rounds))
    report.add(by_library(args.rounds))


if __name__ == "__main__":
    main()
