"""Series of unequal length as lists of arrays: what estimators make of them."""

import re
import tracemalloc

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    SequenceScaler,
    Spec,
    net2vec,
)
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import plain_classifier, plain_regressor

LENGTHS = [9, 3, 14, 1, 6, 11, 14]


@pytest.fixture
def x(rng):
    return [rng.normal(size=(2, t)) for t in LENGTHS]


def padded(arrays, fill=0.0):
    out = np.full(
        (arrays[0].shape[0], len(arrays), max(LENGTHS)), fill, np.asarray(arrays[0]).dtype
    )
    for n, a in enumerate(arrays):
        out[:, n, : a.shape[1]] = a
    return out


def est(n_out=1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, n_out))
    spec = Spec(
        **{"epochs": 2, "batchsize": 3, "seqsize": 4, "shuffle": True} | settings.pop("spec", {})
    )
    return Estimator(model, None, None, spec, random_state=0, **settings)


def targets(x):
    return [a.sum(0, keepdims=True).cumsum(1) for a in x]


@pytest.mark.slow
def test_a_list_is_the_padded_array_with_lengths(x):
    y = targets(x)
    found = est().fit(x, y, validation_data=(x[::-1], y[::-1]))
    data = padded(x[::-1]), padded(y[::-1]), None, LENGTHS[::-1]
    same = est().fit(padded(x), padded(y), lengths=LENGTHS, validation_data=data)
    assert torch.equal(net2vec(found), net2vec(same))
    assert found.validation_loss_curve_ == same.validation_loss_curve_
    assert found.score(x, y) == pytest.approx(
        same.score(padded(x), padded(y), lengths=LENGTHS), rel=1e-12
    )
    found.partial_fit(x, y)
    assert torch.equal(
        net2vec(found), net2vec(same.partial_fit(padded(x), padded(y), lengths=LENGTHS))
    )


@pytest.mark.slow
def test_nothing_is_copied_into_a_padded_block(rng):
    lengths = [40_000] + [50] * 200
    x = [rng.normal(size=(2, t)).astype("f4") for t in lengths]
    y = [a[:1] for a in x]
    model = est(spec={"batchsize": 16, "seqsize": 500, "epochs": 1, "shuffle": False}).fit(
        x[1:4], y[1:4]
    )
    block = 3 * len(lengths) * max(lengths) * 4  # 97 MB
    tracemalloc.start()
    try:
        model.score(x, y)
        model.predict(x)
        model.partial_fit(x, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < block / 10


def test_several_inputs_and_outputs(x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.a, self.b = LSTM(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, u, v):
            h = self.lstm(torch.cat([u, v], -1))
            return self.a(h), self.b(h)

    torch.manual_seed(0)
    made = Estimator(Two(), nn.MSELoss(), None, Spec(1, 3, 4))
    inputs, outputs = (x, targets(x)), (targets(x), x)
    found = made.fit(inputs, outputs)
    expected = net2vec(found)
    predicted = found.predict(inputs)
    assert isinstance(predicted, tuple)
    assert [[a.shape for a in p] for p in predicted] == [[(g, t) for t in LENGTHS] for g in (1, 2)]
    made.fit(tuple(map(padded, inputs)), tuple(map(padded, outputs)), lengths=LENGTHS)
    assert torch.equal(net2vec(made), expected)


@pytest.mark.slow
def test_labels_of_steps(x, rng):
    names = np.array(["up", "down", "sideways"])
    y = [names[rng.integers(0, 3, (1, a.shape[1]))] for a in x]
    made = EstimatorClassifier(spec=Spec(2, 3, 4), random_state=0)
    found = made.fit(x, y)
    assert found.classes_.tolist() == ["down", "sideways", "up"]
    expected = net2vec(found)
    labels, chances = found.predict(x), found.predict_proba(x)
    assert [a.shape for a in labels] == [(1, t) for t in LENGTHS]
    for label, chance in zip(labels, chances, strict=True):
        assert (found.classes_[chance.argmax(0)] == label[0]).all()
        np.testing.assert_allclose(chance.sum(0), 1)
    right = np.mean(np.concatenate(y, 1) == np.concatenate(labels, 1))
    assert found.score(x, y) == pytest.approx(right)
    codes = [np.searchsorted(found.classes_, a) for a in y]
    again = EstimatorClassifier(spec=Spec(2, 3, 4), random_state=0).fit(
        padded(x), padded(codes, 1), lengths=LENGTHS
    )
    assert torch.equal(net2vec(again), expected)


def test_what_is_behind_the_end_of_a_series_is_no_class(x):
    y = [np.ones((1, a.shape[1]), int) + (np.arange(a.shape[1]) % 2) for a in x]
    assert plain_classifier(2, epochs=1).fit(x, y).classes_.tolist() == [1, 2]
    assert plain_classifier(2, epochs=1).fit(
        padded(x), padded(y, 0), lengths=LENGTHS
    ).classes_.tolist() == [1, 2]


@pytest.mark.slow
def test_weights_of_series_and_steps(x, rng):
    y, each = targets(x), rng.random(len(x))
    steps = [rng.random(a.shape[1]) for a in x]
    full = padded([s[None] for s in steps])
    for ours, theirs in (
        (each, each),
        (list(each), each),
        (steps, full),
        ([s[None] for s in steps], full),
    ):
        found = est().fit(x, y, ours)
        assert torch.equal(
            net2vec(found), net2vec(est().fit(padded(x), padded(y), theirs, lengths=LENGTHS))
        )
        assert found.score(x, y, ours) == pytest.approx(
            found.score(padded(x), padded(y), theirs, lengths=LENGTHS), rel=1e-12
        )


def test_one_series(x):
    found = est().fit(x[:1], targets(x[:1]))
    same = est().fit(x[0][:, None], targets(x[:1])[0][:, None])
    assert torch.equal(net2vec(found), net2vec(same))
    assert np.array_equal(found.predict(x[:1])[0], same.predict(x[0][:, None])[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "npy"])
def test_a_pipeline_of_scaler_and_estimator(x, kind, tmp_path):
    given = x
    if kind == "npy":
        for n, a in enumerate(x):
            np.save(tmp_path / f"{n}.npy", a)
        given = [np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in range(len(x))]
    scaled = SequenceScaler().fit(given).transform(given)
    steps = np.concatenate(x, 1)
    expected = [(a - steps.mean(1, keepdims=True)) / steps.std(1, keepdims=True) for a in x]
    for found, wanted in zip(scaled, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[1, ::2], wanted[1, ::2], rtol=0, atol=1e-12)
        assert isinstance(found, np.ndarray) == (kind == "memory")
    piped = make_pipeline(SequenceScaler(), est()).fit(given, targets(x))
    assert torch.allclose(
        net2vec(piped[-1]), net2vec(est().fit(expected, targets(x))), rtol=0, atol=1e-10
    )
    assert [a.shape for a in piped.predict(given)] == [(1, t) for t in LENGTHS]


@pytest.mark.slow
def test_scikit_learn_splits_lists_by_series(x):
    search = GridSearchCV(plain_regressor(2, epochs=1, random_state=0), {"lr": [0.1, 0.01]}, cv=3)
    found = search.fit(x, targets(x))
    assert len(found.predict(x)) == len(x)


@pytest.mark.slow
def test_a_fit_that_was_killed_goes_on_and_one_of_other_lengths_does_not(x, tmp_path):
    y = targets(x)
    saves = Checkpointer(tmp_path, trigger=EveryNSteps(1), keep=2)

    def stop(loop):
        if loop.step == 5:
            raise RuntimeError("killed")

    whole = est().fit(x, y)
    with pytest.raises(RuntimeError, match="killed"):
        est(callbacks=[saves, stop]).fit(x, y)
    assert torch.equal(net2vec(est(callbacks=saves).fit(x, y)), net2vec(whole))
    with pytest.raises(ValueError, match="starts and lengths of series"):
        est(callbacks=saves).fit([*x[:-1], x[-1][:, :13]], [*y[:-1], y[-1][:, :13]])


@pytest.mark.slow
def test_starts_tell_one_fit_from_another(x, tmp_path):
    saves = Checkpointer(tmp_path, trigger=EveryNSteps(1), keep=2)
    data = padded(x), padded(targets(x))
    est(callbacks=saves).fit(*data, lengths=[1] * 7)
    with pytest.raises(ValueError, match="starts and lengths of series"):
        est(callbacks=saves).fit(*data, lengths=[1] * 7, starts=[0, 0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(("arguments", "settings", "message"), [
    (lambda x, y: (x, y[:-1]), {}, "x has 7 series and y has 6"),
    (lambda x, y: (x, [*y[:2], y[2][:, :5], *y[3:]]), {}, "x[2] has 14 time steps and y[2] has 5"),
    (lambda x, y: ([np.ones((9, 3))] * 7, [np.ones((9, 1))] * 7), {},
     "x[0] has 3 time steps and y[0] has 1; the arrays of a list are series (F, T_i): arrays "
     "(T_i, F) become so"),
    (lambda x, y: (x, padded(y)), {}, "x is a list of series and y is not: give both as arrays (F, N, T), or both as"),
    (lambda x, y: (padded(x), y), {}, "x is an array and y is not: give both as arrays (F, N, T), or both as lists"),
    (lambda x, y: ((x, padded(x)), y), {}, "some of the 2 arrays of x are lists of series; give all as lists, or none"),
    (lambda x, y: (x, y), {"lengths": LENGTHS},
     "starts and lengths are for series in one array; those of a list have their own lengths"),
    (lambda x, y: (x, y), {"sample_weight": [np.ones(9)] * 7}, "x[1] has 3 time steps and sample_weight[1] has 9"),
    (lambda x, y: (x, y), {"sample_weight": [np.ones(9)] * 3}, "sample_weight is a list of 3 arrays of 1 features"),
    (lambda x, y: ([a[0] for a in x], y), {}, "x[0] has shape (9,): the arrays of a list are series (F, T_i)"),
    (lambda x, y: (x, [*y[:2], y[2] * np.inf, *y[3:]]), {}, "y is "),
], ids=range(11))  # fmt: skip
def test_arguments_that_do_not_fit(x, arguments, settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        est().fit(*arguments(x, targets(x)), **settings)


@pytest.mark.parametrize(
    "out", [lambda y: y[:-1], lambda y: [a[:, :1] for a in y], lambda y: padded(y)]
)
def test_an_out_that_does_not_fit(x, out):
    found = est().fit(x, targets(x))
    with pytest.raises(ValueError, match=r"^out "):
        found.predict(x, out=out(targets(x)))
