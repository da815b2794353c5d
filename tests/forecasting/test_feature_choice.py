"""What is chosen from the data."""

import numpy as np
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.feature_choice import choose_features, choose_lag, usual_season
from fluxutils_py.forecasting.frequency import parse_frequency
from fluxutils_py.forecasting.sources import ArraySource, PackedSeries


@pytest.mark.parametrize(
    ("alias", "season"),
    [("h", 24), ("30min", 48), ("D", 7), ("W", 52), ("MS", 12), ("QE", 4), ("YS", 1), ("B", 5), ("2D", 1), (3, 1)],
)
def test_the_season_of_a_frequency_is_the_usual_one(alias, season):
    assert usual_season(parse_frequency(alias, integer=alias == 3, polars=False)) == season
    assert usual_season(None) == 1


@pytest.mark.parametrize("weeks", [2, 3, 5, 7])
def test_the_long_season_is_found(rng, weeks):
    lag = 6 * weeks
    y = np.tile(rng.normal(size=(9, lag)), 8) + 0.3 * rng.normal(size=(9, 8 * lag)) + rng.normal(size=(9, 1)) * 9
    y[rng.random(y.shape) < 0.05] = np.nan
    assert choose_lag(y, 6) == lag


def test_without_a_season_or_enough_steps_there_is_no_long_season(rng):
    assert choose_lag(rng.normal(size=(3, 50)), 1) == 1
    assert choose_lag(rng.normal(size=(3, 30)), 6) == 6
    assert choose_lag(np.zeros((3, 90)), 6) == 6
    assert choose_lag(np.full((3, 90), np.nan), 6) == 6


def test_what_is_asked_for_is_taken(rng):
    source = ArraySource(np.exp(rng.normal(size=(1, 4, 99))))
    f = choose_features(source, 5, 7, None, 3, "none")
    assert (f.h, f.season, f.lag, f.input_size, f.log) == (5, 7, 7, 3, False)
    assert choose_features(source, 5, 7, 21, None, "auto").lag == 21
    assert choose_features(source, 5, 24, "auto", None, "auto").input_size == 24


def test_targets_that_cannot_be_learnt_are_refused(rng):
    with pytest.raises(DataError, match="the target is missing everywhere"):
        choose_features(PackedSeries(np.full((1, 9), np.nan), np.array([9])), 2, 1, None, None, "auto")
    with pytest.raises(DataError, match=r"transform='log' needs positive values, the smallest is -1"):
        choose_features(ArraySource(np.full((1, 1, 9), -1.0)), 2, 1, None, None, "log")
