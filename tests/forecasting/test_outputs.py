"""Covariates known ahead, and series that cannot be forecast: what is missing is named."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster


@pytest.fixture(scope="module")
def fitted(small):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(
        {
            "unique_id": np.repeat(["a", "b"], 20),
            "ds": np.tile(pd.date_range("2024-02-20", periods=20), 2),
        }
    )
    df["y"], df["promo"] = rng.normal(size=40), rng.integers(0, 2, 40)
    return Forecaster(3, 5, futr_exog_list=["promo"], **small).fit(df)


@pytest.mark.slow
def test_the_rows_to_fill_in_are_those_that_are_forecast(fitted):
    frame = fitted.make_future_dataframe()
    assert frame.unique_id.tolist() == ["a"] * 3 + ["b"] * 3
    assert frame.ds.tolist() == [*pd.date_range("2024-03-11", periods=3)] * 2
    out = fitted.predict(futr_df=frame.assign(promo=1).sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(out[["unique_id", "ds"]], frame)


@pytest.mark.slow
def test_what_is_missing_is_named(fitted):
    frame = fitted.make_future_dataframe().assign(promo=1.0)
    with pytest.raises(DataError, match=r"names promo: .* predict\(futr_df="):
        fitted.predict()
    with pytest.raises(DataError, match=r"futr_df .*'b' at 2024-03-12.*'ds'"):
        fitted.predict(futr_df=frame.drop(index=4))
    with pytest.raises(DataError, match=r"'promo' of futr_df .*row 2"):
        fitted.predict(futr_df=frame.assign(promo=[1, 1, np.nan, 1, 1, 1]))
    with pytest.raises(DataError, match="futr_df has no column 'promo'"):
        fitted.predict(futr_df=frame.drop(columns="promo"))


def test_rows_of_other_series_and_times_are_left_out(fitted):
    frame = fitted.make_future_dataframe().assign(promo=1.0)
    more = pd.DataFrame(
        {"unique_id": ["c", "a"], "ds": pd.to_datetime(["2024-03-11", "2024-05-01"]), "promo": 9.0}
    )
    expected = fitted.predict(futr_df=frame)
    pd.testing.assert_frame_equal(fitted.predict(futr_df=pd.concat([more, frame])), expected)


@pytest.mark.slow
def test_series_that_change_too_little_beside_the_others_are_named(small):
    t = np.arange(60)
    wave = -3 - np.sin(t / 2)
    df = pd.DataFrame({"unique_id": np.repeat(["a", "b", "c", "d"], 60), "ds": np.tile(t, 4)})
    df["y"] = np.concatenate([1e9 * wave, wave, np.zeros(60), 1e6 * wave])
    fc = Forecaster(3, 1, **small).fit(df)
    message = r"^1 series .*'b', .*128 steps span 2, .* 8e\+07"
    with pytest.warns(UserWarning, match=message):
        fc.predict()
    with pytest.warns(UserWarning, match="^1 series change too little"):
        fc.predict(df[df.unique_id == "b"])
    fc.predict(df[df.unique_id != "b"])
    Forecaster(3, 1, **small).fit(
        df.assign(y=df.y.abs() + 1e-9)
    ).predict()  # their logarithms change alike
