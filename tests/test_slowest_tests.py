"""The table of the slowest tests in CONTRIBUTING.md, and docs/slowest_tests.py, which writes it."""

import re
from pathlib import Path

import pytest

import fluxutils_py

ROOT = Path(__file__).resolve().parents[1]


def of_root(path):
    """A place in the repository; the package may be installed elsewhere."""
    return (
        Path(fluxutils_py.__file__).parents[1] if path.startswith("fluxutils_py/") else ROOT
    ) / path


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("docs/slowest_tests.py")


def test_setup_and_call_are_added_and_the_slowest_is_first(script):
    log = """
============ slowest 3 durations ============
12.40s call     tests/mpi/test_jobs.py::test_one_fit_goes_through_all_jobs
10.10s setup    tests/mpi/test_law6.py::test_a[x | y]
2.50s call     tests/mpi/test_law6.py::test_a[x | y]
1 passed in 3.00s
"""
    assert script.rows(log, 2).splitlines() == [
        f"| 13 | `mpi/test_law6.py::test_a[x \\| y]` | {script.WHY['tests/mpi/']} |",
        "| 12 | `mpi/test_jobs.py::test_one_fit_goes_through_all_jobs` | "
        f"{script.WHY['tests/mpi/test_jobs.py']} |",
    ]


def test_the_table_names_twenty_tests_that_exist_with_their_reasons(script):
    rows = script.TABLE.search(script.PAGE.read_text("utf-8"))[0].splitlines()
    table = [re.split(r" (?<!\\)\| ", row.strip("| ")) for row in rows]
    assert len(table) == 20
    for _, name, why in table:
        path, function = name.strip("`").split("[")[0].split("::")
        place = of_root(path if path.startswith("fluxutils_py/") else f"tests/{path}")
        assert function.startswith("fluxutils_py.") or f"def {function}(" in place.read_text(), name
        assert why == script.reason(
            f"tests/{name.strip('`')}" if place.is_relative_to(ROOT / "tests") else path
        )


def test_reasons_are_given_for_folders_files_and_tests_that_exist(script):
    for start in script.WHY:
        path, _, function = start.partition("::")
        assert of_root(path).exists(), start
        assert f"def {function}" in of_root(path).read_text() if function else True, start
