"""Pictures of predictions: what is drawn is what NumPy computes."""

import matplotlib
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    SequenceRegressor,
    SequenceScaler,
    samples,
)
from fluxutils_py.explaining.sequence_display import SequencePredictionDisplay
from tests.plain_networks import LagRegressor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

F, N, T = 3, 7, 31
RNG = np.random.default_rng(0)
X = RNG.normal(size=(F, N, T))
Y = np.cumsum(X[:2], 2) / 3
Y[0, 1, 4:6] = np.nan
DAYS = np.datetime64("2024-01-01") + np.arange(T)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def est():
    return SequenceRegressor(4, epochs=60, random_state=0, verbose=False).fit(X, Y)


@pytest.fixture(scope="module")
def yhat(est):
    return est.predict(X)


def curve(ax, k):
    return ax.lines[k].get_ydata()


@pytest.mark.slow
def test_truth_prediction_band_and_residuals(est, yhat):
    display = SequencePredictionDisplay.from_estimator(
        est, X, Y, series=[1, -1], output=0, band=(yhat - 1, yhat + 2), steps=slice(3, 20)
    )
    assert len(display.axes_) == 4
    for axes, n in ((display.axes_[:2], 1), (display.axes_[2:], 6)):
        assert_array_equal(axes[0].lines[0].get_xdata(), np.arange(3, 20))
        assert_array_equal(curve(axes[0], 0), Y[0, n, 3:20])
        assert_allclose(curve(axes[0], 1), yhat[0, n, 3:20])
        assert_allclose(curve(axes[1], 1), (Y - yhat)[0, n, 3:20], atol=1e-12)
        (band,) = axes[0].collections
        corners = band.get_paths()[0].vertices[:, 1]
        assert_allclose([corners.min(), corners.max()], _range(yhat[0, n, 3:20]))
    legend = [t.get_text() for t in display.axes_[0].get_legend().get_texts()]
    assert legend == ["target", "prediction", "band"]
    assert display.axes_[-1].get_xlabel() == "step"
    plain = SequencePredictionDisplay.from_estimator(est, X, Y)
    assert len(plain.bands) == 0


@pytest.mark.slow
@pytest.mark.parametrize("piped", [False, True])
def test_an_interval_is_drawn_as_a_band(piped):
    model = LagRegressor(n_lags=2, level=[80, 95], random_state=0)
    if piped:
        model = make_pipeline(SequenceScaler(), model)
    model.fit(samples(X), samples(Y))
    display = SequencePredictionDisplay.from_estimator(model, X, Y, series=2, output=1)
    ((lower, upper),) = display.bands
    rows = samples(X)
    regressor = model
    if piped:
        rows, regressor = model[0].transform(rows), model[1]
    _, low, high = regressor.predict_interval(rows, level=95)
    n_steps = X.shape[2]
    assert_allclose(lower, low[2, n_steps:])
    assert_allclose(upper, high[2, n_steps:])


def _range(values):
    return values.min() - 1, values.max() + 2


def test_dates(est):
    display = SequencePredictionDisplay.from_estimator(est, X, Y, times=DAYS)
    assert_array_equal(display.axes_[0].lines[0].get_xdata(), DAYS)
    assert display.axes_[-1].get_xlabel() == ""


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        (Y[0, :, 0], {}, r"\(G, N, T\).*\(7,\)"),
        (Y, {"series": 7}, "series is 7.* 7 series"),
        (Y, {"output": 2}, "output is 2.* 2"),
        (Y, {"band": (Y[0], Y[0])}, r"\(G, N, T\).*\(7, 31\)"),
        (Y[:, :, :4], {}, r"\(2, 7, 4\)"),
        (samples(Y), {}, r"array of a view"),
    ],
)
def test_what_cannot_be_drawn(est, y, settings, message):
    with pytest.raises(ValueError, match=message):
        SequencePredictionDisplay.from_estimator(est, X, y, **settings)
