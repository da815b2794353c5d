"""What a forecaster has learnt: windows of tails, and warnings of short series."""

import numpy as np
import pytest

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.fitted_state import warn_short_series
from fluxutils_py.forecasting.model_fitting import warn_long_horizon

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
def test_columns_are_those_of_the_fit(panel, small):
    df = panel.rename(columns={"ds": "when"})
    fc = Forecaster(3, quantiles=(0.9, 0.1), **small).fit(df, time_col="when")
    fc.set_params(quantiles=())
    fitted = fc.state_
    assert fitted.names == ["Forecaster", "Forecaster-lo-80", "Forecaster-hi-80"]
    assert (fitted.columns.time, fitted.n_quantiles, fitted.h) == ("when", 2, 3)
    assert fc.features_ is fitted.features
    assert list(fc.predict().columns) == ["unique_id", "when", *fitted.names]


def test_short_series_and_long_horizons_are_warned_of():
    lengths = np.array([9, 3])
    with pytest.warns(UserWarning, match=r"no series .*horizon of 9 steps"):
        warn_long_horizon(9, lengths)
    with pytest.warns(UserWarning, match=r"1 of 2 .*season of 4 .*series 1 has 3"):
        warn_short_series(4, lengths, np.array([0, 1], object))
