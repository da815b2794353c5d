"""Other horizons than that of training: the first steps, and recursion on the median beyond."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")
BEYOND = r"h=11 .* 4 steps .*fit with h=11"


def test_fewer_steps_are_the_first_ones(panel, small):
    fc = Forecaster(4, quantiles=(0.2, 0.8), **small).fit(panel)
    whole = fc.predict()
    first = whole.groupby("unique_id").head(3).reset_index(drop=True)
    pd.testing.assert_frame_equal(fc.predict(h=3), first)
    pd.testing.assert_frame_equal(fc.predict(panel, h=3), first, rtol=1e-5)
    pd.testing.assert_frame_equal(fc.make_future_dataframe(3), first[["unique_id", "ds"]])


@pytest.mark.slow
def test_more_steps_equal_a_naive_loop_over_its_own_forecasts(panel, small, oracle):
    fc = Forecaster(4, **small).fit(panel)
    with pytest.warns(UserWarning, match=BEYOND):
        out = fc.predict(h=11)
    for name in ("wave-60", "large-1", "negative-5"):
        rows = panel[panel.unique_id == name].set_index("ds").y.sort_index()
        y = rows.reindex(pd.date_range(rows.index[0], rows.index[-1])).to_numpy()
        n = len(y)
        while len(y) < n + 11:
            y = np.r_[y, oracle.forecast(y, fc.features_, fc.models_[0])]
        found = out[out.unique_id == name]
        np.testing.assert_allclose(
            found.Forecaster, y[n : n + 11], rtol=1e-4, atol=1e-5 * fc.features_.unit
        )
        assert (found.ds == pd.date_range(rows.index[-1], periods=12)[1:]).all()


@pytest.mark.slow
def test_the_median_is_what_recursion_goes_on_from(small):
    y = 50 + np.random.default_rng(0).normal(size=(2, 3, 40))
    fc = Forecaster(4, 5, quantiles=(0.5, 0.9), **{**small, "max_steps": 20}).fit(y)
    with pytest.warns(UserWarning, match=BEYOND):
        out = fc.predict(h=11)
    assert {v.shape for v in out.values()} == {(2, 3, 11)}
    longer = np.concatenate([y, fc.predict()["Forecaster-median"]], 2)
    for name, values in fc.predict(longer).items():
        np.testing.assert_allclose(out[name][:, :, 4:8], values, rtol=1e-5)


@pytest.mark.slow
def test_covariates_known_ahead_are_needed_as_far_as_h(small, rng):
    df = pd.DataFrame({"unique_id": "a", "ds": np.arange(60), "promo": rng.normal(size=60)})
    df["y"] = 9 + df.promo
    fc = Forecaster(4, futr_exog_list=["promo"], **{**small, "max_steps": 20}).fit(df)
    futr = fc.make_future_dataframe(11).assign(promo=rng.normal(size=11))
    with pytest.warns(UserWarning, match=BEYOND):
        whole = fc.predict(h=11, futr_df=futr)
    for n in (2, 4):
        np.testing.assert_array_equal(
            fc.predict(h=n, futr_df=futr[:n]).Forecaster, whole.Forecaster[:n]
        )
    longer = pd.concat([df, futr[:8].assign(y=whole.Forecaster[:8])])
    direct = fc.predict(longer, h=3, futr_df=futr)
    np.testing.assert_allclose(direct.Forecaster, whole.Forecaster[8:], rtol=1e-5)
    later = futr.assign(promo=np.where(futr.ds >= 67, 9.0, futr.promo))
    with pytest.warns(UserWarning, match=BEYOND):
        changed = fc.predict(h=11, futr_df=later)
    assert ((changed.Forecaster == whole.Forecaster).to_numpy() == (futr.ds < 67)).all()
    with (
        pytest.warns(UserWarning, match=BEYOND),
        pytest.raises(DataError, match=r"'a' at 70 .*needs the 11 steps"),
    ):
        fc.predict(h=11, futr_df=futr[:10])
    with pytest.raises(ValueError, match="h must be a positive integer or None, got 0"):
        fc.predict(h=0)
