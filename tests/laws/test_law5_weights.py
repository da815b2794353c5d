"""Law 5: constant weights equal no weights; masked steps give no gradient, not NaN."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, seqloss

from .conftest import B, N, S, T, difference, flat, window

adam = partial(torch.optim.Adam, lr=1e-2)
still = partial(torch.optim.SGD, lr=0.0)
spec = Spec(epochs=1, batchsize=B, seqsize=S)


def fit(task, loss=None, opt=adam, spec=spec, x=None, y=None, **kw):
    return Estimator(task.ours(), loss, opt, spec).fit(task.x if x is None else x, task.y if y is None else y, **kw)


@pytest.mark.parametrize("shape", [(N,), (N, T), (1, N, T)])
@pytest.mark.parametrize("value", [1, 3.0, 0.01])
def test_constant_weights_are_no_weights(task, shape, value):
    weight = np.full(shape, value)
    assert difference(net2vec(fit(task, sample_weight=weight)), net2vec(fit(task))) < 1e-12
    assert (weight == value).all()  # the user's array is not scaled in place


def weighted_oracle(task, w, x=None, y=None):
    """Plain torch: per window, the sum of weight times loss over live steps, divided by their number."""
    x, y = task.x if x is None else x, task.y if y is None else y
    w = w / w[w > 0].mean()
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = adam(params)
    for g in range(0, N, B):
        state = None
        for t in range(0, T, S):
            h, state = lstm(window(x, slice(g, g + B), t, t + S), state)
            each = ((head(h) - window(y, slice(g, g + B), t, t + S)) ** 2).mean(-1)  # (S, B)
            ws = torch.tensor(w[g : g + B, t : t + S].T)
            if (ws > 0).any():
                opt.zero_grad()
                ((each * ws).sum() / (ws > 0).sum()).backward()
                opt.step()
            state = tuple(s.detach() for s in state)
    return flat(params)


@pytest.mark.parametrize("form", ["(N,)", "(N, T)", "(1, N, T)"])
def test_weights_equal_a_weighted_loop(task, form):
    rng = np.random.default_rng(0)
    w = rng.uniform(0.1, 4, N if form == "(N,)" else (N, T))
    if form != "(N,)":
        w[rng.random((N, T)) < 0.3] = 0
    full = np.broadcast_to(w[:, None], (N, T)) if form == "(N,)" else w
    est = fit(task, sample_weight=w[None] if form == "(1, N, T)" else w)
    assert difference(net2vec(est), weighted_oracle(task, full)) < 1e-12


def test_nan_targets_equal_weight_zero_and_inputs_still_count(task):
    dead = np.random.default_rng(0).random((N, T)) < 0.4
    dead[8:16, 20:30] = True  # a window without any target
    y = task.y.copy()
    y[1, dead] = np.nan  # one of the targets is enough
    est = fit(task, y=y)
    assert difference(net2vec(est), weighted_oracle(task, (~dead).astype(float))) < 1e-12
    assert np.isfinite(est.loss_curve_).all()
    by_weight = fit(task, sample_weight=(~dead).astype(float))
    assert difference(net2vec(est), net2vec(by_weight)) < 1e-14


def test_nan_inputs_of_dead_steps_are_zeros(task):
    dead = np.random.default_rng(1).random((N, T)) < 0.3
    x, y, zeroed = task.x.copy(), task.y.copy(), task.x.copy()
    x[1, dead] = np.nan
    y[:, dead] = np.nan
    zeroed[:, dead] = 0
    est = fit(task, x=x, y=y)
    expected = weighted_oracle(task, (~dead).astype(float), x=zeroed)
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.parametrize("how", ["lengths", "nan", "weights"])
def test_series_of_different_length(task, how):
    lengths = np.random.default_rng(2).integers(1, T + 1, N)
    lengths[8:16] = np.minimum(lengths[8:16], 17)  # a group that ends early
    live = np.arange(T) < lengths[:, None]
    x, y = np.where(live, task.x, 0), np.where(live, task.y, 0)
    expected = weighted_oracle(task, live.astype(float), x, y)
    if how == "lengths":
        est = fit(task, x=np.where(live, x, 7e9), y=np.where(live, y, -3e9), lengths=lengths)
    elif how == "nan":
        est = fit(task, x=np.where(live, x, np.nan), y=np.where(live, y, np.nan))
    else:
        est = fit(task, x=x, y=y, sample_weight=live.astype("f4"))
    assert difference(net2vec(est), expected) < 1e-12


def test_the_loss_curve_weighs_windows_by_live_steps(task):
    y = task.y.copy()
    y[:, :, 5:40] = np.nan
    est = fit(task, y=y, opt=still)
    lstm, head = task.plain()
    with torch.no_grad():
        out = head(lstm(window(task.x, slice(None), 0, T))[0]).numpy().transpose(2, 1, 0)
    assert est.loss_curve_[0] == pytest.approx(np.nanmean((out - y) ** 2), rel=1e-12)


def test_a_loss_with_four_arguments_gets_scaled_weights(task):
    w = np.random.default_rng(0).uniform(0.5, 2, N)
    w[5] = 0
    seen = []

    def loss(model, xs, ys, ws):
        seen.append(ws)
        return (((model(xs) - ys) ** 2).mean(-1, keepdim=True) * ws).sum() / (ws > 0).sum()

    est = fit(task, loss, sample_weight=w)
    assert all(ws.shape[2] == 1 and ws.dim() == 3 for ws in seen)
    used = torch.cat([ws.reshape(-1) for ws in seen])
    assert float(used[used > 0].mean()) == pytest.approx(1, rel=1e-12)
    assert difference(net2vec(est), weighted_oracle(task, np.broadcast_to(w[:, None], (N, T)))) < 1e-12
    assert difference(net2vec(fit(task, loss)), net2vec(fit(task))) < 1e-12  # without weights it gets ones


@pytest.mark.parametrize("criterion", [nn.L1Loss(), nn.HuberLoss(), F.smooth_l1_loss, nn.MSELoss(reduction="sum")])
def test_constant_weights_for_other_criteria(task, criterion):
    small = partial(torch.optim.SGD, lr=1e-4)
    with_weights = fit(task, criterion, opt=small, sample_weight=np.full(N, 2.0))
    assert difference(net2vec(with_weights), net2vec(fit(task, criterion, opt=small))) < 1e-12


@pytest.mark.parametrize("class_weight", [None, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)])
def test_constant_weights_for_cross_entropy(task, class_weight):
    labels = np.digitize(task.y[:1], [-0.5, 0.5])
    lstm, _ = task.plain()
    model = nn.Sequential(lstm, nn.Linear(7, 3).double())
    criterion = nn.CrossEntropyLoss(weight=class_weight)

    def fitted(loss, **kw):
        return net2vec(Estimator(model, loss, adam, spec).fit(task.x, labels, **kw))

    def torchs_own(model, xs, ys):
        return criterion(model(xs).flatten(0, 1), ys.reshape(-1))

    assert difference(fitted(criterion, sample_weight=np.ones((N, T))), fitted(torchs_own)) < 1e-12
    assert difference(fitted(criterion), fitted(torchs_own)) < 1e-12


def test_labels_to_be_ignored_are_dead_steps(task):
    labels = np.digitize(task.y[:1], [-0.5, 0.5])
    dead = np.random.default_rng(0).random((N, T)) < 0.3
    dead[:8, 10:20] = True  # a whole window
    lstm, _ = task.plain()
    model = nn.Sequential(lstm, nn.Linear(7, 3).double())
    ignored = Estimator(model, nn.CrossEntropyLoss(), still, spec).fit(task.x, np.where(dead, -100, labels))
    weighted = Estimator(model, seqloss(F.cross_entropy), still, spec).fit(
        task.x, labels, sample_weight=(~dead).astype(float)
    )
    assert difference(ignored.grad_, weighted.grad_) < 1e-12
    assert ignored.loss_curve_ == pytest.approx(weighted.loss_curve_, rel=1e-12)
    assert ignored.score(task.x, np.where(dead, -100, labels)) == pytest.approx(
        (ignored.predict(task.x).argmax(0) == labels[0])[~dead].mean()
    )
