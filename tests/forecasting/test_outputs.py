"""Covariates known ahead, and series that cannot be forecast: what is missing is named."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError, SpecError
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
    with pytest.raises(DataError, match=r"'promo' of futr_df .*row 2; fill it in: each"):
        fitted.predict(futr_df=frame.assign(promo=[1, 1, np.nan, 1, 1, 1]))
    with pytest.raises(DataError, match="futr_df has no column 'promo'"):
        fitted.predict(futr_df=frame.drop(columns="promo"))


@pytest.mark.slow
def test_the_first_steps_need_the_covariates_of_these_alone(fitted):
    frame = fitted.make_future_dataframe(2).assign(promo=1.0)
    whole = fitted.predict(futr_df=fitted.make_future_dataframe().assign(promo=1.0))
    first = whole.groupby("unique_id").head(2).reset_index(drop=True)
    pd.testing.assert_frame_equal(fitted.predict(h=2, futr_df=frame), first)
    with pytest.raises(SpecError, match=r"h=4 .* 3 steps .*fit one with h=4"):
        fitted.predict(h=4, futr_df=frame)
    with pytest.raises(ValueError, match="h must be a positive integer or None, got 0"):
        fitted.predict(h=0)


def test_rows_of_other_series_and_times_are_left_out(fitted):
    frame = fitted.make_future_dataframe().assign(promo=1.0)
    more = pd.DataFrame(
        {"unique_id": ["c", "a"], "ds": pd.to_datetime(["2024-03-11", "2024-05-01"]), "promo": 9.0}
    )
    expected = fitted.predict(futr_df=frame)
    pd.testing.assert_frame_equal(fitted.predict(futr_df=pd.concat([more, frame])), expected)
