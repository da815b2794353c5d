"""Series padded with NaN and without lengths: never an answer, and never a share of a score."""

import numpy as np
import pytest
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_predict
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceRegressor,
    Spec,
    h5mmap,
    h5save,
    pooled_scorer,
    samples,
)
from fluxutils_py.errors import DataError
from fluxutils_py.nn import LSTM

LENGTHS = np.array([23, 11, 19, 23, 14, 17, 9, 21, 12, 16, 13, 22])
SHORT = {"epochs": 3, "hidden_size": 3, "batchsize": 2, "verbose": False, "random_state": 0}
LABELS = np.array(["low", "mid", "up"] * 4)


def lists():
    rng = np.random.default_rng(0)
    pace = {"low": 0.2, "mid": 0.6, "up": 1.2}
    phases = rng.uniform(0, 6, size=(2, 12, 1))
    return [
        np.sin(pace[label] * np.arange(n) + phases[:, i]) + 0.1 * rng.normal(size=(2, n))
        for i, (n, label) in enumerate(zip(LENGTHS, LABELS, strict=True))
    ]


def padded(arrays):
    out = np.full((len(arrays[0]), len(arrays), LENGTHS.max()), np.nan)
    for i, a in enumerate(arrays):
        out[:, i, : a.shape[1]] = a
    return out


X = padded(lists())
# series 0 and 3 are the longest: the first that is padded is 1
PADDED = r"x.* is nan at feature 0, series 1, step 11, .*list of arrays.* lengths="


@pytest.fixture(scope="module", params=["kernels", "linear", "lstm"])
def fitted(request):
    settings = SHORT if request.param == "lstm" else {"verbose": False, "random_state": 0}
    return SequenceClassifier(cell=request.param, **settings).fit(lists(), LABELS)


@pytest.mark.parametrize("form", ["array", "view", "file"])
def test_padding_without_lengths_is_no_input_of_an_answer(fitted, form, tmp_path):
    x = samples(X) if form == "view" else X
    if form == "file":
        h5save(tmp_path / "x.h5", {"x": X})
        x = h5mmap(tmp_path / "x.h5", "x")
    for method in (fitted.predict, fitted.predict_proba, fitted.decision_function):
        with pytest.raises(DataError, match=PADDED):
            method(x)
    with pytest.raises(DataError, match=PADDED):
        fitted.score(x, LABELS)
    # networks shuffle, and of a file find the first that they read
    with pytest.raises(DataError, match=r"is nan at feature 0, series \d+, step \d+, .* lengths="):
        SequenceClassifier(cell=fitted.cell, verbose=False).fit(x, LABELS)


def test_with_lengths_and_in_lists_each_series_has_its_own_answer(fitted):
    alone = np.concatenate([fitted.predict_proba(a[:, None]) for a in lists()])
    right = np.mean(fitted.classes_[alone.argmax(1)] == LABELS)
    for x, more in ((lists(), {}), (X, {"lengths": LENGTHS})):
        np.testing.assert_allclose(fitted.predict_proba(x, **more), alone, atol=2e-6)
        assert fitted.score(x, LABELS, **more) == pytest.approx(right)


@pytest.mark.parametrize(("place", "said"), [(8, None), (-1, "first {} steps alone")])
def test_a_gap_is_an_error_only_at_the_last_step(fitted, place, said):
    x = lists()
    x[4][:, place] = np.nan
    if said is None:
        assert np.isfinite(fitted.predict_proba(x)).all()
        return
    end = LENGTHS[4] - 1
    with pytest.raises(DataError, match=f"series 4, step {end}, .*{said.format(end)}"):
        fitted.predict(x)


def test_a_series_without_any_input_is_to_be_left_out(fitted):
    x = X.copy()
    x[:, 1:3] = np.nan
    with pytest.raises(DataError, match=r"series 1, step 0, .*leave the series out"):
        fitted.predict(x)


def test_numbers_of_ones_own_model_and_of_several_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = LSTM(2, 3), nn.Linear(3, 2)

        def forward(self, u, v):
            return self.head(self.lstm(u + v))

    y = np.random.default_rng(1).normal(size=(12, 2))
    est = Estimator(Sum(), spec=Spec(epochs=1, batchsize=5, seqsize=4), verbose=False)
    est.fit((lists(), lists()), y)
    alone = np.concatenate([est.predict((a[:, None], a[:, None])) for a in lists()])
    np.testing.assert_allclose(est.predict((X, X), lengths=LENGTHS), alone, atol=1e-12)
    for x in ((X, X), (np.nan_to_num(X), X)):  # one of them is missing
        with pytest.raises(DataError, match="series 1, step 11, "):
            est.predict(x)
        with pytest.raises(DataError, match="series 1, step 11, "):
            est.score(x, y)
    regressor = SequenceRegressor(cell="lstm", **SHORT).fit(lists(), y)
    with pytest.raises(DataError, match=PADDED):
        regressor.predict(X)


# -- searches ------------------------------------------------------------------------------------


def test_a_search_over_lists_is_a_loop_over_folds_and_padding_is_refused():
    est = SequenceClassifier(cell="linear", verbose=False)
    cv = StratifiedKFold(2)
    grid = {"n_lags": [1, 3]}
    x = lists()
    expected = np.zeros((12, 2), "U3")
    for train, test in cv.split(LABELS, LABELS):
        for j, n_lags in enumerate(grid["n_lags"]):
            fold = SequenceClassifier(cell="linear", n_lags=n_lags, verbose=False)
            fold.fit([x[i] for i in train], LABELS[train])
            expected[test, j] = [fold.predict(x[i][:, None])[0] for i in test]
    for scoring in (None, pooled_scorer("accuracy")):
        search = GridSearchCV(est, grid, cv=cv, scoring=scoring).fit(x, LABELS)
        right = (expected == LABELS[:, None]).mean(0)
        np.testing.assert_allclose(search.cv_results_["mean_test_score"], right)
    est.set_params(n_lags=1)
    assert (cross_val_predict(est, x, LABELS, cv=cv) == expected[:, 0]).all()
    for scoring in (None, pooled_scorer("accuracy"), "neg_log_loss"):
        search = GridSearchCV(est, grid, cv=cv, scoring=scoring, error_score="raise")
        with pytest.raises(DataError, match=r"is nan at feature 0.* list of arrays"):
            search.fit(samples(X), LABELS, lengths=LENGTHS)


def test_targets_of_every_step_may_be_padded_in_a_search():
    x, groups, cv = lists(), np.arange(12) // 3, GroupKFold(2)
    y = [(a[:1] + np.roll(a[1:], 1) > 1).astype(int) for a in x]
    expected = []
    for train, test in cv.split(x, groups=groups):
        fold = SequenceClassifier(cell="linear", n_lags=2, verbose=False)
        fold.fit([x[i] for i in train], [y[i] for i in train])
        found = np.concatenate([fold.predict(x[i][:, None]).ravel() for i in test])
        truth = np.concatenate([y[i].ravel() for i in test])
        expected.append(f1_score(truth, found, average="macro"))
    search = GridSearchCV(
        SequenceClassifier(cell="linear", verbose=False),
        {"n_lags": [2]},
        cv=cv,
        scoring=pooled_scorer("f1", average="macro"),
    )
    for data, more in (((x, y), {}), ((samples(X), samples(padded(y))), {"lengths": LENGTHS})):
        search.fit(*data, groups=groups, **more)
        assert search.best_score_ == pytest.approx(np.mean(expected))
