"""Steps from each time of a calendar to the next: business hours, holidays, sessions of an exchange."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster

N = 60
HOLIDAYS = ["2024-03-29", "2024-04-01"]
OPEN_DAYS = pd.offsets.CustomBusinessDay(holidays=HOLIDAYS)
SESSIONS = pd.DatetimeIndex(
    [
        day + pd.Timedelta(hours=hour, minutes=30)
        for day in pd.date_range("2024-03-20", periods=40, freq=OPEN_DAYS)
        # an early close on some days
        for hour in ((9, 11, 14) if day.day % 9 else (9, 11))
    ]
)
CASES = {
    "bh": (pd.date_range("2024-03-07 09:00", periods=N + 8, freq="bh"), "bh", 8),
    "holidays": (pd.date_range("2024-03-01", periods=N + 8, freq=OPEN_DAYS), OPEN_DAYS, 5),
    "sessions": (SESSIONS[: N + 8], SESSIONS, 3),
    "zone": (SESSIONS[: N + 8].tz_localize("Europe/Berlin"), SESSIONS, 3),
    "third fridays": (pd.date_range("2019-01-01", periods=N + 8, freq="WOM-3FRI"), "WOM-3FRI", 1),
}


def values():
    t = np.arange(N + 8)
    return 20 + np.sin(2 * np.pi * t / 5) + np.random.default_rng(0).normal(size=N + 8) / 5


@pytest.mark.few
@pytest.mark.parametrize("case", CASES)
def test_forecasts_are_those_of_integer_times_at_the_right_times(case, small, tmp_path):
    times, freq, season = CASES[case]
    df = pd.DataFrame({"unique_id": "a", "ds": times, "y": values()})
    df = df.drop(index=[20, 33])  # times without a row are missing values
    numbers = df.assign(ds=df.index)
    known = df.index < N
    fc = Forecaster(4, freq=freq, **small).fit(df[known])
    assert fc.features_.season == season
    plain = Forecaster(4, freq=1, **{**small, "season_length": season}).fit(numbers[known])
    out = fc.predict()
    assert (out.ds == times[N : N + 4]).all()
    assert out.ds.dtype == df.ds.dtype
    np.testing.assert_array_equal(out.Forecaster, plain.predict().Forecaster)
    fc.save(tmp_path / "fc.pt")
    code = {} if isinstance(freq, str) else {"freq": freq}
    again = Forecaster.load(tmp_path / "fc.pt", **code)
    assert again.frequency_ == fc.frequency_
    again.update(df[~known][1:])  # a gap of one time
    plain.update(numbers[~known][1:])
    np.testing.assert_allclose(again.predict().Forecaster, plain.predict().Forecaster, rtol=1e-6)
    walked = fc.cross_validation(df[known], 2, refit=None)
    assert walked.cutoff.unique().tolist() == [times[N - 9], times[N - 5]]


@pytest.mark.slow
def test_what_is_not_in_the_calendar_is_refused_or_no_row_ahead(small):
    times = CASES["sessions"][0]
    df = pd.DataFrame({"unique_id": "a", "ds": times, "y": values(), "promo": 0.0})
    late = df.copy()
    late.loc[7, "ds"] += pd.Timedelta(minutes=1)
    fc = Forecaster(4, freq=SESSIONS, futr_exog_list=["promo"], **small)
    with pytest.raises(DataError, match=r"11:31:00 in row 7, .*none of the times"):
        fc.fit(late)
    fc.fit(df)
    hours = pd.date_range(times[-1], periods=24 * 8, freq="30min")
    futr = pd.DataFrame({"unique_id": "a", "ds": hours, "promo": 0.0})
    assert (fc.predict(futr_df=futr).ds == SESSIONS[N + 8 : N + 12]).all()
    short = Forecaster(4, freq=SESSIONS[: N + 10], **small).fit(df[["unique_id", "ds", "y"]])
    with pytest.raises(DataError, match=r"2 more are needed: .*DatetimeIndex"):
        short.predict()
    for freq, said in (
        (SESSIONS.tz_localize("UTC"), "time zone UTC"),
        (SESSIONS[:1], "two times or more, got 1"),
        ("fortnight", "no frequency"),
    ):
        with pytest.raises(ValueError, match=said):
            Forecaster(4, freq=freq, **small).fit(df)
    with pytest.raises(ValueError, match="the times are integers"):
        Forecaster(4, freq=SESSIONS, **small).fit(df.assign(ds=df.index))
