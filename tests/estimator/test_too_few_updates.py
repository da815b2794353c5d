"""A fit that is too short to learn says so, before it trains; one that has learnt nothing, after."""

import re
import warnings
from functools import partial

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py import Estimator, EstimatorClassifier, SequenceRegressor
from fluxutils_py.data.sequence_windows import SequenceWindows
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.inputs import as_series
from fluxutils_py.nn import LSTM
from tests.plain_networks import LagRegressor


class CountingSGD(torch.optim.SGD):
    """Counts the steps of all its instances."""

    n_steps = 0

    def step(self, *arguments, **options):
        type(self).n_steps += 1
        return super().step(*arguments, **options)


@pytest.fixture
def updates(monkeypatch):
    """Fits, and returns the number of updates that were made, and those that were warned of."""
    monkeypatch.setattr(CountingSGD, "n_steps", 0)

    def fit(est, *data, **arguments):
        before = CountingSGD.n_steps
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            est.fit(*data, **arguments)
        messages = [
            str(w.message)
            for w in found
            if "updates" in str(w.message) or "update in" in str(w.message)
        ]
        assert all(w.filename == __file__ for w in found)
        return CountingSGD.n_steps - before, messages

    return fit


def counted(**spec):
    return Estimator(opt=partial(CountingSGD, lr=1e-3), spec=spec, random_state=0)


X = np.random.default_rng(0).normal(size=(2, 7, 23))  # (F, N, T): 7 series of 23 steps
STARTS = np.array([0, 9, 1, 0, 20, 0, 3])
LESS_THAN_50 = [  # settings, arguments of fit, minibatches with a loss in an epoch
    ({"epochs": 7, "batchsize": 3, "seqsize": 10}, {}, 3 * 3),  # 63 updates
    ({"epochs": 5, "batchsize": 3, "seqsize": 10}, {}, 3 * 3),
    ({"epochs": 3, "batchsize": 3, "seqsize": 10, "overlap": 4}, {}, 3 * 3),
    ({"epochs": 4, "batchsize": 3, "seqsize": 10, "burn_in": 4}, {}, 3 * 2),
    ({"epochs": 1}, {}, 1),
    ({"epochs": 2, "batchsize": 2, "seqsize": 5, "accumulate": 3}, {}, 4 * 5),
    ({"epochs": 80, "batchsize": 7, "seqsize": 5}, {"epochs": 3}, 5),
    ({"epochs": 2, "batchsize": 3, "seqsize": 5}, {"lengths": 23 - STARTS, "starts": STARTS}, 14),
    ({"epochs": 25, "batchsize": 4, "seqsize": None}, {}, 2),  # exactly 50
    ({"epochs": 49}, {}, 1),
    ({"epochs": 50}, {}, 1),
]


@pytest.mark.few
@pytest.mark.parametrize(("spec", "arguments", "n_windows"), LESS_THAN_50)
def test_fewer_than_fifty_updates_are_warned_of_with_the_number_that_an_optimizer_counts(
    updates, spec, arguments, n_windows
):
    n, messages = updates(counted(**spec), X, X[:1], **arguments)
    epochs = arguments.get("epochs", spec["epochs"])
    if n >= 50:
        assert not messages
        return
    (message,) = messages
    assert f" {n} update" in message
    assert f"(epochs={epochs}, minibatches per epoch: {n_windows}" in message
    assert ("accumulate=3" in message) == ("accumulate" in spec)
    assert message.endswith("set more epochs, or a smaller batchsize or seqsize")


@pytest.mark.parametrize("starts", [None, STARTS])
def test_with_one_target_per_series_only_windows_in_which_one_ends_make_updates(updates, starts):
    est = counted(epochs=3, batchsize=4, seqsize=6)
    lengths = None if starts is None else 23 - starts
    n, (message,) = updates(est, X, X[0, :, -1], starts=starts, lengths=lengths)
    assert n == 6 if starts is None else n > 6
    assert f" {n} updates in all" in message


def test_the_warning_of_few_updates_comes_before_training():
    est = counted(epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this fit makes 2 updates in all")
        with pytest.raises(UserWarning, match="2 updates"):
            est.fit(X, X[:1])
    assert not hasattr(est, "model_")


def test_windows_with_a_loss_are_counted_without_a_look_at_the_data():
    class Unread:
        shape, dtype = (2, 7, 23), np.dtype("float32")

        def __getitem__(self, key):
            raise AssertionError(f"{key} was read")

    windows = SequenceWindows(as_series(Unread(), "x"), batchsize=2, seqsize=3)
    assert len(list(windows.indices_with_loss())) == 4 * 8


@pytest.mark.slow
def test_fits_whose_length_the_user_did_not_set_are_not_warned_of(updates):
    est = counted(epochs=1)
    assert updates(est.set_params(warm_start=True), X, X[:1]) == (1, [])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this fit makes")
        counted(epochs=1).partial_fit(X, X[:1])
        Forecaster(h=2, max_steps=3, random_state=0).fit(X[:1])


# -- nothing learnt, as the losses tell after a fit ----------------------------------------------

LONG = np.random.default_rng(1).normal(size=(3, 14, 60)).astype("float32")  # (F, N, T)
SPEC = {"epochs": 6, "batchsize": 5, "seqsize": 9}  # 126 updates


def losses_of(message):
    """The loss of the model, and that of a constant."""
    found = re.fullmatch(
        r"after (\d+) updates the loss on the training data is (\S+), above the (\S+) of a "
        r"constant output: the model has learnt nothing yet\..*learning rate.*",
        message,
    )
    n, of_model, of_constant = found.groups()
    assert int(n) == 126
    return float(of_model), float(of_constant)


def slow_fit(y, loss, n_out, *, lr=1e-4, **arguments):
    """Fit with such a small rate that nothing is learnt; return the estimator and its warnings."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(LSTM(3, 4), torch.nn.Linear(4, n_out))
    with torch.no_grad():
        model[1].bias += torch.linspace(1, 2, n_out)
    est = Estimator(model, loss, partial(torch.optim.SGD, lr=lr), SPEC, random_state=0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        est.fit(LONG, y, **arguments)
    return est, [str(w.message) for w in found if "learnt nothing" in str(w.message)]


def mean_loss(f, outputs, targets, weight=1.0):
    """The weighted mean of an elementwise loss of torch, over what has a target."""
    each = f(torch.as_tensor(outputs), torch.as_tensor(targets), reduction="none").numpy()
    weight = np.where(np.isnan(each), 0, np.broadcast_to(weight, each.shape))
    return float(np.nansum(each * weight) / weight.sum())


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_squared_errors_above_the_variance_are_warned_of_with_both(weighted, missing):
    y = 3 + LONG[:2].astype(float)
    weight = np.ones((14, 60))
    if weighted:
        weight = np.random.default_rng(2).integers(1, 4, size=(14, 60)).astype(float)
    if missing:
        y[:, :2, 40:] = np.nan
        y[:, 3] = np.nan
    est, (message,) = slow_fit(y, torch.nn.MSELoss(), 2, sample_weight=weight if weighted else None)
    of_model, of_constant = losses_of(message)
    weights = np.where(np.isnan(y), 0, weight)
    mean = np.average(np.nan_to_num(y), axis=(1, 2), weights=weights)
    constant = np.full(y.shape, mean[:, None, None])
    assert of_constant == pytest.approx(
        mean_loss(torch.nn.functional.mse_loss, constant, y, weight), rel=1e-3
    )
    assert of_model == pytest.approx(min(est.loss_curve_[-2:]), rel=1e-3)


@pytest.mark.slow
def test_several_rare_labels_at_a_step_are_compared_with_their_frequencies():
    y = (LONG > [[[1.5]], [[1]], [[2]]]).astype("float32")
    _, (message,) = slow_fit(y, torch.nn.BCEWithLogitsLoss(), 3)
    p = y.mean(axis=(1, 2))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    of_model, of_constant = losses_of(message)
    assert of_constant == pytest.approx(entropy, rel=1e-3)
    assert of_model > 2 * entropy


@pytest.mark.slow
@pytest.mark.parametrize("class_weight", [None, [1.0, 5.0, 2.0, 1.0]])
def test_classes_are_compared_with_their_frequencies(class_weight):
    y = np.digitize(LONG[:1], [1.2, 2.0])  # three of four classes
    y[0, 0, :7] = -100  # missing
    weight = None if class_weight is None else torch.tensor(class_weight)
    _, (message,) = slow_fit(y, torch.nn.CrossEntropyLoss(weight), 4)
    counts = np.bincount(y[y >= 0], class_weight and np.take(class_weight, y[y >= 0]), 4)[:3]
    p = counts / counts.sum()
    # class weights count within a window, and windows by their steps
    tolerance = 1e-3 if class_weight is None else 0.05
    assert losses_of(message)[1] == pytest.approx(-(p * np.log(p)).sum(), rel=tolerance)


@pytest.mark.slow
def test_weights_of_steps_change_the_frequencies():
    y = (LONG[:1] > 1.2).astype(int)
    weight = np.where(y[0] == 1, 4.0, 1.0)
    _, (message,) = slow_fit(y, torch.nn.CrossEntropyLoss(), 3, sample_weight=weight)
    p = np.average(y[0], weights=weight)
    assert p > 2 * y.mean()
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    assert losses_of(message)[1] == pytest.approx(entropy, rel=1e-3)


@pytest.mark.slow
def test_of_several_outputs_the_losses_add_up():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LSTM(3, 4)

        def forward(self, x):
            h = self.layer(x)
            return h[..., :1] + 4, h[..., 1:3] + 5

    est = Estimator(Two(), opt=partial(torch.optim.SGD, lr=1e-6), spec=SPEC, random_state=0)
    with pytest.warns(UserWarning, match="learnt nothing") as found:
        est.fit(LONG, (LONG[:1], LONG[1:]))
    variances = LONG.var(axis=(1, 2))
    expected = variances[0] + variances[1:].mean()
    assert losses_of(str(found[0].message))[1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seqsize", [7, None])
def test_with_one_target_per_series_the_constant_is_that_of_the_last_steps(seqsize):
    y = 4 + LONG[0, :, -1]
    est = SequenceRegressor(
        cell="lstm",
        hidden_size=3,
        scale_target=False,
        lr=1e-6,
        epochs=50,
        batchsize=14,
        seqsize=seqsize,
        random_state=0,
    )
    with pytest.warns(UserWarning, match="learnt nothing") as found:
        est.fit(LONG, y)
    assert f"above the {y.var():.4g} of" in str(found[0].message)


@pytest.mark.slow
def test_a_fit_that_learns_is_not_warned_of_nor_one_of_noise():
    _, found = slow_fit(LONG[:1], torch.nn.MSELoss(), 1, lr=0.3)
    assert not found
    noise = np.random.default_rng(3).normal(size=(1, 14, 60)).astype("float32")
    _, found = slow_fit(noise, torch.nn.MSELoss(), 1, lr=0.05)
    assert not found


@pytest.mark.filterwarnings("error:after")
def test_one_epoch_says_nothing_as_its_loss_is_that_of_a_model_that_begins_to_learn():
    y = 9 + LONG[:1]
    opt = partial(torch.optim.SGD, lr=0.1)
    spec = {"epochs": 1, "batchsize": 2, "seqsize": 6}
    est = Estimator(torch.nn.Linear(3, 1), opt=opt, spec=spec, random_state=0).fit(LONG, y)
    assert np.square(est.predict(LONG) - y).mean() < y.var() < est.loss_


@pytest.mark.slow
@pytest.mark.filterwarnings("error:after")
def test_losses_whose_best_constant_is_unknown_and_later_calls_say_nothing():
    assert not slow_fit(3 + LONG[:1], lambda yhat, y: (yhat - y).square(), 1)[1]
    assert not slow_fit(3 + LONG[:1], torch.nn.L1Loss(), 1)[1]
    assert not slow_fit(LONG[:1] ** 2, torch.nn.PoissonNLLLoss(), 1)[1]
    labels = (LONG[:1] > 1.2).astype(int)
    assert not slow_fit(labels, torch.nn.CrossEntropyLoss(label_smoothing=0.2), 3)[1]
    est, (_,) = slow_fit(3 + LONG[:1], torch.nn.MSELoss(), 1)
    est.set_params(spec__seqsize=1).partial_fit(LONG, 3 + LONG[:1])  # 180 updates


@pytest.mark.slow
def test_data_that_are_read_from_files_are_looked_at_as_well(tmp_path):
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["y"] = 5 + LONG[:1]
    with h5py.File(tmp_path / "y.h5") as file:
        _, (message,) = slow_fit(file["y"], torch.nn.MSELoss(), 1)
    assert losses_of(message)[1] == pytest.approx(LONG[0].var(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [torch.nn.MSELoss(), torch.nn.BCEWithLogitsLoss()])
def test_of_constant_targets_there_is_nothing_to_learn(loss):
    assert not slow_fit(np.ones((1, 14, 60), "float32"), loss, 1)[1]


# -- what a fit reads ------------------------------------------------------------------------------


class Counted:
    """An array whose reads are counted; no ndarray, so that windows are read one by one."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.n_read = 0

    def __getitem__(self, key):
        block = self.values[key]
        self.n_read += block.nbytes
        return block


SHORT = {"hidden_size": 3, "epochs": 2, "random_state": 0}
READS = {  # of each value of the inputs, and of the targets; some read for scales or labels first
    "one epoch": (lambda: Estimator(torch.nn.Linear(3, 1), spec=SPEC | {"epochs": 1}), 1, 1),
    "six epochs": (lambda: Estimator(torch.nn.Linear(3, 1), spec=SPEC), 6, 6),
    "labels": (lambda: EstimatorClassifier(torch.nn.Linear(3, 2), spec=SPEC | {"epochs": 1}), 1, 2),
    "scales": (lambda: SequenceRegressor(cell="lstm", **SHORT), 3, 4),
    "a part held out": (
        lambda: SequenceRegressor(cell="lstm", early_stopping=True, **SHORT),
        2.7,
        3.6,
    ),
    "closed form": (lambda: LagRegressor(n_lags=2), 2, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_each_epoch_reads_the_data_once(name):
    make, of_inputs, of_targets = READS[name]
    x = Counted(np.random.default_rng(0).normal(size=(3, 20, 400)).astype("float32"))
    targets = 5 + x.values[:1]
    y = Counted((targets > 5).astype(int) if name == "labels" else targets)
    make().fit(x, y)
    assert of_inputs <= x.n_read / x.values.nbytes <= 1.1 * of_inputs
    assert of_targets <= y.n_read / y.values.nbytes <= 1.1 * of_targets
