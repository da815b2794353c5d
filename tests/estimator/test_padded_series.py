"""Series padded with NaN and without lengths: what a list of the series alone gives, also behind
transformers.
"""

import itertools

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceFeatures,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    WinsorScaler,
    h5mmap,
    h5save,
    pooled_scorer,
    samples,
    stream,
)
from fluxutils_py.errors import DataError
from fluxutils_py.nn import LSTM, Recur
from tests.plain_networks import LagClassifier, LagRegressor

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


def padded(arrays, at_start=False):
    out = np.full((len(arrays[0]), len(arrays), LENGTHS.max()), np.nan)
    for i, a in enumerate(arrays):
        n = a.shape[1]
        out[:, i, LENGTHS.max() - n if at_start else 0 :][:, :n] = a
    return out


X = padded(lists())


@pytest.fixture(scope="module", params=["kernels", "linear", "lstm"])
def fitted(request):
    settings = SHORT if request.param == "lstm" else {"verbose": False, "random_state": 0}
    return SequenceClassifier(cell=request.param, **settings).fit(lists(), LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("form", ["array", "view", "file", "list", "lengths"])
def test_each_series_has_the_answer_that_it_has_alone(fitted, form, at_start, tmp_path):
    alone = np.concatenate([fitted.predict_proba(a[:, None]) for a in lists()])
    right = np.mean(fitted.classes_[alone.argmax(1)] == LABELS)
    x, more = padded(lists(), at_start), {}
    if form == "view":
        x = samples(x)
    elif form == "file":
        h5save(tmp_path / "x.h5", {"x": x})
        x = h5mmap(tmp_path / "x.h5", "x")
    elif form == "list":
        x = [x[:, i] for i in range(12)]
    elif form == "lengths":
        x = np.nan_to_num(x)
        more = {"lengths": LENGTHS, "starts": (LENGTHS.max() - LENGTHS) * at_start}
    np.testing.assert_allclose(fitted.predict_proba(x, **more), alone, atol=2e-6)
    assert fitted.score(x, LABELS, **more) == pytest.approx(right)
    again = clone(fitted).fit(x, LABELS, **more)
    assert_same = {"rtol": 0, "atol": 1e-5 if fitted.cell == "lstm" else 1e-4}
    np.testing.assert_allclose(again.predict_proba(x, **more), alone, **assert_same)


BEFORE = {
    "imputer": lambda: [SequenceImputer()],
    "ffill": lambda: [SequenceImputer("ffill", fill_value=0), SequenceScaler()],
    "features": lambda: [SequenceFeatures([1, 2], exponential_means=[], rolling=[3, 100])],
    "all": lambda: [
        make_pipeline(SequenceImputer("ffill"), WinsorScaler()),
        SequenceFeatures([1], exponential_means=[4], rolling=[]),
        SequenceScaler(),
    ],
}


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("per_series", [False, True])
@pytest.mark.parametrize("at_start", [False, True])
def test_a_pipeline_learns_from_padded_series_as_from_a_list(before, per_series, at_start):
    """Also with a gap in all features within a series, which is imputed."""
    x = lists()
    x[4][:, 5:7] = np.nan
    y = [a[:1] - 2 * np.roll(a[1:], 1, 1) for a in map(np.nan_to_num, x)]
    held = padded(x, at_start)
    targets = held_targets = np.array([a[0, -1] + a[0, -3] for a in y])
    if not per_series:
        targets, held_targets = y, padded(y, at_start)
    of_list, of_array = (
        make_pipeline(*BEFORE[before](), LagRegressor(n_lags=2, verbose=False)) for _ in range(2)
    )
    of_list.fit(x, targets)
    of_array.fit(held, held_targets)
    assert of_array.score(held, held_targets) == pytest.approx(of_list.score(x, targets), abs=1e-6)
    found, wanted = of_array.predict(held), of_list.predict(x)
    if not per_series:
        wanted = padded(wanted, at_start)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_target_outside_of_the_inputs_is_not_learnt_from():
    x, y = padded(lists()), padded([a[:1] for a in lists()])
    est = LagRegressor(n_lags=1, verbose=False)
    wanted = clone(est).fit(x, y).predict(x)
    np.testing.assert_array_equal(est.fit(x, np.nan_to_num(y, nan=1e3)).predict(x), wanted)


def test_a_series_without_any_input_is_to_be_left_out(fitted):
    x = X.copy()
    x[:, 1:3] = np.nan
    with pytest.raises(DataError, match=r"series 1, step 22; .*leave the step out"):
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
    for more in ({}, {"lengths": LENGTHS}):
        np.testing.assert_allclose(est.predict((X, X), **more), alone, atol=1e-12)
    # one of them is missing where the other is not
    with pytest.raises(DataError, match=r"series 1, step \d+; "):
        est.predict((np.nan_to_num(X), X))
    with pytest.raises(DataError, match=r"series 1, step \d+; "):
        est.score((np.nan_to_num(X), X), y)


@pytest.mark.parametrize("before", [[], [SequenceScaler()], [SequenceImputer("ffill")]])
def test_a_stream_begins_with_the_first_input_and_cannot_know_the_last(before):
    x = padded(lists(), at_start=True)
    y = padded([a[:1].cumsum(1) for a in lists()], at_start=True)
    pipe = make_pipeline(*before, SequenceRegressor(cell="lstm", **SHORT)).fit(x, y)
    live = stream(pipe, 12)
    found = np.stack([live.step(x[:, :, t]) for t in range(x.shape[2])], 2)
    np.testing.assert_allclose(found, pipe.predict(x), rtol=0, atol=1e-10)
    # a step without input is a gap, in a stream: the series may go on
    assert np.isnan(live.step(np.full((2, 12), np.nan))).all() == (
        not isinstance(pipe[0], SequenceImputer)
    )
    live.reset([1])
    again = live.step(x[:, :, -1])
    np.testing.assert_allclose(again[:, 1], pipe.predict(x[:, 1:2, -1:])[:, 0, 0], atol=1e-10)


# -- searches ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_over_lists_or_padded_series_is_a_loop_over_folds():
    est = LagClassifier(verbose=False)
    cv = StratifiedKFold(2)
    grid = {"n_lags": [1, 3]}
    x = lists()
    expected = np.zeros((12, 2), "U3")
    for train, test in cv.split(LABELS, LABELS):
        for j, n_lags in enumerate(grid["n_lags"]):
            fold = LagClassifier(n_lags=n_lags, verbose=False)
            fold.fit([x[i] for i in train], LABELS[train])
            expected[test, j] = [fold.predict(x[i][:, None])[0] for i in test]
    for scoring in (None, pooled_scorer("accuracy")):
        search = GridSearchCV(est, grid, cv=cv, scoring=scoring).fit(x, LABELS)
        right = (expected == LABELS[:, None]).mean(0)
        np.testing.assert_allclose(search.cv_results_["mean_test_score"], right)
    est.set_params(n_lags=1)
    assert (cross_val_predict(est, x, LABELS, cv=cv) == expected[:, 0]).all()
    for more in ({}, {"lengths": LENGTHS}):
        search = GridSearchCV(est, grid, cv=cv).fit(samples(X), LABELS, **more)
        np.testing.assert_allclose(search.cv_results_["mean_test_score"], right)


@pytest.mark.slow
def test_targets_of_every_step_may_be_padded_in_a_search():
    x, groups, cv = lists(), np.arange(12) // 3, GroupKFold(2)
    y = [(a[:1] + np.roll(a[1:], 1) > 1).astype(int) for a in x]
    expected = []
    for train, test in cv.split(x, groups=groups):
        fold = LagClassifier(n_lags=2, verbose=False)
        fold.fit([x[i] for i in train], [y[i] for i in train])
        found = np.concatenate([fold.predict(x[i][:, None]).ravel() for i in test])
        truth = np.concatenate([y[i].ravel() for i in test])
        expected.append(f1_score(truth, found, average="macro"))
    search = GridSearchCV(
        LagClassifier(verbose=False),
        {"n_lags": [2]},
        cv=cv,
        scoring=pooled_scorer("f1", average="macro"),
    )
    for data, more in (((x, y), {}), ((samples(X), samples(padded(y))), {"lengths": LENGTHS})):
        search.fit(*data, groups=groups, **more)
        assert search.best_score_ == pytest.approx(np.mean(expected))


@pytest.mark.slow
def test_series_that_have_not_begun_begin_with_their_first_input_in_any_chunk():
    """The zero state tells them; a gap moves only the state of series that have begun."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 12)).astype(np.float32)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    est = Estimator(model, nn.functional.mse_loss, None, Spec(epochs=1), verbose=False)
    est.fit(x, x[:1])
    x[:, 1, :3], x[:, 2, :1], x[:, 2, 5], x[:, 3, 6:], x[:, 4, :11] = [np.nan] * 5
    whole, state_of_whole = est.predict(x, return_state=True)
    state, found = None, []
    for begin, end in itertools.pairwise([0, 1, 2, 6, 7, 12]):
        y, state = est.predict(x[:, :, begin:end], state=state, return_state=True)
        found.append(y)
    np.testing.assert_array_equal(np.concatenate(found, axis=2), whole)
    for got, right in zip(state, state_of_whole, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0)
    stream, found = est.stream(5), []
    for t in range(12):
        found.append(stream.step(x[:, :, t]))
        stream = est.stream(5, state=stream.state)  # as after a restart
    np.testing.assert_allclose(np.stack(found, axis=2), whole, atol=1e-6)


def test_a_module_without_a_known_zero_state_says_so_where_a_series_has_not_begun():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.zeros(2))

        def forward(self, x, state):
            return (y := x * self.rate + (0 if state is None else 0.5 * state)), y

    x = np.ones((2, 3, 4), np.float32)
    est = Estimator(Recur(Leaky()), nn.functional.mse_loss, None, Spec(epochs=1), verbose=False)
    est.fit(x, x)
    x[:, 1] = np.nan
    with pytest.raises(DataError, match=r"Leaky .* empty_state\(\)"):
        est.predict(x, return_state=True)
    assert np.isfinite(est.predict(x)[:, [0, 2]]).all()
