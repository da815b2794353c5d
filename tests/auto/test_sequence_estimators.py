"""Ready-made estimators: the same as plain ones that are put together by hand; early stopping."""

import copy
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import AdamW

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceRegressor,
    net2vec,
    samples,
    timesteps,
)
from fluxutils_py.auto.sequence_estimators import CELLS, FIXED
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.estimator import fitting
from fluxutils_py.nn import GRU, LSTM, RNN, Recur
from tests.plain_networks import plain_classifier, plain_regressor

N, T = 13, 17
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, N, T))
Y = X.cumsum(2).mean(0, keepdims=True) + 0.1 * RNG.normal(size=(1, N, T))
LABELS = np.where(np.arange(N) % 3 == 0, "a", "b")
SMALL = {"hidden_size": 3, "epochs": 2, "batchsize": 5, "seqsize": 6, "random_state": 0}
VIEWS = {"native": lambda a: a, "samples": samples, "timesteps": timesteps}


def network(n_in, n_out, cell, hidden, layers):
    return nn.Sequential(cell(n_in, hidden, layers), nn.Linear(hidden, n_out))


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(("name", "cell"), [("lstm", LSTM), ("gru", GRU), ("rnn", RNN), (GRU, GRU)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("more", [{}, {"shuffle": True, "overlap": 2, "burn_in": 1, "clip": 0.1}])
def test_a_ready_made_estimator_is_one_that_is_put_together(name, cell, layers, more):
    est = plain_regressor(**SMALL, cell=name, num_layers=layers, lr=0.03, **more)
    model = partial(network, cell=cell, hidden=3, layers=layers)
    spec = {"epochs": 2, "batchsize": 5, "seqsize": 6, **more}
    plain = Estimator(model, mse_loss, partial(AdamW, lr=0.03), spec, random_state=0)
    counted = Y[:, :, more.get("burn_in", 0) :]  # targets without a loss have no say in the scale
    scaled = (Y - counted.mean()) / counted.std()
    assert torch.allclose(net2vec(est.fit(X, Y)), net2vec(plain.fit(X, scaled)), rtol=0, atol=1e-10)
    est.set_params(scale_target=False)
    assert torch.allclose(net2vec(est.fit(X, Y)), net2vec(plain.fit(X, Y)), rtol=0, atol=1e-10)
    labels = plain_classifier(**SMALL, cell=name, num_layers=layers, lr=0.03, **more)
    plain.set_params(loss=cross_entropy)
    codes = (Y > 0).astype(int)
    assert torch.allclose(
        net2vec(labels.fit(X, Y > 0)), net2vec(plain.fit(X, codes)), rtol=0, atol=1e-10
    )


class Own(nn.Module):
    """A layer of the user's own."""

    def __init__(self, n_in, n_out, num_layers, dropout):
        super().__init__()
        self.rnn, self.drop = Recur(nn.GRU(n_in, n_out, num_layers)), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.rnn(x))


@pytest.mark.slow
def test_a_cell_may_be_a_class():
    est = plain_regressor(**SMALL, cell=Own, num_layers=2, dropout=0.25).fit(X, Y)
    layer = est.model_[0]
    assert isinstance(layer, Own)
    assert (
        layer.rnn.module.input_size,
        layer.rnn.module.hidden_size,
        layer.rnn.module.num_layers,
    ) == (2, 3, 2)
    assert layer.drop.p == 0.25
    assert np.isfinite(clone(est).fit(X, Y).predict(X)).all()


@pytest.mark.slow
def test_dropout_lies_between_layers():
    est = plain_regressor(**SMALL, num_layers=2, dropout=0.4).fit(X, Y)
    assert est.model_[0].module.dropout == 0.4


NAMES = ("auto", *FIXED, "linear+lstm", *CELLS)
BAD = [
    *(
        (
            "cell",
            value,
            ValueError,
            f"cell must be one of {', '.join(map(repr, NAMES))}, or a class, got {value!r}",
        )
        for value in ("elman", None)
    ),
    *(
        (name, value, SpecError, f"{name} must be a positive integer, got {value!r}")
        for name in ("hidden_size", "num_layers", "batchsize", "n_models")
        for value in (0, 1.5, True, None)
    ),
    *(
        (name, value, SpecError, f"{name} must be a positive integer or None, got {value!r}")
        for name in ("seqsize", "n_timesteps", "epochs", "max_updates")
        for value in (0, "3")
    ),
    ("lr", 0, SpecError, "lr must be a positive number, got 0"),
    ("lr", "fast", SpecError, "lr must be a positive number, got 'fast'"),
    ("dropout", 1.5, SpecError, "dropout must be a number from 0 to 1, got 1.5"),
    ("dropout", float("nan"), SpecError, "dropout must be a number from 0 to 1, got nan"),
    ("spec", {"overlap": -1}, SpecError, "spec.overlap must be an integer of at least 0, got -1"),
    ("spec", {"burn_in": -1}, SpecError, "spec.burn_in must be an integer of at least 0, got -1"),
    ("spec", {"clip": 0}, SpecError, "spec.clip must be a positive number or None, got 0"),
    ("spec", {"shuffle": 1}, SpecError, "spec.shuffle must be True or False, got 1"),
    ("spec", {"clipp": 1}, SpecError, "Spec has no field 'clipp'; did you mean 'clip'?"),
    (
        "spec",
        {"lr_schedule": "step"},
        SpecError,
        "spec.lr_schedule must be 'onecycle', 'cosine', None, a function of the optimizer that "
        "returns a torch scheduler, which steps each epoch, or ('step', function), for one that "
        "steps with the optimizer, got 'step'; for example functools.partial("
        "torch.optim.lr_scheduler.StepLR, step_size=5)",
    ),
    (
        "spec",
        3,
        SpecError,
        "spec must be a dict with further fields of Spec, such as {'clip': 0.5}, or None, got 3; "
        "epochs, max_updates, batchsize, seqsize are arguments of their own",
    ),
    ("target", "all", ValueError, "target must be 'auto', 'step' or 'series', got 'all'"),
    ("early_stopping", "yes", SpecError, "early_stopping must be True or False, got 'yes'"),
]


@pytest.mark.parametrize("make", [SequenceRegressor, SequenceClassifier])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"), BAD, ids=[f"{n}={v!r}" for n, v, *_ in BAD]
)
def test_a_bad_argument_is_named_before_anything_changes(make, name, value, error, message):
    est = make(**{**SMALL, name: value})
    before = copy.copy(vars(est))
    with pytest.raises(error) as info:
        est.fit(X, LABELS)
    assert str(info.value) == message
    assert vars(est) == before


@pytest.mark.parametrize("make", [SequenceRegressor, SequenceClassifier])
@pytest.mark.parametrize(
    ("name", "value"), [("epochs", 3), ("seqsize", None), ("max_updates", 9), ("lr", 0.1)]
)
def test_an_argument_has_no_place_in_the_spec(make, name, value):
    with pytest.raises(SpecError) as info:
        make(**SMALL, spec={"clip": 1, name: value}).fit(X, LABELS)
    assert str(info.value) == (
        f"spec has the field {name!r}, which is an argument of its own: "
        f"{make.__name__}({name}={value!r})"
    )


@pytest.mark.slow
def test_fields_of_the_spec_are_parameters():
    est = SequenceRegressor(**SMALL, cell="lstm", spec={"clip": 0.5})
    assert clone(est).get_params()["spec__clip"] == 0.5
    search = GridSearchCV(est, {"spec__overlap": [0, 2], "spec__clip": [0.01]}, cv=2)
    search.fit(samples(X), samples(Y))
    assert search.best_estimator_.spec["clip"] == 0.01
    assert est.spec == {"clip": 0.5}
    default = SequenceRegressor()
    assert default.get_params()["spec__lr_schedule"] == "onecycle"
    assert default.set_params(spec__patience=3).spec == {
        "lr_schedule": "onecycle", "shuffle": True, "clip": 1.0, "patience": 3
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"'clipp' for spec .*'clip',"):
        est.set_params(spec__clipp=1)
    with pytest.raises(SpecError, match=r"'overlap' .*: spec__overlap"):
        est.set_params(spec__overlap=1).set_params(overlap=1)


def test_early_stopping_waits_for_ten_epochs_or_as_many_as_the_spec_says():
    def patience(**settings):
        return plain_regressor(**SMALL, **settings).resolved_params().spec.patience

    assert patience() is None
    assert patience(early_stopping=True) == 10
    assert patience(early_stopping=True, patience=4) == 4
    assert patience(patience=4) == 4


def test_several_inputs_are_for_models_of_ones_own():
    message = r"^a ready-made network is for one input and one output; several need .*model$"
    with pytest.raises(DataError, match=message):
        plain_regressor(**SMALL).fit((X, X), Y)
    with pytest.raises(DataError, match=message):
        plain_regressor(**SMALL).fit(X, (Y, Y))


# -- early stopping --------------------------------------------------------------------------------------


class Trace:
    """Parameters after every epoch."""

    def __init__(self):
        self.epochs = []

    def on_epoch(self, loop):
        self.epochs.append(net2vec(loop.shared_data["model"]).clone())


def traced(make, x, y, *args, **settings):
    trace = Trace()
    stopping = {"early_stopping": True, "callbacks": trace}
    est = make(**{**SMALL, **stopping, **{k: v for k, v in settings.items() if k != "lengths"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "VALIDATION_FRACTION", 0.3)
        est.fit(x, y, *args, **{k: v for k, v in settings.items() if k == "lengths"})
    return est, torch.stack(trace.epochs)


def held_out(make, x, y, place, n, **settings):
    """The places of x that do not touch training: whatever they hold."""
    reference = traced(make, x, y, **settings)[1]
    found = []
    for i in range(n):
        other = x.copy()
        other[place(i)] += 1
        if torch.equal(traced(make, other, y, **settings)[1], reference):
            found.append(i)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("make", "y"), [(plain_regressor, Y), (plain_classifier, LABELS),
                                         (plain_regressor, Y[0, :, -1])])  # fmt: skip
def test_some_series_are_held_out_and_decide(make, y):
    if make is plain_regressor:  # sums of targets would be rounded in another order
        make = partial(make, scale_target=False)
    out = held_out(make, X, y, lambda n: (slice(None), n), N)
    assert len(out) == math.ceil(0.3 * N)
    est, trace = traced(make, X, y)
    kept = [n for n in range(N) if n not in out]
    cut = (lambda a, k: a[:, k]) if np.ndim(y) == 3 else (lambda a, k: a[k])
    by_hand = make(**SMALL, callbacks=(hand := Trace()))
    by_hand.fit(X[:, kept], cut(y, kept), validation_data=(X[:, out], cut(y, out)))
    assert torch.equal(torch.stack(hand.epochs), trace)
    assert est.validation_loss_curve_ == by_hand.validation_loss_curve_


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_each_label_has_its_share_of_what_is_held_out(seed):
    """5 and 8 of 13 series: 2 and 2 of 4."""
    series = held_out(
        plain_classifier, X[:, :, :3], LABELS, lambda n: (slice(None), n), N, random_state=seed
    )
    rows = held_out(
        plain_classifier, X[:, :, 0].T.copy(), LABELS, lambda n: n, N, random_state=seed
    )
    for out in (series, rows):
        assert sorted(LABELS[out]) == ["a", "a", "b", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("in_time", [False, True])
def test_weights_are_scaled_in_each_part_for_itself(in_time):
    w = np.random.default_rng(1).random(T if in_time else N) * np.linspace(
        1, 9, T if in_time else N
    )
    view = timesteps if in_time else samples
    est, trace = traced(plain_regressor, view(X), view(Y), w)
    if in_time:
        kept, out = np.split(np.arange(T), [T - math.ceil(0.3 * T)])
    else:
        out = np.array(held_out(plain_regressor, X, Y, lambda n: (slice(None), n), N))
        kept = np.setdiff1d(np.arange(N), out)
    by_hand = plain_regressor(**SMALL, callbacks=(hand := Trace()))
    by_hand.fit(
        view(X)[kept], view(Y)[kept], w[kept], validation_data=(view(X)[out], view(Y)[out], w[out])
    )
    assert torch.allclose(torch.stack(hand.epochs), trace, rtol=0, atol=1e-12)
    assert est.validation_loss_curve_ == pytest.approx(by_hand.validation_loss_curve_, rel=1e-12)


@pytest.mark.parametrize("form", VIEWS)
def test_the_same_is_held_out_whatever_the_form(form):
    view = VIEWS[form]
    est, trace = traced(plain_regressor, view(X), view(Y))
    if form == "timesteps":
        held = math.ceil(0.3 * T)
        by_hand = plain_regressor(**SMALL, callbacks=(hand := Trace()))
        by_hand.fit(
            X[:, :, :-held], Y[:, :, :-held], validation_data=(X[:, :, -held:], Y[:, :, -held:])
        )
        assert torch.equal(torch.stack(hand.epochs), trace)
        assert est.validation_loss_curve_ == by_hand.validation_loss_curve_
    else:
        native, wanted = traced(plain_regressor, X, Y)
        assert torch.equal(trace, wanted)
        assert est.validation_loss_curve_ == native.validation_loss_curve_


@pytest.mark.slow
@pytest.mark.parametrize("form", VIEWS)
def test_of_one_series_the_last_steps_are_held_out(form):
    x, y, view = X[:, :1], Y[:, :1], VIEWS[form]
    held = math.ceil(0.3 * T)
    out = held_out(plain_regressor, x, y, lambda t: (slice(None), slice(None), t), T)
    assert out == list(range(T - held, T))
    native = traced(plain_regressor, x, y)
    est, trace = traced(plain_regressor, view(x), view(y))
    assert torch.equal(trace, native[1])
    assert est.validation_loss_curve_ == native[0].validation_loss_curve_


@pytest.mark.slow
def test_steps_with_gaps_are_held_out_at_the_end():
    steps = np.array([0, 1, 2, 3, 5, 6, 7, 8, 10, 11])
    # sums would be rounded in another order
    unscaled = partial(plain_regressor, scale_target=False)
    est, trace = traced(unscaled, timesteps(X)[steps], timesteps(Y)[steps])
    by_hand = unscaled(**SMALL, callbacks=(hand := Trace()))
    parts = [(timesteps(X)[steps[k]], timesteps(Y)[steps[k]]) for k in (slice(7), slice(7, 10))]
    by_hand.fit(*parts[0], validation_data=parts[1])
    assert torch.equal(torch.stack(hand.epochs), trace)
    assert est.validation_loss_curve_[0] > 0


@pytest.mark.few
@pytest.mark.parametrize(
    "form",
    ["lists", "torch", "float32", "weights of series", "weights of steps", "lists of weights"],
)
def test_other_forms_of_the_same_data_are_divided_alike(form):
    w = np.random.default_rng(1).random((N, T)) + 0.5
    plain = traced(plain_regressor, X, Y, *([w] if "steps" in form or "lists of" in form else []))[
        1
    ]
    if form == "lists":
        found = traced(plain_regressor, X.tolist(), Y.tolist())[1]
    elif form == "torch":
        found = traced(plain_regressor, torch.tensor(X), torch.tensor(Y))[1]
    elif form == "weights of series":
        found, plain = (
            traced(plain_regressor, X, Y, v)[1] for v in (w[:, 0], w[:, :1].repeat(T, 1))
        )
    elif form == "float32":
        found, plain = (traced(plain_regressor, a.astype("float32"), b.astype("float32"))[1]
                        for a, b in ((X, Y), (X, Y)))  # fmt: skip
    else:
        found = traced(plain_regressor, X, Y, w[None].tolist() if "lists" in form else w[None])[1]
    assert torch.equal(found, plain)


@pytest.mark.slow
def test_rows_and_frames_are_divided_alike():
    x, y = X[:, :, 0].T, Y[0, :, 0]
    native = traced(plain_regressor, x.T[:, :, None], y[None, :, None])[1]
    assert torch.equal(traced(plain_regressor, x, y)[1], native)
    frame = pd.DataFrame(x, columns=["p", "q"], index=range(50, 50 + N))
    est, trace = traced(plain_regressor, frame, pd.Series(y, index=frame.index))
    assert torch.equal(trace, native)
    assert est.feature_names_in_.tolist() == ["p", "q"]
    one = x[:1].repeat(1, 0), X[:, :1]  # one row of many steps
    est, trace = traced(
        plain_regressor,
        one[1].reshape(1, -1),
        Y[:, :1].reshape(1, -1),
        n_timesteps=T,
        target="step",
    )
    assert torch.equal(trace, traced(plain_regressor, X[:, :1], Y[:, :1])[1])


@pytest.mark.slow
def test_lengths_are_held_out_with_their_series():
    lengths = np.arange(N) % 4 + T - 3
    x, y = X.copy(), Y.copy()
    for a in (x, y):
        a[:, np.arange(T)[None, :] >= lengths[:, None]] = 1e4
    est, trace = traced(plain_regressor, x, y, lengths=lengths)
    other, wanted = traced(plain_regressor, X, Y, lengths=lengths)
    assert torch.equal(trace, wanted)
    assert est.validation_loss_curve_ == other.validation_loss_curve_
    assert max(est.validation_loss_curve_) < 100


def test_training_stops_and_the_best_weights_stay():
    settings = {"epochs": 200, "lr": 0.2, "patience": 4, "batchsize": 100}
    est, trace = traced(
        plain_regressor, X, np.random.default_rng(8).normal(size=Y.shape), **settings
    )
    best = int(np.argmin(est.validation_loss_curve_))
    assert est.n_iter_ == len(trace) == best + 1 + 4 < 200
    assert torch.equal(net2vec(est), trace[best])
    assert not torch.equal(trace[best], trace[-1])


def test_given_validation_data_decide_in_place_of_held_out_ones():
    val = X[:, :4], Y[:, :4]
    est = plain_regressor(**SMALL, early_stopping=True, callbacks=(trace := Trace())).fit(
        X, Y, validation_data=val
    )
    plain = plain_regressor(**SMALL, callbacks=(other := Trace())).fit(X, Y)
    assert torch.equal(torch.stack(trace.epochs), torch.stack(other.epochs))  # trained on all
    assert len(est.validation_loss_curve_) == 2
    assert plain.validation_loss_curve_ == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_labels_that_are_held_out_are_classes_too(seed):
    """A rare one, and one that comes late in time, may be among them alone."""
    rare = LABELS.astype("<U5")
    rare[4] = "rare"
    settings = {**SMALL, "early_stopping": True, "random_state": seed}
    assert plain_classifier(**settings).fit(X, rare).classes_.tolist() == ["a", "b", "rare"]
    late = np.full((1, N, T), "early")
    late[:, :, -1] = "late"
    for view in (timesteps, samples):
        assert plain_classifier(**settings).fit(view(X), view(late)).classes_.tolist() == [
            "early",
            "late",
        ]
    steps = plain_classifier(**settings).fit(X, late)
    assert steps.classes_.tolist() == ["early", "late"]


def test_the_same_random_state_holds_out_the_same():
    first = traced(plain_regressor, X, Y)[1]
    np.random.seed(99)  # noqa: NPY002  a global generator that must not matter
    assert torch.equal(traced(plain_regressor, X, Y)[1], first)
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    traced(plain_regressor, X, Y, shuffle=True)
    assert before == np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize(("x", "y", "fraction", "message"), [
    (X, Y, 0.99, "early_stopping holds out 13 of n_samples=13, which leaves nothing to train on; give more data, or "
                 "early_stopping=False"),
    (X[:, :1], Y[:, :1], 0.99, "early_stopping holds out 17 of n_samples=17 time steps, which leaves nothing to train "
                               "on; give more data, or early_stopping=False"),
    (X[:, :1], [1.0], 0.5, "early_stopping of one series holds out its last steps, but y has one target, at the last "
                           "step; give more series, or early_stopping=False"),
    (X, Y[:, :5], 0.5, "x has 13 series and y has 5 (axis 1 of shapes (2, 13, 17) and (1, 5, 17)); both must be "
                       "(F, N, T) with equal N and T"),
    (X, None, 0.5, "This SequenceRegressor estimator requires y to be passed, but the target y is None."),
])  # fmt: skip
def test_data_that_cannot_be_divided(x, y, fraction, message, monkeypatch):
    monkeypatch.setattr(fitting, "VALIDATION_FRACTION", fraction)
    est = plain_regressor(**SMALL, early_stopping=True)
    with pytest.raises(ValueError) as info:  # noqa: PT011  the whole message is compared
        est.fit(x, y)
    assert str(info.value) == message
    assert not hasattr(est, "model_")


def test_partial_fit_learns_from_all():
    a = plain_regressor(**SMALL, early_stopping=True).partial_fit(X, Y)
    assert torch.equal(net2vec(a), net2vec(plain_regressor(**SMALL).partial_fit(X, Y)))


def test_warm_start_goes_on_with_the_same_held_out():
    est = plain_regressor(**{**SMALL, "epochs": 1}, early_stopping=True, warm_start=True)
    est.fit(X, Y).fit(X, Y)
    assert est.n_iter_ == len(est.loss_curve_) == len(est.validation_loss_curve_) == 2
