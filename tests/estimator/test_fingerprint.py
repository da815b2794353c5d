"""A checkpoint folder of another fit is refused, whatever differs, and the message says what."""

import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from fluxutils_py import (
    Estimator,
    Spec,
    samples,
    seqloss,
    timesteps,
)
from fluxutils_py.data import digest as digest_module
from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.fingerprint import LISTED, join_differences
from fluxutils_py.nn import HFGRU, LSTM
from fluxutils_py.optim import Chain, Clip
from fluxutils_py.training import Checkpointer
from tests.plain_networks import plain_classifier, plain_regressor

N, T = 7, 11
RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, N, T))
Y = np.cumsum(X.mean(0, keepdims=True), 2)
W = np.arange(1.0, N + 1)


class Lazy:
    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key):
        return self.array[key]


class Scaled(nn.Module):
    """A layer of one's own, with settings of many kinds, and with what it remembers."""

    def __init__(self, by=1.0, shape=(1,), table=None, activation=torch.tanh, flags=()):
        super().__init__()
        self.by, self.shape, self.table, self.activation, self.flags = (
            by,
            shape,
            table or {},
            activation,
            set(flags),
        )
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return self.activation(x) * self.by


class Rescaled(Scaled):
    def forward(self, x):
        return self.activation(x) * self.by + 1


class Distance:
    """A criterion that is an object."""

    def __init__(self, power, log=()):
        self.power, self.log = power, list(log)

    def __call__(self, yhat, y):
        return (yhat - y).abs() ** self.power


def net(layer=LSTM, *others, **settings):
    torch.manual_seed(1)
    return nn.Sequential(layer(2, 4, **settings), *others, nn.Linear(4, 1)).double()


def criterion(power):
    return lambda yhat, y: (yhat - y).abs() ** power


def other_code(power):
    return lambda yhat, y: 2 * (yhat - y).abs() ** power


def own(yhat, y, scale=1.0):
    return scale * (yhat - y) ** 2


def in_groups(*rates, model=None):
    model = net() if model is None else model
    groups = [
        {"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, rates, strict=True)
    ]
    return {"model": model, "opt": Adam(groups)}


def after(n, gamma):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: gamma if k > n else 1.0)


def make(
    folder=None,
    model=None,
    loss=None,
    opt=Adam,
    callbacks=(),
    random_state=0,
    kind=Estimator,
    **spec,
):
    callbacks = [*callbacks, *([] if folder is None else [Checkpointer(folder)])]
    spec = Spec(**{"epochs": 1, "batchsize": 4, "seqsize": 4, "rebatch": False, **spec})
    settings = {"callbacks": callbacks, "random_state": random_state, "verbose": False}
    return kind(net() if model is None else model, loss, opt, spec, **settings)


def message(folder, settings, arguments):
    """The reason of the refusal, without digests."""
    est = make(folder, **settings)
    before = dict(vars(est))
    with pytest.raises(LoadError) as caught:
        est.fit(**{"x": X, "y": Y, **arguments})
    assert vars(est) == before
    found = re.search(
        "does not fit, its fit: (.*); call fit with the same data and settings", str(caught.value)
    )
    return re.sub("[0-9a-f]{12}", "..", found[1])


# -- settings ------------------------------------------------------------------------------------------

POWERS = partial(nn.BCEWithLogitsLoss, pos_weight=None)
SETTINGS = {
    "delta of a loss": (
        {"loss": nn.HuberLoss(delta=1)},
        {"loss": nn.HuberLoss(delta=2.5)},
        "loss.delta: 1 -> 2.5",
    ),
    "a loss's partial": (
        {"loss": partial(F.huber_loss, delta=1.0)},
        {"loss": partial(F.huber_loss, delta=0.5)},
        "loss.delta: 1 -> 0.5",
    ),
    "a partial within seqloss": (
        {"loss": seqloss(partial(own, scale=1.0))},
        {"loss": seqloss(partial(own, scale=2.0))},
        "loss.scale: 1 -> 2",
    ),
    "tensor of a loss": (
        {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0]))},
        {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))},
        "loss.pos_weight: (1,) float32 .. -> (1,) float32 ..",
    ),
    "closure of a loss": (
        {"loss": criterion(2.0)},
        {"loss": criterion(1.5)},
        "loss.power: 2 -> 1.5",
    ),
    "code of a loss": (
        {"loss": criterion(2.0)},
        {"loss": other_code(2.0)},
        "loss: criterion.<locals>.<lambda> -> other_code.<locals>.<lambda>, the code of loss: .. "
        "-> ..",
    ),
    "a loss that is an object": (
        {"loss": Distance(2.0)},
        {"loss": Distance(1.5)},
        "loss.power: 2 -> 1.5",
    ),
    "a loss that is a method": (
        {"loss": Distance(2.0).__call__},
        {"loss": Distance(1.5).__call__},
        "loss.__self__.power: 2 -> 1.5",
    ),
    "dropout": (
        {"model": net(num_layers=2)},
        {"model": net(num_layers=2, dropout=0.5)},
        "model.0.dropout: 0 -> 0.5, model.0.module.dropout: 0 -> 0.5",
    ),
    "a layer's dropout": (
        {"model": net(LSTM, nn.Dropout(0.1))},
        {"model": net(LSTM, nn.Dropout(0.2))},
        "model.1.p: 0.1 -> 0.2",
    ),
    "activation": (
        {"model": net(LSTM, nn.Tanh())},
        {"model": net(LSTM, nn.ReLU())},
        "model.1: Tanh -> ReLU, ",
    ),
    "setting of an activation": (
        {"model": net(LSTM, nn.LeakyReLU(0.1))},
        {"model": net(LSTM, nn.LeakyReLU(0.2))},
        "model.1.negative_slope: 0.1 -> 0.2",
    ),
    "setting of a cell": (
        {"model": net(HFGRU)},
        {"model": net(HFGRU, alpha=0.5)},
        "model.0.alpha: 1 -> 0.5, ",
    ),
    "number in a module": (
        {"model": net(LSTM, Scaled())},
        {"model": net(LSTM, Scaled(2.0))},
        "model.1.by: 1 -> 2",
    ),
    "tuple in a module": (
        {"model": net(LSTM, Scaled())},
        {"model": net(LSTM, Scaled(shape=(1, 2)))},
        "model.1.shape: (1) -> (1, 2)",
    ),
    "mapping in a module": (
        {"model": net(LSTM, Scaled(table={"a": 1}))},
        {"model": net(LSTM, Scaled(table={"a": 2}))},
        "model.1.table.a: 1 -> 2",
    ),
    "function in a module": (
        {"model": net(LSTM, Scaled())},
        {"model": net(LSTM, Scaled(activation=torch.sigmoid))},
        "model.1.activation: _VariableFunctionsClass.tanh -> _VariableFunctionsClass.sigmoid",
    ),
    "code of a module": (
        {"model": net(LSTM, Scaled())},
        {"model": net(LSTM, Rescaled())},
        "model.1: Scaled -> Rescaled, the code of model.1.forward: .. -> ..",
    ),
    "a group's learning rate": (
        in_groups(0.1, 0.2),
        in_groups(0.1, 0.3),
        "lr of the optimizer's group 1: 0.2 -> 0.3",
    ),
    "betas": (
        {"opt": partial(Adam, betas=(0.8, 0.9))},
        {"opt": partial(Adam, betas=(0.8, 0.99))},
        "betas: (0.8, 0.9) -> (0.8, 0.99)",
    ),
    "chain": (
        {"opt": Chain(Clip(0.5), SGD)},
        {"opt": Chain(Clip(0.25), SGD)},
        "what is chained before the optimizer.0.thresh: 0.5 -> 0.25",
    ),
    "random_state": ({"random_state": 0}, {"random_state": 1}, "random_state: 0 -> 1"),
    "no random_state": ({"random_state": None}, {"random_state": 1}, "random_state: None -> 1"),
    "generator": (
        {"random_state": np.random.default_rng(0)},
        {"random_state": 1},
        "random_state: Generator -> 1",
    ),
    "scheduler": (
        {"lr_schedule": partial(lr_scheduler.MultiStepLR, milestones=[3, 5])},
        {"lr_schedule": partial(lr_scheduler.MultiStepLR, milestones=[3, 6])},
        "spec.lr_schedule.milestones: (3, 5) -> (3, 6)",
    ),
    "closure of a scheduler": (
        {"lr_schedule": after(1, 0.5)},
        {"lr_schedule": after(2, 0.5)},
        "spec.lr_schedule.n: 1 -> 2",
    ),
    "no scheduler": (
        {},
        {"lr_schedule": partial(lr_scheduler.StepLR, step_size=1)},
        "spec.lr_schedule: none -> StepLR, spec.lr_schedule.step_size: none -> 1",
    ),
    "when the scheduler steps": (
        {"lr_schedule": partial(lr_scheduler.StepLR, step_size=1)},
        {"lr_schedule": ("step", partial(lr_scheduler.StepLR, step_size=1))},
        "spec.lr_schedule.every: none -> step",
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("case", SETTINGS)
def test_other_settings_are_refused_and_named(tmp_path, case):
    before, now, told = SETTINGS[case]
    y = {"y": (Y > 0).astype(float)}
    make(tmp_path, **before).fit(X, **y)
    found = message(tmp_path, now, y)
    assert found.startswith(told) if told.endswith(", ") else found == told
    make(tmp_path, **before).fit(X, **y)  # its own goes on


def test_of_many_differences_the_first_are_listed():
    changed = [f"setting {i}" for i in range(LISTED + 2)]
    assert join_differences(changed) == ", ".join([*changed[:LISTED], "and 2 more"])
    assert join_differences(changed[:LISTED]) == ", ".join(changed[:LISTED])


@pytest.mark.slow
def test_many_differences_are_counted(tmp_path):
    make(tmp_path).fit(X, Y)
    assert message(tmp_path, {"opt": SGD, "clip": 1.0, "batchsize": 3, "random_state": 3}, {}) == (
        "spec.batchsize: 4 -> 3, spec.clip: None -> 1, the optimizer: Adam -> SGD, momentum: none "
        "-> 0, dampening: none -> 0, and 6 more"
    )


def test_hyper_parameters_of_ready_made_estimators_are_named(tmp_path):
    def make(**settings):
        return plain_regressor(
            4, epochs=1, random_state=0, callbacks=Checkpointer(tmp_path), **settings
        )

    make(lr=0.001).fit(X, Y)
    with pytest.raises(LoadError, match=r"its fit: lr: 0\.001 -> 0\.002; call fit"):
        make(lr=0.002).fit(X, Y)
    with pytest.raises(LoadError, match="scale_target: True -> False"):
        make(lr=0.001, scale_target=False).fit(X, Y)


# -- data ----------------------------------------------------------------------------------------------


def changed(a, *place):
    a = a.copy()
    a[place] += 1e-9
    return a


X_CHANGED, Y_CHANGED = changed(X, 1, 3, 5), changed(Y, 0, 3, 5)
LENGTHS = np.array([11, 3, 9, 4, 11, 5, 7])
LABELS = np.where(Y[0, :, -1] > 0, "up", "down")
DATA = {
    "x": ({}, {"x": X_CHANGED}, "the values of x (digest): .. -> .."),
    "y": ({}, {"y": Y_CHANGED}, "the values of y (digest): .. -> .."),
    "one of two": (
        {"x": (X, X[:1])},
        {"x": (X, X_CHANGED[1:])},
        "the values of x[1] (digest): .. -> ..",
    ),
    "validation data": (
        {"validation_data": (X, Y)},
        {"validation_data": (X_CHANGED, Y_CHANGED)},
        "the values of validation x (digest): .. -> .., the values of validation y (digest): .. "
        "-> ..",
    ),
    "weights": (
        {"sample_weight": W},
        {"sample_weight": W[::-1]},
        "the values of sample_weight (digest): .. -> ..",
    ),
    "validation weights": (
        {"validation_data": (X, Y, W)},
        {"validation_data": (X, Y, W[::-1])},
        "the values of validation sample_weight (digest): .. -> ..",
    ),
    "lengths": (
        {"lengths": LENGTHS},
        {"lengths": LENGTHS[::-1]},
        "the starts and lengths of series: .. -> ..",
    ),
    "starts": (
        {"starts": 11 - LENGTHS},
        {"starts": (11 - LENGTHS)[::-1]},
        "the starts and lengths of series: .. -> ..",
    ),
    "a view's": (
        {"x": samples(X), "y": samples(Y)},
        {"x": samples(X_CHANGED), "y": samples(Y)},
        "the values of x",
    ),
    "rows of a view": (
        {"x": timesteps(X)[:8], "y": timesteps(Y)[:8]},
        {"x": timesteps(X)[1:9], "y": timesteps(Y)[1:9]},
        "the values of x",
    ),
    "one target per series": (
        {"y": Y[0, :, -1]},
        {"y": Y_CHANGED[0, :, -1] + np.arange(N)},
        "the values of y",
    ),
    "what is read lazily": (
        {"x": Lazy(X)},
        {"x": Lazy(X_CHANGED)},
        "the values of x (digest): .. -> ..",
    ),
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)).double()

    def forward(self, a, b):
        return self.net(torch.cat([a, b], -1))


@pytest.mark.few
@pytest.mark.parametrize("case", DATA)
def test_data_that_differ_anywhere_are_refused(tmp_path, case):
    before, now, told = DATA[case]
    settings = {"model": Two()} if case == "one of two" else {}
    before, now = {"x": X, "y": Y, **before}, {"x": X, "y": Y, **now}
    make(tmp_path, **settings).fit(**before)
    assert message(tmp_path, settings, now).startswith(told)
    make(tmp_path, **settings).fit(**before)


@pytest.mark.slow
def test_labels_that_differ_are_refused(tmp_path):
    def make():
        return plain_classifier(4, epochs=1, random_state=0, callbacks=Checkpointer(tmp_path))

    make().fit(X, LABELS)
    with pytest.raises(LoadError, match=r"the values of y \(digest\)"):
        make().fit(X, np.roll(LABELS, 1))
    with pytest.raises(LoadError, match=r"classes: .*'down', 'up'\] -> \['a', 'z'"):
        make().fit(X, np.where(LABELS == "up", "z", "a"))


@pytest.mark.slow
def test_of_large_files_the_sample_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(digest_module, "WHOLE", 100)
    x = RNG.normal(size=(2, N, 1000))
    y = x[:1]
    make(tmp_path).fit(Lazy(x), y)
    last, between = changed(x, 1, 6, 999), changed(x, 1, 3, 100)
    assert message(tmp_path, {}, {"x": Lazy(last), "y": y}) == "the values of x (digest): .. -> .."
    make(tmp_path).fit(Lazy(between), y)  # not seen, as the documentation of Checkpointer says
    make(tmp_path).fit(x, y)  # the same in memory
    make(tmp_path / "other").fit(x, y)
    make(tmp_path / "other").fit(Lazy(x), y)
    assert (
        message(tmp_path / "other", {}, {"x": between, "y": y})
        == "the values of x (digest): .. -> .."
    )


# -- what may change -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_data_in_other_forms_go_on(tmp_path):
    make(tmp_path).fit(X, Y, sample_weight=W)
    for x in (
        X.astype(">f8"),
        np.asfortranarray(X),
        np.repeat(X, 2, 1)[:, ::2],
        torch.from_numpy(X),
        Lazy(X),
    ):
        assert make(tmp_path).fit(x, Y, sample_weight=W.astype(">f4").astype(int)).n_iter_ == 1


@pytest.mark.few
@pytest.mark.parametrize("late", [False, True])
def test_padding_may_be_anything(tmp_path, late):
    padding = np.arange(T) >= LENGTHS[:, None]
    padding, where = (
        (padding[:, ::-1], {"starts": T - LENGTHS}) if late else (padding, {"lengths": LENGTHS})
    )
    make(tmp_path).fit(X, Y, **where)
    make(tmp_path).fit(np.where(padding, 9.0, X), np.where(padding, -3.0, Y), **where)


ALLOWED = {
    "weights that it starts from": ({"model": net()}, {"model": net().apply(lambda m: None)}),
    "types of numbers": (
        {"opt": partial(Adam, lr=1), "clip": 2},
        {"opt": partial(Adam, lr=1.0), "clip": np.float64(2)},
    ),
    "another generator": (
        {"random_state": np.random.default_rng(0)},
        {"random_state": np.random.default_rng(1)},
    ),
    "fused": ({"opt": partial(AdamW, fused=False)}, {"opt": AdamW}),
    "callbacks": ({}, {"callbacks": [lambda loop: None]}),
    "what a loss has written down": ({"loss": Distance(2.0)}, {"loss": Distance(2.0, log=[1, 2])}),
}


@pytest.mark.few
@pytest.mark.parametrize("case", ALLOWED)
def test_what_does_not_matter_may_change(tmp_path, case):
    before, now = ALLOWED[case]
    make(tmp_path, **before).fit(X, Y)
    est = make(tmp_path, **now, epochs=2).fit(X, Y)
    assert est.n_iter_ == 2


@pytest.mark.slow
def test_a_model_that_was_used_before_is_the_same(tmp_path):
    make(tmp_path).fit(X, Y)
    model = net()
    model(torch.zeros(3, 2, dtype=torch.float64))
    make(tmp_path, model=model).fit(X, Y)


@pytest.mark.slow
def test_functions_that_refer_to_each_other_are_described(tmp_path):
    def ping(yhat, y, n=0):
        return pong(yhat, y) if n else (yhat - y) ** 2

    def pong(yhat, y):
        return ping(yhat, y)

    make(tmp_path, loss=ping).fit(X, Y)
    make(tmp_path, loss=ping).fit(X, Y)


def test_without_a_checkpointer_no_data_are_digested(monkeypatch):
    monkeypatch.setattr("fluxutils_py.estimator.fingerprint.digest_series", None)
    make().fit(X, Y)


def test_a_warm_fit_with_a_schedule_is_of_the_settings_it_began_with(tmp_path):
    halving = {"lr_schedule": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)}
    est = make(tmp_path, **halving).set_params(warm_start=True)
    est.fit(X, Y).fit(X, Y)
    assert est.optimizer_.param_groups[0]["lr"] == 0.001 / 4
    make(tmp_path, **halving).fit(X, Y)
