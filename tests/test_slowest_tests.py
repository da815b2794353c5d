"""The table of the slowest tests in CONTRIBUTING.md, and docs/slowest_tests.py, which writes it."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load():
    spec = importlib.util.spec_from_file_location("slowest_tests", ROOT / "docs" / "slowest_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_setup_and_call_are_added_and_the_slowest_is_first():
    log = """
============ slowest 3 durations ============
12.40s call     tests/mpi/test_jobs.py::test_one_fit_goes_through_all_jobs
10.10s setup    tests/mpi/test_law6.py::test_a[x | y]
2.50s call     tests/mpi/test_law6.py::test_a[x | y]
1 passed in 3.00s
"""
    module = load()
    assert module.rows(log, 2).splitlines() == [
        f"| 13 | `mpi/test_law6.py::test_a[x \\| y]` | {module.WHY['tests/mpi/']} |",
        f"| 12 | `mpi/test_jobs.py::test_one_fit_goes_through_all_jobs` | {module.WHY['tests/mpi/test_jobs.py']} |",
    ]


def test_the_table_names_twenty_tests_that_exist_with_their_reasons():
    module = load()
    rows = module.TABLE.search(module.PAGE.read_text("utf-8"))[0].splitlines()
    table = [re.split(r" (?<!\\)\| ", row.strip("| ")) for row in rows]
    assert len(table) == 20
    for _, name, why in table:
        path, function = name.strip("`").split("[")[0].split("::")
        place = ROOT / path if path.startswith("fluxutils_py/") else ROOT / "tests" / path
        assert function.startswith("fluxutils_py.") or f"def {function}(" in place.read_text(), name
        assert why == module.reason(f"tests/{name.strip('`')}" if place.is_relative_to(ROOT / "tests") else path)


def test_reasons_are_given_for_folders_files_and_tests_that_exist():
    for start in load().WHY:
        path, _, function = start.partition("::")
        assert (ROOT / path).exists(), start
        assert f"def {function}" in (ROOT / path).read_text() if function else True, start
