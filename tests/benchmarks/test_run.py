"""The program that runs all benchmarks and writes their results."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"

# what a benchmark hands over, without the seconds that importing torch takes
GOOD = """
import json, sys
table = {{"title": "of x", "columns": ["a"], "rows": [["{}"]]}}
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({{"about": "What it measures.", "conditions": "5 rounds", "tables": [table], "left_out": []}}, file)
"""


@pytest.fixture
def run(module, monkeypatch, tmp_path):
    """``run(*arguments, **programs)``: run.py with these programs as its parts; returns what it
    wrote.
    """
    runner = module("run")
    out = tmp_path / "RESULTS.md"

    def called(*arguments, **programs):
        parts = {}
        for name, program in programs.items():
            file = tmp_path / f"{name}.py"
            file.write_text(program)
            parts[name] = runner.Part(str(file))
        monkeypatch.setattr(runner, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *arguments])
        runner.main()
        return out.read_text()

    called.out = out
    return called


def cells(text):
    """The numbers in the tables of parts."""
    return [
        line.strip("| ")
        for line in text.partition("## ")[2].splitlines()
        if line.strip("| ").isdigit()
    ]


@pytest.mark.slow
def test_failing_and_endless_parts_are_reported_and_stop_no_other(run):
    text = run(
        "--limit", "3",
        bad=GOOD.format(1) + "raise ValueError('something is wrong')",
        endless="import time\ntime.sleep(600)",
        good=GOOD.format(2),
    )  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith(("## ", "**Failed"))] == [
        "## bad",
        "**Failed:** it ended with 1: ValueError: something is wrong",
        "## endless",
        "**Failed:** it was stopped after 3 s",
        "## good",
    ]
    assert cells(text) == ["1", "2"]  # what the failing part had found before is kept


@pytest.mark.slow
def test_part_measured_again_leaves_the_others(run):
    run(first=GOOD.format(11), second=GOOD.format(22), third=GOOD.format(33))
    text = run("--only", "second", first="", second=GOOD.format(44), third="")
    assert cells(text) == ["11", "44", "33"]


def test_results_of_another_machine_are_not_mixed(run):
    run.out.write_text("# Results\n\n| torch | 1.0 |\n\n## first\n\nabc\n")
    with pytest.raises(SystemExit) as error:
        run("--only", "second", first="", second=GOOD.format(2))
    assert str(error.value) == (
        "RESULTS.md is of another machine or other versions, or of an older run.py: parts of both "
        "in one file could not be told apart. Run all parts, or give another file with --out."
    )
    assert run.out.read_text() == "# Results\n\n| torch | 1.0 |\n\n## first\n\nabc\n"


@pytest.mark.slow
def test_every_benchmark_has_its_part(module):
    files = {path.name for path in RUN.parent.glob("bench_*.py")}
    assert {part.file for part in module("run").PARTS.values()} == files


@pytest.mark.slow
def test_quick_run_prints_what_it_finds_and_says_that_it_means_nothing(python):
    done = subprocess.run(
        [python, RUN, "--quick", "--only", "hooks", "etth1"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "## hooks\n\nWhat hooks cost per step." in done.stdout
    assert "| 100 hooks |" in done.stdout
    assert "a quick run, whose numbers mean nothing*" in done.stdout
    assert done.stdout.endswith(
        "Left out: all of it: the data were not given (`--etth1 ETTh1.csv`)\n\n"
    )
