"""Turns, ratios and tables of the benchmarks."""

import argparse
import json
import math

import pytest


@pytest.mark.slow
def test_every_round_begins_with_another_contender(module):
    called = []

    def turn(name):
        return lambda: called.append(name) or float(len(called))

    seconds = module("common").interleaved({name: turn(name) for name in "abc"}, rounds=4)
    assert "".join(called) == "abcbcacababc"
    assert seconds == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


@pytest.mark.slow
def test_slow_contender_sits_out_and_its_ratios_are_of_its_own_rounds(module):
    common = module("common")
    base, slow = iter([1.0, 2.0, 4.0]), iter([10.0, 30.0])
    seconds = common.interleaved(
        {"base": lambda: next(base), "slow": lambda: next(slow)}, 3, {"slow": 2}
    )
    assert seconds["slow"][:2] == [10.0, 30.0]
    assert math.isnan(seconds["slow"][2])
    assert common.ratios(seconds["slow"], seconds["base"]) == [10.0, 15.0]
    assert common.median(seconds["slow"]) == 20.0


def test_spread_is_median_and_range(module):
    assert module("common").spread([1.1, 1.0, 1.42]) == "1.10 (1.00-1.42)"
    assert module("common").spread([8.25, 3.75, 5.75, 5.0], digits=1) == "5.4 (3.8-8.2)"


def test_table_is_markdown_with_notes_below(module):
    table = module("common").Table("of x", ["a", "b"], [["1", "2"]], ["a note"])
    assert str(table) == "**of x**\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\na note"


def test_table_with_a_cell_too_few_is_not_written(module):
    with pytest.raises(AssertionError, match="rows of different lengths in 'of x'"):
        str(module("common").Table("of x", ["a", "b"], [["1"]]))


def test_report_keeps_in_its_file_what_was_found_before_a_failure(module, tmp_path, capsys):
    common = module("common")
    path = tmp_path / "found.json"
    args = argparse.Namespace(json=path, rounds=1)
    report = common.Report(
        "What it measures.\n\nHow.\n\n    python bench_x.py\n", args, threads=False
    )
    report.add(common.Table("of x", ["a"], [["1"]]))
    report.leave_out("Keras", "keras is not installed")
    assert json.loads(path.read_text()) == {
        "about": "What it measures.\n\nHow.",
        "conditions": "1 round",
        "tables": [{"title": "of x", "columns": ["a"], "rows": [["1"]], "notes": []}],
        "left_out": ["Keras: keras is not installed"],
    }
    assert (
        "| a |\n| --- |\n| 1 |\n\nleft out: Keras: keras is not installed\n"
        in capsys.readouterr().out
    )


def test_machine_is_described_without_its_name(module):
    import platform

    found = module("common").machine()
    assert found["Python"] == platform.python_version()
    assert found["torch"].startswith("2.")
    assert int(found["cores"]) >= 1
    assert platform.node() not in found.values()
