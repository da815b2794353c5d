"""Pictures of predictions and confusions: what is drawn is what NumPy computes."""

import matplotlib
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    EstimatorClassifier,
    SequenceClassifier,
    SequenceRegressor,
    SequenceScaler,
    samples,
    timesteps,
)
from fluxutils_py.explaining import drawing, predicted_series
from fluxutils_py.explaining.confusion_display import ConfusionOverTimeDisplay
from fluxutils_py.explaining.sequence_display import SequencePredictionDisplay

matplotlib.use("Agg")
from matplotlib import dates
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


# -- predictions ----------------------------------------------------------------------------------


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
    assert legend == ["truth", "prediction", "band"]
    assert display.axes_[-1].get_xlabel() == "step"
    plain = SequencePredictionDisplay.from_estimator(est, X, Y)
    assert len(plain.bands) == 0


@pytest.mark.slow
@pytest.mark.parametrize("piped", [False, True])
def test_an_interval_is_drawn_as_a_band(piped):
    model = SequenceRegressor(cell="linear", n_lags=2, interval=0.8)
    if piped:
        model = make_pipeline(SequenceScaler(), model)
    model.fit(samples(X), samples(Y))
    regressor = model[-1] if piped else model
    display = SequencePredictionDisplay.from_estimator(model, X, Y, series=2, output=1)
    ((lower, upper),) = display.bands
    expected = model.predict(X)[1, 2]
    assert_allclose(lower, expected - regressor.interval_width_[1])
    assert_allclose(upper, expected + regressor.interval_width_[1])


def _range(values):
    return values.min() - 1, values.max() + 2


@pytest.mark.slow
def test_outputs_of_the_model_as_band(est, yhat):
    class Quantiles:
        def predict(self, x):
            return np.concatenate([est.predict(x), est.predict(x) - 1, est.predict(x) + 2])[:6]

    display = SequencePredictionDisplay.from_estimator(Quantiles(), X, Y, band=(2, 4))
    lower, upper = display.bands[0]
    assert_allclose([lower, upper], [yhat[0, 0] - 1, yhat[0, 0] + 2])


@pytest.mark.few
@pytest.mark.parametrize("form", ["list", "samples", "timesteps"])
def test_lists_and_views(form, est, yhat):
    if form == "list":
        x, y = [X[:, 0], X[:, 1, :9]], [Y[:, 0], Y[:, 1, :9]]
        model = est
    else:
        view = samples if form == "samples" else timesteps
        x, y = view(X), view(Y)
        model = make_pipeline(
            SequenceScaler(), SequenceRegressor(4, epochs=60, random_state=0, verbose=False)
        ).fit(x, y)
    display = SequencePredictionDisplay.from_estimator(model, x, y, series=1, output=1)
    n = 9 if form == "list" else T
    expected = model.predict(X[:, 1:2, :n])[1, 0]
    assert_allclose(curve(display.axes_[0], 1), expected, atol=1e-9)
    assert_array_equal(curve(display.axes_[0], 0), Y[1, 1, :n])


def test_dates(est):
    display = SequencePredictionDisplay.from_estimator(est, X, Y, times=DAYS)
    formatter = display.axes_[-1].xaxis.get_major_formatter()
    assert isinstance(formatter, dates.ConciseDateFormatter)
    assert display.axes_[-1].get_xlabel() == ""


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        (Y[0, :, 0], {}, r"every step.*\(7,\)"),
        (Y, {"series": 7}, "series is 7.* 7 series"),
        (Y, {"output": 2}, "output is 2.* 2"),
        (Y, {"band": (0, 9)}, "output 9.* 2"),
        (Y, {"band": (Y[0], Y[0])}, r"\(7, 31\).*\(G, N, T\)"),
        (Y[:, :, :4], {}, r"\(2, 4\).*\(2, 31\)"),
    ],
)
def test_what_cannot_be_drawn(est, y, settings, message):
    with pytest.raises(ValueError, match=message):
        SequencePredictionDisplay.from_estimator(est, X, y, **settings)


# -- confusions -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_shares_are_those_of_a_confusion_matrix():
    truth = RNG.integers(0, 3, size=(N, 125))
    predicted = np.where(RNG.random(truth.shape) < 0.7, truth, 2)
    truth[:, :3] = 1  # no class 0 in the first column
    display = ConfusionOverTimeDisplay.from_predictions(truth, predicted)
    assert display.shares_.shape == (3, 3, 42)  # of three steps
    for column in (0, 17, 41):
        t, p = (a[:, 3 * column : 3 * column + 3] for a in (truth, predicted))
        for i in range(3):
            for j in range(3):
                expected = (p[t == i] == j).mean() if (t == i).any() else np.nan
                assert_allclose(display.shares_[i, j, column], expected)
    assert np.isnan(display.shares_[0, :, 0]).all()
    # the share that is right is drawn first, from 0 up
    values, edges, baseline = display.axes_[2].patches[0].get_data()
    assert_allclose(values, np.nan_to_num(display.shares_[2, 2]))
    assert not np.any(baseline)
    assert_array_equal(edges, [*range(0, 125, 3), 125])


@pytest.mark.slow
def test_labels_of_every_step():
    y = np.where(X[:1] > 0, "up", "down")
    est = EstimatorClassifier(
        spec={"epochs": 3, "batchsize": 3, "seqsize": 10}, random_state=0, verbose=False
    ).fit(X, y)
    display = ConfusionOverTimeDisplay.from_estimator(est, X, y, times=DAYS)
    predicted = est.predict(X)[0]
    expected = (predicted[y[0] == "up"] == "up").mean()
    n_true = (y[0] == "up").sum(0)
    assert_allclose(np.nansum(display.shares_[1, 1] * n_true) / n_true.sum(), expected)
    assert display.axes_[0].get_title("left") == "true: down"
    assert len(display.axes_[0].get_legend().get_texts()) == 2


@pytest.mark.slow
def test_one_label_per_series_is_that_after_so_many_steps():
    labels = np.array(["a", "b", "c", "a", "b", "c", "a"])
    est = SequenceClassifier(4, cell="lstm", epochs=60, random_state=0, verbose=False)
    est.fit(X, labels)
    display = ConfusionOverTimeDisplay.from_estimator(est, X, labels)
    for t in (1, 12, T):
        assert_array_equal(display.predicted[:, t - 1], est.predict(X[:, :, :t]))
    assert display.shares_.shape == (3, 3, T)
    ended = X.copy()
    ended[:, 2, T // 2 :] = np.nan  # the series has ended: the label of a stream means nothing
    live = ConfusionOverTimeDisplay.from_estimator(est, ended, labels).live
    assert np.argwhere(~live).tolist() == [[2, t] for t in range(T // 2, T)]


def test_labels_that_do_not_count_or_are_unknown(est):
    truth = np.array([[0.0, np.nan, 1.0]])
    display = ConfusionOverTimeDisplay.from_predictions(truth, np.array([[0.0, 1.0, 0.0]]))
    assert display.classes.tolist() == [0, 1]
    assert_array_equal(display.shares_[1, 0], [np.nan, np.nan, 1])
    with pytest.raises(ValueError, match=r"2.*\[0, 1\]"):
        ConfusionOverTimeDisplay.from_predictions([[0, 2]], [[0, 1]], classes=[0, 1])
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"):
        ConfusionOverTimeDisplay.from_predictions([[0, 1]], [[0, 1, 1]])
    with pytest.raises(TypeError, match=r"SequenceRegressor.*classes_"):
        ConfusionOverTimeDisplay.from_estimator(est, X, Y)


# -- what they share ------------------------------------------------------------------------------


def test_columns_and_series():
    assert drawing.column_starts(10, 4).tolist() == [0, 3, 6, 9]
    assert drawing.column_starts(3, 10).tolist() == [0, 1, 2]
    assert predicted_series.check_series([0, -1], 5) == [0, 4]
