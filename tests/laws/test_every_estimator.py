"""The laws for each estimator as it stands: no model, loss, optimizer or spec given."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import (
    Estimator,
    EstimatorClassifier,
    EstimatorRegressor,
    SequenceClassifier,
    SequenceRegressor,
    h5mmap,
    h5save,
    net2vec,
)
from fluxutils_py.training import Checkpointer
from tests.plain_networks import plain_classifier, plain_regressor

# few steps: leaving out groups of rows takes most of the time of a ready-made estimator's fit
N, T = 37, 23
EPOCHS = 12
READY_MADE = (SequenceRegressor, SequenceClassifier)
ALL = [Estimator, EstimatorRegressor, EstimatorClassifier, *READY_MADE]
every = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
LABELS = np.array(["down", "flat", "up"], object)
X = np.random.default_rng(5).normal(size=(3, N, T))
SALES = np.stack([50 + 5 * X[0].cumsum(1), 1e-3 * X.mean(0)])


def is_classifier(kind):
    return kind in (EstimatorClassifier, SequenceClassifier)


def targets(kind):
    return LABELS[X.argmax(0)][None] if is_classifier(kind) else SALES


def without(y, steps):
    """The targets with none at some steps, bool (N, T)."""
    return np.where(steps, None if y.dtype == object else np.nan, y)


def of_a_plain_network(kind, **settings):
    """An estimator of a plain network, also of a kind that chooses by itself."""
    make = {SequenceRegressor: plain_regressor, SequenceClassifier: plain_classifier}.get(
        kind, kind
    )
    return make(random_state=0, verbose=False, **settings)


def fit(kind, x=X, y=None, weight=None, epochs=3, **settings):
    y = targets(kind) if y is None else y
    return made(kind, **settings).fit(x, y, weight, epochs=epochs)


def made(kind, **settings):
    if kind in READY_MADE:  # a trial of 60 updates shows as much
        settings = {"max_updates": 60, **settings}
    return kind(random_state=0, verbose=False, **settings)


@functools.cache
def plain(kind):
    """Fitted once; tests only read it."""
    return fit(kind)


class Start:
    """Keeps the model as training begins."""

    def on_start(self, loop):
        self.model = copy.deepcopy(loop.shared_data["estimator"].model_)


@pytest.mark.slow
@every
def test_law_1_and_2_a_fit_is_back_propagation_through_whole_series(kind):
    start = Start()
    est = of_a_plain_network(kind, callbacks=start).fit(X, targets(kind), epochs=EPOCHS)
    cell, head = nn.LSTM(3, 32).double(), start.model[1]
    cell.load_state_dict(start.model[0].module.state_dict())
    params = [*cell.parameters(), *head.parameters()]
    opt, y = torch.optim.AdamW(params, lr=0.01), targets(kind)
    criterion = nn.MSELoss()
    if is_classifier(kind):
        target = torch.from_numpy(np.searchsorted(LABELS.astype(str), y[0].astype(str)).T.ravel())
        criterion = nn.CrossEntropyLoss()
    else:
        if kind is SequenceRegressor:
            y = (y - y.mean((1, 2), keepdims=True)) / y.std((1, 2), keepdims=True)
        target = torch.from_numpy(y.transpose(2, 1, 0).copy())
    xs = torch.from_numpy(X.transpose(2, 1, 0).copy())
    for _ in range(EPOCHS):
        opt.zero_grad()
        out = head(cell(xs)[0])
        criterion(out.flatten(0, 1) if is_classifier(kind) else out, target).backward()
        opt.step()
    assert (net2vec(est) - torch.cat([p.detach().reshape(-1) for p in params])).abs().max() < 1e-12
    assert est.history_[-1]["folds"] == 1


@pytest.mark.few
@every
def test_law_3_chunks_equal_the_whole(kind):
    est = plain(kind)
    for method in ["predict"] + ["predict_proba", "decision_function"] * is_classifier(kind):
        predict, state, found = getattr(est, method), None, []
        for start, stop in ((0, 7), (7, 8), (8, T)):
            y, state = predict(X[:, :, start:stop], state=state, return_state=True)
            found.append(y)
        live, whole = est.stream(N, method=method), predict(X)
        for y in (np.concatenate(found, 2), np.stack([live.step(X[:, :, t]) for t in range(T)], 2)):
            if y.dtype == object:
                assert np.array_equal(y, whole)
            else:
                assert np.abs(y - whole).max() < 1e-12 * np.abs(whole).max()


@pytest.mark.slow
@every
def test_law_4_and_5_steps_without_a_target_are_steps_without_weight(kind):
    y, odd = targets(kind), np.random.default_rng(1).random((N, T)) < 0.3
    missing = fit(kind, y=without(y, odd))
    same = 1e-11 if kind in READY_MADE else 1e-12  # a closed form rounds more than a step
    assert (
        net2vec(fit(kind, weight=np.full((N, T), 7.0))) - net2vec(plain(kind))
    ).abs().max() < same
    assert (net2vec(fit(kind, weight=1.0 - odd)) - net2vec(missing)).abs().max() < same
    assert (net2vec(missing) - net2vec(plain(kind))).abs().max() > 1e-6
    late = np.arange(N) % 5
    inside = np.arange(T) >= late[:, None]
    series = [X[:, n, s:] for n, s in enumerate(late)], [y[:, n, s:] for n, s in enumerate(late)]
    starting = made(kind).fit(X, without(y, ~inside), epochs=3, starts=late)
    assert (net2vec(fit(kind, *series)) - net2vec(starting)).abs().max() < same


@pytest.mark.few
@every
def test_law_8_a_fit_that_was_stopped_goes_on_bit_for_bit(kind, tmp_path):
    def fall(loop):
        if loop.step == 2:
            raise KeyboardInterrupt

    # without a trial, after which there may be no network
    network = {"cell": "linear+lstm"} if kind in READY_MADE else {}
    with pytest.raises(KeyboardInterrupt):
        fit(kind, callbacks=[Checkpointer(tmp_path), fall], **network)
    found = fit(kind, callbacks=Checkpointer(tmp_path), **network)
    expected = fit(kind, **network)
    assert found.n_iter_ == 3
    assert torch.equal(net2vec(found), net2vec(expected))
    assert np.array_equal(found.predict(X), expected.predict(X))


@pytest.mark.few
@every
def test_law_9_a_file_is_the_array(kind, tmp_path):
    h5save(tmp_path / "d.h5", {"x": X, **({} if is_classifier(kind) else {"y": SALES})})
    x = h5mmap(tmp_path / "d.h5", "x")
    y = targets(kind) if is_classifier(kind) else h5mmap(tmp_path / "d.h5", "y")
    assert torch.equal(net2vec(fit(kind, x, y)), net2vec(plain(kind)))
    assert torch.equal(net2vec(fit(kind, np.asfortranarray(X))), net2vec(plain(kind)))
