"""Rows of a frame and the places they take, against pandas' cumulative counts."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.frames.panel import count_within, read_rows


def rows_of(df, id_col, time_col, freq=None):
    return read_rows(df, dict.fromkeys(df.columns, "x"), id_col, time_col, freq)


def test_rows_are_counted_within_their_series():
    series = np.random.default_rng(0).integers(0, 7, 100)
    expected = pd.Series(series).groupby(series).cumcount()
    np.testing.assert_array_equal(count_within(series), expected)


def test_lengths_and_first_times_are_found():
    at = pd.to_datetime(["2024-01-31", "2024-03-31", "2024-02-29", "2024-04-30"])
    df = pd.DataFrame({"id": [2, 1, 1, 1], "at": at, "v": 1.0})
    _, panel, series, steps = rows_of(df, "id", "at")
    assert panel.frequency.text == "1ME"
    assert (panel.ids.tolist(), panel.lengths.tolist()) == ([1, 2], [3, 1])
    assert panel.times(np.array([1]), np.array([0]))[0] == np.datetime64("2024-01-31")
    assert (series.tolist(), steps.tolist()) == ([1, 0, 0, 0], [0, 1, 0, 2])


def test_times_of_another_kind_than_the_step_are_refused():
    df = pd.DataFrame({"at": [1, 2], "v": 1.0})
    with pytest.raises(ValueError, match="integers"):
        rows_of(df, None, "at", "h")
    hourly = pd.DataFrame({"at": pd.date_range("2024", periods=3, freq="h"), "v": 1.0})
    _, panel, *_ = rows_of(hourly, None, "at")
    with pytest.raises(DataError, match="'at' of df holds integers"):
        rows_of(df, None, "at", panel.frequency)
