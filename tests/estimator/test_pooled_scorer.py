"""Scores pooled over series, time and features: compared with NumPy on the predictions, and with
``score``.
"""

import pickle
from functools import partial

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, clone
from sklearn.dummy import DummyRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    get_scorer,
    get_scorer_names,
    log_loss,
    max_error,
    r2_score,
    roc_auc_score,
)
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit, cross_validate
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorRegressor,
    Spec,
    pooled_scorer,
    samples,
    timesteps,
)
from fluxutils_py.errors import ShapeError, SpecError
from tests.plain_networks import plain_classifier, plain_regressor

pytestmark = pytest.mark.filterwarnings("ignore:feature . of . has values of about")

F, N, T = 3, 7, 11
FORMS = {"native": lambda a: a, "samples": samples, "timesteps": timesteps}
ERRORS = {
    "neg_mean_squared_error": lambda e, w: -(w * e**2).sum() / (w.sum() * len(e)),
    "neg_root_mean_squared_error": lambda e, w: -np.sqrt((w * e**2).sum() / (w.sum() * len(e))),
    "neg_mean_absolute_error": lambda e, w: -(w * abs(e)).sum() / (w.sum() * len(e)),
}


class Given(BaseEstimator):
    """Predicts what it was given, in the form of x; scikit-learn needs no more."""

    def __init__(self, pred=None, kind="regressor"):
        self.pred = pred
        self.kind = kind

    def fit(self, x, y=None):
        return self

    def predict(self, x):
        return self.pred if isinstance(x, np.ndarray) else np.asarray(FORMS[name_of(x)](self.pred))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.estimator_type = self.kind
        return tags


def name_of(view):
    return "samples" if "Samples" in type(view).__name__ else "timesteps"


@pytest.fixture
def data(rng):
    """Two features of very different size, and a prediction of them that is wrong."""
    y = rng.normal(size=(2, N, T)) * [[[1.0]], [[30.0]]] + [[[100.0]], [[0.0]]]
    return y, y + rng.normal(size=y.shape)


def r2(y, pred, w=None):
    """One mean per feature, of its values that are there; y (G, ...), weights of all but the first
    axis.
    """
    live = ~(np.isnan(y) | np.isnan(pred))
    w = np.broadcast_to(1.0 if w is None else w, y.shape) * live
    y, pred = np.where(live, y, 0), np.where(live, pred, 0)
    axes = tuple(range(1, y.ndim))
    mean = (w * y).sum(axes, keepdims=True) / w.sum(axes, keepdims=True)
    return 1 - (w * (y - pred) ** 2).sum() / (w * (y - mean) ** 2).sum()


def near(value):
    return pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_all_series_steps_and_features_count_alike(data, form, rng):
    y, pred = data
    y[0, 3, 4] = y[1, 6, 10] = np.nan
    live = ~np.isnan(y)
    face, w = FORMS[form], rng.integers(0, 3, (N, T)).astype(float)
    by_step = {"samples": w, "timesteps": w.T, "native": w[None]}[form]
    by_row = np.ones((N, T)) * w[:1] if form == "timesteps" else np.ones((N, T)) * w[:, :1]
    row = w[0] if form == "timesteps" else w[:, 0]
    for name, error in ERRORS.items():
        scorer = pooled_scorer(name)
        for weight, each in ((None, np.ones((N, T))), (by_step, w), (row, by_row)):
            found = scorer(Given(pred), face(y), face(y), sample_weight=weight)
            assert found == near(
                error((pred - y)[live][None], np.broadcast_to(each, y.shape)[live])
            )
    for weight, each in ((None, None), (by_step, w), (row, by_row)):
        assert pooled_scorer("r2")(Given(pred), face(y), face(y), sample_weight=weight) == near(
            r2(y, pred, each)
        )


def test_columns_of_a_plain_matrix_are_features(data):
    y, pred = (a[:, :, 0].T for a in data)
    w = np.arange(N, dtype=float)
    assert pooled_scorer("r2")(Given(pred), y, y, sample_weight=w) == near(r2(y.T, pred.T, w))
    assert pooled_scorer("neg_mean_squared_error")(Given(pred), y, y) == near(
        -((y - pred) ** 2).mean()
    )
    y, pred = y[:, 0].copy(), pred[:, 0]
    assert pooled_scorer("r2")(Given(pred), y, y, sample_weight=w) == near(
        r2_score(y, pred, sample_weight=w)
    )
    assert pooled_scorer("r2")(Given(pred[:, None]), y, y.tolist()) == near(r2_score(y, pred))
    y[2] = np.nan
    there = ~np.isnan(y)
    assert pooled_scorer("r2")(Given(pred), y, y) == near(r2_score(y[there], pred[there]))


def test_steps_without_a_prediction_do_not_count(data):
    y, pred = data
    pred[1, 2, 3] = np.nan
    error = (y - pred)[~np.isnan(pred)]
    expected = {"r2": r2(y, pred), "neg_mean_absolute_error": -abs(error).mean()}
    n = y[0].size
    for name, score in expected.items():
        scorer = pooled_scorer(name)
        with pytest.warns(UserWarning, match=f"^1 of {n} steps with a target have no prediction"):
            assert scorer(Given(pred), samples(y), samples(y)) == near(score)
        with pytest.warns(UserWarning, match=f"^{n} of {n} steps with a target"):
            assert np.isnan(scorer(Given(pred * np.nan), samples(y), samples(y)))


# -- of estimators -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    """An estimator of two features that has been trained a little, and the data."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(F, N, 150)).astype("float32")  # more steps than a block of prediction
    y = (x[:2].cumsum(2) * [[[1.0]], [[50.0]]] + [[[0.0]], [[1000.0]]]).astype("float32")
    y[:, 3, 20:40] = np.nan
    est = EstimatorRegressor(spec={"epochs": 2, "batchsize": 4, "seqsize": 50}, random_state=0).fit(
        x, y
    )
    return est, x, y


@pytest.mark.parametrize("form", FORMS)
def test_r2_is_the_score_of_the_estimator(fitted, form):
    est, x, y = fitted
    face = FORMS[form]
    w = np.random.default_rng(1).random((N, 150))
    w = w.T if form == "timesteps" else w
    scorer = pooled_scorer("r2")
    for weight in (None, w, w[:, 0]):
        found = scorer(est, face(x), face(y), sample_weight=weight)
        assert found == pytest.approx(est.score(face(x), face(y), weight), rel=1e-12)
    if form != "native":
        rows = [5, 6] if form == "timesteps" else [2, 3, 0]
        x, y = face(x)[rows], face(y)[rows]
        assert scorer(est, x, y) == pytest.approx(est.score(x, y), rel=1e-9)


def test_r2_of_one_target_per_series_is_the_score_too(rng):
    x = rng.normal(size=(F, 20, T))
    y = np.stack([x[0].mean(1), 100 + 5 * x[1, :, -1]], 1)  # (N, 2)
    est = plain_regressor(4, epochs=3, random_state=0)
    for target in (y, y[:, 0]):
        est.fit(samples(x), target)
        assert pooled_scorer("r2")(est, samples(x), target) == pytest.approx(
            est.score(samples(x), target), rel=1e-12
        )


@pytest.fixture(scope="module")
def labelled():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 20, T))
    return x, np.digitize(x[0] + 0.3 * rng.normal(size=(20, T)), [-0.5, 0.5])[None]


@pytest.mark.few
@pytest.mark.parametrize("form", FORMS)
def test_labels_of_all_steps_are_pooled(labelled, form):
    x, y = labelled
    face = FORMS[form]
    clf = plain_classifier(6, epochs=30, random_state=0).fit(x, y)
    pred, proba = clf.predict(x).ravel(), clf.predict_proba(x).reshape(3, -1).T  # (n, K)
    true = y.ravel()
    x, y = face(x), face(y)
    assert 0.4 < pooled_scorer("accuracy")(clf, x, y) == clf.score(x, y) < 1
    assert pooled_scorer("f1", average="macro")(clf, x, y) == near(
        f1_score(true, pred, average="macro")
    )
    assert pooled_scorer("neg_log_loss")(clf, x, y) == near(-log_loss(true, proba.astype(float)))
    assert pooled_scorer("roc_auc_ovr")(clf, x, y) == near(
        roc_auc_score(true, proba, multi_class="ovr")
    )


@pytest.mark.few
@pytest.mark.parametrize("form", FORMS)
def test_labels_of_two_classes_are_pooled(labelled, form):
    x, y = labelled[0], labelled[1] > 0
    y = np.where(np.arange(T) < 2, np.nan, y)  # no label at first
    face = FORMS[form]
    clf = plain_classifier(6, epochs=20, random_state=0).fit(x, y)
    live = ~np.isnan(y.ravel())
    true, margin = y.ravel()[live], clf.decision_function(x).ravel()[live]
    assert pooled_scorer("roc_auc")(clf, face(x), face(y)) == near(roc_auc_score(true, margin))
    assert pooled_scorer("accuracy")(clf, face(x), face(y)) == near(clf.score(face(x), face(y)))
    with pytest.raises(ShapeError) as e:
        pooled_scorer("neg_log_loss")(clf, face(x), face(y))
    of = {
        "native": ((1, 20, T), (2, T)),
        "samples": ((20, T), (20,)),
        "timesteps": ((T, 20), (T,)),
    }[form]
    message = str(e.value)
    assert message.startswith(f"y has shape {of[0]} and the predictions {of[1]}")
    assert "one column of the probabilities of two classes" in message
    assert "predict or decision_function" in message
    assert "labels per series" in message


def test_labels_per_series_may_be_strings(labelled):
    x = samples(labelled[0])
    y = np.where(labelled[0][0].mean(1) > 0, "up", "down")
    clf = plain_classifier(4, epochs=3, random_state=0).fit(x, y)
    for name in ("accuracy", "neg_log_loss", "roc_auc", "balanced_accuracy"):
        assert pooled_scorer(name)(clf, x, y) == near(get_scorer(name)(clf, x, y))
    assert pooled_scorer("f1", pos_label="up")(clf, x, y) == near(
        f1_score(y, clf.predict(x), pos_label="up")
    )


@pytest.mark.slow
def test_metrics_of_scikit_learn_are_themselves_on_vectors(rng):
    x = rng.normal(size=(40, 2))
    y = (x[:, 0] + rng.normal(size=40) > 0).astype(int)
    clf, reg = LogisticRegression().fit(x, y), DummyRegressor().fit(x, abs(x[:, 0]))
    for name in get_scorer_names():
        if "_samples" in name or "top_k" in name:  # of several labels; of more than two classes
            continue
        est, target = (clf, y) if accepts(name, clf, x, y) else (reg, abs(x[:, 0]))
        assert pooled_scorer(name)(est, x, target) == near(get_scorer(name)(est, x, target)), name


def accepts(name, est, x, y):
    try:
        return np.isfinite(get_scorer(name)(est, x, y))
    except ValueError:
        return False


# -- in searches ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_short_folds_in_time_are_scored_as_by_the_estimator(rng):
    x = rng.normal(size=(F, 5, 60))
    y = x[:1] + 3 * np.arange(5)[:, None]  # each series at a level of its own
    x, y = timesteps(x), timesteps(y)
    scoring = {name: pooled_scorer(name) for name in ("r2", "neg_mean_squared_error")} | {
        "columns": "r2"
    }
    est, cv = plain_regressor(4, epochs=4, random_state=0), TimeSeriesSplit(4)
    found = cross_validate(est, x, y, cv=cv, scoring=scoring, n_jobs=2, return_estimator=True)
    for i, (_, test) in enumerate(cv.split(x)):
        fitted = found["estimator"][i]
        assert found["test_r2"][i] == pytest.approx(fitted.score(x[test], y[test]), rel=1e-9)
        error = fitted.predict(x[test]) - np.asarray(y[test])
        assert found["test_neg_mean_squared_error"][i] == near(-(error**2).mean())
    assert (found["test_columns"] < found["test_r2"] - 1).all()  # why there are pooled ones
    one = cross_validate(est, x, y, cv=cv, scoring=scoring)
    assert (one["test_r2"] == found["test_r2"]).all()


@pytest.mark.slow
def test_a_grid_search_goes_by_it(rng):
    x = rng.normal(size=(F, 12, T))
    x, y = samples(x), samples(x[:1])
    grid = {"epochs": [1, 30]}
    search = GridSearchCV(
        plain_regressor(4, random_state=0), grid, scoring=pooled_scorer("r2"), cv=3
    ).fit(x, y)
    same = GridSearchCV(plain_regressor(4, random_state=0), grid, cv=3).fit(x, y)  # by score
    assert search.best_params_ == {"epochs": 30}
    assert search.cv_results_["mean_test_score"] == near(same.cv_results_["mean_test_score"])


def test_weights_are_routed(rng):
    x = rng.normal(size=(F, 12, T))
    x, y, w = samples(x), samples(x[:1]), rng.random(12)
    est = plain_regressor(4, epochs=2, random_state=0)
    with sklearn.config_context(enable_metadata_routing=True):
        scorer = pooled_scorer("r2").set_score_request(sample_weight=True)
        est = clone(est).set_fit_request(sample_weight=False)
        found = cross_validate(
            est,
            x,
            y,
            cv=3,
            scoring=scorer,
            params={"sample_weight": w},
            return_estimator=True,
            return_indices=True,
        )
    for fitted, test, score in zip(
        found["estimator"], found["indices"]["test"], found["test_score"], strict=True
    ):
        assert score == near(fitted.score(x[test], y[test], w[test]))


def test_scorers_can_be_pickled(fitted):
    est, x, y = fitted
    for name in ("r2", "neg_mean_absolute_error"):
        scorer = pooled_scorer(name)
        assert pickle.loads(pickle.dumps(scorer))(est, x, y) == scorer(est, x, y)
    assert repr(pooled_scorer("f1", average="macro")) == (
        "make_scorer(pooled_f1, response_method='predict', average=macro)"
    )


# -- several labels, and functions of one's own ----------------------------------------------------------


@pytest.fixture(scope="module")
def several():
    """An estimator whose outputs are the log-odds of two labels, and the data."""
    x = np.random.default_rng(0).normal(size=(2, N, 20))
    y = (x > 0.3).astype(float)
    y[1, 2, 5:] = np.nan
    loss = nn.BCEWithLogitsLoss()
    est = Estimator(
        partial(nn.Linear, 2, 2), loss, spec=Spec(epochs=10, batchsize=2), random_state=0
    )
    return est.fit(x, y), x, y


@pytest.mark.few
@pytest.mark.parametrize("form", [*FORMS, "list"])
def test_functions_get_the_values_of_all_steps(several, form):
    est, x, y = several
    face = FORMS.get(form, lambda a: list(a.transpose(1, 0, 2)))
    z = est.predict(x)
    live = ~np.isnan(y)

    def f1_of_log_odds(true, log_odds, threshold=0.0, sample_weight=None):
        return f1_score(true, log_odds > threshold, sample_weight=sample_weight)

    for threshold in (0.0, 0.4):
        scorer = pooled_scorer(f1_of_log_odds, threshold=threshold)
        wanted = f1_score(y[live], z[live] > threshold)
        assert scorer(est, face(x), face(y)) == near(wanted)
    assert pooled_scorer(lambda t, p: 3.0)(est, face(x), face(y)) == 3
    # which only compare outputs
    for name, metric in (
        ("roc_auc", roc_auc_score),
        ("average_precision", average_precision_score),
    ):
        assert pooled_scorer(name)(est, face(x), face(y)) == near(metric(y[live], z[live]))
        assert pooled_scorer(metric)(est, face(x), face(y)) == near(metric(y[live], z[live]))


def test_metrics_of_labels_name_the_way_out(several):
    est, x, y = several
    for name in ("f1", "accuracy"):
        with pytest.raises(SpecError, match=rf"{name}.*continuous.*pooled_scorer\(lambda"):
            pooled_scorer(name)(est, samples(x), samples(y))


# -- errors --------------------------------------------------------------------------------------------


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match=r"'xyz' is not a valid scoring value.*get_scorer_names"):
        pooled_scorer("xyz")


def test_metrics_without_weights_take_none(data):
    y, pred = data
    scorer = pooled_scorer("neg_max_error")
    assert scorer(Given(pred), samples(y), samples(y)) == near(-max_error(y.ravel(), pred.ravel()))
    with pytest.raises(TypeError, match=r"unexpected .*'sample_weight'"):
        scorer(Given(pred), samples(y), samples(y), sample_weight=np.ones(N))


@pytest.mark.parametrize(
    ("y", "pred"),
    [
        (lambda a: a, lambda a: np.asarray(samples(a))),
        (lambda a: samples(a), lambda a: np.asarray(timesteps(a))),
        (lambda a: timesteps(a), lambda a: np.asarray(timesteps(a[:1]))),
        (lambda a: a[:1], lambda a: a),
        (lambda a: a[:, :, 0].T, lambda a: a[:, 1:, 0].T),
    ],
)
def test_targets_and_predictions_of_different_forms_are_an_error(data, y, pred):
    y, pred = y(data[0]), pred(data[1])
    with pytest.raises(ShapeError) as e:
        pooled_scorer("r2")(Given(pred), np.zeros((2, 2)), y)
    assert all(part in str(e.value) for part in (f"{y.shape}", f"{pred.shape}", "timesteps(...)"))


def as_list(a, lengths):
    return [a[:, n, :t] for n, t in enumerate(lengths)]


@pytest.mark.parametrize("weighted", [None, "series", "steps"])
def test_lists_of_series_are_scored_as_their_steps_in_a_row(rng, weighted):
    lengths = [T, 3, 8, 5, T, 9, 4]
    x = rng.normal(size=(F, N, T))
    y = np.stack([x[0] + 1, x[1] * 3])
    xs, ys = as_list(x, lengths), as_list(y, lengths)
    est = plain_regressor(epochs=1, hidden_size=3, random_state=0).fit(xs, ys)
    w = rng.uniform(0.5, 2, size=N) if weighted == "series" else rng.uniform(0.5, 2, size=(N, T))
    of_steps = np.concatenate([np.broadcast_to(a, T)[:t] for a, t in zip(w, lengths, strict=True)])
    given = [a[:t] for a, t in zip(w, lengths, strict=True)] if weighted == "steps" else w
    arguments = {} if weighted is None else {"sample_weight": given}
    true, pred = np.concatenate(ys, 1), np.concatenate(est.predict(xs), 1)
    per_step = of_steps if weighted else np.ones(len(of_steps))
    expected = -(per_step * abs(true - pred)).sum() / (per_step.sum() * 2)
    found = pooled_scorer("neg_mean_absolute_error")(est, xs, ys, **arguments)
    assert found == pytest.approx(expected)
    found = pooled_scorer("r2")(est, xs, ys, **arguments)
    assert found == pytest.approx(est.score(xs, ys, **arguments))


def test_labels_of_lists_are_scored_too(rng):
    lengths = [T, 3, 8, 5, T, 9, 4]
    x = rng.normal(size=(F, N, T))
    xs, ys = as_list(x, lengths), as_list(np.where(x[:1] > 0, "up", "down"), lengths)
    est = plain_classifier(epochs=1, hidden_size=3, random_state=0).fit(xs, ys)
    true, scores = np.concatenate(ys, 1)[0], np.concatenate(est.decision_function(xs), 1)
    assert pooled_scorer("accuracy")(est, xs, ys) == pytest.approx(est.score(xs, ys))
    assert pooled_scorer("roc_auc")(est, xs, ys) == pytest.approx(
        roc_auc_score(true == "up", scores.ravel())
    )
    lost = Given([a[0, :1] for a in np.split(x, N, 1)])
    with pytest.raises(ShapeError, match=r"7 series of 51 steps.* 7 of 77"):
        pooled_scorer("neg_max_error")(lost, x, as_list(x[:1], lengths))
