"""Rows of a frame and the places they take, against pandas' cumulative counts."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.frames.frame_rows import FrameRows, Roles, count_within, scan_series


def test_rows_are_counted_within_their_series():
    series = np.random.default_rng(0).integers(0, 7, 100)
    expected = pd.Series(series).groupby(series).cumcount()
    np.testing.assert_array_equal(count_within(series), expected)


def test_a_scan_finds_lengths_and_first_times():
    at = pd.to_datetime(["2024-01-31", "2024-03-31", "2024-02-29", "2024-04-30"])
    df = pd.DataFrame({"id": [2, 1, 1, 1], "at": at, "v": 1.0})
    panel, n_rows, _ = scan_series(FrameRows(df, Roles("id", "at", ("v",), ())), None, None)
    assert panel.frequency.text == "1ME"
    assert (panel.ids.tolist(), panel.lengths.tolist(), n_rows.tolist()) == ([1, 2], [3, 1], [3, 1])
    assert panel.times(np.array([1]), np.array([0]))[0] == np.datetime64("2024-01-31")


def test_times_of_another_kind_than_the_step_are_refused():
    df = pd.DataFrame({"at": [1, 2], "v": 1.0})
    rows = FrameRows(df, Roles(None, "at", ("v",), ()))
    with pytest.raises(ValueError, match="integers"):
        scan_series(rows, "h", None)
    hourly = pd.DataFrame({"at": pd.date_range("2024", periods=3, freq="h"), "v": 1.0})
    panel, *_ = scan_series(FrameRows(hourly, rows.roles), None, None)
    with pytest.raises(DataError, match="'at' of df holds integers"):
        scan_series(rows, panel.frequency, None)


def test_a_column_has_one_role():
    for roles in (("a", "a", (), ()), (None, "t", ("t",), ()), ("a", None, (), ("b", "b"))):
        with pytest.raises(SpecError, match="named before"):
            Roles(*roles)
