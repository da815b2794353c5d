"""Ranks of explanations, and their picture."""

import matplotlib
import numpy as np
import pytest

from fluxutils_py import SequenceRegressor, explain
from fluxutils_py.explaining.explanation import Explanation

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def make(attributions, names=("wind", "sun"), first=0):
    n = attributions.shape[1]
    return Explanation(
        attributions=attributions,
        steps=np.arange(first, first + n),
        feature_names=names,
        value=3.0,
        baseline_value=1.0,
        completeness=1e-6,
        n_points=16,
        series=2,
        step=first + n - 1,
        output="output 0",
    )


A = np.array([[1.0, -2.0, 0.5], [0.0, 4.0, -4.5]])


def test_ranks():
    e = make(A, first=10)
    assert e.by_feature() == [("sun", -0.5, 8.5), ("wind", -0.5, 3.5)]
    assert e.by_step() == [(11, 2.0, 6.0), (12, -4.0, 5.0), (10, 1.0, 1.0)]
    assert "sun" in repr(e)
    assert "1.0e-06" in repr(e)


def test_the_map_has_the_attributions():
    image = make(A).plot()
    assert (image.get_array() == A).all()
    assert [t.get_text() for t in image.axes.get_yticklabels()] == ["wind", "sun"]
    assert image.get_clim() == (-4.5, 4.5)
    assert image.axes.get_xlim() == (-0.5, 2.5)
    _, ax = plt.subplots()
    assert make(A).plot(ax).axes is ax


@pytest.mark.slow
def test_long_pasts_are_cut_where_nothing_is():
    a = RNG.normal(size=(2, 5003))
    a[:, :1000] = 0
    image = make(a).plot()
    left, right = image.axes.get_xlim()
    assert right == 5002.5
    assert 1000 <= left < 1100
    assert make(a * 0).plot().get_array().shape == (2, 10)


@pytest.mark.slow
def test_of_an_estimator():
    x = RNG.normal(size=(2, 6, 20)).astype("float32")
    est = SequenceRegressor(4, epochs=30, random_state=0, verbose=False).fit(x, x[:1])
    e = explain(est, x, series=1, step=9)
    assert e.plot().get_array().shape == (2, 10)
    assert e.by_feature()[0].name == "feature 0"
