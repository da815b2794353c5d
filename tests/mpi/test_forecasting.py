"""Forecasters on two ranks: fit, predict, update and cross_validation equal one process, and are
the same on both.
"""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "forecasting.py"


def in_one_process(factor):
    spec = importlib.util.spec_from_file_location("forecasting_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.results(factor, None)


@pytest.mark.slow
def test_two_ranks_forecast_as_one_process(ran):
    folder = ran("forecasting", 2)
    first, second = (np.load(folder / f"rank-{rank}.npz") for rank in range(2))
    expected = in_one_process(2)
    assert set(first.files) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], values, rtol=2e-4, atol=2e-5, err_msg=name)
    other = in_one_process(1)["parameters"]
    assert np.abs(other - expected["parameters"]).max() > 1e-3  # the comparison can fail


MISTAKES = {
    "series": "ranks disagree about the number of series: 7 on rank 0, 6 on rank 1",
    "values": r"ranks disagree about the series \(digest\): \w+ on rank 0, \w+ on rank 1",
    "array": "ranks disagree about the number of series: 4 on rank 0, 3 on rank 1",
    "walk": r"ranks disagree about the series \(digest\)",
}


def test_ranks_with_different_series_are_refused_before_anything_is_chosen_by_them(ran):
    for said in json.loads((ran("forecasting", 2) / "said.json").read_text()):
        for name, text in MISTAKES.items():
            assert re.match(f"RankError: {text}", said[name]), said[name]
            assert "A forecaster has no sharded=True" in said[name]


def test_an_error_in_the_data_of_one_rank_is_one_on_both(ran):
    other, own = json.loads((ran("forecasting", 2) / "said.json").read_text())
    for name, kind in (("column", "DataError: .*'y'"), ("level", "SpecError: .*quantiles")):
        assert re.match(kind, own[name]), own[name]
        assert other[name].endswith(f"rank 1: {own[name]}")
    for name in ("the same", "saved", "forecast of its own"):
        assert (other[name], own[name]) == ("none", "none")


def test_rank_0_alone_saves_a_forecaster(ran):
    assert [path.name for path in ran("forecasting", 2).glob("of-rank-*")] == ["of-rank-0"]
