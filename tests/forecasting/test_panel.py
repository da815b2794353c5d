"""Long frames as panels: against pandas' own reindexing; errors name column and row."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.frames.panel import Columns, read_panel


def split(panel, name="y"):
    ends = np.cumsum(panel.lengths)
    return {
        i: panel.values[name][stop - n : stop]
        for i, stop, n in zip(panel.ids, ends, panel.lengths, strict=True)
    }


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rows_in_any_order_lie_on_a_grid_with_nan_where_there_are_none(panel, to_polars, library):
    found = read_panel(panel if library == "pandas" else to_polars(panel), Columns(), "D")
    assert found.backend == library
    assert found.ids.tolist() == sorted(panel.unique_id.unique())
    values = split(found)
    for i, (name, part) in enumerate(panel.groupby("unique_id")):
        y = part.set_index("ds").y.sort_index()
        grid = pd.date_range(y.index[0], y.index[-1])
        np.testing.assert_array_equal(values[name], y.reindex(grid))
        at = found.times(np.full(len(grid), i), np.arange(len(grid)))
        np.testing.assert_array_equal(at, grid.to_numpy().astype("M8[ns]"))


def test_hours_pass_and_days_are_local_where_clocks_change():
    for freq, n in (("h", 30), ("D", 5)):
        times = pd.date_range("2024-10-26", periods=n, freq=freq, tz="Europe/Berlin")
        found = read_panel(
            pd.DataFrame({"unique_id": 1, "ds": times, "y": np.arange(float(n))}), Columns(), freq
        )
        np.testing.assert_array_equal(found.values["y"], np.arange(n))
        at = found.times(np.zeros(n, int), np.arange(n))
        assert (pd.DatetimeIndex(at).tz_localize("UTC") == times).all()


def test_columns_may_have_other_names_and_ids_any_type():
    df = pd.DataFrame({"shop": [3, 3, 1], "day": [5, 6, 9], "sales": [1, 2, 3]})
    found = read_panel(df, Columns("shop", "day", "sales"))
    assert found.ids.tolist() == [1, 3]
    np.testing.assert_array_equal(found.values["sales"], [3, 1, 2])


def test_a_panel_is_cut_by_steps(panel):
    whole = read_panel(panel, Columns(), "D")
    start = np.minimum(whole.lengths, 2)
    part = whole.cut(start, np.maximum(start, whole.lengths - 1))
    kept = whole.lengths > 3
    assert part.ids.tolist() == whole.ids[kept].tolist()
    before, after = split(whole), split(part)
    for name in part.ids:
        np.testing.assert_array_equal(after[name], before[name][2:-1])
    np.testing.assert_array_equal(part.first, whole.first[kept] + 2 * 86_400 * 10**9)


def frame(**columns):
    base = {
        "unique_id": ["a", "a", "b"],
        "ds": pd.to_datetime(["2024-01-01", "2024-01-02", "2024-01-01"]),
    }
    return pd.DataFrame({**base, "y": [1.0, 2.0, 3.0], **columns})


@pytest.mark.parametrize(
    ("df", "columns", "message"),
    [
        (frame().rename(columns={"y": "Y"}), {}, r"no column 'y' .*target_col"),
        (frame().rename(columns={"unique_id": "unique_ids"}), {}, "did you mean 'unique_ids'?"),
        (
            frame()[["ds", "y"]],
            {},
            r"'unique_id' .*pandas.melt",
        ),
        (
            frame().set_index("ds"),
            {},
            r"'ds' .*index: .*df.reset_index\(\)",
        ),
        (
            frame().set_index(["unique_id", "ds"]),
            {},
            r"no column 'unique_id' .*reset_index\(\)",
        ),
        (frame(unique_id=["a", None, "b"]), {}, r"'unique_id' .*missing in row 1"),
        (
            frame(ds=pd.to_datetime(["2024-01-01", None, "2024-01-03"])),
            {},
            "column 'ds' of df is missing in row 1",
        ),
        (
            frame(ds=["x", "y", "z"]),
            {},
            r"'ds' .*dates or integers.* String",
        ),
        (frame(ds=[1, 1.5, 2]), {}, r"'ds' .*integers.* Float64"),
        (
            frame(y=["1", "2", "3"]),
            {},
            r"'y' .*numbers.* String; .*pandas.to_num",
        ),
        (frame(y=[1, np.inf, 3]), {}, "column 'y' of df is inf in row 1"),
        (frame(unique_id="a"), {}, r"rows 0 and 2 .*'a' at 2024-01-01"),
        (frame(p=[1, np.nan, 2]), {"futr": ("p",)}, "column 'p' of df is missing in row 1"),
        (frame(), {"hist": ("q",)}, r"no column 'q' .*hist_exog_list"),
        (
            frame(s=[1, 2, 3]),
            {"stat": ("s",)},
            r"'s' .* 2\.0 in row 1 .* 1\.0 .*'a'",
        ),
        (frame().iloc[:0], {}, "df has no rows"),
    ],
)
def test_errors_name_column_and_row(df, columns, message):
    with pytest.raises(DataError, match=message):
        read_panel(df, Columns(**columns), "D" if "ds" in df and df.ds.dtype.kind == "M" else None)


def test_times_off_the_grid_are_named():
    df = frame(ds=pd.to_datetime(["2024-01-01 00:00", "2024-01-02 06:00", "2024-01-01 00:00"]))
    message = r"'ds' .*06:00:00 in row 1, .*freq='D'"
    with pytest.raises(DataError, match=message):
        read_panel(df, Columns(), "D")


def test_static_covariates_may_be_a_frame_of_their_own():
    columns = Columns(stat=("town", "size"))
    static = pd.DataFrame(
        {"unique_id": ["b", "c", "a"], "town": ["x", "y", "z"], "size": [1, 2, 3]}
    )
    found = read_panel(frame(), columns, "D", static_df=static).static
    assert found["town"].tolist() == ["z", "x"]
    assert found["size"].tolist() == [3.0, 1.0]
    with pytest.raises(DataError, match="static_df has no row of series 'b'"):
        read_panel(frame(), columns, "D", static_df=static[1:])
