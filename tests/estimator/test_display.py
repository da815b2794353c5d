"""Loss curves as pictures: the lines are the estimators' attributes."""

import math
import sys
from functools import partial

import matplotlib
import numpy as np
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch.optim import AdamW

from fluxutils_py import Estimator, Spec
from fluxutils_py.estimator.display import LossCurveDisplay

matplotlib.use("Agg")
from matplotlib import pyplot as plt

F, N, T = 3, 7, 11
X = np.random.default_rng(0).normal(size=(F, N, T))
Y = np.cumsum(X[::-1], 2) / 3
XV, YV = X[:, :5, :9] + 0.1, Y[:, :5, :9]
EVERYTHING = [(np.arange(F), np.arange(F))] * 2  # splits that keep all of (F, N, T)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def make(epochs=4, **settings):
    return Estimator(
        opt=partial(AdamW, lr=0.01), spec=Spec(epochs, 4, 5), random_state=0, **settings
    )


def drawn(line):
    x, y = line.get_data()
    assert list(x) == list(range(1, len(y) + 1))
    return list(y)


def legend(display):
    return [text.get_text() for text in display.ax_.get_legend().get_texts()]


# -- one estimator ------------------------------------------------------------------------------------------


def test_the_line_is_the_loss_curve():
    est = make().fit(X, Y)
    display = LossCurveDisplay.from_estimator(est)
    assert drawn(display.line_) == est.loss_curve_
    assert display.validation_line_ is None
    assert (display.loss_curve, display.validation_loss_curve) == (est.loss_curve_, None)
    assert legend(display) == ["Estimator, training"]
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("epoch", "loss")
    assert display.figure_ is display.ax_.figure
    assert all(tick % 1 == 0 for tick in display.ax_.get_xticks())


def test_validation_is_dashed_in_the_same_colour():
    est = make().fit(X, Y, validation_data=(XV, YV))
    display = LossCurveDisplay.from_estimator(est, name="LSTM")
    assert drawn(display.line_) == est.loss_curve_
    assert drawn(display.validation_line_) == est.validation_loss_curve_
    assert display.validation_line_.get_color() == display.line_.get_color()
    assert (display.line_.get_linestyle(), display.validation_line_.get_linestyle()) == ("-", "--")
    assert legend(display) == ["LSTM, training", "LSTM, validation"]


@pytest.mark.slow
def test_epochs_without_validation_are_gaps():
    est = make(epochs=2, warm_start=True).fit(X, Y).fit(X, Y, validation_data=(XV, YV))
    display = LossCurveDisplay.from_estimator(est)
    assert drawn(display.line_) == est.loss_curve_
    np.testing.assert_array_equal(
        drawn(display.validation_line_), [math.nan, math.nan, *est.validation_loss_curve_]
    )


def test_a_single_epoch_can_be_seen():
    display = LossCurveDisplay.from_estimator(make(epochs=1).fit(X, Y))
    assert display.line_.get_marker() == "o"
    assert all(tick % 1 == 0 for tick in display.ax_.get_xticks())


@pytest.mark.slow
def test_two_estimators_share_axes():
    _, ax = plt.subplots()
    one, two = make().fit(X, Y), make(epochs=6).fit(X, Y, validation_data=(XV, YV))
    first = LossCurveDisplay.from_estimator(one, ax=ax, name="one")
    second = LossCurveDisplay.from_estimator(two, ax=ax, name="two", curve_kwargs={"lw": 3})
    assert first.ax_ is second.ax_ is ax
    assert ax.spines["top"].get_visible()  # axes of the user's stay as they are
    assert ax.lines[:] == [first.line_, second.line_, second.validation_line_]
    assert first.line_.get_color() != second.line_.get_color()
    assert second.line_.get_linewidth() == second.validation_line_.get_linewidth() == 3
    assert legend(second) == ["one, training", "two, training", "two, validation"]


def test_keywords_name_the_line():
    est = make().fit(X, Y, validation_data=(XV, YV))
    kwargs = {"color": "red", "linestyle": ":", "label": "mine"}
    display = LossCurveDisplay.from_estimator(est, curve_kwargs=kwargs)
    assert [line.get_color() for line in display.ax_.lines] == ["red", "red"]
    assert [line.get_linestyle() for line in display.ax_.lines] == [":", "--"]
    assert legend(display) == ["mine", "Estimator, validation"]
    assert kwargs == {"color": "red", "linestyle": ":", "label": "mine"}


def test_arrays_are_curves_too():
    one = LossCurveDisplay(
        loss_curve=np.array([3.0, 2.0]), validation_loss_curve=np.array([4.0, 2.5])
    ).plot()
    assert (drawn(one.line_), drawn(one.validation_line_)) == ([3, 2], [4, 2.5])


def test_it_can_be_drawn_again():
    display = LossCurveDisplay(loss_curve=[3.0, 2.0], validation_loss_curve=[4.0, 2.5])
    assert display.plot() is display
    first = display.figure_
    assert legend(display) == ["training", "validation"]
    display.plot(name="other")
    assert display.figure_ is not first
    assert legend(display) == ["other, training", "other, validation"]
    assert display.name is None


# -- where the curve is found -------------------------------------------------------------------------------


def test_of_a_pipeline_the_last_step_counts():
    pipe = make_pipeline(FunctionTransformer(), make()).fit(X, Y)
    display = LossCurveDisplay.from_estimator(pipe)
    assert drawn(display.line_) == pipe[-1].loss_curve_
    assert legend(display) == ["Estimator, training"]


@pytest.mark.slow
def test_of_a_search_the_best_counts():
    pipe = make_pipeline(FunctionTransformer(), make())
    search = GridSearchCV(pipe, {"estimator__warm_start": [False]}, cv=EVERYTHING)
    display = LossCurveDisplay.from_estimator(search.fit(X, Y))
    assert drawn(display.line_) == search.best_estimator_[-1].loss_curve_


def test_estimators_of_scikit_learn_have_loss_curves_too():
    rng = np.random.default_rng(0)
    pipe = make_pipeline(
        StandardScaler(),
        MLPRegressor(hidden_layer_sizes=5, max_iter=30, tol=10, n_iter_no_change=7),
    )
    pipe.fit(rng.normal(size=(20, 3)), rng.normal(size=20))
    display = LossCurveDisplay.from_estimator(pipe)
    assert drawn(display.line_) == pipe[-1].loss_curve_
    assert legend(display) == ["MLPRegressor, training"]


@pytest.mark.parametrize("est", [make(), make_pipeline(make()), GridSearchCV(make(), {})])
def test_before_fit_there_is_no_curve(est):
    with pytest.raises(NotFittedError):
        LossCurveDisplay.from_estimator(est)
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    "est",
    [
        Ridge(),
        GridSearchCV(Ridge(), {}, refit=False, cv=2),
        TransformedTargetRegressor(),
        make_pipeline(Ridge()),
    ],
)
def test_estimators_without_a_curve_are_refused(est):
    est.fit(np.arange(8.0).reshape(4, 2), np.arange(4.0))
    inner = {"Pipeline": "Ridge", "TransformedTargetRegressor": "LinearRegression"}
    name = inner.get(type(est).__name__, type(est).__name__)
    with pytest.raises(TypeError) as error:
        LossCurveDisplay.from_estimator(est)
    assert f"{name} has none" in str(error.value)
    assert not plt.get_fignums()


# -- matplotlib -------------------------------------------------------------------------------------------------


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    display = LossCurveDisplay(loss_curve=[3.0, 2.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes "import matplotlib" fail
    with pytest.raises(ImportError) as error:
        display.plot()
    assert all(part in str(error.value) for part in ("needs matplotlib", "pip install matplotlib"))
