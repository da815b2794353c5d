"""Forecasts as pictures: the lines hold the numbers."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting import ForecastDisplay, Forecaster

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pytestmark = pytest.mark.filterwarnings("ignore:.*series have no more steps than a season")


@pytest.fixture(autouse=True)
def closed():
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.mark.slow
def test_history_forecast_band_and_truth_are_drawn(panel, small):
    past, truth = panel[panel.ds <= "2024-03-20"], panel[panel.ds > "2024-03-20"]
    fc = Forecaster(4, quantiles=(0.1, 0.5, 0.9), **small).fit(past)
    shown = ["wave-60", "negative-52"]
    display = ForecastDisplay.from_forecaster(fc, ids=shown, truth_df=truth, n_history=9)
    out = fc.predict()
    assert len(display.axes_) == 2
    for ax, name in zip(display.axes_, shown, strict=True):
        lines = {line.get_label(): line for line in ax.lines}
        forecast = out[out.unique_id == name]
        np.testing.assert_allclose(lines["forecast"].get_ydata(), forecast.Forecaster)
        history = past[past.unique_id == name].set_index("ds").y.sort_index()
        grid = pd.date_range(end=history.index[-1], periods=9)
        np.testing.assert_array_equal(lines["history"].get_ydata(), history.reindex(grid))
        (band,) = ax.collections
        low, high = (
            band.get_paths()[0].vertices[:, 1].min(),
            band.get_paths()[0].vertices[:, 1].max(),
        )
        np.testing.assert_allclose(
            [low, high], [forecast["Forecaster-lo-80"].min(), forecast["Forecaster-hi-80"].max()]
        )
        there = truth[truth.unique_id == name].set_index("ds").y.sort_index()
        there = there[there.index <= forecast.ds.max()]
        np.testing.assert_array_equal(lines["truth"].get_ydata(), there)
        assert ax.get_title("left") == name


def test_a_forecaster_that_is_not_fitted_is_refused():
    with pytest.raises(NotFittedError, match="Forecaster"):
        ForecastDisplay.from_forecaster(Forecaster(4))


@pytest.mark.slow
def test_arrays_have_numbers_for_names_and_unknown_ones_are_refused(rng, small):
    fc = Forecaster(4, **small).fit(rng.normal(size=(1, 6, 30)))
    display = ForecastDisplay.from_forecaster(fc)
    assert [ax.get_title("left") for ax in display.axes_] == ["0", "1", "2", "3"]
    assert not display.axes_[0].collections
    with pytest.raises(DataError, match=r"ids has 6, .*none of the 6"):
        ForecastDisplay.from_forecaster(fc, ids=[6])
