"""Steps that carry no loss have no say in what is learnt from targets: scales, classes, weights of
classes, widths of intervals. What stands there is NaN, or anything.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, SequenceClassifier, SequenceRegressor, net2vec
from fluxutils_py.errors import DataError
from tests.plain_networks import plain_classifier, plain_regressor, with_spec

F, N, T, BURN_IN = 2, 3, 43, 4
SMALL = {
    **{"hidden_size": 3, "epochs": 2, "batchsize": 7, "seqsize": 5, "random_state": 0},
    **{"burn_in": BURN_IN},
}
pytestmark = pytest.mark.filterwarnings("ignore:this fit makes", "ignore:after . updates")


def beginnings(rebatch):
    """Which steps (N, T) are the first of a row: of a series, or of one of its folds."""
    n_folds = SMALL["batchsize"] // N if rebatch else 1
    marks = np.zeros(T, bool)
    for fold in np.array_split(np.arange(T), n_folds):
        marks[fold[:BURN_IN]] = True
    return np.broadcast_to(marks, (N, T))


@pytest.fixture
def x(rng):
    return rng.normal(size=(F, N, T))


def same(a, b, x):
    assert torch.equal(net2vec(a), net2vec(b))
    assert np.array_equal(a.predict(x), b.predict(x))
    return True


@pytest.mark.few
@pytest.mark.parametrize("rebatch", [False, True])
@pytest.mark.parametrize("value", [100.0, 1e4])
def test_numbers_within_the_burn_in(rebatch, value, x):
    y = x.cumsum(2) * [[[1.0]], [[50.0]]]
    y[1, 2, 9] = np.nan  # one of two outputs
    here = beginnings(rebatch)
    y[:, here] = np.nan
    nothing = plain_regressor(**SMALL, rebatch=rebatch).fit(x, y)
    assert nothing.target_mean_ == pytest.approx(np.nanmean(y, (1, 2)), rel=1e-12)
    y[:, here] = value
    assert same(plain_regressor(**SMALL, rebatch=rebatch).fit(x, y), nothing, x)


@pytest.mark.few
@pytest.mark.parametrize("rebatch", [False, True])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_labels_within_the_burn_in(rebatch, class_weight, x, rng):
    y = rng.choice([1.0, 2.0, 5.0], p=[0.7, 0.2, 0.1], size=(1, N, T))
    here = beginnings(rebatch)
    settings = {**SMALL, "rebatch": rebatch, "class_weight": class_weight}
    y[:, here] = np.nan
    nothing = plain_classifier(**settings).fit(x, y)
    for labels in ([9.0], [5.0], [-3.0, 1.0]):
        y[:, here] = rng.choice(labels, size=here.sum())
        est = plain_classifier(**settings).fit(x, y)
        assert est.classes_.tolist() == [1.0, 2.0, 5.0]
        assert same(est, nothing, x)
        assert np.array_equal(est.predict_proba(x), nothing.predict_proba(x))


def test_labels_of_series_that_are_no_longer_than_the_burn_in(x):
    lengths = np.array([T, BURN_IN, T])
    est = plain_classifier(**SMALL).fit(x, ["a", "b", "c"], lengths=lengths)
    assert est.classes_.tolist() == ["a", "c"]
    w = np.ones((N, T))
    w[2, -1] = 0  # the step of the label
    est = plain_classifier(**SMALL).fit(x, ["a", "b", "c"], w)
    assert est.classes_.tolist() == ["a", "b"]


def test_labels_without_a_loss_make_no_outputs(x, rng):
    y = rng.integers(0, 3, (1, N, T))
    y[:, :, :BURN_IN] = 77
    y[:, 1, 9:20] = 255
    y[:, 2, 30:] = 99
    w = np.ones((N, T))
    w[0, 7] = 0
    y[:, 0, 7] = 88
    made = []

    def linear(n_in, n_out):
        made.append(n_out)
        return nn.Linear(n_in, n_out)

    loss = nn.CrossEntropyLoss(ignore_index=255)
    spec = {"epochs": 1, "batchsize": 7, "seqsize": 5, "burn_in": BURN_IN}
    est = Estimator(linear, loss, None, spec, random_state=0)
    est.fit(x, y, w, lengths=[T, T, 30])
    assert set(made) == {3}
    assert est.n_outputs_ == 3


@pytest.mark.slow
def test_widths_of_intervals(rng):
    x = rng.normal(size=(F, 20, T))
    y = x[:1] + 0.1 * rng.normal(size=(1, 20, T))
    widths = []
    for value in (np.nan, 100.0):
        y[:, :, :BURN_IN] = value
        est = SequenceRegressor(
            cell="linear", spec={"burn_in": BURN_IN}, level=90, scale_target=False, random_state=0
        )
        widths.append(est.fit(x, y).fitted_parts_.calibration.quantile(0.9))
    assert np.array_equal(*widths)


@pytest.mark.slow
def test_validation_weighs_classes_as_training_does(x, rng):
    y = rng.choice([1, 2], p=[0.8, 0.2], size=(1, N, T))
    held_out = rng.normal(size=(F, 2, 9)), rng.integers(1, 3, (1, 2, 9))
    counted = y[:, :, BURN_IN:]
    of_class = counted.size / (2 * np.bincount(counted.ravel())[1:])
    est = plain_classifier(**SMALL, class_weight="balanced").fit(x, y, validation_data=held_out)
    weights = of_class[held_out[1] - 1]
    by_hand = plain_classifier(**SMALL).fit(
        x, y, of_class[y - 1], validation_data=(*held_out, weights)
    )
    assert est.validation_loss_curve_ == pytest.approx(by_hand.validation_loss_curve_, rel=1e-9)


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("form", ["native", "rows"])
@pytest.mark.parametrize("cell", ["linear", "kernels", "lstm"])
def test_weights_of_classes_of_series_are_sample_weights(cell, form, rng):
    n = 26
    x = rng.normal(size=(1, n, 12)) + np.arange(n)[:, None] % 4
    y = np.arange(n) % 4
    settings = {"cell": cell, "random_state": 0, "batchsize": 10}
    if cell == "lstm":
        settings |= {"hidden_size": 3, "max_updates": 6}
    of_class = {0: 0, 1: 0.25, 2: 3.0, 3: 1}
    w = np.array([of_class[label] for label in y.tolist()], float)
    if form == "rows":
        x = x[0]
        settings["n_timesteps"] = 12
    est = SequenceClassifier(**settings, class_weight=of_class).fit(x, y)
    oracle = SequenceClassifier(**settings).fit(x, y, w)
    assert est.classes_.tolist() == oracle.classes_.tolist() == [1, 2, 3]
    ours, wanted = est.model_.state_dict(), oracle.model_.state_dict()
    for name, value in wanted.items():
        assert torch.allclose(ours[name], value, rtol=1e-9, atol=1e-9), name
    assert np.array_equal(est.predict(x), oracle.predict(x))


@pytest.mark.parametrize("cell", ["lstm", "linear"])
def test_an_output_that_never_has_a_target_is_named(cell, x):
    y = np.stack([x[0], x[1]])
    y[1, :, BURN_IN if cell == "lstm" else 0 :] = np.nan  # at the steps that have a loss
    est = SequenceRegressor(**with_spec({"cell": cell, **(SMALL if cell == "lstm" else {})}))
    with pytest.raises(DataError, match=r"output \[1\]"):
        est.fit(x, y)
    assert not hasattr(est, "model_")
