"""Write the slowest twenty tests into CONTRIBUTING.md, with the reason for each:

python -m pytest -n 3 --dist worksteal --durations 40 | tee log; python docs/slowest_tests.py log
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
TABLE = re.compile(
    r"(?<=^\| seconds \| test \| why \|\n\|---\|---\|---\|\n)(?:\|.*\n)*", re.MULTILINE
)
LINE = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(\S+?::.*)$", re.MULTILINE)
WHY = {  # by how the name begins; the longest one counts
    "fluxutils_py/": "an example of a docstring",
    "tests/": "many small fits",
    "tests/benchmarks/": "a benchmark with its smallest shapes, and time limits that programs must reach",
    "tests/data/": "many sources, layouts and shapes",
    "tests/data/hdf5/": "programs that are killed while they write, damaged files, many layouts",
    "tests/data/hdf5/test_larger_than_memory.py": "reads from a file larger than the memory of the machine",
    "tests/estimator/": "many fits through scikit-learn",
    "tests/estimator/test_checks.py": "all checks of scikit-learn",
    "tests/estimator/test_compatibility.py": "searches of scikit-learn, each some ten fits",
    "tests/estimator/test_dask_search.py": "a cluster of a scheduler and two workers, which import Dask",
    "tests/estimator/test_grid_memory.py": "three searches over a file of 270 MiB, two of them in two processes",
    "tests/estimator/test_model_export.py": "exports by torch, and a consumer in another process",
    "tests/exporting/": "exports by torch, which trace and compile each model",
    "tests/forecasting/": "fits of forecasters on many panels",
    "tests/forecasting/test_forecaster_export.py": "exports by torch, which trace and compile each forecaster",
    "tests/forecasting/test_larger_than_memory.py": "two fits, one on a file of 10 GiB",
    "tests/laws/": "many fits, each beside a hand-written loop",
    "tests/laws/test_differential.py": "20 random settings, each beside a naive loop",
    "tests/laws/test_law8_resume.py::test_a_fit_stopped": "a fit for each step at which it can stop, and its end",
    "tests/laws/test_law8_resume.py::test_a_fit_that_goes_on": "6 kills, after each of which 1 to 4 ranks go on",
    "tests/laws/test_law8_resume.py::test_a_fit_that_is_killed": "20 kills, after each of which all ranks start again",
    "tests/laws/test_law8_resume.py::test_of_two_ranks": "two ranks that fail in eight ways, and go on",
    "tests/learning/": "trains until a task is learnt",
    "tests/mpi/": "starts ranks; the first test with a number of ranks waits for all programs that run on them",
    "tests/mpi/test_collectives.py::test_two_hosts": "two hosts with a network of their own, without forks",
    "tests/mpi/test_elastic.py::test_a_fit_that_is_killed": "starts a fit under mpirun, kills it, starts it again",
    "tests/mpi/test_elastic.py::test_fits": "nine kinds of fits, each stopped and resumed by 1 to 4 ranks",
    "tests/mpi/test_hanging.py": "starts three ranks, and waits until one that hangs is found",
    "tests/mpi/test_jobs.py": "five jobs one after the other, each of which starts two ranks",
    "tests/mpi/test_resume.py": "two ranks under mpirun are started three times, and killed twice",
    "tests/nn/": "many shapes, dtypes and instruction sets",
    "tests/test_docs.py": "all blocks of a page, as one program",
    "tests/test_notebooks.py": "a notebook, in a kernel of its own",
    "tests/test_readme.py": "all blocks of the README, as one program",
    "tests/test_typing.py": "mypy reads the package",
    "tests/training/test_optuna_pruning.py": "a study that is killed, and its resumption",
}


def seconds_by_test(text):
    """Seconds of each test of pytest's list, with its setup, the slowest first."""
    found = {}
    for seconds, name in LINE.findall(text):
        found[name] = found.get(name, 0.0) + float(seconds)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def reason(name):
    return WHY[max((start for start in WHY if name.startswith(start)), key=len)]


def rows(text, n=20):
    """The rows of the table as Markdown."""
    slowest = list(seconds_by_test(text).items())[:n]
    return "".join(
        f"| {seconds:.0f} | `{name.removeprefix('tests/').replace('|', chr(92) + '|')}` | "
        f"{reason(name)} |\n"
        for name, seconds in slowest
    )


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    PAGE.write_text(TABLE.sub(lambda _: rows(Path(sys.argv[1]).read_text("utf-8")), page), "utf-8")
