"""What y means beside x: matrices of all steps, labels per step, labels and values that are
missing.
"""

import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.inspection import permutation_importance
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    RocCurveDisplay,
    accuracy_score,
    confusion_matrix,
    roc_auc_score,
)
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.preprocessing import StandardScaler

from fluxutils_py import (
    EstimatorClassifier,
    SequenceScaler,
    net2vec,
    samples,
    timesteps,
)
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator import flatten_steps
from tests.plain_networks import plain_classifier, plain_regressor

F, N, T = 2, 11, 13
SMALL = {"hidden_size": 4, "epochs": 3, "batchsize": 5, "seqsize": 6, "random_state": 0}


@pytest.fixture
def x(rng):
    return rng.normal(size=(F, N, T))


@pytest.fixture
def y(x):
    return np.stack([x[0].cumsum(1), x[1] + 3])


def same(a, b):
    return torch.equal(net2vec(a), net2vec(b))


def matrix(y):
    """(N, G * T), as samples(y) looks."""
    return y.transpose(1, 0, 2).reshape(y.shape[1], -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [plain_regressor, plain_classifier])
@pytest.mark.parametrize("listed", [False, True], ids=["array", "list"])
def test_with_one_target_per_series_fit_refuses_what_predict_refuses(x, y, kind, listed):
    target = y[0, :, -1] if kind is plain_regressor else np.where(y[0, :, -1] > 0, "a", "b")
    as_given = (lambda x: list(x.transpose(1, 0, 2))) if listed else np.copy
    est = kind(**SMALL).fit(as_given(x), target)
    bad, gap, zero = x.copy(), x.copy(), x.copy()
    bad[1, 7, 5], gap[:, 7, 5], zero[:, 7, 5] = np.nan, np.nan, 0
    for call in (
        lambda: kind(**SMALL).fit(as_given(bad), target),
        lambda: kind(**SMALL).fit(as_given(x), target, validation_data=(as_given(bad), target)),
        lambda: est.evaluate(as_given(bad), target),
        lambda: est.predict(as_given(bad)),
        lambda: est.score(as_given(bad), target),
    ):
        with pytest.raises(
            DataError,
            match="x is nan at feature 1, series 7, step 5",
        ):
            call()
    with_gap = kind(**SMALL).fit(as_given(gap), target)
    assert same(with_gap, kind(**SMALL).fit(as_given(zero), target))
    assert np.array_equal(with_gap.predict(as_given(gap)), with_gap.predict(as_given(zero)))


# -- matrices --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("g", [1, 2])
def test_a_matrix_of_all_steps_beside_samples_is_every_steps(x, y, g):
    native = plain_regressor(**SMALL).fit(x, y[:g])
    est = plain_regressor(**SMALL).fit(samples(x), matrix(y[:g]))
    assert same(est, native)
    assert np.array_equal(est.predict(samples(x)), matrix(native.predict(x)))
    assert est.score(samples(x), matrix(y[:g])) == native.score(x, y[:g])
    flat = plain_regressor(**SMALL, n_timesteps=T).fit(matrix(x), matrix(y[:g]))
    assert same(flat, native)
    assert same(est.partial_fit(samples(x), matrix(y[:g])), native.partial_fit(x, y[:g]))
    # so few steps could be targets of series, had it not been fitted
    other = (
        x[:, :, :3],
        y[:g, :, :3],
    )
    assert est.score(samples(other[0]), matrix(other[1])) == native.score(*other)


@pytest.mark.slow
def test_other_matrices_beside_samples_are_of_series(x, y):
    last = y[:, :, -1].T
    est = plain_regressor(**SMALL).fit(samples(x), last)
    assert est.predict(samples(x)).shape == (N, 2)
    assert same(est, plain_regressor(**SMALL).fit(x, last))
    many = np.repeat(last, 13, 1)  # 2 * T targets of a series
    assert plain_regressor(**SMALL, target="series").fit(samples(x), many).predict(x).shape == (
        N,
        26,
    )
    for n_steps in (1, 2):  # what was fitted tells what it is
        est.score(samples(x[:, :, :n_steps]), last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_steps", "view", "g"), [(4, samples, 1), (4, samples, 2), (T, lambda a: a, 1)]
)
def test_what_may_be_either_is_asked_for(x, y, n_steps, view, g):
    x, y = x[:, :, :n_steps], y[:g, :, :n_steps]
    remedy = {
        1: "a target for each step, add the missing axis, y[None]",
        2: "2 targets for each step, give an array, ",
    }
    with pytest.raises(ShapeError) as info:
        plain_regressor(**SMALL).fit(view(x), matrix(y))
    assert remedy[g] in str(info.value)
    assert str(info.value).endswith(
        f", or set target='step'; if it is {g * n_steps} targets for each series, set "
        "target='series'"
    )
    native = plain_regressor(**SMALL).fit(x, y)
    assert same(plain_regressor(**SMALL, target="step").fit(view(x), matrix(y)), native)
    per_series = plain_regressor(**SMALL, target="series").fit(view(x), matrix(y))
    assert per_series.predict(view(x)).shape == (N, g * n_steps)


def standard(y):
    return (y - 500) / 20


def back(y):
    return y * 20 + 500


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("view", [samples, timesteps])
def test_transformed_targets_are_right_by_default(rng, view, g):
    """It makes a plain matrix of the view of targets; predictions come in the same rows and are
    transformed back.
    """
    x = rng.normal(size=(F, 30, 20))
    y = 500 + 20 * np.stack([x[0] + x[1], x[0] - x[1]])[:g]
    settings = {"epochs": 300, "random_state": 0, "scale_target": False}
    model = TransformedTargetRegressor(
        plain_regressor(**settings), func=standard, inverse_func=back
    )
    found = model.fit(view(x), view(y)).predict(view(x))
    by_hand = plain_regressor(**settings).fit(x, standard(y))
    assert np.allclose(found, np.asarray(view(back(by_hand.predict(x)))), rtol=1e-9)
    assert (
        1
        - ((found - np.asarray(view(y))) ** 2).sum()
        / ((y - y.mean((1, 2), keepdims=True)) ** 2).sum()
        > 0.99
    )
    assert model.score(view(x), view(y)) > 0.98  # the mean over columns
    scaled = TransformedTargetRegressor(plain_regressor(**SMALL), transformer=StandardScaler())
    assert cross_val_predict(scaled, view(x), view(y), cv=KFold(2)).shape == view(y).shape


# -- labels ----------------------------------------------------------------------------------------------

LABELS = np.array(["ant", "bee", "cow"])


@pytest.fixture
def labels(x):
    """One per step, (N, T)."""
    return LABELS[np.digitize(x[0], [-0.4, 0.4])]


@pytest.mark.slow
def test_labels_of_steps_may_be_a_matrix(x, labels):
    native = plain_classifier(**SMALL).fit(x, labels[None])
    for est in (
        plain_classifier(**SMALL).fit(x, labels),
        plain_classifier(**SMALL).fit(samples(x), labels),
        plain_classifier(**SMALL).fit(timesteps(x), labels.T),
        plain_classifier(**SMALL).fit(x, labels.tolist()),
        plain_classifier(**SMALL).fit(x, pd.DataFrame(labels)),
        plain_classifier(**SMALL).partial_fit(x, labels, classes=LABELS).set_params(epochs=2, warm_start=True)
        .fit(x, labels),
    ):  # fmt: skip
        assert same(est, native)
        assert est.classes_.tolist() == LABELS.tolist()
    assert est.score(x, labels) == native.score(x, labels[None])
    assert est.score(timesteps(x), labels.T) == native.score(x, labels[None])
    stopping = {"early_stopping": True, "class_weight": "balanced"}
    assert same(
        plain_classifier(**SMALL, **stopping).fit(x, labels),
        plain_classifier(**SMALL, **stopping).fit(x, labels[None]),
    )


@pytest.mark.parametrize("shape", [(N, T + 1), (T, N), (N, 2)])
def test_a_matrix_of_other_labels_is_an_error(x, shape):
    with pytest.raises(ShapeError) as info:
        plain_classifier(**SMALL).fit(x, np.zeros(shape, int))
    assert all(part in str(info.value) for part in (f"({N}, {T})", f"y has shape {shape}"))


def test_class_weights_of_labels_that_are_no_class_are_refused(x, labels):
    classes = np.unique(labels).tolist()
    with pytest.raises(
        ValueError,
        match=f"^class_weight .*'zzz'.*{re.escape(str(classes))}$",
    ):
        plain_classifier(**SMALL, class_weight={"zzz": 3, classes[0]: 1}).fit(x, labels)


@pytest.mark.slow
def test_a_flat_matrix_after_sequences_is_told_how_to_come(x, y):
    est = plain_regressor(**SMALL).fit(x, y[:1])
    for flat in (samples(x), matrix(x)):
        message = rf"; if it is samples\(x\) of {T} steps, fit on samples\(x\), or on its matrix with n_timesteps={T}$"
        with pytest.raises(ShapeError, match=message):
            permutation_importance(est, flat, samples(y[:1]), n_repeats=1)
    for given in (plain_regressor(**SMALL), plain_regressor(**SMALL, n_timesteps=T)):
        form = samples if given.n_timesteps is None else matrix
        est = given.fit(form(x), form(y[:1]))
        assert permutation_importance(
            est, samples(x), samples(y[:1]), n_repeats=1
        ).importances_mean.shape == (F * T,)


@pytest.mark.slow
@pytest.mark.parametrize("none", [None, np.nan, pd.NA])
@pytest.mark.parametrize("form", ["native", "matrix", "samples", "timesteps", "file"])
def test_steps_without_a_label_do_not_count(x, labels, none, form, rng):
    gone = rng.random((N, T)) < 0.3
    y = np.where(gone, none, labels.astype(object))
    weighed = plain_classifier(**SMALL).fit(x, labels[None], (~gone).astype(float))
    given = {
        "native": lambda: (x, y[None]),
        "matrix": lambda: (x, y),
        "samples": lambda: (samples(x), samples(y[None])),
        "timesteps": lambda: (timesteps(x), timesteps(y[None])),
        "file": lambda: (x, Lazy(y[None])),
    }[form]()
    est = plain_classifier(**SMALL).fit(*given)
    assert est.classes_.tolist() == LABELS.tolist()
    assert torch.allclose(net2vec(est), net2vec(weighed), rtol=0, atol=1e-12)
    assert est.score(*given) == pytest.approx(
        accuracy_score(labels[~gone], est.predict(x)[0][~gone])
    )


class Lazy:
    """An array that is no NumPy array."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key):
        return self.array[key]


@pytest.mark.parametrize("none", [None, np.nan, pd.NA, pd.NaT])
def test_a_series_without_a_label_is_refused(x, labels, none):
    y = labels[:, -1].astype(object)
    gone = np.arange(N) == 4
    est = plain_classifier(**SMALL).fit(x, y, (~gone).astype(float))  # what the message says
    message = rf"^y has no label in row 4: {none!r}; leave such rows out, or give them a label and the sample_weight 0\."
    for call in (
        lambda y: plain_classifier(**SMALL).fit(x, y),
        lambda y: plain_classifier(**SMALL).fit(samples(x), y, gone.astype(float)),
        lambda y: plain_classifier(**SMALL).fit(timesteps(x[:, :1, :N]), y),
        lambda y: plain_classifier(**SMALL).fit(x[:, :, 0].T, y),
        lambda y: est.partial_fit(x, y),
        lambda y: est.score(x, y),
    ):
        with pytest.raises(DataError, match=message):
            call(np.where(gone, none, y))
        with pytest.raises(DataError, match=message):
            call(np.where(gone, none, y).tolist())
    with pytest.raises(
        DataError,
        match=r"^y .*types .*int.*str.*no order",
    ):
        est.partial_fit(x, np.arange(N).astype(object))


@pytest.mark.slow
def test_displays_and_metrics_take_the_steps(x, labels, rng):
    mpl.use("agg")
    est = plain_classifier(**SMALL).fit(x, labels)
    y = np.where(rng.random((N, T)) < 0.2, None, labels.astype(object))
    there = y != None  # noqa: E711  element by element
    proba, found = est.predict_proba(x), est.predict(x)
    wanted = y[there], found[0][there], proba[:, there].T
    for got in (
        flatten_steps(y[None], found, proba),
        flatten_steps(y, found, proba),
        flatten_steps(y, est.predict(samples(x)), est.predict_proba(samples(x))),
        flatten_steps(samples(y[None]), est.predict(samples(x)), est.predict_proba(samples(x))),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    in_time = flatten_steps(y.T, est.predict(timesteps(x)), est.predict_proba(timesteps(x)))
    assert (
        confusion_matrix(*in_time[:2]).tolist()
        == confusion_matrix(wanted[0].astype(str), wanted[1]).tolist()
    )
    view = flatten_steps(
        timesteps(y[None]), est.predict(timesteps(x)), est.predict_proba(timesteps(x))
    )
    assert all(np.array_equal(a, b) for a, b in zip(view, wanted, strict=True))
    true, pred, p = got
    display = ConfusionMatrixDisplay.from_predictions(true.astype(str), pred)
    assert display.confusion_matrix.sum() == there.sum()
    roc = RocCurveDisplay.from_predictions(true == "ant", p[:, 0])
    assert roc.roc_auc == pytest.approx(roc_auc_score(true == "ant", p[:, 0]))
    assert roc_auc_score(true.astype(str), p, multi_class="ovr") > 0.5
    (alone,) = flatten_steps(y)
    assert np.array_equal(alone, wanted[0])
    with pytest.raises(ShapeError, match="which are not of the same steps"):
        flatten_steps(y, found[:, :, 1:])


@pytest.mark.slow
def test_displays_take_estimators_of_series_and_of_one_series_in_time(x, labels):
    mpl.use("agg")
    per_series = plain_classifier(**SMALL).fit(samples(x), labels[:, -1])
    display = ConfusionMatrixDisplay.from_estimator(per_series, samples(x), labels[:, -1])
    assert display.confusion_matrix.sum() == N
    one, is_ant = timesteps(x[:, :1]), labels[0] == "ant"
    per_step = EstimatorClassifier(spec={"epochs": 2, "batchsize": 5, "seqsize": 6}).fit(
        one, is_ant
    )
    display = ConfusionMatrixDisplay.from_estimator(per_step, one, is_ant)
    assert display.confusion_matrix.sum() == T
    assert 0 <= RocCurveDisplay.from_estimator(per_step, one, is_ant).roc_auc <= 1


@pytest.mark.slow
def test_numbers_are_flattened_too(x, y):
    y[0, 3, 4] = np.nan
    est = plain_regressor(**SMALL).fit(x, y)
    there = ~np.isnan(y)
    true, pred = flatten_steps(y, est.predict(x))
    assert np.array_equal(true, y[there])
    assert np.array_equal(pred, est.predict(x)[there])


# -- masks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", ["x", "y", "labels", "per series", "per series labels", "weights", "matrix", "view"]
)
def test_the_mask_of_a_masked_array_is_never_dropped(x, y, labels, what):
    def masked(array):
        return np.ma.masked_array(
            array, np.arange(np.size(array)).reshape(np.shape(array)) % 3 == 0
        )

    regressor, classifier = plain_regressor(**SMALL), plain_classifier(**SMALL)
    call = {
        "x": lambda: regressor.fit(masked(x), y),
        "y": lambda: regressor.fit(x, masked(y)),
        "labels": lambda: classifier.fit(x, masked(labels)),
        "per series": lambda: regressor.fit(x, masked(y[:, :, -1].T)),
        "per series labels": lambda: classifier.fit(x, masked(labels[:, -1])),
        "weights": lambda: regressor.fit(x, y, masked(np.ones((N, T)))),
        "matrix": lambda: regressor.fit(masked(matrix(x)), y[0, :, 0]),
        "view": lambda: samples(masked(x)),
    }[what]
    name, fill = (
        {"x": "x", "matrix": "x", "view": "x", "weights": "sample_weight"}.get(what, "y"),
        "np.nan",
    )
    fill = "0" if what == "weights" else fill
    with pytest.raises(DataError) as info:
        call()
    assert all(
        part in str(info.value) for part in (f"{name} is a masked array", f"{name}.filled({fill})")
    )


@pytest.mark.slow
def test_other_uses_of_masked_arrays_are_refused_too(x, y):
    est = plain_regressor(**SMALL).fit(x, y)
    for call in (
        lambda: est.predict(np.ma.masked_array(x)),
        lambda: est.score(x, y, np.ma.masked_array(np.ones(N))),
        lambda: est.fit(x, y, lengths=np.ma.masked_array(np.full(N, T))),
        lambda: est.fit(x, y, validation_data=(x, np.ma.masked_array(y))),
        lambda: SequenceScaler().fit(np.ma.masked_array(matrix(x))),
    ):
        with pytest.raises(DataError, match="masked array"):
            call()


# -- one series, and labels of steps in folds -----------------------------------------------------


@pytest.mark.parametrize("kind", [plain_regressor, plain_classifier])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_vector_of_targets_of_all_steps_is_refused_with_what_fits(x, kind, as_text):
    one = x[:, :1]
    y = (one[0, 0] > 0).astype(int)
    if as_text and kind is plain_classifier:
        y = np.where(y, "a", "b")
    with pytest.raises(ShapeError, match=rf"y has {T} rows.* 1 series.* y\[None, None\]$"):
        kind(**SMALL).fit(one, y)
    remedy = r"x\[:, None\] and y\[None, None\]"
    with pytest.raises(ShapeError, match=rf"y has {T} rows.*matrix x has {F}.*{remedy}"):
        kind(**SMALL).fit(one[:, 0], y)
    assert kind(**SMALL).fit(one, y[None, None]).predict(one).shape == (1, 1, T)


def test_a_matrix_of_targets_of_all_steps_of_one_series_is_refused_with_its_transpose(x, y):
    rows = y[:, 0].T
    with pytest.raises(ShapeError, match=r"y has 13 rows.* y\.T\[:, None\]$"):
        plain_regressor(**SMALL).fit(x[:, :1], rows)
    plain_regressor(**SMALL).fit(x[:, :1], rows.T[:, None])
    # of other numbers of rows, what is meant is not known
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        plain_regressor(**SMALL).fit(x[:, :1], rows[1:])
