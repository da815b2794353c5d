"""Tables of pyarrow: the same values as frames of pandas, and the types of the table that came."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster

N = 40
EXOG = {
    "hist_exog_list": ["sky"],
    "futr_exog_list": ["promo"],
    "stat_exog_list": ["size"],
    "quantiles": (0.1,),
}
KINDS = {
    "text": (pa.string(), pa.timestamp("us")),
    "dictionary": (pa.dictionary(pa.uint32(), pa.string()), pa.date32()),
    "a time zone": (pa.string(), pa.timestamp("ms", "America/New_York")),
    "numbers": (pa.uint16(), pa.timestamp("us", "UTC")),
    "booleans and integers": (pa.bool_(), pa.int32()),
}


@pytest.fixture(params=list(KINDS))
def types(request):
    return KINDS[request.param]


def panel(types=KINDS["text"]):
    """A frame of pandas with missing values of the target, and the ids and times of these types."""
    rng = np.random.default_rng(0)
    label, time = types
    ids = {pa.uint16(): [7, 12], pa.bool_(): [False, True]}.get(label, ["a", "b"])
    ds = pd.Series(pd.date_range("2026-01-05", periods=N, freq="D"))
    if pa.types.is_integer(time):
        ds = pd.Series(range(N))
    elif getattr(time, "tz", None):
        ds = ds.dt.tz_localize(time.tz)
    columns = {
        "ds": ds,
        "promo": np.arange(N) % 3 == 0,
        "sky": np.where(np.arange(N) % 2, "grey", "blue"),
    }
    parts = [pd.DataFrame({**columns, "unique_id": i, "size": 3.0 + n}) for n, i in enumerate(ids)]
    df = pd.concat(parts, ignore_index=True).assign(y=20 + rng.normal(size=2 * N))
    df.loc[[3, 50], "y"] = np.nan
    return df


def label_array(labels, label_type):
    """An array of labels; pyarrow before 24 makes no dictionary of large strings from a list."""
    if pa.types.is_dictionary(label_type):
        return pa.array(labels, label_type.value_type).cast(label_type)
    return pa.array(labels, label_type)


def table(df, types=KINDS["text"]):
    """A table with more than one chunk, in random order."""
    df = df.sample(frac=1, random_state=0)
    columns = {
        name: pa.array(df[name], from_pandas=True) for name in df if name not in ("unique_id", "ds")
    }
    columns["unique_id"] = label_array(df.unique_id.tolist(), types[0])
    at = df.ds.dt.tz_convert("UTC").dt.tz_localize(None) if getattr(types[1], "tz", None) else df.ds
    columns["ds"] = pa.array(at.to_numpy()).cast(types[1])
    made = pa.table(columns)
    return pa.concat_tables([made.slice(5), made.slice(0, 5)])


def parts(df):
    """Rows to fit on, and rows that follow."""
    early = df.groupby("unique_id").cumcount() < 36
    return df[early], df[~early]


def require_same(found, expected, types):
    """Compare a table with a frame of pandas, and its keys with the types of the data."""
    assert isinstance(found, pa.Table)
    assert found.column_names == list(expected)
    kinds = {"unique_id": types[0], "ds": types[1], "cutoff": types[1]}
    for name in expected:
        if name not in kinds:
            np.testing.assert_array_equal(found[name].to_numpy(), expected[name])
            continue
        assert found[name].type == kinds[name]
        is_time = expected[name].dtype.kind == "M"
        assert [pd.Timestamp(v) if is_time else v for v in found[name].to_pylist()] == expected[
            name
        ].tolist()


@pytest.mark.slow
def test_every_method_gives_the_values_of_pandas_with_the_types_that_came(types, small, tmp_path):
    df = panel(types)
    freq = 1 if types[1] == pa.int32() else "D"
    first, rest = parts(df)
    of_pandas = Forecaster(3, 7, freq, **EXOG, **small).fit(first)
    of_arrow = Forecaster(3, 7, freq, **EXOG, **small).fit(table(first, types))
    ahead, expected = of_arrow.make_future_dataframe(), of_pandas.make_future_dataframe()
    require_same(ahead, expected, types)
    promo = pa.array([True, False, True] * 2)
    found = of_arrow.predict(futr_df=ahead.append_column("promo", promo))
    require_same(found, of_pandas.predict(futr_df=expected.assign(promo=promo)), types)

    of_arrow.save(tmp_path / "fc.pt")
    for fc in (of_arrow, Forecaster.load(tmp_path / "fc.pt")):
        fc.update(table(rest, types))
    ahead, expected = fc.make_future_dataframe(), of_pandas.update(rest).make_future_dataframe()
    found = fc.predict(futr_df=ahead.append_column("promo", promo))
    require_same(found, of_pandas.predict(futr_df=expected.assign(promo=promo)), types)
    whole = fc.predict(table(df, types), futr_df=table(expected.assign(promo=promo), types))
    require_same(whole, of_pandas.predict(df, futr_df=expected.assign(promo=promo)), types)


@pytest.mark.slow
def test_walks_and_scores_are_those_of_pandas(types, small):
    df = panel(types)
    freq = 1 if types[1] == pa.int32() else "D"
    static = df.groupby("unique_id", as_index=False)["size"].first()
    own = pa.table(
        {"unique_id": label_array(static.unique_id.tolist(), types[0]), "size": static["size"]}
    )
    fc = Forecaster(3, 7, freq, stat_exog_list=["size"], **small)
    expected = fc.cross_validation(df, 2, 4)
    found = fc.cross_validation(table(df.drop(columns="size"), types), 2, 4, static_df=own)
    require_same(found, expected, types)
    first, rest = parts(df)
    scored = [
        f.fit(a).score(b)
        for f, a, b in ((fc, first, rest), (fc, table(first, types), table(rest, types)))
    ]
    # equal but for the rounding of sums, which depends on where arrays lie in memory
    assert scored[0] == pytest.approx(scored[1], rel=1e-12)


def test_columns_with_equal_values_are_two_columns_and_equal_names_are_refused(small):
    df = panel()
    fc = Forecaster(3, 7, "D", **small)
    fc.fit(table(df.assign(z=df.y)))
    with pytest.raises(ValueError, match="unique column names"):
        fc.fit(table(df).append_column("y", pa.array(df.y)))


@pytest.mark.slow
def test_new_series_get_codes_of_their_own(small):
    """More ids than the codes of the dictionary can hold."""
    df, types = panel(), (pa.dictionary(pa.int8(), pa.string()), pa.timestamp("us"))
    fc = Forecaster(3, 7, "D", **small).fit(table(df, types))
    one = df[df.unique_id == "a"]
    more = pd.concat([one.assign(unique_id=f"s{i}") for i in range(150)])
    found = fc.update(table(more, (pa.string(), types[1]))).predict()
    assert sorted(set(found["unique_id"].to_pylist())) == sorted(
        ["a", "b", *(f"s{i}" for i in range(150))]
    )


def test_missing_forecasts_are_null(small):
    df = panel()
    with pytest.warns(UserWarning, match="their forecasts are missing"):
        found = (
            Forecaster(3, 7, "D", **small)
            .fit(table(df.assign(y=df.y.where(df.unique_id == "a"))))
            .predict()
        )
    assert found["Forecaster"].null_count == 3


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "ds",
            pa.array(["2026-01-05"] * 80),
            r"'ds' .*dates or integers.* String",
        ),
        (
            "y",
            pa.array(["4"] * 80),
            r"'y' .*numbers.* String",
        ),
        ("y", pa.nulls(80), r"'y' .* must hold numbers"),
        (
            "unique_id",
            pa.array(["a"] * 9 + [None] + ["b"] * 70),
            r"'unique_id' .* missing in row 9",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_named_with_the_type_of_pyarrow(
    small, column, values, message
):
    made = table(panel())
    made = made.set_column(made.column_names.index(column), column, values)
    with pytest.raises(DataError, match=message):
        Forecaster(3, 7, "D", hist_exog_list=["sky"], **small).fit(made)
