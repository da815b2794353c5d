"""Scores are pooled over series and time: compared with NumPy on the predictions."""

import copy
from functools import partial

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    Spec,
    pooled_scorer,
    samples,
)
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.training import predictor

pytestmark = pytest.mark.filterwarnings("ignore:feature . of . has values of about")

N, T = 7, 150  # more steps than a block of prediction, and a group that is not full
SPEC = Spec(epochs=1, batchsize=3, seqsize=20)


class Two(nn.Module):
    """One and three outputs."""

    def __init__(self):
        super().__init__()
        self.rnn, self.one, self.three = GRU(2, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        h = self.rnn(x)
        return self.one(h), self.three(h)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, N, T))
    scales = np.array([1e-4, 1.0, 1e6]).reshape(3, 1, 1)
    offsets = np.array([1e3, 0.0, -1e8]).reshape(3, 1, 1)
    return x, scales * (x.sum(0, keepdims=True) + rng.normal(size=(3, N, T))) + offsets


@pytest.fixture(scope="module")
def est(data):
    x, y = data
    return Estimator(
        nn.Sequential(LSTM(2, 4), nn.Linear(4, 3)), None, None, SPEC, random_state=0
    ).fit(x, y)


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
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def fitted_to(y, noise=0.3):
    """Targets that the predictions are near to, so that scores are of the order of 1."""
    return y + noise * np.random.default_rng(1).normal(size=y.shape) * y.std((1, 2), keepdims=True)


def test_pooled_r2(est, data):
    x, y = data
    assert est.score(x, y) == near(r2(y, est.predict(x)))
    close = fitted_to(est.predict(x))
    score = est.score(x, close)
    assert score == near(r2(close, est.predict(x)))
    assert 0.5 < score < 1


def test_one_feature_is_scikit_learns_r2(data):
    x, y = data
    est = Estimator(None, None, None, SPEC, random_state=0).fit(x, y[1:2])
    yhat = est.predict(x)
    assert est.score(x, y[1:2]) == near(r2_score(y[1].ravel(), yhat[0].ravel()))
    w = np.random.default_rng(2).random((N, T))
    assert est.score(x, y[1:2], w) == near(
        r2_score(y[1].ravel(), yhat[0].ravel(), sample_weight=w.ravel())
    )


def test_features_are_not_averaged(est, data):
    x, _ = data
    est = copy.deepcopy(est)
    with torch.no_grad():  # predictions of very different scale
        est.model_[1].weight *= torch.tensor([[1e-4], [1.0], [1e4]])
        est.model_[1].bias += torch.tensor([1e3, 0.0, -1e6])
    y = fitted_to(est.predict(x))
    y[0] += 1.0  # hopeless in the first feature, whose scale is small: the others decide
    expected = r2(y, est.predict(x))
    assert est.score(x, y) == near(expected)
    assert expected > 0.5 > 0 > r2_score(y.reshape(3, -1).T, est.predict(x).reshape(3, -1).T)


@pytest.mark.parametrize("shape", [(N,), (N, T), (1, N, T)])
@pytest.mark.parametrize("zeros", [False, True])
def test_weights(est, data, shape, zeros):
    x, _ = data
    y = fitted_to(est.predict(x))
    w = np.random.default_rng(2).random(shape)
    if zeros:
        w[..., ::2] = 0
        y[
            :,
            w.reshape(N, -1)[:, 0] == 0
            if len(shape) == 1
            else np.broadcast_to(w, (1, N, T))[0] == 0,
        ] += 1e3
    full = np.broadcast_to(w.reshape(N, -1), (N, T))
    assert est.score(x, y, w) == near(r2(y, est.predict(x), full))
    assert est.score(x, y, 17 * w) == near(r2(y, est.predict(x), full))
    assert est.score(x, y, np.full(shape, 3.0)) == near(est.score(x, y))


def test_weights_of_whole_numbers_are_repetitions(est, data):
    x, _ = data
    y = fitted_to(est.predict(x))
    twice = np.r_[np.arange(N), 2, 2]
    w = np.bincount(twice)
    assert est.score(x, y, w) == near(est.score(x[:, twice], y[:, twice]))


def test_steps_without_a_target_or_input_do_not_count(est, data):
    x, _ = data
    y = fitted_to(est.predict(x))
    y[:, 3, 5:90] = np.nan
    y[1, 4, 7] = np.nan  # the other feature counts
    assert est.score(x, y) == near(r2(y, est.predict(x)))
    w = np.random.default_rng(2).random((N, T))
    assert est.score(x, y, w) == near(r2(y, est.predict(x), w))


UNPREDICTED = "{} of {} steps with a target have no prediction, .*SequenceImputer"


@pytest.mark.parametrize("gap", [slice(100, None), slice(40, 60), slice(0, 30)])
def test_steps_with_a_target_but_without_input_do_not_count_and_are_told_of(est, data, gap):
    x, y = data[0].copy(), fitted_to(est.predict(data[0]))
    x[:, 0, gap] = np.nan
    y[:, 0, 0:110] = np.nan
    y[:, 5, 7] = np.nan
    y[1, 2, 9] = np.nan  # the other features count
    yhat = est.predict(x)
    masked = np.where(np.isnan(yhat).any(0), np.nan, y)
    expected = near(r2(masked, yhat))
    n_lacking = (np.isnan(yhat).any(0) & ~np.isnan(y).all(0)).sum()
    assert n_lacking == (40 if gap.stop is None else 0)
    if not n_lacking:  # of targets that are missing too, nothing is to be told
        assert est.score(x, y) == expected
        return
    told = UNPREDICTED.format(40, N * T - 111)
    with pytest.warns(UserWarning, match=f"^{told}") as found:
        assert est.score(x, y) == expected
    assert [w.filename for w in found] == [__file__]
    end = np.where(np.arange(N) == 0, 100, T)
    assert est.score(x, y, lengths=end) == expected  # who gives lengths knows of the ends


@pytest.mark.slow
def test_searches_and_pooled_scorers_tell_of_steps_without_a_prediction_too():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 40))
    y = x[:1].cumsum(2)
    x[:, 4, 10:15] = np.nan
    folds = [([0, 1, 2], [3, 4, 5]), ([1, 2, 3], [4, 5])]
    est = EstimatorRegressor(spec={"epochs": 9, "batchsize": 2, "seqsize": 5}, random_state=0)
    for scorer in (None, pooled_scorer("r2"), pooled_scorer("neg_mean_absolute_error")):
        with pytest.warns(UserWarning, match="no prediction") as found:
            cross_val_score(est, samples(x), samples(y), cv=folds, scoring=scorer)
        told = [str(w.message).partition(" steps with")[0] for w in found]
        assert told == ["5 of 120", "5 of 80"]


def test_weights_where_no_step_has_all_its_targets(est, data):
    x, _ = data
    y = fitted_to(est.predict(x))
    y[np.random.default_rng(2).integers(3, size=(N, T)), np.arange(N)[:, None], np.arange(T)] = (
        np.nan
    )
    w = np.random.default_rng(3).uniform(0.1, 5, (N, T))
    assert est.score(x, y, w) == near(r2(y, est.predict(x), w))


def test_lengths(est, data):
    x, _ = data
    y = fitted_to(est.predict(x))
    lengths = np.array([T, 1, 17, 64, 65, T, 149])
    masked = np.where(np.arange(T) < lengths[:, None], y, np.nan)
    expected = r2(masked, est.predict(x))
    assert est.score(x, y, lengths=lengths) == near(expected)
    garbage = np.where(np.arange(T) < lengths[:, None], y, np.inf)
    assert est.score(x, garbage, lengths=lengths) == near(expected)


def test_constant_targets(est, data):
    x, _ = data
    flat = np.ones((3, N, T)) * np.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    assert est.score(x, flat) == 0
    one = Estimator(nn.Linear(2, 1), None, None, SPEC).fit(x, flat[:1])
    for p in one.model_.parameters():
        p.data.zero_()
    assert one.score(x, 0 * flat[:1]) == 1  # exact
    assert one.score(x, flat[:1]) == 0


def test_no_step_that_counts(est, data):
    x, y = data
    assert np.isnan(est.score(x, np.full_like(y, np.nan)))


def test_a_large_offset_costs_no_digits(data):
    x, _ = data
    est = Estimator(nn.Linear(2, 1), None, None, SPEC).fit(x, x[:1])
    yhat = est.predict(x)
    est.model_.bias.data += 1e8
    y = fitted_to(yhat) + 1e8
    assert est.score(x, y) == pytest.approx(r2(y - 1e8, est.predict(x) - 1e8), rel=1e-6)


def test_several_outputs_are_averaged(data):
    x, y = data
    y = (y[1:2], np.stack([y[1], -y[1], y[1]]))
    est = Estimator(Two(), None, None, SPEC, random_state=0).fit(x, y)
    w = np.random.default_rng(2).random((N, T))
    for weight in (None, w):
        expected = np.mean([r2(a, b, weight) for a, b in zip(y, est.predict(x), strict=True)])
        assert est.score(x, y, weight) == near(expected)
    y[0][0, 2, 5] = np.nan  # not live in the one, not live in the other
    y[1][:, 2, 5] = np.nan
    expected = np.mean([r2(a, b) for a, b in zip(y, est.predict(x), strict=True)])
    assert est.score(x, y) == near(expected)


def test_integer_targets_of_a_regression(est, data):
    x, y = data
    est = Estimator(nn.Linear(2, 1), None, None, SPEC, random_state=0).fit(x, y[1:2])
    whole = np.round(3 * est.predict(x)).astype("int32")
    assert est.score(x, whole) == near(r2(whole.astype(float), est.predict(x)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_few_digits_are_added_up_in_double_precision(data, dtype):
    x, y = data
    x = x.astype(dtype)
    est = Estimator(nn.Linear(2, 1), None, None, SPEC, random_state=0).fit(x, y[1:2].astype(dtype))
    close = fitted_to(est.predict(x)).astype(dtype)
    assert est.score(x, close) == near(r2(close.astype(float), est.predict(x).astype(float)))


@pytest.mark.parametrize("batchsize", [1, 2, 100])
def test_the_order_of_the_work_does_not_matter(est, data, batchsize):
    x, _ = data
    y = fitted_to(est.predict(x))
    expected = est.score(x, y)
    spec = est.spec
    try:
        est.set_params(spec=Spec(batchsize=batchsize))
        assert est.score(x, y) == near(expected)
    finally:
        est.set_params(spec=spec)


# -- labels -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labels():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, N, T))
    return x, (x[:1] > 0).astype(int) + (x[1:] > 0.5)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, nn.NLLLoss()])
def test_accuracy(labels, loss):
    x, y = labels
    last = [nn.LogSoftmax(-1)] if isinstance(loss, nn.NLLLoss) else []
    est = Estimator(
        nn.Sequential(GRU(2, 8), nn.Linear(8, 3), *last), loss, None, SPEC, random_state=0
    ).fit(x, y)
    guess = est.predict(x).argmax(0)
    assert est.score(x, y) == near(accuracy_score(y[0].ravel(), guess.ravel()))
    w = np.random.default_rng(2).random((N, T))
    w[3] = 0
    assert est.score(x, y, w) == near(
        accuracy_score(y[0].ravel(), guess.ravel(), sample_weight=w.ravel())
    )
    lengths = np.full(N, T)
    lengths[2] = 10
    live = np.arange(T) < lengths[:, None]
    assert est.score(x, y, lengths=lengths) == near((guess == y[0])[live].mean())
    assert est.score(x, guess[None]) == 1
    assert est.score(x, (guess[None] + 1) % 3) == 0


def test_labels_to_be_ignored_do_not_count(labels):
    x, y = labels
    y = y.copy()
    y[0, 2, 5:] = -100
    est = Estimator(
        nn.Sequential(GRU(2, 8), nn.Linear(8, 3)), nn.CrossEntropyLoss(), None, SPEC, random_state=0
    )
    live = y[0] >= 0
    assert est.fit(x, y).score(x, y) == near((est.predict(x).argmax(0) == y[0])[live].mean())
    assert np.isnan(est.score(x, np.full_like(y, -100)))


def test_labels_without_a_prediction_are_told_of(labels):
    x, y = labels[0].copy(), labels[1].copy()
    est = Estimator(
        nn.Sequential(GRU(2, 8), nn.Linear(8, 3)), nn.CrossEntropyLoss(), None, SPEC, random_state=0
    ).fit(x, y)
    x[:, 2, 50:60] = np.nan
    y[0, 2, 55:90] = -100
    live = (y[0] >= 0) & ~np.isnan(x[0])
    guess = est.predict(x).argmax(0)
    with pytest.warns(UserWarning, match=UNPREDICTED.format(5, N * T - 35)):
        assert est.score(x, y) == near((guess == y[0])[live].mean())


def test_labels_must_be_one_feature_for_each_output(labels):
    x, y = labels
    est = Estimator(nn.Linear(2, 3), nn.CrossEntropyLoss(), None, SPEC, random_state=0).fit(x, y)
    for given, features in [(np.concatenate([y, y]), "2"), ((y, y), "1, 1")]:
        with pytest.raises(ShapeError) as caught:
            est.score(x, given)
        assert all(
            part in str(caught.value) for part in (f"y has {features} features", "score needs 1")
        )


@pytest.mark.slow
def test_accuracy_of_the_default_model(labels):
    x, y = labels
    adam = partial(torch.optim.Adam, lr=0.05)
    est = Estimator(
        None, nn.CrossEntropyLoss(), adam, Spec(epochs=15, batchsize=7, seqsize=50), random_state=0
    )
    assert est.fit(x, y).score(x, y) > 0.9
    assert est.n_outputs_ == 3


# -- losses whose outputs are in another unit than the targets -------------------------------------------


OTHER_UNITS = [
    (nn.BCEWithLogitsLoss(), lambda o, y: np.logaddexp(0, np.where(y > 0, -o, o))),
    (F.binary_cross_entropy_with_logits, lambda o, y: np.logaddexp(0, np.where(y > 0, -o, o))),
    (nn.PoissonNLLLoss(), lambda o, y: np.exp(o) - y * o),
    (nn.SoftMarginLoss(), lambda o, y: np.log1p(np.exp(-y * o))),
]


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(("loss", "by_hand"), OTHER_UNITS)
@pytest.mark.parametrize("kind", [Estimator, EstimatorRegressor])
def test_scores_are_minus_the_loss_where_the_outputs_are_in_another_unit(loss, by_hand, kind, rng):
    x = rng.normal(size=(2, N, 43))
    y = (x > 0).astype(float)
    y[1, 2, 5:9] = np.nan
    # folds, burn-in and windows are of the training
    spec = Spec(epochs=2, batchsize=5, seqsize=4, burn_in=3, rebatch=True)
    est = kind(nn.Sequential(LSTM(2, 3), nn.Linear(3, 2)), loss, None, spec, random_state=0)
    each = np.where(np.isnan(y), np.nan, by_hand(est.fit(x, y).predict(x), y))
    assert est.score(x, y) == near(-np.nanmean(each))
    assert est.score(samples(x), samples(y)) == near(-np.nanmean(each))
    w = rng.random((N, 43))
    live = ~np.isnan(y)
    mean = np.average(each[live], weights=np.broadcast_to(w, y.shape)[live])
    assert est.score(x, y, w) == near(-mean)
    lengths = np.r_[43, 1, np.full(N - 2, 20)]
    counts = live & (np.arange(43) < lengths[:, None])
    assert est.score(x, y, lengths=lengths) == near(-each[counts].mean())
    assert np.isnan(est.score(x, y * np.nan))


def own_loss(model, xs, ys):
    return F.binary_cross_entropy_with_logits(model(xs), ys)


def own_criterion(out, y):
    return F.binary_cross_entropy_with_logits(out, y, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), own_loss, own_criterion])
def test_a_search_finds_the_setting_that_learns_several_labels(loss, rng):
    x = rng.normal(size=(3, 12, 30))
    y = (x[:2] > 0.5).astype(float)
    opt = partial(torch.optim.AdamW, lr=0.01)
    model = partial(nn.Linear, 3, 2)  # built anew, from the random state
    est = Estimator(model, loss, opt, Spec(epochs=25, batchsize=4), random_state=0)
    search = GridSearchCV(est, {"opt__lr": [1e-5, 0.1]}, cv=2).fit(samples(x), samples(y))
    assert search.best_params_ == {"opt__lr": 0.1}
    right = []
    for lr in (1e-5, 0.1):  # by hand
        fitted = est.set_params(opt__lr=lr).fit(x[:, :6], y[:, :6])
        right.append(((fitted.predict(x[:, 6:]) > 0) == y[:, 6:]).mean())
    assert right[0] < 0.75 < 0.9 < right[1]


def test_probabilities_as_targets_of_cross_entropy(rng):
    x = rng.normal(size=(3, N, 20))
    y = rng.random((3, N, 20))
    y /= y.sum(0)
    loss = nn.CrossEntropyLoss()
    est = Estimator(nn.Linear(3, 3), loss, None, SPEC, random_state=0).fit(x, y)
    z = est.predict(x)
    log_p = z - np.log(np.exp(z).sum(0))
    assert est.score(x, y) == near((y * log_p).sum(0).mean())


@pytest.mark.parametrize("names", [["up", "down"], [0, 2]])
@pytest.mark.parametrize("kind", ["window", "criterion"])
def test_classifiers_with_a_loss_of_their_own_have_the_accuracy(rng, names, kind):
    def of_window(model, xs, ys):
        return F.cross_entropy(model(xs).flatten(0, 1), ys.flatten())

    def criterion(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten().long(), reduction="none").view(
            out.shape[:2]
        )

    x = rng.normal(size=(2, N, 20))
    y = np.array(names)[(x[:1] > 0).astype(int)]
    loss = of_window if kind == "window" else criterion
    est = EstimatorClassifier(nn.Linear(2, 2), loss, None, SPEC, random_state=0).fit(x, y)
    assert est.score(x, y) == near((est.predict(x) == y).mean())


# -- from files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memmap", "h5py", "time-major", "torch"])
def test_targets_from_a_file(est, data, labels, kind, tmp_path):
    x, _ = data
    y = fitted_to(est.predict(x))
    y[:, 3, 5:90] = np.nan
    w = np.random.default_rng(2).random((N, T))
    expected = est.score(x, y), est.score(x, y, w)
    with h5py.File(tmp_path / "data.h5", "w") as f:
        if kind == "h5py":
            y, w = f.create_dataset("y", data=y), f.create_dataset("w", data=w)
        elif kind == "torch":
            y, w = torch.tensor(y), torch.tensor(w)
        else:
            shape = y.shape if kind == "memmap" else y.shape[::-1]
            m = np.memmap(tmp_path / "y", y.dtype, "w+", shape=shape)
            m = m if kind == "memmap" else m.transpose(2, 1, 0)
            m[:], y = y, m
        assert (est.score(x, y), est.score(x, y, w)) == expected
    x, y = labels
    classifier = Estimator(nn.Linear(2, 3), nn.CrossEntropyLoss(), None, SPEC, random_state=0).fit(
        x, y
    )
    m = np.memmap(tmp_path / "labels", "i4", "w+", shape=y.shape)
    m[:] = y
    assert classifier.score(x, m) == classifier.score(x, y)


def test_only_one_window_of_targets_is_read_at_a_time(est, data, monkeypatch):
    monkeypatch.setattr(predictor, "MAX_ACTIVATION_BYTES", 1 << 16)
    x, y = (np.tile(a, 5) for a in data)
    spy = Spy(y)
    assert est.score(x, spy) == near(est.score(x, y))
    assert max(spy.sizes) <= y.size / 4
    assert sum(spy.sizes) >= y.size


class Spy:
    """An array on a disk, that notes what is read."""

    def __init__(self, a):
        self.a, self.shape, self.dtype, self.sizes = a, a.shape, a.dtype, []

    def __getitem__(self, index):
        part = self.a[index]
        self.sizes.append(part.size)
        return part
