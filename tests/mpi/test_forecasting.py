"""Forecasters on two ranks: fit, predict, update and cross_validation equal one process, and are the same on both."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "forecasting.py"


def in_one_process(factor):
    spec = importlib.util.spec_from_file_location("forecasting_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.results(factor, None)


def test_two_ranks_forecast_as_one_process(ran):
    pytest.importorskip("narwhals")
    folder = ran("forecasting", 2)
    first, second = (np.load(folder / f"rank-{rank}.npz") for rank in range(2))
    expected = in_one_process(2)
    assert set(first.files) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], values, rtol=2e-4, atol=2e-5, err_msg=name)
    other = in_one_process(1)["parameters"]
    assert np.abs(other - expected["parameters"]).max() > 1e-3  # the comparison can fail
