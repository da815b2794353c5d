"""Frames that a forecaster cannot use, or could misread: right values, or errors that change
nothing.
"""

import datetime
from decimal import Decimal
from enum import Enum, StrEnum

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster

N = 40


@pytest.fixture
def df():
    rng = np.random.default_rng(0)
    days = pd.date_range("2026-01-05", periods=N, freq="D")
    parts = [
        pd.DataFrame({"unique_id": name, "ds": days, "y": 20 + rng.normal(size=N)}) for name in "ab"
    ]
    return pd.concat(parts, ignore_index=True)


def following(df, n=1, **columns):
    """The next n rows of each series."""
    last = df.ds.max()
    rows = [
        (name, last + pd.Timedelta(days=k + 1), 21.0 + k)
        for name in df.unique_id.unique()
        for k in range(n)
    ]
    return pd.DataFrame(rows, columns=["unique_id", "ds", "y"]).assign(**columns)


# -- update: what is refused changes nothing ------------------------------------------------------------


def infinite(rows):
    return rows.assign(y=np.inf)


def zero(rows):
    return rows.assign(y=[0.0, *rows.y[1:]])


def negative(rows):
    return rows.assign(y=[*rows.y[:-1], -3.0])


def overlapping(rows):
    return rows.assign(ds=rows.ds - pd.Timedelta(days=1))


def off_grid(rows):
    return rows.assign(ds=rows.ds + pd.Timedelta(hours=5))


def twice(rows):
    return pd.concat([rows, rows.iloc[:1]])


def numbers_as_ids(rows):
    return rows.assign(unique_id=range(len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [infinite, zero, negative, overlapping, off_grid, twice, numbers_as_ids],
    ids=lambda f: f.__name__,
)
def test_an_update_that_is_refused_changes_nothing(df, small, change, tmp_path):
    fc = Forecaster(3, freq="D", **small).fit(df)
    assert fc.features_.log
    before = fc.predict()
    rows = following(df, 2)
    with pytest.raises(DataError):
        fc.update(change(rows))
    pd.testing.assert_frame_equal(fc.predict(), before)
    fc.save(tmp_path / "fc.pt")
    pd.testing.assert_frame_equal(Forecaster.load(tmp_path / "fc.pt").predict(), before)
    fc.update(rows)  # the corrected rows are no overlap
    again = Forecaster(3, freq="D", **small).fit(df)
    expected = again.predict(pd.concat([df, rows]))
    np.testing.assert_allclose(fc.predict().Forecaster, expected.Forecaster, rtol=1e-5)


@pytest.mark.slow
def test_a_value_that_has_no_logarithm_is_named(df, small):
    fc = Forecaster(3, freq="D", **small).fit(df)
    with pytest.raises(DataError, match=r"there is 0; .*transform='none'"):
        fc.update(zero(following(df, 2)))
    bad = df.copy()
    bad.loc[N + 7, "y"] = -2.0
    with pytest.raises(DataError, match=r"there is -2;"):
        fc.predict(bad)


def test_an_array_that_has_no_logarithm_is_refused_before_it_is_taken(small):
    x = 20 + np.random.default_rng(0).normal(size=(1, 2, N))
    fc = Forecaster(3, season_length=7, **small).fit(x)
    before = fc.predict()
    for value in (0.0, -1.0, np.inf):
        with pytest.raises(DataError, match=r"there is (0|-1);|\[0, 1, 0\]"):
            fc.update(np.array([[[21.0], [value]]]))
    np.testing.assert_array_equal(fc.predict(), before)


def later(df, name, n, y=21.0):
    """A row of a series, ``n`` steps after its last one."""
    return pd.DataFrame({"unique_id": [name], "ds": [df.ds.max() + pd.Timedelta(days=n)], "y": [y]})


def refuses(fc, rows, match, **arguments):
    """Assert that an update raises DataError and changes nothing."""
    before, lengths = fc.predict(), fc.history_.lengths.copy()
    with pytest.raises(DataError, match=match):
        fc.update(rows, **arguments)
    pd.testing.assert_frame_equal(fc.predict(), before)
    np.testing.assert_array_equal(fc.history_.lengths, lengths)


@pytest.mark.slow
def test_a_row_long_after_the_last_one_is_refused_with_both_times(df, small):
    """The last row is of 2026-02-13; with a season of 7 days, the forecasts depend on 28 of them:
    196 days.
    """
    fc = Forecaster(3, 7, "D", **small).fit(df)
    refuses(
        fc,
        later(df, "b", 197),
        r"'b' has a row at 2026-08-29.*known until 2026-02-13.* 196 steps",
    )
    refuses(fc, later(df, "a", 30000), r"'a' has a row at 2108-04-04.*until 2026-02-13")
    new = pd.concat([later(df, "c", 1), later(df, "c", 400)])  # of a series of its own, as in fit
    assert fc.update(new).predict().unique_id.nunique() == 3


@pytest.mark.slow
def test_rows_within_memory_and_missing_values_that_are_given_are_no_gap(df, small):
    fc = Forecaster(3, 7, "D", **small).fit(df)
    near = pd.concat([later(df, "a", 196), later(df, "b", 1)])
    fc.update(near)
    with pytest.warns(UserWarning, match="'a' at 41 of 236"):
        expected = Forecaster(3, 7, "D", **small).fit(df).predict(pd.concat([df, near]))
    np.testing.assert_allclose(fc.predict().Forecaster, expected.Forecaster, rtol=1e-5)
    other = Forecaster(3, 7, "D", **small).fit(df)
    said = pd.concat([later(df, "b", n, np.nan) for n in range(1, 230)] + [later(df, "b", 230)])
    expected = other.predict(pd.concat([df, said]))
    np.testing.assert_allclose(
        other.update(said).predict().Forecaster, expected.Forecaster, rtol=1e-5
    )


def test_integer_times_far_ahead_are_refused_too(small):
    frame = pd.DataFrame(
        {"unique_id": 4, "ds": range(0, 90, 3), "y": 20 + np.random.default_rng(0).normal(size=30)}
    )
    fc = Forecaster(3, 1, 3, **small).fit(frame)
    row = pd.DataFrame({"unique_id": [4], "ds": [3000], "y": [20.0]})
    refuses(fc, row, r"series 4 has a row at 3000 \(column 'ds'\), .*until 87; .* 128 steps")


@pytest.fixture
def with_static(df):
    return df.assign(
        size=df.unique_id.map({"a": 3, "b": 8}), town=df.unique_id.map({"a": "Ulm", "b": "Bonn"})
    )


STATIC = {"stat_exog_list": ["town", "size"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("size", 9.5, r"'size' .*'b' is .*9\.5"),
        ("town", "Ulm", r"'town' .*'b' is 'Ulm'"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["static_df", "df"])
@pytest.mark.parametrize("stored", [True, False], ids=["from a file", "fitted"])
def test_another_static_value_of_a_known_series_is_refused(
    with_static, small, tmp_path, column, value, message, own, stored
):
    fc = Forecaster(3, 7, "D", **STATIC, **small).fit(with_static)
    if stored:
        fc.save(tmp_path / "fc.pt")
        fc = Forecaster.load(tmp_path / "fc.pt")
    rows = following(with_static, 2, size=[3, 3, 8, 8], town=["Ulm", "Ulm", "Bonn", "Bonn"])
    changed = rows.astype({"size": float})
    changed.loc[rows.unique_id == "b", column] = value
    static = changed.drop_duplicates("unique_id")[["unique_id", "size", "town"]]
    if own:
        refuses(fc, rows, message, static_df=static)
    else:
        refuses(fc, changed, message)
    expected = fc.predict(pd.concat([with_static, rows]))
    np.testing.assert_allclose(fc.update(rows).predict().Forecaster, expected.Forecaster, rtol=1e-5)


@pytest.mark.slow
def test_new_series_bring_static_values_and_known_ones_repeat_theirs(with_static, small):
    fc = Forecaster(3, 7, "D", **STATIC, **small).fit(with_static)
    new = with_static[with_static.unique_id == "a"].assign(unique_id="A", size=5, town="Bonn")
    static = pd.DataFrame(
        {"unique_id": ["b", "A", "z"], "size": [8.0, 5.0, 1.0], "town": ["Bonn", "Bonn", "Rome"]}
    )
    found = fc.update(new.drop(columns=["size", "town"]), static_df=static).predict()
    expected = fc.predict(pd.concat([with_static, new]))
    both = found.merge(expected, on=["unique_id", "ds"])
    assert len(both) == 9
    np.testing.assert_allclose(both.Forecaster_x, both.Forecaster_y, rtol=1e-5)
    row = following(new, 1, size=6, town="Bonn")
    refuses(fc, row, r"'size' of series 'A' is .*6\.0")


@pytest.mark.slow
def test_a_category_unknown_in_training_stays_unknown(with_static, small):
    fc = Forecaster(3, 7, "D", **STATIC, **small).fit(with_static)
    new = with_static[with_static.unique_id == "a"].assign(unique_id="c", town="Rome")
    with pytest.warns(UserWarning, match="'Rome'"):
        fc.update(new)
    row = following(new, 1, size=3)
    refuses(
        fc,
        row.assign(town="Ulm"),
        r"'town' .*'c' is 'Ulm'",
    )
    with pytest.warns(UserWarning, match="'Rome'"):
        fc.update(row.assign(town="Rome"))


@pytest.mark.slow
def test_static_df_without_static_covariates_is_refused(df, small):
    static = pd.DataFrame({"unique_id": ["a", "b"], "size": [1, 2]})
    message = r"static_df .*stat_exog_list .*no cov"
    fc = Forecaster(2, freq="D", **small)
    for call in (fc.fit, fc.cross_validation, fc.fit(df).predict):
        with pytest.raises(DataError, match=message):
            call(df, static_df=static)
    refuses(fc, following(df), message, static_df=static)


# -- files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label",
    [pd.Interval(0, 1), Decimal("1.5"), (1, 2), b"ab", pd.Period("2026-01")],
    ids=lambda v: type(v).__name__,
)
def test_labels_that_a_file_cannot_hold_are_refused_at_save(df, small, label, tmp_path):
    kinds = np.empty(len(df), object)
    for i in range(len(df)):
        kinds[i] = label
    fc = Forecaster(3, freq="D", hist_exog_list=["kind"], **small)
    try:
        fc.fit(df.assign(kind=pd.Series(kinds, dtype=object)))
    except (DataError, TypeError):
        return  # refused earlier still
    with pytest.raises(DataError, match="'kind'"):
        fc.save(tmp_path / "fc.pt")
    assert not (tmp_path / "fc.pt").exists()


@pytest.mark.slow
def test_categories_of_intervals_are_refused_at_save_and_their_texts_are_not(df, small, tmp_path):
    bins = pd.cut(df.y, 3)
    fc = Forecaster(3, freq="D", hist_exog_list=["bin"], **small).fit(df.assign(bin=bins))
    with pytest.raises(DataError, match=r"'bin'.*Interval"):
        fc.save(tmp_path / "fc.pt")
    fc = Forecaster(3, freq="D", hist_exog_list=["bin"], **small).fit(
        df.assign(bin=bins.astype(str))
    )
    fc.save(tmp_path / "fc.pt")
    pd.testing.assert_frame_equal(Forecaster.load(tmp_path / "fc.pt").predict(), fc.predict())


# -- times ----------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
def test_small_integer_times_do_not_wrap(small, dtype):
    ds = np.arange(86, 126).astype(dtype)
    df = pd.DataFrame(
        {"unique_id": "a", "ds": ds, "y": 20 + np.random.default_rng(0).normal(size=len(ds))}
    )
    fc = Forecaster(4, **small).fit(df)
    assert fc.predict().ds.tolist() == [126, 127, 128, 129]
    assert fc.make_future_dataframe().ds.tolist() == [126, 127, 128, 129]
    more = pd.DataFrame({"unique_id": "a", "ds": [126, 127], "y": [20.0, 21.0]})
    assert fc.update(more).predict().ds.tolist() == [128, 129, 130, 131]


def test_missing_integer_times_are_named_by_their_row(small):
    frame = pl.DataFrame({"unique_id": ["a"] * 4, "ds": [1, 2, None, 4], "y": [1.0, 2, 3, 4]})
    with pytest.raises(DataError, match=r"'ds'.*2"):
        Forecaster(1, **small).fit(frame)


@pytest.mark.slow
def test_months_on_the_fifteenth_are_months(small):
    ds = pd.date_range("2020-01-15", periods=30, freq=pd.DateOffset(months=1))
    df = pd.DataFrame(
        {"unique_id": "a", "ds": ds, "y": 20 + np.random.default_rng(0).normal(size=30)}
    )
    found = Forecaster(2, **small).fit(df).predict()
    assert found.ds.tolist() == [pd.Timestamp("2022-07-15"), pd.Timestamp("2022-08-15")]


def test_business_days_have_no_weekends(df, small):
    with pytest.raises(DataError, match=r"'ds'.*2026-01-10.*freq='B'"):
        Forecaster(3, freq="B", **small).fit(df[df.ds >= "2026-01-10"])  # from a Saturday on


def test_dates_before_the_first_nanosecond_are_refused(small):
    ds = np.arange("1650", "1700", dtype="M8[Y]").astype("M8[s]")
    df = pd.DataFrame({"unique_id": "a", "ds": ds, "y": 1.0})
    with pytest.raises(DataError, match=r"1678.*1650"):
        Forecaster(1, freq="YS", **small).fit(df)


@pytest.mark.slow
def test_one_hourly_and_one_daily_series_warn(small):
    rng = np.random.default_rng(0)
    hourly = pd.DataFrame(
        {"unique_id": "h", "ds": pd.date_range("2026-01-01", periods=96, freq="h"), "y": 1.0}
    )
    daily = pd.DataFrame(
        {"unique_id": "d", "ds": pd.date_range("2026-01-01", periods=30, freq="D"), "y": 2.0}
    )
    both = pd.concat([hourly, daily]).assign(y=lambda d: 20 + rng.normal(size=len(d)))
    with pytest.warns(UserWarning, match=r"1 of 2 series.*'d' at 30 of 697"):
        Forecaster(2, **small).fit(both)


# -- predict --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_that_say_a_covariate_twice_are_refused_with_both_rows(df, small):
    known = df.assign(price=1.0)
    fc = Forecaster(2, freq="D", futr_exog_list=["price"], **small).fit(known)
    ahead = fc.make_future_dataframe().assign(price=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(DataError, match=r"rows 1 and 4 of futr_df"):
        fc.predict(futr_df=pd.concat([ahead, ahead.iloc[[1]].assign(price=9.0)], ignore_index=True))


def test_static_covariates_without_series_and_targets_as_covariates_are_refused(df, small):
    fc = Forecaster(2, freq="D", **small).fit(df)
    with pytest.raises(DataError, match="static_df"):
        fc.predict(static_df=pd.DataFrame({"unique_id": ["a", "b"], "size": [1, 2]}))
    for argument in ("futr_exog_list", "hist_exog_list"):
        with pytest.raises(SpecError, match=f"{argument}.*'y'"):
            Forecaster(2, freq="D", **{argument: ["y"]}, **small).fit(df)


def test_ids_that_are_nan_are_no_series(small):
    frame = pl.DataFrame(
        {"unique_id": [1.0, 1.0, float("nan"), 2.0], "ds": [1, 2, 1, 1], "y": [1.0, 2, 3, 4]}
    )
    with pytest.raises(DataError, match=r"'unique_id'.*2"):
        Forecaster(1, **small).fit(frame)


def test_two_columns_of_one_name_are_refused(df, small):
    frame = pd.concat([df, df[["y"]]], axis=1)
    with pytest.raises(ValueError, match="unique column names"):
        Forecaster(1, freq="D", **small).fit(frame)


def test_numbers_in_a_column_of_objects_are_no_categories(df, small):
    frame = df.assign(price=pd.Series(list(np.arange(len(df)) * 1.5), dtype=object))
    with pytest.raises(DataError, match=r"'price'.*0.0.*Object"):
        Forecaster(1, freq="D", hist_exog_list=["price"], **small).fit(frame)


# -- kinds of frames ------------------------------------------------------------------------------------


def test_ids_of_categories_come_back_as_such(df, small, to_polars):
    frame = to_polars(df).with_columns(pl.col("unique_id").cast(pl.Enum(["a", "b"])))
    found = Forecaster(2, freq="D", **small).fit(frame).predict()
    assert found["unique_id"].dtype == frame["unique_id"].dtype
    assert found.join(frame.select("unique_id").unique(), on="unique_id").height == 4


# -- ids, texts and numbers that would be found too late -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("label", [datetime.date(2026, 1, 1), 1.5, "c"])
def test_a_new_id_of_another_type_is_refused_and_the_forecaster_still_works(
    df, small, to_polars, library, label
):
    make = to_polars if library == "polars" else pd.DataFrame
    fc = Forecaster(3, **small).fit(make(df.assign(unique_id=df.unique_id.map({"a": 1, "b": 2}))))
    before = np.asarray(fc.predict()["Forecaster"])
    rows = following(df)[:1]
    with pytest.raises(DataError, match=f"'unique_id'.*{type(label).__name__}.*held int "):
        fc.update(make(rows.assign(unique_id=pd.Series([label], dtype=object))))
    np.testing.assert_array_equal(np.asarray(fc.predict()["Forecaster"]), before)
    with pytest.warns(UserWarning, match="series 7 has 1"):
        fc.update(make(rows.assign(unique_id=[7])))
    assert len(fc.predict()) == 9


@pytest.mark.slow
def test_every_new_id_is_looked_at_not_only_the_first(df, small):
    fc = Forecaster(3, **small).fit(df.assign(unique_id=df.unique_id.map({"a": 1, "b": 2})))
    rows = following(df).assign(unique_id=pd.Series([1, "c"], dtype=object))
    with pytest.raises(DataError, match=r"holds str, .*held int "):
        fc.update(rows)


class Size(str, Enum):  # noqa: UP042  str() gives its name, not its value
    SMALL = "small"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*categories that were not there")
def test_texts_of_enumerations_are_saved_as_their_values(df, small, tmp_path):
    none = StrEnum("Transform", {"NONE": "none"}).NONE
    size = pd.Series([Size.SMALL, "large"] * N, dtype=object)
    fc = Forecaster(3, transform=none, hist_exog_list=["size"], **small).fit(df.assign(size=size))
    fc.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    assert again.transform == "none"
    assert set(again.state_.channels.hist[0].categories) == {"small", "large"}
    pd.testing.assert_frame_equal(again.predict(), fc.predict())


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, -10.5])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_values_of_arrays_are_named_in_fit_and_predict(small, shift, value):
    y = 10 + shift + np.random.default_rng(0).random((2, 3, 40))
    fc = Forecaster(3, **small).fit(y)
    bad = y.copy()
    bad[1, 2, 37] = value
    with pytest.raises(DataError, match=r"infinite at \[1, 2, 37\]"):
        fc.predict(bad)
    with pytest.raises(DataError, match="inf"):
        Forecaster(3, **small).fit(bad)
    assert np.isfinite(fc.predict()).all()


# -- rows of times that are to be forecast ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("n", [1, 3])
def test_future_rows_without_a_value_are_named(df, n, library, small, to_polars):
    later = following(df, n, y=np.nan)
    late = pd.concat([later, df], ignore_index=True)
    late = late if library == "pandas" else to_polars(late)
    begin, end = df.ds.max() + pd.Timedelta(days=1), df.ds.max() + pd.Timedelta(days=n)
    said = f"{2 * n} rows of 2 series .*'y'.*row 0 of df, series 'a' at {begin:%Y-%m-%dT%H:%M:%S}"
    said += ".*futr_df"
    fc = Forecaster(3, freq="D", calibrate=False, **small)
    with pytest.warns(UserWarning, match=said):
        fc.fit(late)
    # as the warning says, the horizon begins after them
    assert np.min(fc.predict()["ds"].to_numpy()) == end + pd.Timedelta(days=1)
    fc.fit(df)
    with pytest.warns(UserWarning, match=said):
        fc.predict(late)
    with pytest.warns(UserWarning, match=f"{2 * n} rows of 2 series .*'y'"):
        fc.update(later)


def test_missing_values_while_other_series_go_on_are_no_future_rows(df, small):
    df.loc[df.index[N - 5 : N], "y"] = np.nan
    Forecaster(3, freq="D", calibrate=False, **small).fit(df)


@pytest.mark.filterwarnings("ignore:.*no series has a later one")
def test_windows_without_truth_have_nan_there(df, small):
    fc = Forecaster(3, freq="D", calibrate=False, **small).fit(df)
    partly = pd.concat([df, following(df, 2, y=np.nan)])
    assert fc.cross_validation(partly, refit=None).y.notna().sum() == 2
