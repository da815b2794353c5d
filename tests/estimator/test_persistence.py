"""Saved estimators come back whole, hold no code, and say what does not fit."""

import contextlib
import copy
import io
import os
import pickle
import resource
import stat
import zipfile
from collections import OrderedDict, namedtuple
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from torch import nn
from torch.optim import SGD, Adam, RMSprop, lr_scheduler

import fluxutils_py.files as files
from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceRegressor,
    Spec,
    loadstates,
    net2vec,
    samples,
    seqloss,
    states,
)
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    SMGU,
    GaussianNoise,
    Recur,
    RNNStack,
    WinsorNorm,
)
from fluxutils_py.nn.cells import FLSTMCell, HFGRUCell
from fluxutils_py.nn.layers import DenseReLU, ffnn
from fluxutils_py.nn.model_windows import run_window
from tests.plain_networks import plain_classifier, plain_regressor

N, T = 6, 20
X = np.random.default_rng(0).normal(size=(2, N, T)).astype("float32")
Y = X.mean(0, keepdims=True)
SPEC = Spec(epochs=2, batchsize=4, seqsize=5, shuffle=True)
SIZES = {"epochs": 1, "batchsize": 3, "seqsize": 4}


def assert_same(a, b, x=X):
    assert np.array_equal(a.predict(x), b.predict(x))
    for name in ("loss_", "loss_curve_", "validation_loss_curve_", "n_iter_", "n_features_in_"):
        assert repr(getattr(a, name)) == repr(getattr(b, name)), name
    for record, other in zip(a.history_, b.history_, strict=True):
        assert {**record, "seconds": 0} == {**other, "seconds": 0}
    assert a.n_outputs_ == b.n_outputs_
    assert torch.equal(a.grad_, b.grad_)
    assert [n for n, _ in a.model_.named_parameters()] == [
        n for n, _ in b.model_.named_parameters()
    ]
    assert [p.requires_grad for p in a.model_.parameters()] == [
        p.requires_grad for p in b.model_.parameters()
    ]
    for (n, s), (m, t) in zip(
        a.model_.state_dict().items(), b.model_.state_dict().items(), strict=True
    ):
        assert n == m
        assert s.dtype == t.dtype
        assert torch.equal(s, t)
    for g, h in zip(a.optimizer_.param_groups, b.optimizer_.param_groups, strict=True):
        assert {k: v for k, v in g.items() if k != "params"} == {
            k: v for k, v in h.items() if k != "params"
        }
    assert not b.model_.training


def round_trip(est, tmp_path, x=X, y=Y, **arguments):
    """Save, load, compare; go on with both, compare again. Returns what was loaded, before going
    on.
    """
    generators = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002  the one to be left alone
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est", **arguments)
    first = copy.deepcopy(loaded)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.random.get_state(legacy=False)["state"]["pos"] == generators[1]  # noqa: NPY002
    assert_same(est, loaded, x)
    for _ in range(2):
        est.partial_fit(x, y)
        loaded.partial_fit(x, y)
    assert_same(est, loaded, x)
    return first


# -- round trips ------------------------------------------------------------------------------------------


def dropout():
    return nn.Sequential(LSTM(2, 5, num_layers=2, dropout=0.5), nn.Dropout(0.3), nn.Linear(5, 1))


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda: None,
        dropout,
        lambda: nn.Sequential(
            nn.Sequential(GRU(2, 4), nn.LayerNorm(4)), nn.Sequential(nn.ELU(0.3), nn.Linear(4, 1))
        ),
        lambda: nn.Sequential(RNN(2, 4, bias=False), nn.Linear(4, 1, bias=False)),
        lambda: nn.Sequential(nn.LSTM(2, 4, 2, dropout=0.2), nn.Linear(4, 1)),
        lambda: nn.Sequential(
            nn.RNN(2, 4, nonlinearity="relu"), nn.LayerNorm(4, elementwise_affine=False), RNN(4, 1)
        ),
        lambda: nn.Sequential(
            nn.GRUCell(2, 4, bias=False), nn.RNNCell(4, 3, nonlinearity="relu"), nn.Linear(3, 1)
        ),
        lambda: nn.Sequential(Recur(nn.LSTMCell(2, 4)), nn.Linear(4, 1)),
        lambda: nn.GRU(2, 1),
        lambda: LSTM(2, 1),
        lambda: Recur(nn.GRUCell(2, 1)),
        lambda: nn.Linear(2, 1),
        lambda: nn.Sequential(OrderedDict(rnn=GRU(2, 4), head=nn.Linear(4, 1))),
        lambda: nn.Sequential(
            nn.PReLU(), nn.RMSNorm(2), GRU(2, 4), nn.GELU("tanh"), nn.Linear(4, 1)
        ),
        lambda: lambda n_in, n_out: nn.Sequential(GRU(n_in, 5), nn.Linear(5, n_out)),
        lambda: partial(nn.Linear, 2, 1),
        lambda: nn.Sequential(GaussianNoise(0.1), FLSTM(2, 4, 2, 0.3), SGRU(4, 3), nn.Linear(3, 1)),
        lambda: nn.Sequential(HFGRU(2, 4, alpha=0.5), Recur(HFGRUCell(4, 3, 0.2)), MGU(3, 1)),
        lambda: nn.Sequential(RNNStack(2, 4, 2, 0.2, SMGU), DenseReLU(4, 5), nn.Linear(5, 1)),
        lambda: nn.Sequential(
            Recur(FLSTMCell(2, 4)),
            ffnn(4, 3, 2, nn.Tanh, nn.Identity, 0.1),
            nn.Linear(3, 1),
        ),
        lambda: nn.Sequential(WinsorNorm().fit(X), nn.Linear(2, 1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_models(model, dtype, tmp_path):
    est = Estimator(model(), None, None, SPEC, random_state=0).fit(X.astype(dtype), Y.astype(dtype))
    loaded = round_trip(est, tmp_path, X.astype(dtype), Y.astype(dtype))
    assert net2vec(loaded).dtype == getattr(torch, dtype)
    assert repr(loaded.model_) == repr(est.model_)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
        partial(lr_scheduler.LinearLR, total_iters=15),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
        partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.1, cycle_momentum=False),
        partial(lr_scheduler.CosineAnnealingLR, T_max=7),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
        partial(lr_scheduler.MultiStepLR, milestones=[1, 3, 20]),
        partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
        lr_scheduler.ConstantLR,  # for five steps
    ],
    ids=lambda s: getattr(s, "func", s).__name__,
)
@pytest.mark.parametrize("every", ["epoch", "step"])
@pytest.mark.parametrize("kind", [Spec, dict])
def test_going_on_with_dropout_shuffling_and_a_schedule(scheduler, every, kind, tmp_path):
    if every == "step" and getattr(scheduler, "func", None) is lr_scheduler.ReduceLROnPlateau:
        return
    spec = kind(
        epochs=2,
        batchsize=4,
        seqsize=5,
        shuffle=True,
        lr_schedule=scheduler if every == "epoch" else (every, scheduler),
        clip=0.1,
    )
    est = Estimator(dropout(), None, partial(SGD, lr=0.05, momentum=0.9), spec, random_state=0).fit(
        X, Y
    )
    straight = copy.deepcopy(est).partial_fit(X, Y).partial_fit(X, Y)
    loaded = round_trip(est, tmp_path)
    assert_same(loaded.partial_fit(X, Y).partial_fit(X, Y), straight)
    assert type(loaded.spec) is kind
    assert scheduler is lr_scheduler.ConstantLR or {r["lr"] for r in loaded.history_} != {0.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, None),
        (SPEC, SPEC),
        (SIZES, SIZES),
        (namedtuple("Sizes", "epochs batchsize seqsize")(1, 3, None), {"epochs": 1, "batchsize": 3, "seqsize": None}),
        (SimpleNamespace(epochs=1, batchsize=3, seqsize=4, clip=0.5), {**SIZES, "clip": 0.5}),
        (
            {"epochs": np.int64(1), "batchsize": np.int32(3), "seqsize": 4, "clip": np.float32(0.5), "note": ""},
            {**SIZES, "clip": 0.5, "note": ""},
        ),
    ],
    ids=["None", "Spec", "dict", "namedtuple", "object", "numpy"],
)  # fmt: skip
def test_specs(spec, expected, tmp_path):
    est = Estimator(None, None, None, spec, random_state=np.int64(3)).fit(X, Y)
    loaded = round_trip(est, tmp_path)
    assert loaded.spec == expected
    assert loaded.random_state == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "opt",
    [
        None,
        Adam,
        partial(Adam, lr=np.float64(0.01), betas=(0.8, 0.9)),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(RMSprop, lr=np.float32(1e-3), centered=True),
        partial(torch.optim.AdamW, fused=True, weight_decay=0.1),
    ],
)
def test_optimizers(opt, tmp_path):
    est = Estimator(None, None, opt, SPEC, random_state=0).fit(X, Y)
    loaded = round_trip(est, tmp_path)
    assert type(loaded.optimizer_) is type(est.optimizer_)
    # the settings are there too: model=None
    assert torch.equal(net2vec(loaded.fit(X, Y)), net2vec(est.fit(X, Y)))


@pytest.mark.slow
def test_an_optimizer_instance_with_two_groups(tmp_path):
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))
    opt = SGD(
        [{"params": model[1].parameters(), "lr": 0.2}, {"params": model[0].parameters()}],
        lr=0.01,
        momentum=0.9,
    )
    est = Estimator(model, None, opt, SPEC, random_state=0).fit(X, Y)
    loaded = round_trip(est, tmp_path)
    assert [g["lr"] for g in loaded.optimizer_.param_groups] == [0.2, 0.01]
    assert [len(g["params"]) for g in loaded.optimizer_.param_groups] == [2, 4]
    with pytest.raises(ValueError, match=r"opt .*torch.optim.*SGD\).*params\(opt="):
        loaded.fit(X, Y)  # from the start: the groups belong to a model that is not there
    loaded.set_params(opt=SGD).fit(X, Y)


@pytest.mark.slow
def test_an_optimizer_instance_with_one_group(tmp_path):
    model = dropout()
    est = Estimator(
        model, None, Adam(model.parameters(), lr=0.02, amsgrad=True), SPEC, random_state=0
    ).fit(X, Y)
    loaded = round_trip(est, tmp_path)
    assert loaded.fit(X, Y).optimizer_.defaults["lr"] == 0.02
    assert loaded.optimizer_.defaults["amsgrad"]


@pytest.mark.slow
def test_frozen_parameters_stay_frozen(tmp_path):
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 3), nn.Linear(3, 1))
    model[1].weight.requires_grad_(False)
    spec = {"epochs": 1, "batchsize": 4, "seqsize": 5, "clip": 1e-3}
    loaded = round_trip(Estimator(model, None, None, spec, random_state=0).fit(X, Y), tmp_path)
    fresh = loaded.model[1].weight.clone()
    assert torch.equal(loaded.fit(X, Y).model_[1].weight, fresh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        None,
        nn.L1Loss(),
        nn.HuberLoss(delta=0.3),
        seqloss(F.smooth_l1_loss),
        F.l1_loss,
        partial(F.huber_loss, delta=np.float64(0.3)),
        seqloss(nn.MSELoss(reduction="sum")),
    ],
)
def test_losses(loss, tmp_path):
    est = Estimator(None, loss, None, SPEC, random_state=0).fit(X, Y)
    assert round_trip(est, tmp_path).score(X, Y) == Estimator.load(tmp_path / "est").score(X, Y)


@pytest.mark.slow
def test_embedding_and_cross_entropy_with_class_weights(tmp_path):
    x = np.random.default_rng(1).integers(0, 5, size=(1, N, T))
    model = nn.Sequential(
        nn.Embedding(5, 4, padding_idx=0), nn.Flatten(-2), GRU(4, 8), nn.Linear(8, 5)
    )
    for loss in (
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6), label_smoothing=0.1, ignore_index=3),
        partial(F.cross_entropy, weight=torch.arange(1.0, 6)),
    ):
        est = Estimator(model, loss, None, SPEC, random_state=0).fit(x, x)
        loaded = round_trip(est, tmp_path, x, x)
        assert loaded.score(x, x) == Estimator.load(tmp_path / "est").score(x, x)
        assert loaded.n_outputs_ == 5


@pytest.mark.slow
def test_settings_and_streaming(tmp_path):
    est = Estimator(
        dropout(), None, None, SPEC, random_state=3, warm_start=True, verbose=False
    ).fit(X, Y)
    whole, state = est.predict(X, return_state=True)
    loaded = round_trip(est, tmp_path)
    for name in ("random_state", "warm_start", "verbose", "comm"):
        assert loaded.get_params(deep=False)[name] == est.get_params(deep=False)[name]
    assert np.array_equal(
        loaded.predict(X, state=state), copy.deepcopy(loaded).predict(X, state=state)
    )
    assert np.array_equal(loaded.predict(X), whole)


@pytest.mark.slow
def test_several_inputs_and_outputs(tmp_path):
    est = Estimator(TwoInputs, None, None, SPEC, random_state=0).fit((X, Y), (Y, X))
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est", model=TwoInputs)
    for a, b in zip(est.predict((X, Y)), loaded.predict((X, Y)), strict=True):
        assert np.array_equal(a, b)
    assert (loaded.n_features_in_, loaded.n_outputs_) == ((2, 1), (1, 2))
    loaded.fit((X, Y), (Y, X))


class TwoInputs(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.rnn = GRU(sum(n_in), 3)
        self.heads = nn.ModuleList(nn.Linear(3, n) for n in n_out)

    def forward(self, a, b):
        h = self.rnn(torch.cat([a, b], -1))
        return tuple(head(h) for head in self.heads)


# -- the user's own code ----------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, n_in=2, n_out=1, hidden=4):
        super().__init__()
        self.rnn, self.head = LSTM(n_in, hidden), nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.head(self.rnn(x))


def own_loss(model, xs, ys):
    return (run_window(model, xs) - ys).abs().mean()


def own_opt(params):
    return SGD(params, lr=0.1)


class OwnSGD(SGD):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [Own, Own(), partial(Own, hidden=4)], ids=["class", "instance", "partial"]
)
def test_own_model_is_named_and_can_be_given(model, tmp_path):
    est = Estimator(model, None, None, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    with pytest.raises(
        LoadError,
        match=r"(Own|partial).*load\(path, model=...\)",
    ):
        Estimator.load(tmp_path / "est")
    for again in (Own, Own(), partial(Own, hidden=4), nn.Sequential):
        if again is not nn.Sequential:
            round_trip(est, tmp_path, model=again)


class Scaled(Own):
    """Its settings change what it computes, and no shape."""

    def __init__(self, n_in=2, n_out=1, hidden=4, factor=1.0, act=torch.relu):
        super().__init__(n_in, n_out, hidden)
        self.factor, self.act = factor, act

    def forward(self, x):
        return self.factor * self.act(super().forward(x))


def scaled_loss(model, xs, ys, factor=1.0):
    return factor * own_loss(model, xs, ys)


@pytest.mark.slow
def test_settings_inside_code_are_stored_and_given_to_it(tmp_path):
    est = Estimator(Scaled, scaled_loss, None, SPEC, random_state=0)
    est.set_params(model__hidden=3, model__factor=2.5, loss=partial(scaled_loss, factor=3.0))
    est.fit(X, Y)
    loaded = round_trip(est, tmp_path, model=Scaled, loss=scaled_loss)
    names = ("model__hidden", "model__factor")
    assert [loaded.get_params()[k] for k in names] == [3, 2.5]
    # what the caller gives wins
    other = Estimator.load(tmp_path / "est", model=partial(Scaled, factor=5.0))
    np.testing.assert_allclose(other.predict(X), 2 * loaded.predict(X), rtol=1e-6)
    # an instance and a function of another name are taken as they are
    for given in (Scaled(2, 1), lambda: Scaled(2, 1)):
        with pytest.raises(LoadError, match=r"Scaled with hidden=3, factor=2\.5"):
            Estimator.load(tmp_path / "est", model=given)


@pytest.mark.slow
def test_settings_that_no_file_holds_are_asked_for(tmp_path):
    est = Estimator(Scaled, None, None, SPEC, random_state=0)
    est.set_params(model__hidden=3, model__act=torch.tanh).fit(X, Y).save(tmp_path / "est")
    with pytest.raises(LoadError, match=r"hidden=3, act=\.\.\..*partial\(Scaled, act="):
        Estimator.load(tmp_path / "est", model=Scaled)
    loaded = Estimator.load(tmp_path / "est", model=partial(Scaled, act=torch.tanh))
    assert np.array_equal(loaded.predict(X), est.predict(X))


@pytest.mark.slow
def test_settings_in_a_file_make_no_model_larger_than_its_parameters(tmp_path):
    Estimator(partial(Own, hidden=3), None, None, SPEC).fit(X, Y).save(tmp_path / "est")
    stored = content(tmp_path / "est")
    stored["keywords"]["model"]["plain"]["hidden"] = 10**6  # 16 TB
    write(tmp_path / "est", **stored)
    with pytest.raises(LoadError, match="4000000"):
        Estimator.load(tmp_path / "est", model=Own)


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    lambda: nn.Sequential(Own(), nn.Linear(1, 1)),
    lambda: tied(),
    lambda: hooked(),
], ids=["own inside", "tied", "hooked"])  # fmt: skip
def test_what_a_recipe_would_lose_is_not_described(model, tmp_path):
    est = Estimator(model(), None, None, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    with pytest.raises(LoadError, match="give the model too"):
        Estimator.load(tmp_path / "est")
    round_trip(est, tmp_path, model=model())


def tied():
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].weight = model[2].weight
    return model


def hooked():
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.slow
def test_own_loss_is_named_and_can_be_given(tmp_path):
    est = Estimator(None, own_loss, None, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    assert np.array_equal(loaded.predict(X), est.predict(X))
    before = net2vec(loaded)
    for call in (loaded.fit, loaded.partial_fit, clone(loaded).fit, loaded.score):
        with pytest.raises(
            ValueError,
            match=r"loss \(.*own_loss\).*load\(path, loss=",
        ):
            call(X, Y)
    assert torch.equal(net2vec(loaded), before)
    assert loaded.set_params(loss=own_loss).score(X, Y) == est.score(X, Y)
    round_trip(est, tmp_path, loss=own_loss)


@pytest.mark.few
@pytest.mark.parametrize("opt", [own_opt, OwnSGD])
def test_own_optimizer_is_named_and_can_be_given(opt, tmp_path):
    est = Estimator(None, None, opt, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    assert np.array_equal(loaded.predict(X), est.predict(X))
    with pytest.raises(ValueError, match=r" opt \(.*(own_opt|OwnSGD)\)"):
        loaded.fit(X, Y)
    loaded = Estimator.load(tmp_path / "est", opt=opt).partial_fit(X, Y)
    assert type(loaded.optimizer_) is type(est.optimizer_)


@pytest.mark.slow
def test_own_schedule_is_named_and_can_be_given(tmp_path):
    def spec():
        return Spec(
            epochs=1,
            batchsize=4,
            lr_schedule=partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.5**n),
        )

    est = Estimator(None, None, SGD, spec(), random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    with pytest.raises(ValueError, match=r"spec.lr_schedule \(\S+LambdaLR\).*spec="):
        loaded.partial_fit(X, Y)
    round_trip(est, tmp_path, spec=spec())


def test_arguments_in_place_of_the_stored_ones(tmp_path):
    Estimator(None, None, None, SPEC, random_state=0).fit(X, Y).save(tmp_path / "est")
    calls = []
    loaded = Estimator.load(
        tmp_path / "est", callbacks=calls.append, spec=Spec(epochs=1, batchsize=2), opt=SGD
    )
    assert type(loaded.partial_fit(X, Y).optimizer_) is SGD
    assert len(calls) == 3
    with pytest.raises(TypeError, match=r"modle; Estimator takes .*model"):
        Estimator.load(tmp_path / "est", modle=Own)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def test_device(device, tmp_path):
    est = Estimator(dropout(), None, Adam, SPEC, random_state=0, device=device).fit(X, Y)
    est.save(tmp_path / "est")
    for to in (None, device):
        loaded = Estimator.load(tmp_path / "est", device=to)
        kind = torch.device(to or "cpu").type
        assert {p.device.type for p in loaded.model_.parameters()} == {kind}
        assert {
            loaded.optimizer_.state[p]["exp_avg"].device.type for p in loaded.model_.parameters()
        } == {kind}
        assert loaded.grad_.device.type == kind
        np.testing.assert_allclose(loaded.predict(X), est.predict(X), atol=1e-5)
        loaded.partial_fit(X, Y)


# -- what does not fit --------------------------------------------------------------------------------------


def test_each_mismatch_is_named(tmp_path):
    est = Estimator(Own, None, None, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    with pytest.raises(LoadError) as info:
        Estimator.load(tmp_path / "est", model=partial(Own, hidden=5))
    assert "mismatch for rnn.module.weight_ih_l0" in str(info.value)
    assert "mismatch for head.weight" in str(info.value)
    assert "head.bias" not in str(info.value)
    with pytest.raises(LoadError) as info:
        Estimator.load(
            tmp_path / "est", model=nn.Sequential(OrderedDict(rnn=LSTM(2, 4), top=nn.Linear(4, 1)))
        )
    assert 'Missing key(s) in state_dict: "top.weight", "top.bias"' in str(info.value)
    assert 'Unexpected key(s) in state_dict: "head.weight", "head.bias"' in str(info.value)
    assert "rnn" not in str(info.value)


def test_other_classes_and_formats_are_named(tmp_path):
    class Other(Estimator):
        pass

    Estimator(None, None, None, SPEC).fit(X, Y).save(tmp_path / "est")
    with pytest.raises(LoadError, match=r"Estimator, not Other; .*Estimator.load"):
        Other.load(tmp_path / "est")
    write(tmp_path / "est", **{**content(tmp_path / "est"), "format": 99})
    with pytest.raises(LoadError, match=r"format 99, .*\d+: update"):
        Estimator.load(tmp_path / "est")


def content(path):
    return torch.load(path, weights_only=True)


def write(path, **what):
    torch.save(what, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "est"
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 1))
    spec = Spec(
        epochs=1, batchsize=4, seqsize=5, lr_schedule=partial(lr_scheduler.StepLR, step_size=1)
    )
    Estimator(model, nn.L1Loss(), partial(SGD, lr=0.1, momentum=0.9), spec).fit(X, Y).save(path)
    return path


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing: no such file"):
        Estimator.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    "what",
    [
        lambda: b"",
        lambda: b"hello, world",
        lambda: os.urandom(500),
        lambda: pickle.dumps({"kind": "fluxutils_py estimator"}),
        lambda: pickle.dumps(3),
        lambda: as_bytes(np.save, np.ones(3)),
        lambda: as_bytes(np.savez, np.ones(3)),
        lambda: as_bytes(lambda f, v: torch.save(v, f), nn.Linear(1, 1).state_dict()),
        lambda: as_bytes(lambda f, v: torch.save(v, f), [1, 2]),
        lambda: as_bytes(lambda f, v: torch.save(v, f), nn.Linear(1, 1)),
        lambda: as_bytes(lambda f, v: torch.save(v, f), {"kind": "fluxutils_py checkpoint"}),
    ],
    ids=[
        "empty",
        "text",
        "noise",
        "pickle",
        "number",
        "npy",
        "npz",
        "state_dict",
        "list",
        "module",
        "other kind",
    ],
)
def test_foreign_files(what, tmp_path):
    (tmp_path / "est").write_bytes(what())
    with pytest.raises(LoadError, match=r"est .*no fluxutils_py estimator file"):
        Estimator.load(tmp_path / "est")


def as_bytes(save, value):
    f = io.BytesIO()
    save(f, value)
    return f.getvalue()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(LoadError, match="no fluxutils_py estimator file"):
        Estimator.load(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 1000, -1])
def test_truncated_files(cut, saved, tmp_path):
    (tmp_path / "est").write_bytes(saved.read_bytes()[:cut])
    with pytest.raises(LoadError, match="damaged"):
        Estimator.load(tmp_path / "est")


@pytest.mark.slow
def test_flipped_bytes_never_give_anything_but_a_load_error(saved, tmp_path):
    whole = saved.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            damaged[at] ^= int(rng.integers(1, 256))
        (tmp_path / "est").write_bytes(bytes(damaged))
        with contextlib.suppress(LoadError):  # or padding may be hit
            Estimator.load(tmp_path / "est").predict(X)


MAY_BE_NONE = (
    *("model", "loss", "opt", "spec", "optimizer", "scheduler", "choice", "calibration"),
    "intervals",
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "None", "number", "string", "list", "dict"])
def test_any_part_of_the_wrong_kind_is_a_load_error(how, saved, tmp_path):
    whole = content(saved)
    for part in whole:
        wrong = {k: v for k, v in whole.items() if k != part}
        if how != "gone":
            wrong[part] = {
                "None": None,
                "number": 3,
                "string": "abc",
                "list": [1],
                "dict": {"a": 1},
            }[how]
        write(tmp_path / "est", **wrong)
        if how == "None" and part in MAY_BE_NONE:
            continue  # which there may be
        if how == "gone" and part in (
            *("choice", "data", "calibration", "intervals", "longest", "keywords"),
        ):
            continue  # earlier files have none
        if (how != "gone" and part == "model_name") or (
            how == "dict" and part in ("settings", "code", "keywords", "scheduler", "data")
        ):
            continue  # a name to show, and data under names that are not used
        if how == "number" and part == "longest":
            continue
        with pytest.raises(LoadError, match="est"):
            Estimator.load(tmp_path / "est")


# -- no code runs -------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["torch.save", "legacy torch.save", "pickle", "part", "zip"])
def test_a_malicious_file_is_refused_and_not_run(how, saved, tmp_path):
    evil = Malicious(tmp_path / "pwned")
    path = tmp_path / "est"
    if how == "pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif how == "zip":  # in place of the pickle of an honest file
        with zipfile.ZipFile(saved) as honest, zipfile.ZipFile(path, "w") as f:
            for name in honest.namelist():
                f.writestr(
                    name,
                    pickle.dumps(evil, protocol=2)
                    if name.endswith("data.pkl")
                    else honest.read(name),
                )
    else:
        whole = {**content(saved), "history_": evil} if how == "part" else evil
        torch.save(whole, path, _use_new_zipfile_serialization=how != "legacy torch.save")
    # what is no archive is none that this package has written, and is not looked into
    is_archive = how not in ("pickle", "legacy torch.save")
    told = r"run code \(\w+\.mkdir\)" if is_archive else "no fluxutils_py estimator file"
    with pytest.raises(LoadError, match=told):
        Estimator.load(path)
    assert not (tmp_path / "pwned").exists()
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert (tmp_path / "pwned").exists()  # the file is as bad as it should be


@pytest.mark.parametrize(
    ("part", "recipe", "telling"),
    [
        (
            "model",
            {"class": "os.system", "arguments": {"command": "touch pwned"}, "children": []},
            "'os.system', which is none of",
        ),
        (
            "model",
            {"class": "torch.nn.functional", "arguments": {}, "children": []},
            "'torch.nn.functional', which is none of",
        ),
        (
            "model",
            {"class": "torch.nn.modules.module.Module", "arguments": {}, "children": []},
            "', which is none of",
        ),
        (
            "model",
            {"class": "subprocess.Popen", "arguments": {"args": "id"}, "children": []},
            "'subprocess.Popen', which is none of",
        ),
        (
            "model",
            {"class": "fluxutils_py.nn.seqloss", "arguments": {"f": "x"}, "children": []},
            "seqloss', which is none of",
        ),
        (
            "model",
            {"class": "torch.nn.Linear.__init__", "arguments": {}, "children": []},
            "', which is none of",
        ),
        (
            "model",
            {"class": "Linear", "arguments": {}, "children": []},
            "'Linear', which is none of",
        ),
        ("model", {"class": 3, "arguments": {}, "children": []}, "cannot be built"),
        (
            "model",
            {"class": "torch.nn.Linear", "arguments": {"in_features": 2}, "children": []},
            "cannot be built",
        ),
        (
            "model",
            {"class": "torch.nn.Linear", "arguments": {"in_features": {}}, "children": []},
            "not plain data",
        ),
        (
            "loss",
            [{"name": "torch.nn.Module", "made_with": {}}, "x"],
            "'torch.nn.Module', which is none of torch.nn or ",
        ),
        (
            "loss",
            [{"name": "os.system", "made_with": {}}, "x"],
            "'os.system', which is none of torch.nn or torch.nn.fun",
        ),
        (
            "loss",
            [{"name": "torch.nn.functional.linear"}, "x"],
            "'torch.nn.functional.linear', which is none of",
        ),
        (
            "opt",
            [{"name": "os.system", "keywords": {}}, "x"],
            "'os.system', which is none of torch.optim or",
        ),
        ("opt", [{"name": "torch.optim.Optimizer.step"}, "x"], "which is none of torch.optim"),
        ("opt", [{"name": "torch.optim.Optimizer"}, "x"], "which is none of torch.optim"),
        ("opt", [{"name": "torch.optim.lr_scheduler"}, "x"], "which is none of torch.optim"),
        ("opt", [{"name": "torch.nn.functional.mse_loss"}, "x"], "which is none of torch.optim"),
        ("dtype", "load", "dtype"),
        ("dtype", "hub", "dtype"),
    ],
)
def test_recipes_name_only_what_they_may(part, recipe, telling, saved, tmp_path):
    write(
        tmp_path / "est", **{**content(saved), part: (recipe, "x") if part == "model" else recipe}
    )
    with pytest.raises(LoadError, match=telling):
        Estimator.load(tmp_path / "est")


def test_unknown_names_in_a_file_are_not_used(saved, tmp_path):
    whole = content(saved)
    whole["settings"]["callbacks"] = "os.system"
    whole["settings"]["__class__"] = "os.system"
    whole["fitted"]["predict"] = "os.system"
    write(tmp_path / "est", **whole)
    loaded = Estimator.load(tmp_path / "est")
    assert loaded.callbacks is None
    assert loaded.predict(X).shape == Y.shape
    fields = {"epochs": 1, "batchsize": 2, "seqsize": 3}
    for name in (
        "os.system",
        "torch.optim.lr_scheduler.LRScheduler",
        "torch.optim.lr_scheduler.math",
    ):
        spec = {
            "is_spec": False,
            "fields": fields,
            "scheduler": [{"name": name, "keywords": {}}, ""],
        }
        write(tmp_path / "est", **{**whole, "spec": spec})
        with pytest.raises(LoadError, match=f"'{name}', .*torch.optim.lr_scheduler"):
            Estimator.load(tmp_path / "est")


# -- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["save", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file(where, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    est = Estimator(None, None, None, SPEC, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    before = (tmp_path / "est").read_bytes()
    expected = est.predict(X)
    est.partial_fit(X, Y)
    monkeypatch.setattr(torch if where == "save" else files.os, where, fail)
    with pytest.raises(type(error)):
        est.save(tmp_path / "est")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["est"]
    assert (tmp_path / "est").read_bytes() == before
    assert np.array_equal(Estimator.load(tmp_path / "est").predict(X), expected)


@pytest.mark.slow
def test_save_replaces_and_keeps_to_the_umask(tmp_path):
    est = Estimator(None, None, None, SPEC).fit(X, Y)
    old = os.umask(0o027)
    try:
        for _ in range(2):
            est.partial_fit(X, Y).save(str(tmp_path / "est"))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "est").stat().st_mode) == 0o640
    assert Estimator.load(str(tmp_path / "est")).n_iter_ == 4
    with pytest.raises(FileNotFoundError):
        est.save(tmp_path / "nowhere" / "est")


@pytest.mark.slow
def test_saving_changes_nothing(tmp_path):
    est = Estimator(dropout(), None, None, SPEC, random_state=0).fit(X, Y)
    est.model_.train()
    est.model_(torch.zeros(3, 2, 2))
    kept, before, generator = states(est), net2vec(est), torch.get_rng_state()
    est.save(tmp_path / "est")
    assert est.model_.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(net2vec(est), before)
    assert all(torch.equal(a, b) for a, b in zip(states(est), kept, strict=True))
    loadstates(Estimator.load(tmp_path / "est"), kept)


# -- pickle, copy, clone --------------------------------------------------------------------------------------

copies = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e)), clone],
    ids=["deepcopy", "pickle", "clone"],
)


@pytest.mark.slow
@copies
@pytest.mark.parametrize("fitted", [False, True])
def test_an_optimizer_instance_stays_bound_to_its_model(copied, fitted):
    model = dropout()
    opt = SGD(
        [{"params": model[2].parameters(), "lr": 0.2}, {"params": model[0].parameters()}],
        lr=0.01,
        momentum=0.9,
    )
    est = Estimator(model, None, opt, SPEC, random_state=0)
    if fitted:
        est.fit(X, Y)
    before = net2vec(model)
    twin = copied(est)
    assert twin.model is not model
    own = {id(p) for p in twin.model.parameters()}
    assert all(id(p) in own for group in twin.opt.param_groups for p in group["params"])
    assert torch.equal(net2vec(twin.fit(X, Y)), net2vec(est.fit(X, Y)))
    assert [g["lr"] for g in twin.optimizer_.param_groups] == [0.2, 0.01]
    assert torch.equal(net2vec(twin.model), before)
    assert torch.equal(net2vec(model), before)


@pytest.mark.slow
@copies
def test_unfitted_copies_fit_alike(copied):
    est = Estimator(dropout(), nn.L1Loss(), partial(Adam, lr=0.01), SPEC, random_state=0)
    assert torch.equal(net2vec(copied(est).fit(X, Y)), net2vec(est.fit(X, Y)))


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "scheduler", [None, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40)]
)
def test_fitted_copies_go_on_alike_and_share_nothing(copied, scheduler):
    spec = Spec(epochs=2, batchsize=4, seqsize=5, shuffle=True, lr_schedule=scheduler)
    est = Estimator(Own(), nn.L1Loss(), Adam, spec, random_state=0).fit(X, Y)
    before = net2vec(est)
    twin = copied(est)
    assert_same(est, twin)
    twin.partial_fit(X, Y)
    assert torch.equal(net2vec(est), before)
    assert est.n_iter_ == len(est.history_) == 2
    assert_same(est.partial_fit(X, Y), twin)


def test_a_clone_is_unfitted_and_shares_no_model():
    est = Estimator(
        Own(), None, None, {"epochs": 1, "batchsize": 4, "seqsize": 5}, random_state=0
    ).fit(X, Y)
    twin = clone(est)
    assert not hasattr(twin, "model_")
    assert twin.model is not est.model
    assert twin.spec == est.spec
    assert twin.spec is not est.spec


# -- files that ask for more than they hold ------------------------------------------------------------------


def changed(saved, path, change):
    stored = content(saved)
    change(stored)
    torch.save(stored, path)
    return path


def set_in(*keys):
    *outer, last, value = keys

    def change(stored):
        for key in outer:
            stored = stored[key]
        stored[last] = value

    return change


BOMBS = {
    "layers": set_in("settings", "num_layers", 10**6),
    "hidden": set_in("settings", "hidden_size", 10**5),
    "outputs": set_in("fitted", "n_outputs_", 10**8),
    "no codec": set_in("codec", {}),
    "integer parameters": set_in("dtype", "int64"),
    "complex parameters": set_in("dtype", "complex64"),
    "long text": set_in("layout", "names", {"dtype": "S1000000000", "values": [b"a", b"b"]}),
    "wrong setting": set_in("settings", "hidden_size", "many"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_sizes_beyond_what_a_file_holds_are_refused_before_memory_is_taken(name, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    plain_regressor(hidden_size=3, epochs=1, batchsize=5, seqsize=7).fit(x, x[:1]).save(
        tmp_path / "est"
    )
    path = changed(tmp_path / "est", tmp_path / "bomb", BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LoadError, match="bomb"):
        SequenceRegressor.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


@pytest.mark.parametrize(
    "argument", [("out_features", 10**9), ("device", "cuda"), ("dtype", "float64")]
)
def test_models_in_a_file_are_no_larger_than_their_parameters(argument, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    Estimator(model, spec={"epochs": 1, "batchsize": 5, "seqsize": 7}).fit(x, x[:1]).save(
        tmp_path / "est"
    )

    def change(stored):
        stored["model"][0]["children"][0]["arguments"][argument[0]] = argument[1]

    with pytest.raises(LoadError, match="bomb"):
        Estimator.load(changed(tmp_path / "est", tmp_path / "bomb", change))


def test_parameters_of_another_kind_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    plain_regressor(hidden_size=3, epochs=1, batchsize=5, seqsize=7).fit(x, x[:1]).save(
        tmp_path / "est"
    )

    def change(stored):
        name = next(iter(stored["parameters"]))
        stored["parameters"][name] = stored["parameters"][name].to(torch.complex64)

    with pytest.raises(LoadError, match="Casting complex"):
        SequenceRegressor.load(changed(tmp_path / "est", tmp_path / "bomb", change))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_models_whose_outputs_are_not_finite_predict_after_loading_as_before(value, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    est = Estimator(
        torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)),
        spec={"epochs": 1, "batchsize": 5, "seqsize": 7},
    ).fit(x, x[:1])
    with torch.no_grad():
        est.model_[1].weight.fill_(value)
    with np.errstate(all="ignore"):
        wanted = est.predict(x)
        est.save(tmp_path / "est")
        np.testing.assert_array_equal(Estimator.load(tmp_path / "est").predict(x), wanted)


@pytest.mark.parametrize(
    "labels", [np.array(["2020-01-01", "2021-05-03"], "M8[ns]"), np.array(["a", "b"], "U20")]
)
def test_labels_of_any_type_come_back_as_they_were(labels, tmp_path):
    y = labels[(np.arange(6) % 2)]
    est = plain_classifier(hidden_size=3, epochs=1).fit(samples(X), y)
    est.save(tmp_path / "est")
    found = SequenceClassifier.load(tmp_path / "est").classes_
    assert np.array_equal(found, est.classes_)
    assert found.dtype == est.classes_.dtype


def test_labels_that_no_file_holds_are_refused_at_save(tmp_path):
    y = np.array([Fraction(1, 3), Fraction(2, 3)] * 3, object)
    est = plain_classifier(hidden_size=3, epochs=1)
    est.fit(samples(X), np.array(["a", "b"] * 3, object))
    codec = replace(est.fitted_parts_.codec, classes=np.unique(y))
    est.fitted_parts_ = replace(est.fitted_parts_, codec=codec)
    with pytest.raises(TypeError, match=r"Fraction\(1, 3\)"):
        est.save(tmp_path / "est")
    assert os.listdir(tmp_path) == []
