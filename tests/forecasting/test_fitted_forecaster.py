"""What a forecaster has learnt: windows of tails, and warnings of short series."""

import numpy as np
import pytest

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.fitted_forecaster import (
    FittedForecaster,
    warn_long_horizon,
    warn_short_series,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


@pytest.mark.slow
def test_tails_are_windows_of_the_last_steps_alone(panel, small):
    fc = Forecaster(3, **small).fit(panel)
    tail = fc.history_.tail
    windows = fc._fitted.tail_windows(tail, fc.history_.static)
    assert windows.ahead is None
    np.testing.assert_array_equal(
        windows.source.cut(np.array([2]), np.array([0]), tail.shape[2])[0, 0], tail[0, 2]
    )


@pytest.mark.slow
def test_columns_are_those_that_the_settings_name_now(panel, small):
    fc = Forecaster(3, quantiles=(0.9, 0.1), **small).fit(panel)
    fc.set_params(alias="Other", time_col="when")
    fitted = FittedForecaster(fc.features_, fc.channels_, fc.covariates_, fc, fc.models_)
    assert fitted.names == ["Other", "Other-lo-80", "Other-hi-80"]
    assert (fitted.columns.time, fitted.n_quantiles, fitted.h) == ("when", 2, 3)


def test_short_series_and_long_horizons_are_warned_of():
    lengths = np.array([9, 3])
    with pytest.warns(UserWarning, match=r"no series .*horizon of 9 steps"):
        warn_long_horizon(9, lengths)
    with pytest.warns(UserWarning, match=r"1 of 2 .*season of 4 .*series 1 has 3"):
        warn_short_series(4, lengths, np.array([0, 1], object))
