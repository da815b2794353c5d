"""Covariates of the calendar, against pandas and against the same numbers given as columns."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.calendar_features import FIELDS, calendar_channel, usual_fields
from fluxutils_py.frames.panel import Columns, read_panel

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


def shares(times):
    """The part of each cycle that has passed, by pandas."""
    seconds = times.hour * 3600 + times.minute * 60 + times.second
    return {
        "hour": seconds / 86400,
        "dayofweek": times.day_of_week / 7,
        "dayofmonth": (times.day - 1) / 31,
        "weekofyear": (times.isocalendar().week.to_numpy(int) - 1) / 53,
        "month": (times.month - 1) / 12,
    }


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("2024-03-30 05:15", periods=99, freq="15min", tz="Europe/Berlin"),
        pd.date_range("1959-12-20", periods=4000, freq="D"),
        pd.date_range("2024-01-31", periods=50, freq="D", tz="America/New_York"),
        pd.date_range("2020-12-27", periods=40, freq="W"),
        pd.date_range("2020-01-31", periods=40, freq="ME"),
        pd.date_range("2024-02-26 09:30", periods=40, freq="B"),
    ],
)
def test_positions_are_those_of_pandas(times):
    df = pd.DataFrame({"unique_id": "a", "ds": times, "y": 1.0})
    panel = read_panel(df, Columns(), times.freq)
    for field, share in shares(times).items():
        for wave in ("sin", "cos"):
            got = calendar_channel(panel, f"calendar_{field}_{wave}")
            np.testing.assert_allclose(got, getattr(np, wave)(2 * np.pi * share), atol=1e-9)
    assert set(shares(times)) == set(FIELDS)


def test_auto_goes_by_frequency_and_length():
    for freq, n, expected in (
        ("15min", 50, ["hour", "dayofweek"]),
        ("h", 19000, ["hour", "dayofweek", "weekofyear"]),
        ("D", 300, ["dayofweek"]),
        ("D", 800, ["dayofweek", "weekofyear"]),
        ("B", 30, ["dayofweek"]),
        ("W", 110, ["weekofyear"]),
        ("MS", 24, ["month"]),
        ("MS", 12, []),
    ):
        ds = pd.date_range("2020-01-05", periods=n, freq=freq)
        df = pd.DataFrame({"unique_id": "a", "ds": ds, "y": 1.0})
        assert usual_fields(read_panel(df, Columns(), freq)) == expected, freq


def with_columns(df):
    """The same covariates as columns of a frame."""
    out = df.copy()
    for field in ("dayofweek", "dayofmonth"):
        share = shares(pd.DatetimeIndex(df.ds))[field]
        out[f"{field}_sin"] = np.sin(2 * np.pi * share)
        out[f"{field}_cos"] = np.cos(2 * np.pi * share)
    return out


@pytest.fixture(scope="module")
def fitted(make_panel):
    settings = {"hidden_size": 5, "max_steps": 8, "random_state": 0, "verbose": False, "comm": None}
    df = make_panel(("wave",), missing=False)
    df["promo"] = df.ds.dt.day % 4 == 0
    df = df[df.ds <= "2024-03-20"]
    fields = ["dayofweek", "dayofmonth"]
    fc = Forecaster(4, freq="D", calendar=fields, futr_exog_list=["promo"], **settings)
    return df, fc.fit(df)


def futr(fc, h=None):
    return fc.make_future_dataframe(h).assign(promo=lambda d: d.ds.dt.day % 4 == 0)


@pytest.mark.slow
def test_the_calendar_equals_columns_known_ahead(fitted):
    df, fc = fitted
    names = [f"{field}_{wave}" for field in ("dayofweek", "dayofmonth") for wave in ("sin", "cos")]
    columns = Forecaster(**{**fc.get_params(), "calendar": (), "futr_exog_list": ["promo", *names]})
    columns.fit(with_columns(df))
    # columns are standardised, the calendar is not: the same network on the same numbers
    for covariate, column in zip(fc.covariates_.futr, columns.covariates_.futr, strict=True):
        assert covariate.name in (f"calendar_{column.name}", column.name)
        mean, scale = (0.0, 1.0) if covariate.from_time else (column.mean, column.scale)
        object.__setattr__(column, "mean", mean)
        object.__setattr__(column, "scale", scale)
    columns.models_ = fc.models_
    expected = columns.predict(with_columns(df), futr_df=with_columns(futr(fc)))
    pd.testing.assert_frame_equal(fc.predict(futr_df=futr(fc)), expected, rtol=1e-5)
    walked = fc.cross_validation(df[df.unique_id.isin(["wave-60", "wave-41"])], 2, 3, refit=None)
    by_columns = columns.cross_validation(
        with_columns(df[df.unique_id.isin(["wave-60", "wave-41"])]), 2, 3, refit=None
    )
    pd.testing.assert_frame_equal(walked, by_columns, rtol=1e-5)


@pytest.mark.slow
def test_the_calendar_of_a_gap_is_known_in_update_and_files(fitted, tmp_path):
    df, fc = fitted
    fc.save(tmp_path / "fc.pt")
    again = Forecaster.load(tmp_path / "fc.pt")
    assert again.covariates_ == fc.covariates_
    later = pd.DataFrame({"unique_id": ["wave-60", "new"], "y": [20.0, 30.0], "promo": False})
    later["ds"] = df[df.unique_id == "wave-60"].ds.max() + pd.Timedelta(days=6)
    again.update(later)
    whole = pd.concat([df, later])
    got = again.predict(futr_df=futr(again))
    expected = fc.predict(whole, futr_df=futr(again))
    both = got.merge(expected, on=["unique_id", "ds"], validate="1:1")
    assert len(both) == len(got) == len(expected)
    np.testing.assert_allclose(both.Forecaster_x, both.Forecaster_y, rtol=1e-5)
    with pytest.warns(UserWarning, match="h=6 is more"):
        far = fc.predict(h=6, futr_df=futr(fc, 6))
    assert np.isfinite(far.Forecaster).all()


@pytest.mark.slow
def test_a_cycle_that_no_season_has_is_learnt(small):
    ds = pd.date_range("2024-01-01", periods=200, freq="D")
    y = 10 + 8 * (ds.day <= 10) + 0.3 * np.random.default_rng(0).normal(size=200)
    df = pd.DataFrame({"unique_id": "a", "ds": ds, "y": y})
    settings = {**small, "max_steps": 120, "hidden_size": 16, "lag": None, "transform": "none"}
    settings["calibrate"] = False  # by few errors, and with simple forecasts

    def error(calendar):
        fc = Forecaster(14, calendar=calendar, **settings).fit(df[:175])
        return np.abs(fc.predict().Forecaster.to_numpy() - y[175:189]).mean()

    assert error(["dayofmonth"]) < 0.6 * error(())


@pytest.mark.slow
def test_what_has_no_calendar_is_refused(small, panel):
    integers = panel.assign(ds=(panel.ds - panel.ds.min()).dt.days)
    with pytest.raises(DataError, match=r"calendar='auto' .*integers"):
        Forecaster(3, calendar="auto", **small).fit(integers)
    with pytest.raises(DataError, match=r"calendar=\['hour'\] .*array"):
        Forecaster(3, calendar=["hour"], **small).fit(np.ones((1, 2, 30)))
    for calendar in (["hours"], ["hour", "hour"], "hour"):
        with pytest.raises(SpecError, match=r"calendar must be .*'?hours?'"):
            Forecaster(3, calendar=calendar, **small).fit(panel)
    with pytest.warns(UserWarning, match=r"'hour'.* same .*freq='1D'"):
        Forecaster(3, calendar=["hour"], **small).fit(panel)
