"""Classifiers of labels of any type, and regressors, against plain estimators and scikit-learn's
own functions.
"""

from functools import partial

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.base import is_classifier, is_regressor
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, check_cv, cross_validate
from sklearn.utils.class_weight import compute_sample_weight
from torch import nn
from torch.nn import functional as F

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
    net2vec,
    samples,
    timesteps,
)
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import LSTM
from tests.plain_networks import plain_classifier, plain_regressor

N, T, K = 11, 7, 3
SPEC = {"epochs": 2, "batchsize": 4, "seqsize": 3, "shuffle": False}
RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, N, T))
CODES = RNG.integers(0, K, (1, N, T))
LABELS = {
    "str": np.array(["down", "level", "up"]),
    "object": np.array(["a", "bb", "c"], dtype=object),
    "int": np.array([-7, 2, 90]),
    "uint8": np.array([1, 2, 250], dtype="uint8"),
    "float": np.array([-1.0, 0.0, 4.0], dtype="float32"),
    "bool": np.array([False, True]),
}
VIEWS = {"native": lambda a: a, "samples": samples, "timesteps": timesteps}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def net(n_in, n_out, tail=None):
    return nn.Sequential(LSTM(n_in, 4), nn.Linear(4, n_out), *([] if tail is None else [tail]))


def flat(view, a):
    """An array (G, N, T) as rows of a view."""
    order = {samples: (1, 0, 2), timesteps: (2, 0, 1)}.get(view)
    return a if order is None else a.transpose(order).reshape(a.shape[order[0]], -1)


def classifier(**settings):
    return EstimatorClassifier(
        net, settings.pop("loss", None), None, SPEC, **{"random_state": 1, **settings}
    )


def plain(n_classes=K, **settings):
    """The same without labels: an estimator of integers from 0."""
    return Estimator(
        partial(net, n_out=n_classes),
        F.cross_entropy,
        None,
        SPEC,
        **{"random_state": 1, **settings},
    )


# -- labels ----------------------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.few
@views
@pytest.mark.parametrize("kind", LABELS)
def test_labels_per_step_are_learnt_as_their_places_among_the_classes(kind, view):
    classes = LABELS[kind]
    codes = CODES % len(classes)
    est = classifier().fit(view(X), view(classes[codes]))
    oracle = plain(len(classes)).fit(X, codes)
    assert torch.equal(net2vec(est), net2vec(oracle))
    assert est.classes_.tolist() == classes.tolist()
    assert est.classes_.dtype == classes.dtype
    scores = oracle.predict(X)
    found = est.predict(view(X))
    assert found.dtype == classes.dtype
    assert np.array_equal(found, flat(view, classes[scores.argmax(0)][None]))
    proba = torch.softmax(torch.tensor(scores), 0).numpy()
    assert est.predict_proba(view(X)).shape == flat(view, proba).shape
    assert np.allclose(est.predict_proba(view(X)), flat(view, proba), rtol=0, atol=1e-12)
    assert np.allclose(
        est.predict_log_proba(view(X)), np.log(flat(view, proba)), rtol=0, atol=1e-12
    )
    margins = scores if len(classes) > 2 else scores[1:] - scores[:1]
    assert np.allclose(est.decision_function(view(X)), flat(view, margins), rtol=0, atol=1e-12)
    assert est.score(view(X), view(classes[codes])) == accuracy_score(
        codes.ravel(), scores.argmax(0).ravel()
    )


@pytest.mark.parametrize("form", [np.asarray, list, lambda a: pd.Series(a, index=range(5, 5 + N))],
                         ids=["array", "list", "Series"])  # fmt: skip
@pytest.mark.parametrize("view", [VIEWS["native"], samples], ids=["native", "samples"])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_per_series_are_learnt_at_the_last_step(kind, view, form):
    classes = LABELS[kind]
    codes = CODES[0, :, 0] % len(classes)
    est = classifier().fit(view(X), form(classes[codes]))
    at_last = np.full((1, N, T), -100)
    at_last[0, :, -1] = codes
    oracle = plain(len(classes)).set_params(spec={**SPEC, "rebatch": False}).fit(X, at_last)
    assert torch.equal(net2vec(est), net2vec(oracle))
    scores = oracle.predict(X)[:, :, -1].T  # (N, K)
    assert est.classes_.tolist() == classes.tolist()
    assert np.array_equal(est.predict(view(X)), classes[scores.argmax(1)])
    proba = est.predict_proba(view(X))
    assert np.allclose(proba, torch.softmax(torch.tensor(scores), 1), rtol=0, atol=1e-12)
    margin = est.decision_function(view(X))
    assert np.allclose(
        margin, scores[:, 1] - scores[:, 0] if len(classes) == 2 else scores, rtol=0, atol=1e-12
    )
    assert est.score(view(X), form(classes[codes])) == accuracy_score(codes, scores.argmax(1))
    assert np.array_equal(est.predict(samples(X)[[4, 2]]), est.predict(X)[[4, 2]])


@pytest.mark.slow
def test_labels_of_series_of_different_length():
    lengths = np.arange(N) % T + 1
    y = LABELS["str"][CODES[0, :, 0]]
    est = classifier().fit(X, y, lengths=lengths)
    padded = X.copy()
    padded[:, np.arange(T)[None, :] >= lengths[:, None]] = 1e3
    assert torch.equal(net2vec(est), net2vec(classifier().fit(padded, y, lengths=lengths)))
    proba = est.predict_proba(X, lengths=lengths)
    for n, k in enumerate(lengths):
        assert np.allclose(proba[n], est.predict_proba(X[:, n : n + 1, :k])[0], rtol=0, atol=1e-12)
    assert est.score(X, y, lengths=lengths) == accuracy_score(y, est.predict(X, lengths=lengths))


@pytest.mark.parametrize("kind", ["memmap", "h5py"])
@views
@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_labels_in_a_file_are_read_as_they_are_needed(kind, view, class_weight, tmp_path):
    """None of them is 0: nothing may look at more than what is there."""
    y = np.array([3, 5, 8], "i4")[CODES]
    if kind == "memmap":
        stored = np.memmap(tmp_path / "y", "i4", "w+", shape=y.shape)
        stored[:] = y
    else:
        stored = h5py.File(tmp_path / "y.h5", "w").create_dataset("y", data=y)
    settings = {"hidden_size": 3, "epochs": 2, "random_state": 0, "class_weight": class_weight}
    est = plain_classifier(**settings).fit(view(X), view(stored))
    memory = plain_classifier(**settings).fit(X, y)
    assert torch.equal(net2vec(est), net2vec(memory))
    assert est.classes_.tolist() == [3, 5, 8]
    assert est.score(view(X), view(stored)) == memory.score(X, y)


@pytest.mark.few
@views
def test_a_label_that_is_nan_is_missing(view):
    y = np.array([1.0, 2.0, 5.0])[CODES]
    y[0, 2], y[0, :, 4] = np.nan, np.nan
    est = classifier().fit(view(X), view(y))
    codes = np.where(np.isnan(y), -100, CODES)
    assert torch.equal(net2vec(est), net2vec(plain().fit(X, codes)))
    assert est.classes_.tolist() == [1, 2, 5]
    there = ~np.isnan(y)
    assert est.score(view(X), view(y)) == accuracy_score(y[there], est.predict(X)[there])


@pytest.mark.parametrize("y", [np.full((1, N, T), "a"), ["a"] * N], ids=["per step", "per series"])
def test_one_class_is_always_right(y):
    with pytest.warns(UserWarning, match="all labels of y are 'a'"):
        est = classifier().fit(X, y)
    assert est.classes_.tolist() == ["a"]
    assert (est.predict(X) == "a").all()
    assert est.predict(X).shape == np.shape(y)
    proba = est.predict_proba(X)
    assert proba.shape == ((N, 1) if len(y) == N else (1, N, T))
    assert (proba == 1).all()
    assert est.score(X, y) == 1


@pytest.mark.slow
def test_labels_whose_weight_is_0_are_no_classes():
    y = LABELS["str"][CODES[0, :, 0]]
    w = np.where(y == "up", 0.0, 2.0)
    y2 = np.repeat(y[None, :, None], T, 2)
    for targets in (y, y2):
        est = classifier().fit(X, targets, w)
        assert est.classes_.tolist() == ["down", "level"]
    kept = y != "up"
    spec = {**SPEC, "batchsize": 100}
    few = classifier().set_params(spec=spec).fit(X[:, kept, 0].T, y[kept])
    rows = classifier().set_params(spec=spec).fit(X[:, :, 0].T, y, w)
    assert torch.allclose(net2vec(rows), net2vec(few), rtol=0, atol=1e-12)


def test_labels_that_a_classifier_has_not_seen():
    y = LABELS["str"][CODES]
    few = np.where(y == "up", "down", y)
    est = classifier().fit(X, few)
    assert est.score(X, y) == accuracy_score(y.ravel(), est.predict(X).ravel())  # wrong, no error
    before = net2vec(est).clone()
    message = (
        r"^y has labels \['up'\] that are not in the classes \['down', 'level'\]; name all of them at the first call, "
        r"partial_fit\(x, y, classes=\.\.\.\)"
    )
    with pytest.raises(ValueError, match=message):
        est.partial_fit(X, y)
    with pytest.raises(ValueError, match=message.replace("y has", "validation y has")):
        classifier().fit(X, few, validation_data=(X, y))
    assert torch.equal(net2vec(est), before)
    est = classifier().partial_fit(X, few, classes=["up", "down", "level"]).partial_fit(X, y)
    assert est.classes_.tolist() == ["down", "level", "up"]
    assert not hasattr(est, "_announced")
    est.partial_fit(X, few, classes=["up", "down", "level"])
    with pytest.raises(ValueError, match=(
        r"^classes=\['up'\].*'down', 'level', 'up'"
    )):  # fmt: skip
        est.partial_fit(X, few, classes=["up"])
    with pytest.raises(ValueError, match=r"^y .*\['up'\] .*\['down', 'level'\]"):
        classifier().partial_fit(X, y, classes=["down", "level"])


@pytest.mark.slow
def test_partial_fits_are_a_fit():
    y = LABELS["str"][CODES]
    est = classifier().partial_fit(X, y).partial_fit(samples(X), samples(y))
    assert torch.equal(net2vec(est), net2vec(classifier().partial_fit(X, y).partial_fit(X, y)))
    assert len(est.loss_curve_) == 2


# -- weights of classes ----------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    "class_weight", ["balanced", {"down": 1, "level": 5, "up": 0.5}, {"level": 3}]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["native", "samples", "timesteps", "per series", "rows"])
def test_weights_of_classes_are_weights_of_their_steps(form, weighted, class_weight):
    per_series, view = form in ("per series", "rows"), VIEWS.get(form, VIEWS["native"])
    labels = LABELS["str"][CODES[0, :, 0] if per_series else CODES]
    labels[..., :3] = "up"
    x = X[:, :, 0].T if form == "rows" else view(X)
    w = (
        np.random.default_rng(0).integers(
            1, 4, N if per_series else T if form == "timesteps" else (N, T)
        )
        * 1.0
    )
    given = w if weighted else None
    y = labels if per_series else view(labels)
    settings = {"hidden_size": 3, "epochs": 2, "batchsize": 100, "seqsize": 3, "random_state": 0}
    est = plain_classifier(class_weight=class_weight, **settings).fit(x, y, given)
    steps = np.broadcast_to(w, (N, T)).ravel() if not per_series else w
    flat_labels = labels.ravel()
    if class_weight == "balanced" and weighted:  # counted with the weights
        counts = {c: steps[flat_labels == c].sum() for c in LABELS["str"]}
        of_class = np.array([steps.sum() / (3 * counts[c]) for c in flat_labels])
    else:
        of_class = compute_sample_weight(class_weight, flat_labels)
    total = of_class * (steps if weighted else 1)
    total = total if per_series else total.reshape(1, N, T)
    oracle = plain_classifier(**settings).fit(x, y, total)
    assert torch.allclose(net2vec(est), net2vec(oracle), rtol=0, atol=1e-10)
    unweighted = plain_classifier(**settings).fit(x, y, given)
    assert not torch.allclose(net2vec(unweighted), net2vec(est), rtol=0, atol=1e-6)


def test_weights_of_classes_leave_missing_labels_alone():
    y = np.array([1.0, 2.0, 5.0])[CODES]
    y[0, 2], y[0, :, 4] = np.nan, np.nan
    settings = {"hidden_size": 3, "epochs": 2, "random_state": 0}
    there = ~np.isnan(y)
    w = np.ones(y.shape)
    w[there] = compute_sample_weight("balanced", y[there])
    est = plain_classifier(class_weight="balanced", **settings).fit(X, y)
    assert torch.allclose(
        net2vec(est), net2vec(plain_classifier(**settings).fit(X, y, w)), rtol=0, atol=1e-10
    )


def test_weights_of_classes_do_not_count_labels_around_the_series(rng):
    y = np.array([1, 2, 5])[CODES]
    lengths, starts = rng.integers(1, T // 2, N), rng.integers(0, T // 2, N)
    steps = np.arange(T)
    there = (steps >= starts[:, None]) & (steps < (starts + lengths)[:, None])
    w = np.ones(y.shape)
    w[0, there] = compute_sample_weight("balanced", y[0, there])
    settings = {"hidden_size": 3, "epochs": 2, "random_state": 0}
    given = {"lengths": lengths, "starts": starts}
    est = plain_classifier(class_weight="balanced", **settings).fit(X, y, **given)
    oracle = plain_classifier(**settings).fit(X, y, w, **given)
    assert torch.allclose(net2vec(est), net2vec(oracle), rtol=0, atol=1e-10)


def weighted_softmax(scores, of_class):
    """Probabilities of the data, (K, N, T), from scores of weighted steps."""
    p = np.exp(scores - scores.max(0)) / np.reshape(of_class, (-1, 1, 1))
    return p / p.sum(0)


@pytest.mark.parametrize("class_weight", ["balanced", "sqrt_balanced", {"level": 5.0}])
def test_probabilities_are_without_the_weights_of_classes_and_labels_with_them(class_weight):
    y = LABELS["str"][np.where(CODES == 0, CODES, 2 - (RNG.random(CODES.shape) < 0.2))]
    of_class = np.array([1.0, 5.0, 1.0])
    if isinstance(class_weight, str):
        counts = np.unique(y, return_counts=True)[1]
        of_class = (y.size / (K * counts)) ** (1.0 if class_weight == "balanced" else 0.5)
    est = plain_classifier(3, class_weight=class_weight, epochs=9, random_state=0).fit(X, y)
    scores = est.decision_function(X)
    p = est.predict_proba(X)
    np.testing.assert_allclose(p, weighted_softmax(scores, of_class), rtol=1e-9)
    np.testing.assert_allclose(np.exp(est.predict_log_proba(X)), p, rtol=1e-9)
    assert np.array_equal(est.predict(X)[0], est.classes_[scores.argmax(0)])
    assert (est.classes_[p.argmax(0)] != est.predict(X)[0]).any()


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("settings", [{"cell": "linear"}, {"hidden_size": 4, "cell": "lstm"}])
@pytest.mark.parametrize("class_weight", ["auto", "balanced"])
def test_probabilities_of_a_rare_label_are_its_rate(settings, class_weight):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 20, 150))
    true = 1 / (1 + np.exp(4 - 1.5 * x[0]))
    y = (rng.random(true.shape) < true)[None]
    est = SequenceClassifier(**settings, class_weight=class_weight, random_state=0, verbose=False)
    p = est.fit(x[:, :10], y[:, :10]).predict_proba(x[:, 10:])[1]
    assert p.mean() == pytest.approx(true[10:].mean(), abs=0.015)
    brier = np.square(p - y[0, 10:]).mean()
    assert brier < np.square(true[10:] - y[0, 10:]).mean() + 0.004
    # the class that the weights favour is the rare one more often than it occurs
    assert est.predict(x[:, 10:]).mean() > (p > 0.5).mean()


def test_a_fit_in_parts_keeps_the_frequencies_of_the_first():
    y = LABELS["str"][CODES]
    first = plain_classifier(3, class_weight="balanced", epochs=1, random_state=0).partial_fit(X, y)
    of_class = y.size / (K * np.unique(y, return_counts=True)[1])
    first.partial_fit(X[:, :4], np.full((1, 4, T), "up"))
    np.testing.assert_allclose(
        first.predict_proba(X), weighted_softmax(first.decision_function(X), of_class), rtol=1e-9
    )


@pytest.mark.slow
def test_labels_of_weight_0_have_no_loss_wherever_they_are():
    y = LABELS["str"][CODES]
    settings = {"hidden_size": 3, "epochs": 2, "random_state": 0}
    without_level = {"class_weight": {"level": 0}, "warm_start": True}
    data = {"validation_data": (X, y)}
    est = plain_classifier(**settings, **without_level).fit(X, y, **data).fit(X, y)
    missing = np.where(y == "level", None, y)
    data = {"validation_data": (X, missing)}
    oracle = plain_classifier(**settings, warm_start=True).fit(X, missing, **data).fit(X, missing)
    assert est.classes_.tolist() == ["down", "up"]
    assert torch.equal(net2vec(est), net2vec(oracle))
    assert np.array_equal(est.predict_proba(X), oracle.predict_proba(X))
    told = plain_classifier(**settings, **without_level)
    told.partial_fit(X, y, classes=LABELS["str"]).partial_fit(X, y, classes=LABELS["str"])
    assert told.classes_.tolist() == ["down", "up"]


@pytest.mark.parametrize("class_weight", ["even", 3, {"left": 2.0}, {"left": 0}, {"up": -1}])
def test_weights_of_classes_that_are_none(class_weight):
    est = plain_classifier(2, class_weight=class_weight, epochs=1)
    with pytest.raises(ValueError, match="class_weight"):
        est.fit(X, LABELS["str"][CODES])
    assert not hasattr(est, "model_")


# -- models and losses -----------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("loss", [nn.NLLLoss(), F.nll_loss])
def test_models_may_give_logarithms_of_probabilities(loss):
    y = LABELS["str"][CODES]
    est = EstimatorClassifier(
        partial(net, tail=nn.LogSoftmax(-1)), loss, None, SPEC, random_state=1
    ).fit(X, y)
    scores = classifier().fit(X, y)
    assert torch.allclose(net2vec(est), net2vec(scores), rtol=0, atol=1e-10)
    assert np.allclose(est.predict_proba(X), scores.predict_proba(X), rtol=0, atol=1e-10)
    assert np.array_equal(est.predict(X), scores.predict(X))


@pytest.mark.slow
def test_a_loss_of_the_users_own_gets_the_places_of_labels():
    seen = []

    def loss(model, xs, ys):
        seen.extend(ys.unique().tolist())
        out = model(xs)
        return F.cross_entropy(out.flatten(0, 1), ys.flatten())

    y = np.array([10, 20, 30])[CODES]
    est = classifier(loss=loss).fit(X, y)
    assert set(seen) == {0, 1, 2}
    assert torch.allclose(net2vec(est), net2vec(classifier().fit(X, y)), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_model_with_another_number_of_scores():
    y = LABELS["str"][CODES]
    message = r"^the model gives 5 scores for 3 classes; a model given as class or function gets their number as n_out$"
    est = EstimatorClassifier(net(2, 5).double(), None, None, SPEC).fit(X, y)
    for method in (est.predict, est.predict_proba, est.predict_log_proba, est.decision_function):
        with pytest.raises(DataError, match=message):
            method(X)
    with pytest.raises(DataError, match=r"^labels .*0 to 2, .*2 scores"):
        EstimatorClassifier(net(2, 2).double(), None, None, SPEC).fit(X, y)


@pytest.mark.parametrize(("y", "error", "message"), [
    (X[:1], ValueError, "Unknown label type: continuous. Maybe you are trying to fit a classifier, which expects "
                        "discrete classes on a regression target with continuous values."),
    (X[0, :, 0], ValueError, "Unknown label type: continuous. Maybe you are trying to fit a classifier, which expects "
                             "discrete classes on a regression target with continuous values."),
    (np.repeat(CODES, 2, 0), ShapeError, "y has 2 labels per step; a classifier learns one, of shape (1, N, T): for "
                                         "several at once, give rows of zeros and ones to "
                                         "Estimator(loss=nn.BCEWithLogitsLoss()), whose outputs are log-odds"),
    (np.full((1, N, T), np.nan), DataError, "there is nothing to learn from: no step of y that counts has a label"),
    (np.array([1, "a", 2.5] * 4, dtype=object)[:N], DataError,
     "y has labels of types float, int, str, which have no order; make all of one type"),
    (CODES[0, :5, 0], ValueError, "Found input variables with inconsistent numbers of samples: [11, 5]"),
    (CODES[:, :5], ShapeError, "x has 11 series and y has 5 (axis 1 of shapes (2, 11, 7) and (1, 5, 7)); both must be "
                               "(F, N, T) with equal N and T"),
    (None, ValueError, "This EstimatorClassifier estimator requires y to be passed, but the target y is None."),
])  # fmt: skip
def test_labels_that_are_none(y, error, message):
    est = classifier()
    with pytest.raises(error) as info:
        est.fit(X, y)
    assert info.type is error
    assert str(info.value) == message
    assert not hasattr(est, "model_")


@pytest.mark.slow
def test_out_takes_labels_and_probabilities():
    y = LABELS["int"][CODES]
    est = classifier().fit(X, y)
    out = np.zeros((1, N, T), int)
    assert est.predict(X, out) is out
    assert np.array_equal(out, est.predict(X))
    proba = np.zeros((K, N, T))
    assert est.predict_proba(samples(X), proba) is proba
    assert np.array_equal(proba, est.predict_proba(X))
    words = classifier().fit(X, LABELS["str"][CODES])
    assert np.array_equal(words.predict(X, np.zeros((1, N, T), "U9")), words.predict(X))
    for labels, short in ((est, "int8"), (words, "U3")):
        out = np.zeros((1, N, T), short)
        wanted = f"^out has dtype {out.dtype}, which cannot hold {labels.classes_.dtype}; make it "
        with pytest.raises(DataError, match=wanted + f"{labels.classes_.dtype}$"):
            labels.predict(X, out)
        assert not out.astype(bool).any()
    with pytest.raises(DataError, match=r"predict_proba.*integer labels"):
        words.predict(X, np.zeros((1, N, T), int))


# -- what scikit-learn sees --------------------------------------------------------------------------------


def test_scikit_learn_knows_what_they_are():
    for est in (EstimatorClassifier(), SequenceClassifier()):
        assert is_classifier(est)
        assert isinstance(
            check_cv(3, CODES[0, :, 0], classifier=is_classifier(est)), StratifiedKFold
        )
    for est in (EstimatorRegressor(), SequenceRegressor()):
        assert is_regressor(est)
    assert not is_classifier(Estimator())
    assert not is_regressor(Estimator())


@views
def test_the_score_of_a_regressor_is_pooled(view):
    y = np.random.default_rng(2).normal(size=(1, N, T))
    est = EstimatorRegressor(net, None, None, SPEC, random_state=0).fit(view(X), view(y))
    assert est.score(view(X), view(y)) == pytest.approx(
        r2_score(y.ravel(), est.predict(X).ravel()), rel=1e-9
    )
    w = np.random.default_rng(4).random((1, N, T))
    wanted = r2_score(y.ravel(), est.predict(X).ravel(), sample_weight=w.ravel())
    assert est.score(view(X), view(y), w) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("make", [Estimator, EstimatorRegressor, EstimatorClassifier, SequenceRegressor,
                                  SequenceClassifier])  # fmt: skip
def test_data_are_no_metadata(make):
    requests = make().get_metadata_routing()
    for method in (
        "fit",
        "partial_fit",
        "predict",
        "predict_proba",
        "predict_log_proba",
        "decision_function",
        "score",
    ):
        found = getattr(requests, method).requests
        assert "x" not in found
        assert "y" not in found
        if hasattr(make, method):
            assert "lengths" in found
    assert "sample_weight" in requests.fit.requests
    assert "sample_weight" in requests.score.requests


@pytest.mark.slow
@pytest.mark.parametrize("view", [samples, timesteps])
def test_weights_and_lengths_are_routed(view):
    """To fit and to score, cut like the rows."""
    y = np.random.default_rng(2).normal(size=(1, N, T))
    settings = {"hidden_size": 3, "epochs": 1, "random_state": 0}
    rows = N if view is samples else T
    w = np.arange(1.0, rows + 1)
    metadata = {"sample_weight": w} | ({"lengths": np.arange(N) % 3 + 5} if view is samples else {})
    folds = KFold(3)
    with config_context(enable_metadata_routing=True):
        est = plain_regressor(**settings)
        est.set_fit_request(**dict.fromkeys(metadata, True)).set_score_request(
            **dict.fromkeys(metadata, True)
        )
        found = cross_validate(est, view(X), view(y), params=metadata, cv=folds)["test_score"]
        search = GridSearchCV(est, {"hidden_size": [3]}, cv=folds).fit(view(X), view(y), **metadata)
        unasked = plain_regressor(**settings)
        with pytest.raises(
            ValueError,
            match=r"\[sample_weight\] .*not .*requested",
        ):
            GridSearchCV(unasked, {"hidden_size": [3]}, cv=folds).fit(
                view(X), view(y), sample_weight=w
            )
    for (a, b), score in zip(folds.split(w), found, strict=True):
        cut = [{k: v[i] for k, v in metadata.items()} for i in (a, b)]
        hand = plain_regressor(**settings).fit(view(X)[a], view(y)[a], **cut[0])
        assert hand.score(view(X)[b], view(y)[b], **cut[1]) == score
    assert search.cv_results_["mean_test_score"].tolist() == [pytest.approx(found.mean())]
    whole = plain_regressor(**settings).fit(view(X), view(y), **metadata)
    assert torch.equal(net2vec(search.best_estimator_), net2vec(whole))
