"""Frames as arrays and back: against pandas' own pivoting and reindexing, in every library."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from fluxutils_py import SequenceClassifier, SequenceRegressor, from_frame
from fluxutils_py.errors import DataError, ShapeError, SpecError


def long_frame(lengths=(7, 4, 11), gaps=(), seed=0):
    """A frame of series "b0", "b1", ... with rows in disorder; ``gaps`` are (series, step)."""
    rng = np.random.default_rng(seed)
    parts = []
    for n, length in enumerate(lengths):
        at = pd.date_range("2024-03-01", periods=length, freq="h") + pd.Timedelta(days=n)
        part = pd.DataFrame({"town": f"b{n}", "at": at, "wind": rng.normal(size=length)})
        part["sun"] = np.arange(length) * 1.0
        part["load"] = 2 * part["wind"] + n
        part["sky"] = np.where(part["wind"] > 0, "clear", "grey")
        part["kind"] = "even" if n % 2 == 0 else "odd"
        parts.append(part.drop([step for series, step in gaps if series == n]))
    return pd.concat(parts).sample(frac=1, random_state=seed).reset_index(drop=True)


def to_library(df, library):
    if library == "pandas":
        return df
    if library == "polars":
        return pl.DataFrame(df.to_dict("list"))
    return pa.Table.from_pandas(df, preserve_index=False)


LIBRARIES = ["pandas", "polars", "pyarrow"]


def expected(df, columns):
    """One frame per series on its own hours, by pandas."""
    for _, part in df.groupby("town"):
        part = part.set_index("at").sort_index()[columns]
        yield part.reindex(pd.date_range(part.index[0], part.index[-1], freq="h"))


@pytest.mark.few
@pytest.mark.parametrize("library", LIBRARIES)
def test_series_of_different_lengths_are_lists_and_come_back(library):
    df = long_frame(gaps=[(0, 2), (2, 5)])
    given = to_library(df, library)
    series = from_frame(given, "town", "at", x=["wind", "sun"], y="load")
    assert (series.names, series.target_names) == (("wind", "sun"), ("load",))
    assert series.ids.tolist() == ["b0", "b1", "b2"]
    grids = list(expected(df, ["wind", "sun", "load"]))
    for x, y, times, grid in zip(series.x, series.y, series.times, grids, strict=True):
        np.testing.assert_array_equal(x, grid[["wind", "sun"]].to_numpy().T)
        np.testing.assert_array_equal(y, grid[["load"]].to_numpy().T)
        np.testing.assert_array_equal(times, grid.index.to_numpy().astype("M8[ns]"))
    back = series.to_frame([y + 1 for y in series.y])
    kind = {"polars": pl.DataFrame, "pandas": pd.DataFrame}.get(library, pa.Table)
    assert isinstance(back, kind)
    columns = (
        back.to_pydict()
        if kind is pa.Table
        else back.to_dict(**({"orient": "list"} if library == "pandas" else {"as_series": False}))
    )
    # the rows of the frame, in its order
    assert list(columns) == ["town", "at", "load_hat"]
    assert list(columns["town"]) == df["town"].tolist()
    assert pd.DatetimeIndex(columns["at"]).equals(pd.DatetimeIndex(df["at"]))
    np.testing.assert_allclose(columns["load_hat"], df["load"] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_series_of_one_length_are_an_array_that_an_estimator_takes(library):
    df = long_frame((30, 30, 30), gaps=[(1, 4)])
    series = from_frame(to_library(df, library), "town", "at", x="wind", y="load")
    grids = np.stack([g.to_numpy() for g in expected(df, ["wind", "load"])])  # (N, T, F)
    np.testing.assert_array_equal(series.x, grids.transpose(2, 0, 1)[:1])
    np.testing.assert_array_equal(series.y, grids.transpose(2, 0, 1)[1:])
    assert series.x.transpose(2, 1, 0).flags.c_contiguous
    est = SequenceRegressor(cell="linear").fit(series.x, series.y)
    back = series.to_frame(est.predict(series.x))
    assert len(back) == len(df)


def test_rows_without_times_are_steps_in_their_order():
    df = pd.DataFrame({"who": ["b", "a", "b", "b", "a"], "v": [1.0, 2, 3, 4, 5]}, index=[*"vwxyz"])
    series = from_frame(df.astype({"v": "float32"}), "who", x="v")
    assert [x.tolist() for x in series.x] == [[[2.0, 5]], [[1.0, 3, 4]]]
    assert series.x[0].dtype == np.float32
    assert series.y is None
    back = series.to_frame(series.x, ["yhat"])
    pd.testing.assert_series_equal(back["yhat"], df["v"].astype("float32"), check_names=False)
    one = from_frame(df, x=["v"])
    assert one.x.shape == (1, 1, 5)
    assert one.x[0, 0].tolist() == df["v"].tolist()
    assert list(one.to_frame(one.x, ["again"]).columns) == ["again"]


@pytest.mark.slow
def test_text_stays_text_and_its_gaps_are_missing_labels():
    df = long_frame((20, 20), gaps=[(0, 3)])
    series = from_frame(df, "town", "at", x="wind", y="sky")
    assert series.y.dtype == object
    assert series.y[0, 0, 3] is None
    clf = SequenceClassifier(cell="linear").fit(series.x, series.y)
    assert sorted(clf.classes_) == ["clear", "grey"]
    back = series.to_frame(clf.predict(series.x))
    assert set(back["sky_hat"]) == {"clear", "grey"}
    assert (back["sky_hat"] == df["sky"]).mean() > 0.8


LARGE = 2**53 + 1  # float64 has no such number
INTEGERS = ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]


def drawn_labels(rng, kind, n):
    """Two labels that float32, and where possible float64, would take for one; n of them."""
    pair = {
        "bool": [False, True],
        "text": ["clear", "grey"],
        "float32": [3.0, 4.0],
        "float64": [100100037.0, 100100038.0],
    }.get(kind)
    if pair is None:
        large = {"int64": LARGE, "uint64": 2**63 + 1, "int32": 100100037, "uint32": 2**31 + 1}
        begin = large.get(kind, 100)
        pair = [begin, begin + 1]
    labels = [pair[i] for i in rng.integers(0, 2, n)]
    labels[:2] = pair
    return labels


def typed_column(labels, missing, kind, form):
    """A column of pandas, None where missing."""
    given = [None if m else label for label, m in zip(labels, missing, strict=True)]
    if kind == "text":
        return pd.Series(given, dtype=form if form == "category" else object)
    if form == "category":  # of integers, booleans
        return pd.Series(given, dtype=pd.CategoricalDtype(sorted(set(labels))))
    if kind.startswith("float"):
        return pd.Series(given, dtype=kind)
    if form == "pyarrow" and kind != "bool":
        return pd.Series(given, dtype=f"{kind}[pyarrow]")
    if missing.any() or form == "nullable":
        name = {"bool": "boolean"}.get(kind, kind.replace("i", "I").replace("uI", "UI"))
        return pd.Series(given, dtype=name)
    return pd.Series(given, dtype=kind)


def to_native(df, library, y):
    """The frame in another library, the labels in the type that it has for them."""
    if library == "pandas":
        return df
    names = {"text": (pl.String, pa.string()), "bool": (pl.Boolean, pa.bool_())}
    kind = y["kind"]
    of_polars, of_arrow = names.get(
        kind,
        (getattr(pl, kind.replace("i", "I").replace("uI", "UI").replace("f", "F"), None), kind),
    )
    columns = {name: df[name].tolist() for name in ("town", "at")}
    columns |= {"wind": df["wind"].to_numpy(), "sky": [None if pd.isna(v) else v for v in y["y"]]}
    if library == "polars":
        wind = pl.Float32 if df["wind"].dtype == np.float32 else pl.Float64
        return pl.DataFrame(columns, schema_overrides={"sky": of_polars, "wind": wind})
    if isinstance(of_arrow, str):
        of_arrow = {"float32": pa.float32(), "float64": pa.float64()}.get(kind) or getattr(
            pa, kind
        )()
    return pa.table(columns | {"sky": pa.array(columns["sky"], of_arrow)})


def as_lists(frame):
    """The columns of a frame of any library, None where missing."""
    if isinstance(frame, pl.DataFrame):
        return frame.to_dict(as_series=False)
    if isinstance(frame, pa.Table):
        return frame.to_pydict()
    return {c: [None if pd.isna(v) else v for v in frame[c].tolist()] for c in frame}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_labels_keep_their_type_from_the_frame_to_the_classes(seed):
    rng = np.random.default_rng(seed)
    kind = str(rng.choice([*INTEGERS, "bool", "text", "float32", "float64"]))
    form = str(rng.choice(["plain", "nullable", "pyarrow", "category"]))
    library = str(rng.choice(LIBRARIES))
    per_series, lacks = (bool(v) for v in rng.random(2) < (0.3, 0.4))
    if library != "pandas":
        form = "plain"
    lacks = lacks and not per_series
    df = long_frame((24, 24, 24, 24), gaps=[(1, 4)] * bool(rng.random() < 0.3), seed=seed)
    df["wind"] = df["wind"].astype(str(rng.choice(["float32", "float64"])))
    labels = drawn_labels(rng, kind, 4 if per_series else len(df))
    if per_series:
        labels = [labels[int(town[1])] for town in df["town"]]
    missing = rng.random(len(df)) < (0.1 if lacks else 0)
    df["sky"] = typed_column(labels, missing, kind, form)
    given = to_native(df, library, {"kind": kind, "y": df["sky"]})
    read = {"x": "wind", "y": "sky", "per_series": per_series, "freq": "h"}
    has_gaps = (missing.any() or len(df) < 96) and not per_series
    if has_gaps and max(labels) in (LARGE + 1, 2**63 + 2):
        with pytest.raises(DataError, match=r"'sky' of df is \d{16,} in row \d+.*text"):
            from_frame(given, "town", "at", **read)
        return
    series = from_frame(given, "town", "at", **read)
    clf = SequenceClassifier(cell="linear").fit(series.x, series.y)
    known = [v for v, m in zip(labels, missing, strict=True) if not m]
    assert clf.classes_.tolist() == sorted(set(known))
    if not has_gaps and kind != "text":
        assert clf.classes_.dtype.kind == np.dtype(kind).kind
        assert form == "category" or clf.classes_.dtype == kind
    expected = [None if m else v for v, m in zip(labels, missing, strict=True)]
    if per_series:
        expected = [dict(zip(df["town"], labels, strict=True))[f"b{n}"] for n in range(4)]
    assert as_lists(series.to_frame(series.y))["sky_hat"] == expected
    if not per_series:
        # of test data, which may lack labels elsewhere
        other = series.like(given)
        found = [as_lists(a.to_frame(clf.predict(a.x)))["sky_hat"] for a in (series, other)]
        assert found[0] == found[1]


def test_targets_keep_their_type_beside_other_inputs():
    df = long_frame((9, 9))
    df["wind"] = df["wind"].astype("float32")
    df["count"] = np.random.default_rng(0).integers(0, 2**31, 18).astype("int32")
    df["exact"] = 1e9 + df["count"] / 3
    df["code"] = LARGE + np.arange(18)
    two = from_frame(df, "town", "at", "wind", ["count", "exact"])
    assert (two.x.dtype, two.y.dtype) == (np.float32, np.float64)
    back = two.to_frame(two.y)
    for name in ("count", "exact"):
        np.testing.assert_array_equal(back[f"{name}_hat"], df[name])
    codes = from_frame(df, "town", "at", "code", "code")
    assert (codes.x.dtype, codes.y.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(codes.to_frame(codes.y)["code_hat"], df["code"])
    with pytest.raises(DataError, match=r"'code' of df is \d{16} in row 0.*floats"):
        from_frame(df, "town", "at", "wind", ["code", "exact"])


def test_one_label_per_series():
    df = long_frame((9, 9, 9, 9))
    series = from_frame(df, "town", "at", x=["wind"], y="kind", per_series=True)
    assert series.y.tolist() == ["even", "odd", "even", "odd"]
    back = series.to_frame(series.y)
    assert back.to_dict("list") == {"town": ["b0", "b1", "b2", "b3"], "kind_hat": [*series.y]}
    with pytest.raises(DataError, match=r"'sky'.*row \d+ .*per_series"):
        from_frame(df, "town", "at", x=["wind"], y="sky", per_series=True)


def test_several_targets_per_series():
    df = long_frame((9, 9, 9))
    df["a"] = df["town"].str[1:].astype(float)
    df["b"] = df["a"] * 10
    series = from_frame(df, "town", "at", x=["wind"], y=["a", "b"], per_series=True)
    np.testing.assert_array_equal(series.y, [[0, 0], [1, 10], [2, 20]])


def test_another_frame_is_read_by_the_same_rules():
    train = long_frame((12, 12))
    series = from_frame(train, "town", "at", x=["wind"], y="load")
    # a row every two hours: alone it would be a series of steps of two hours
    test = long_frame((9,), seed=1).sort_values("at")[::2].drop(columns="load")
    other = series.like(test)
    assert other.x.shape == (1, 1, 9)
    assert other.y is None
    assert np.isnan(other.x[0, 0, 1::2]).all()
    assert not np.isnan(other.x[0, 0, ::2]).any()
    assert list(other.to_frame(other.x).columns) == ["town", "at", "load_hat"]
    with pytest.raises(DataError, match="'wind'"):
        series.like(test.drop(columns="wind"))


@pytest.mark.parametrize("zone", ["Europe/Berlin"])
def test_times_keep_their_zone_where_clocks_change(zone):
    at = pd.date_range("2024-10-26 12:00", periods=30, freq="h", tz=zone)
    df = pd.DataFrame({"at": at, "v": np.arange(30.0)})
    series = from_frame(df[::-1], time_col="at", x="v")
    assert series.x.shape == (1, 1, 30)
    back = series.to_frame(series.x, ["v"])
    pd.testing.assert_index_equal(back.index, df[::-1].index)
    assert (back["at"] == df["at"][::-1]).all()
    assert str(back["at"].dtype.tz) == zone


def test_what_cannot_be_used_is_named():
    df = long_frame((5, 6))
    twice = pd.concat([df, df[3:4]], ignore_index=True)
    with pytest.raises(DataError, match="rows 3 and 11"):
        from_frame(twice, "town", "at", x="wind")
    with pytest.raises(DataError, match="'sky' of df"):
        from_frame(df, "town", "at", x="sky")
    with pytest.raises(DataError, match=r"'winds'.*did you mean 'wind'"):
        from_frame(df, "town", "at", x="winds")
    with pytest.raises(SpecError, match="time_col and x are both 'at'"):
        from_frame(df, "town", "at", x=["at"])
    with pytest.raises(DataError, match="no rows"):
        from_frame(df[:0], "town", "at", x="wind")


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"id_col": "town", "time_col": "town"}, "id_col and time_col are both 'town'"),
        ({"time_col": "at", "x": ["at"]}, "time_col and x are both 'at'"),
        ({"id_col": "town", "y": ["load", "load"]}, "y names a column twice: load, load"),
    ],
)
def test_a_column_has_one_role(roles, message):
    with pytest.raises(SpecError, match=message):
        from_frame(long_frame(), **roles)


def test_predictions_of_other_series_are_refused():
    series = from_frame(long_frame((5, 6)), "town", "at", x="wind", y="load")
    for wrong in (np.zeros((1, 2, 5)), [np.zeros((1, 5))], np.zeros(3)):
        with pytest.raises(ShapeError, match="predictions"):
            series.to_frame(wrong)
    with pytest.raises(ShapeError, match="2 names"):
        series.to_frame([np.zeros((2, 5)), np.zeros((2, 6))])
    with pytest.raises(DataError, match="'at'"):
        series.to_frame(series.y, ["at"])


def test_a_time_between_two_steps_of_the_only_series_is_named_with_the_remedy():
    at = pd.to_datetime(["2024-01-01 00:00:00", "2024-01-01 00:00:59", "2024-01-01 00:02:00"])
    df = pd.DataFrame({"at": at, "v": [1.0, 2.0, 3.0]})
    with pytest.raises(DataError, match=r"00:00:59.*of series None;.*df\['at'\]\.dt\.round"):
        from_frame(df, time_col="at", x="v", freq="1min")
    df["at"] = df["at"].dt.round("min")
    assert from_frame(df, time_col="at", x="v").x.shape == (1, 1, 3)


def test_another_frame_has_a_time_zone_if_the_first_has():
    df = pd.DataFrame({"t": pd.date_range("2024", periods=9, freq="h", tz="Europe/Vienna")})
    df["v"] = np.arange(9.0)
    naive = df.assign(t=df.t.dt.tz_localize(None))
    for first, other in ((df, naive), (naive, df)):
        series = from_frame(first, time_col="t", x=["v"])
        with pytest.raises(DataError, match=r"time zone .*Vienna|time zone None"):
            series.like(other)
