"""Frames of several libraries, column by column and back."""

import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pytest

from fluxutils_py.frames.frames import (
    Frame,
    is_frame,
    make_frame,
    require,
    to_absolute,
    to_local,
)


def test_arrays_and_lists_are_no_frames():
    assert is_frame(pd.DataFrame({"a": [1]}))
    assert is_frame(pl.DataFrame({"a": [1]}))
    assert not is_frame(np.zeros((1, 2, 3)))
    for value in ([1], {"a": 1}):
        with pytest.raises(
            TypeError,
            match=r"^df .*pandas.*polars.*pyarrow, got",
        ):
            Frame(value, "df")
    with pytest.raises(TypeError, match=r"in memory.* LazyFrame"):
        Frame(pl.LazyFrame({"a": [1]}), "df")


@pytest.mark.parametrize("zone", [None, "Europe/Berlin", "America/New_York", "Etc/GMT+5"])
def test_local_and_absolute_times_are_those_of_pandas(zone):
    times = pd.date_range("2024-03-30 12:00", periods=30, freq="h", tz=zone)
    at, own_zone = Frame(pd.DataFrame({"ds": times}), "df").times("ds")
    absolute = at.astype(np.int64)
    assert own_zone == zone
    utc = times if zone is None else times.tz_convert("UTC").tz_localize(None)
    local = times if zone is None else times.tz_localize(None)
    np.testing.assert_array_equal(absolute, utc.astype("datetime64[ns]").astype(np.int64))
    np.testing.assert_array_equal(
        to_local(absolute, zone), local.astype("datetime64[ns]").astype(np.int64)
    )
    found = to_absolute(to_local(absolute, zone), zone)
    np.testing.assert_array_equal(found, absolute)


def test_a_clock_time_that_is_skipped_moves_on_and_the_first_of_two_is_taken():
    local = (
        pd.DatetimeIndex(["2024-03-31 02:30", "2024-10-27 02:30"])
        .astype("datetime64[ns]")
        .astype(np.int64)
    )
    found = pd.DatetimeIndex(to_absolute(np.asarray(local), "Europe/Berlin").astype("M8[ns]"))
    assert found.tolist() == [pd.Timestamp("2024-03-31 01:00"), pd.Timestamp("2024-10-27 00:30")]


@pytest.mark.parametrize("backend", ["pandas", "polars"])
def test_columns_get_the_types_that_they_had(backend):
    like = {"ds": nw.Datetime("us", "Asia/Kolkata"), "n": nw.Int16()}
    ids = np.array(["a", "b"], object)
    at = np.array(["2024-01-01", "2024-01-02"], "M8[ns]")
    made = nw.from_native(make_frame({"id": ids, "ds": at, "n": np.array([1, 2])}, like, backend))
    assert {name: made.schema[name] for name in like} == like
    assert made["id"].to_list() == ["a", "b"]
    assert str(made["ds"].to_list()[0]).startswith("2024-01-01 05:30")


def test_a_library_that_is_missing_is_named_with_what_to_install():
    with pytest.raises(
        ImportError,
        match=r"no_such_library.* pip install .*narwhals",
    ):
        require("no_such_library.inner")
