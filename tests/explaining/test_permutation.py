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


@pytest.mark.slow
def test_kernels_which_have_no_gradient():
    y = (X[1, :, 20:].mean(1) > 0).astype(int)
    est = SequenceClassifier(cell="kernels", random_state=0, verbose=False).fit(X, y)
    p = permutation_importance(est, X, y, lags=[(0, 9), (10, 29)], random_state=0)
    assert p.by_feature()[0].name == "feature 1"
    assert p.by_lag()[0].name == ("feature 1", (0, 9))


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- series of different lengths -------------------------------------------------------------------

LENGTHS = np.array([30, 12, 21, 30, 17, 9, 25, 14, 28, 11])
LISTS = [X[:, n, :t] for n, t in enumerate(LENGTHS)]


class Recorder:
    """Predicts the third feature, two steps before the end of a series, and keeps its inputs."""

    def __init__(self):
        self.seen = []

    def predict(self, x):
        self.seen.append(x)
        return np.array([a[2, -3] for a in x])


@pytest.mark.slow
def test_a_list_of_equal_lengths_is_an_array():
    x = X[:, :9]
    for y, of_list in ((AtTheEnd().predict(x), None), (Lagged().predict(x), True)):
        est = SequenceRegressor(cell="linear", n_lags=6).fit(x, y)
        lists = [y[:, n] for n in range(9)] if of_list else y
        settings = {"lags": [2, (1, 3)], "n_repeats": 1, "n_steps": 2, "random_state": 3}
        p = permutation_importance(est, x, y, **settings)
        q = permutation_importance(est, [x[:, n] for n in range(9)], lists, **settings)
        assert_allclose(q.features, p.features)
        assert_allclose(q.at_lags, p.at_lags)


def test_what_stands_in_for_series_of_a_list():
    est = Recorder()
    p = permutation_importance(est, LISTS, est.predict(LISTS), lags=[2, (0, 11), 20], n_repeats=1)
    plain, *changed = est.seen[1:]
    assert all(np.array_equal(a, b) for a, b in zip(plain, LISTS, strict=True))
    for f in range(3):
        whole, lag_2, first_12, lag_20 = changed[4 * f : 4 * f + 4]
        for n, t in enumerate(LENGTHS):
            others = [i for i in range(3) if i != f]
            for x in (whole, lag_2, first_12, lag_20):
                assert np.array_equal(x[n][others], LISTS[n][others])
            # another series, backwards from its end and again
            donors = [np.resize(a[f, ::-1], t)[::-1] for a in LISTS]
            assert [np.array_equal(whole[n][f], d) for d in donors].count(True) == 1
            assert not np.array_equal(whole[n][f], donors[n])
            assert np.array_equal(np.delete(lag_2[n][f], -3), np.delete(LISTS[n][f], -3))
            assert np.array_equal(first_12[n][f, : t - 12], LISTS[n][f, : t - 12])
            has_lag_20 = lag_20[n][f] != LISTS[n][f]
            assert not has_lag_20.any() or np.flatnonzero(has_lag_20).tolist() == [t - 21]
        # only series that have all steps of a lag; lag 2 of those that have it: all
        assert sorted(a[f, -3] for a in lag_2) == sorted(a[f, -3] for a in LISTS)
        for n in (5, 9):  # of 9 and 11 steps
            assert np.array_equal(first_12[n], LISTS[n])
    found = {i.name for i in p.by_lag() if i.mean > 0}
    assert found == {("feature 2", (2, 2)), ("feature 2", (0, 11))}


@pytest.mark.slow
def test_targets_of_every_step_and_lengths():
    pad, y_pad = np.full((3, 10, 34), np.nan), np.full((1, 10, 34), np.nan)
    y = [Lagged().predict(a[:, None])[:, 0] for a in LISTS]
    for n, t in enumerate(LENGTHS):
        pad[:, n, n % 4 : n % 4 + t], y_pad[:, n, n % 4 : n % 4 + t] = LISTS[n], y[n]
    est = SequenceRegressor(cell="linear", n_lags=4).fit(LISTS, y)
    settings = {"lags": [0, 1, 2], "n_repeats": 2, "n_steps": 4, "random_state": 0}
    p = permutation_importance(est, LISTS, y, **settings)
    assert [i.name for i in p.by_lag()[:2]] == [("feature 1", (2, 2)), ("feature 0", (0, 0))]
    assert_allclose(np.array([i.mean for i in p.by_lag()[2:]]), 0, atol=0.05)
    errors = [np.square(est.predict(a[:, None])[:, 0] - b) for a, b in zip(LISTS, y, strict=True)]
    assert_allclose(p.loss, np.concatenate(errors, 1).mean(), rtol=1e-6)
    more = {"lengths": LENGTHS, "starts": np.arange(10) % 4}
    for x, targets in ((pad, y_pad), (samples(pad), samples(y_pad))):
        assert_allclose(
            permutation_importance(est, x, targets, **more, **settings).at_lags, p.at_lags
        )


@pytest.mark.slow
def test_kernels_on_series_of_different_lengths():
    y = np.where([a[1, -4:].mean() > 0 for a in LISTS], "up", "down")
    est = SequenceClassifier(cell="kernels", random_state=0, verbose=False).fit(LISTS, y)
    p = permutation_importance(est, LISTS, y, lags=[0], n_repeats=1, random_state=0)
    assert p.loss == 1 - est.score(LISTS, y)
    q = permutation_importance(est, LISTS, y, lags=[0], n_repeats=1, random_state=0)
    assert_allclose(p.features, q.features)
    with pytest.raises(ValueError, match="y an array"):
        permutation_importance(est, LISTS, np.zeros((1, 10, 30)))
    with pytest.raises(ValueError, match=r"y\[1\] has 11"):
        permutation_importance(est, LISTS, [np.zeros((1, t - (t == 12))) for t in LENGTHS])
