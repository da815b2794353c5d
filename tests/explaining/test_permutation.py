"""Permutation importance: against models whose inputs are known."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.pipeline import make_pipeline

from fluxutils_py import SequenceClassifier, SequenceRegressor, SequenceScaler, samples
from fluxutils_py.explaining import permutation_importance

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 40, 30))


class Lagged:
    """Predicts 2 x[1] of two steps before, plus x[0] of this step; not ours, no gradient."""

    def predict(self, x):
        y = x[0] + 2 * np.pad(x[1], ((0, 0), (2, 0)))[:, :-2]
        return y[None]


class AtTheEnd:
    """One number per series: the third feature, four steps before the end."""

    def predict(self, x):
        return x[2, :, -5]


def test_the_lag_that_counts_is_found():
    y = Lagged().predict(X)
    p = permutation_importance(Lagged(), X, y, n_repeats=2, random_state=0)
    assert p.loss == 0
    assert p.lags == [(0, 0), (1, 1), (2, 2), (4, 4), (8, 8), (16, 16)]
    assert [i.name for i in p.by_feature()] == ["feature 1", "feature 0", "feature 2"]
    names = [i.name for i in p.by_lag()]
    assert names[:2] == [("feature 1", (2, 2)), ("feature 0", (0, 0))]
    assert all(i.mean == 0 for i in p.by_lag()[2:])
    # two independent numbers of variance 1 differ by 2 in the mean square
    assert_allclose(p.by_feature()[0].mean, 4 * 2, rtol=0.2)
    assert_allclose(p.by_lag()[0].mean, 4 * 2, rtol=0.4)


def test_ranges_of_lags():
    y = Lagged().predict(X)
    lags = [(0, 1), (1, 3), 2]
    p = permutation_importance(Lagged(), X, y, lags=lags, n_repeats=1, random_state=0)
    assert p.lags == [(0, 1), (1, 3), (2, 2)]
    assert p.at_lags[1, 0, 0] == 0
    assert (p.at_lags[1, 1:, 0] > 1).all()
    assert p.at_lags[0, 0, 0] > 0.5
    assert not p.at_lags[0, 1:].any()


def test_one_target_per_series():
    y = AtTheEnd().predict(X)
    p = permutation_importance(AtTheEnd(), X, y, lags=[0, 4, (3, 9), (5, 29)], random_state=0)
    names = {i.name for i in p.by_lag() if i.mean > 0}
    assert names == {("feature 2", (4, 4)), ("feature 2", (3, 9))}
    assert (p.at_lags[:, [0, 3]] == 0).all()
    parts = permutation_importance(AtTheEnd(), X, y, n_repeats=1).lags
    assert (len(parts), parts[0][0], parts[-1][1]) == (8, 0, 29)


def test_kernels_which_have_no_gradient():
    y = (X[1, :, 20:].mean(1) > 0).astype(int)
    est = SequenceClassifier(cell="kernels", random_state=0, verbose=False).fit(X, y)
    p = permutation_importance(est, X, y, lags=[(0, 9), (10, 29)], random_state=0)
    assert p.by_feature()[0].name == "feature 1"
    assert p.by_lag()[0].name == ("feature 1", (0, 9))


def test_pipelines_views_and_missing_targets():
    y = X[:1].copy()
    y[0, :7] = np.nan
    pipe = make_pipeline(
        SequenceScaler(), SequenceRegressor(4, epochs=20, random_state=0, verbose=False)
    ).fit(samples(X), samples(y))
    p = permutation_importance(pipe, samples(X), samples(y), n_repeats=1, n_steps=2, random_state=0)
    assert p.by_feature()[0].name == "feature 0"
    assert_allclose(p.loss, np.nanmean((pipe.predict(X) - y) ** 2), rtol=1e-9)
    again = permutation_importance(pipe, X, y, n_repeats=1, n_steps=2, random_state=0)
    assert_allclose(again.features, p.features, rtol=1e-9)


class OfTwo:
    def predict(self, x):
        return x[0][:1] - x[1]


def test_several_inputs_and_a_single_series():
    x = (X[:2, :1], X[2:, :1])
    p = permutation_importance(OfTwo(), x, OfTwo().predict(x), lags=[0, 1], random_state=0)
    assert {i.name for i in p.by_feature()[:2]} == {"x[0] feature 0", "x[1] feature 0"}
    assert (p.at_lags[[0, 2], 0] > 0).all()
    assert not p.at_lags[1].any()
    assert not p.at_lags[:, 1].any()


def test_a_loss_of_ones_own():
    y = Lagged().predict(X)
    p = permutation_importance(
        Lagged(), X, y, lags=[2], n_repeats=1, loss=lambda a, b: abs(a - b), random_state=0
    )
    squared = permutation_importance(Lagged(), X, y, lags=[2], n_repeats=1, random_state=0)
    assert 0 < p.by_feature()[0].mean < squared.by_feature()[0].mean


@pytest.mark.parametrize(
    ("x", "y", "settings", "message"),
    [
        (X[0], X[:1], {}, r"\(F, N, T\).*\(40, 30\)"),
        (X, X[:1, :, :4], {}, r"\(1, 40, 4\).*40 targets"),
        (X, X[:1], {"lags": [30]}, "30.*0 to 29"),
        (X, X[:1], {"n_repeats": 0}, "n_repeats.*0"),
        (X, X[0], {}, r"\(40, 30\).*samples\(y\)"),
        (X, X[:2], {}, r"\(1, 40, 30\).*\(2, 40, 30\)"),
        (X, np.full((1, 40, 30), np.nan), {}, "NaN"),
    ],
)
def test_arguments_that_do_not_fit(x, y, settings, message):
    with pytest.raises(ValueError, match=message):
        permutation_importance(Lagged(), x, y, **settings)


def test_names_are_those_of_the_view_or_of_the_fit():
    y = Lagged().predict(X)
    est = SequenceRegressor(cell="linear", n_lags=3).fit(X, y)
    named = samples(X, feature_names=["a", "b", "c"])
    p = permutation_importance(est, named, y, n_repeats=1, n_steps=1, random_state=0)
    assert p.by_feature()[0].name == "b"
    assert p.feature_names == ["a", "b", "c"]
    est.fit(named, samples(y))
    p = permutation_importance(est, X, y, n_repeats=1, n_steps=1, random_state=0)
    assert p.feature_names == ["a", "b", "c"]
