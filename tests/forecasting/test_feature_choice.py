"""What is chosen from the data."""

import numpy as np
import pandas as pd
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.feature_choice import (
    choose_features,
    choose_lag,
    season_within,
    usual_season,
)
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frequency import parse_frequency


def packed(values):
    """Series of any lengths, or an array (1, N, T)."""
    series = [v for rows in values for v in np.atleast_2d(rows)]
    return PackedSeries(np.concatenate(series)[None], np.array([len(v) for v in series]))


@pytest.mark.parametrize(
    ("alias", "season"),
    [
        ("h", 24),
        ("30min", 48),
        ("D", 7),
        ("W", 52),
        ("MS", 12),
        ("QE", 4),
        ("YS", 1),
        ("B", 5),
        ("2D", 1),
        (3, 1),
    ],
)
def test_the_season_of_a_frequency_is_the_usual_one(alias, season):
    assert usual_season(parse_frequency(alias, integer=alias == 3)) == season


@pytest.mark.parametrize("weeks", [2, 3, 5, 7])
def test_the_long_season_is_found(rng, weeks):
    lag = 6 * weeks
    y = (
        np.tile(rng.normal(size=(9, lag)), 8)
        + 0.3 * rng.normal(size=(9, 8 * lag))
        + rng.normal(size=(9, 1)) * 9
    )
    y[rng.random(y.shape) < 0.05] = np.nan
    assert choose_lag(y, 6) == lag


def test_without_a_season_or_enough_steps_there_is_no_long_season(rng):
    assert choose_lag(rng.normal(size=(3, 50)), 1) == 1
    assert choose_lag(rng.normal(size=(3, 30)), 6) == 6
    assert choose_lag(np.zeros((3, 90)), 6) == 6
    assert choose_lag(np.full((3, 90), np.nan), 6) == 6


def test_what_is_asked_for_is_taken(rng):
    source = packed(np.exp(rng.normal(size=(1, 4, 99))))
    f = choose_features(source, 5, 7, None, "none")
    assert (f.h, f.season, f.lag, f.input_size, f.log) == (5, 7, 7, 12, False)
    assert choose_features(source, 5, 7, 21, "auto").lag == 21
    assert choose_features(source, 5, 24, "auto", "auto").input_size == 24


def test_targets_that_cannot_be_learnt_are_refused(rng):
    with pytest.raises(DataError, match="the target is missing everywhere"):
        choose_features(PackedSeries(np.full((1, 9), np.nan), np.array([9])), 2, 1, None, "auto")
    with pytest.raises(
        DataError,
        match=r"'log' .* -1: .*transform='none'",
    ):
        choose_features(packed(np.full((1, 1, 9), -1.0)), 2, 1, None, "log")


@pytest.mark.parametrize(("where", "value"), [((0, 599, 0), -1.0), ((0, 300, 2999), 0.0)])
def test_one_value_of_an_array_decides_the_transform_wherever_it_is(where, value):
    x = np.full((1, 600, 3000), 2.0, "float32")
    assert choose_features(packed(x), 3, 1, "auto", "auto").log
    x[where] = value
    assert not choose_features(packed(x), 3, 1, "auto", "auto").log
    with pytest.raises(DataError, match=f"smallest is {value:g}.*NaN"):
        choose_features(packed(x), 3, 1, "auto", "log")


def test_an_array_with_values_outside_the_sample_alone_can_be_learnt_from():
    x = np.full((1, 600, 50), np.nan)
    x[0, 1, 3] = 4.0
    choose_features(packed(x), 3, 1, "auto", "auto")
    with pytest.raises(DataError, match="missing everywhere"):
        choose_features(packed(x * np.nan), 3, 1, "auto", "auto")


@pytest.mark.parametrize(
    ("season", "longest", "used"),
    [
        (86400, 86401, 86400),
        (86400, 5000, 3600),
        (86400, 600, 60),
        (1440, 600, 60),
        (96, 50, 4),
        (24, 20, 24),
        (7, 5, 7),
    ],
)
def test_a_day_that_no_series_has_becomes_an_hour_or_a_minute(season, longest, used, recwarn):
    assert season_within(season, longest) == used
    told = [str(w.message) for w in recwarn]
    assert len(told) == (used != season)
    assert all(str(season) in text and str(used) in text and str(longest) in text for text in told)


@pytest.mark.slow
def test_data_by_the_second_take_the_season_of_a_minute(small):
    rng = np.random.default_rng(0)
    times = pd.date_range("2026-01-01", periods=300, freq="s")
    df = pd.DataFrame({"unique_id": "a", "ds": times, "y": rng.normal(size=300)})
    with pytest.warns(UserWarning, match=r"300 steps.*86400.*60 steps"):
        fc = Forecaster(3, **small).fit(df)
    assert fc.features_.season == 60
    assert fc.features_.lookback < 3000
    assert np.isfinite(fc.predict().Forecaster).all()
