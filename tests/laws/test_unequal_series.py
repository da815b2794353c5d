"""Laws 1, 3, 4 and 5 for series that begin late and end early: against loops over each series by
itself.
"""

import functools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.estimator import fitting
from tests.plain_networks import plain_regressor

from .conftest import B, N, S, T, difference, flat, make_task

adam = partial(torch.optim.Adam, lr=1e-2)
still = partial(torch.optim.SGD, lr=0.0)

draw = np.random.default_rng(11)
STARTS = draw.integers(0, 30, N)
LENGTHS = draw.integers(1, T - STARTS + 1)
STARTS[8:16] = np.minimum(STARTS[8:16], 3)
LENGTHS[8:16] = np.minimum(LENGTHS[8:16], 12)  # a group that ends early
SPANS = [slice(s, s + n) for s, n in zip(STARTS, LENGTHS, strict=True)]
INSIDE = (np.arange(T) >= STARTS[:, None]) & (np.arange(T) < (STARTS + LENGTHS)[:, None])


def by_itself(task, parts, *, epochs=1, batchsize=B, seqsize=S, overlap=0, burn_in=0, opt=adam):
    """Plain torch, series by series and step by step. ``parts``: (x (F, T_i), y (G, T_i), w (T_i,))
    of each series.

    Returns the parameters, and loss and live steps of each window of the last epoch.
    """
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = opt(params)
    zero = tuple(torch.zeros(1, 1, lstm.hidden_size, dtype=task.dtype) for _ in range(2))
    parts = [tuple(torch.tensor(np.asarray(a), dtype=task.dtype) for a in part) for part in parts]
    for _ in range(epochs):
        found = []
        for g in range(0, len(parts), batchsize):
            group = parts[g : g + batchsize]
            longest = max(x.shape[1] for x, _, _ in group)
            # the state before each step, as it was last computed
            before = [{0: zero} for _ in group]
            burn = [
                (t, min(t + seqsize, burn_in), False)
                for t in range(0, min(burn_in, longest), seqsize)
            ]
            rest = [(t, min(t + seqsize, longest), True) for t in range(burn_in, longest, seqsize)]
            for start, stop, counts in burn + rest:
                first = max(burn_in, start - overlap) if counts else start
                total, live = 0.0, 0
                for (x, y, w), states in zip(group, before, strict=True):
                    if first >= x.shape[1]:
                        continue
                    state = tuple(s.detach() for s in states[first])
                    for t in range(first, min(stop, x.shape[1])):
                        h, state = lstm(x[:, t].reshape(1, 1, -1), state)
                        states[t + 1] = state
                        if t >= start and counts and w[t] > 0:
                            total = total + w[t] * ((head(h)[0, 0] - y[:, t]) ** 2).mean()
                            live += 1
                if live:
                    opt.zero_grad()
                    (total / live).backward()
                    opt.step()
                    found.append((float(total.detach()) / live, live))
    return flat(params), found


def cut(task, w=None):
    """Each series by itself."""
    w = np.ones((N, T)) if w is None else w
    return [(task.x[:, n, span], task.y[:, n, span], w[n, span]) for n, span in enumerate(SPANS)]


def given(task, form, w=None):
    """The same series, as ``fit`` takes them: in lists, or in an array full of rubbish elsewhere."""
    if form == "list":
        settings = (
            {} if w is None else {"sample_weight": [w[n, span] for n, span in enumerate(SPANS)]}
        )
        return ([x for x, _, _ in cut(task)], [y for _, y, _ in cut(task)]), settings
    x, y = np.where(INSIDE, task.x, np.nan), np.where(INSIDE, task.y, 5e9)
    y[:, ::2] = np.where(INSIDE[::2], task.y[:, ::2], np.nan)
    settings = {} if w is None else {"sample_weight": np.where(INSIDE, w, 77)}
    return (x, y), settings | {"starts": STARTS, "lengths": LENGTHS}


FORMS = ["starts", "list"]


@functools.cache
def expected_of(more):
    """The loop with the task's data, once for both forms."""
    task = make_task()
    return by_itself(task, cut(task), **dict(more))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [
    {}, {"overlap": 4}, {"burn_in": 3}, {"overlap": 7, "burn_in": 5}, {"batchsize": 100, "seqsize": 7},
    {"batchsize": 1}, {"seqsize": 99},
], ids=str)  # fmt: skip
def test_fit_equals_a_loop_over_each_series(task, form, more):
    expected, losses = expected_of(tuple(more.items()))
    spec = Spec(**{"epochs": 1, "batchsize": B, "seqsize": S, "rebatch": False, **more})
    data, settings = given(task, form)
    est = Estimator(task.ours(), None, adam, spec).fit(*data, **settings)
    assert difference(net2vec(est), expected) < 1e-12
    values, live = np.array(losses).T
    assert est.loss_curve_[0] == pytest.approx((values * live).sum() / live.sum(), rel=1e-12)
    assert est.loss_ == pytest.approx(np.mean([v for v, _ in losses]), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_series_that_begin_late(task, form):
    w = np.random.default_rng(3).uniform(0.2, 3, (N, T))
    w[np.random.default_rng(4).random((N, T)) < 0.2] = 0
    counting = w[INSIDE & (w > 0)]
    expected, _ = by_itself(task, cut(task, w / counting.mean()))
    data, settings = given(task, form, w)
    est = Estimator(task.ours(), None, adam, Spec(1, B, S)).fit(*data, **settings)
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.few
@pytest.mark.parametrize("form", FORMS)
def test_constant_weights_of_series_that_begin_late(task, form):
    spec = Spec(1, B, S)
    data, settings = given(task, form, np.full((N, T), 3.0))
    weighted = Estimator(task.ours(), None, adam, spec).fit(*data, **settings)
    data, settings = given(task, form)
    assert (
        difference(
            net2vec(weighted),
            net2vec(Estimator(task.ours(), None, adam, spec).fit(*data, **settings)),
        )
        < 1e-12
    )


def oracle_outputs(model, task):
    lstm, head = model[0].module, model[1]
    with torch.no_grad():
        return [head(lstm(torch.tensor(x).T[:, None])[0])[:, 0].T.numpy() for x, _, _ in cut(task)]


@pytest.fixture(scope="module")
def fitted():
    task = make_task()
    return task, Estimator(task.ours(), None, adam, Spec(1, B, S)).fit(task.x, task.y)


@pytest.mark.few
@pytest.mark.parametrize("form", FORMS)
def test_predictions_are_those_of_each_series_alone(fitted, form):
    task, est = fitted
    (x, _), settings = given(task, form)
    expected = oracle_outputs(est.model_, task)
    found = est.predict(x, **settings)
    into = (
        np.full((2, N, T), 8.0) if form == "starts" else [np.full(e.shape, 8.0) for e in expected]
    )
    assert est.predict(x, out=into, **settings) is into
    if form == "list":
        assert isinstance(found, list)
        assert [f.shape for f in found] == [e.shape for e in expected]
        assert max(difference(f, e) for f, e in zip(found, expected, strict=True)) < 1e-12
        assert all(np.array_equal(f, i) for f, i in zip(found, into, strict=True))
        return
    for n, span in enumerate(SPANS):
        assert difference(found[:, n, span], expected[n]) < 1e-12
    assert np.array_equal(np.isnan(found), np.broadcast_to(~INSIDE, found.shape))
    np.testing.assert_array_equal(into, found)


@pytest.mark.parametrize("form", FORMS)
def test_the_score_is_of_the_steps_inside(fitted, form):
    task, est = fitted
    (x, y), settings = given(task, form)
    yhat = np.concatenate(oracle_outputs(est.model_, task), 1)
    true = np.concatenate([y for _, y, _ in cut(task)], 1)
    y = np.where(INSIDE, task.y, np.nan) if form == "starts" else y
    spread = ((true - true.mean(1, keepdims=True)) ** 2).sum()
    assert est.score(x, y, **settings) == pytest.approx(
        1 - ((true - yhat) ** 2).sum() / spread, rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_one_target_per_series_is_at_its_last_step(task, form):
    (x, _), settings = given(task, form)
    y = np.random.default_rng(0).normal(size=(N, 2))
    w = [np.r_[np.zeros(n - 1), 1.0] for n in LENGTHS]
    parts = [
        (x, np.repeat(y[n][:, None], x.shape[1], 1), w[n]) for n, (x, _, _) in enumerate(cut(task))
    ]
    expected, _ = by_itself(task, parts)
    est = Estimator(task.ours(), None, adam, Spec(1, B, S)).fit(x, y, **settings)
    assert difference(net2vec(est), expected) < 1e-12
    last = np.array([out[:, -1] for out in oracle_outputs(est.model_, task)])
    assert difference(est.predict(x, **settings), last) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_validation_data_that_begin_late(task, form):
    (x, y), settings = given(task, form)
    weight, lengths, starts = (settings.get(k) for k in ("sample_weight", "lengths", "starts"))
    est = Estimator(task.ours(), None, still, Spec(1, B, S))
    est.fit(task.x, task.y, validation_data=(x, y, weight, lengths, starts))
    errors = [
        ((out - y) ** 2).mean(0)
        for out, (_, y, _) in zip(oracle_outputs(est.model_, task), cut(task), strict=True)
    ]
    assert est.validation_loss_curve_[0] == pytest.approx(np.concatenate(errors).mean(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_folds_lie_within_their_series(task, form):
    """Each series is cut into pieces of its own steps, each of which is then a series."""
    pieces = []
    for x, y, w in cut(task):
        n = 3 if x.shape[1] > 3 else 1  # 111 // 37; too short a series stays whole
        at = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(x.shape[1]), n)]
        pieces += [(x[:, a], y[:, a], w[a]) for a in at]
    expected, _ = by_itself(task, pieces, batchsize=111, seqsize=4)
    (x, y), settings = given(task, form)
    est = Estimator(task.ours(), None, adam, Spec(1, 111, 4, rebatch=True)).fit(x, y, **settings)
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_that_after_the_last_step_of_each_series(fitted, form):
    task, est = fitted
    (x, _), settings = given(task, form)
    state = est.predict(x, return_state=True, **settings)[1]
    with torch.no_grad():
        alone = [est.model_[0].module(torch.tensor(x).T[:, None])[1] for x, _, _ in cut(task)]
    for i, found in enumerate(state):
        assert difference(found, torch.cat([s[i] for s in alone], 1)) < 1e-12


def test_early_stopping_holds_out_the_last_steps_of_one_series_that_begins_late(monkeypatch):
    monkeypatch.setattr(fitting, "VALIDATION_FRACTION", 0.25)
    task = make_task(n_series=1)
    model = partial(nn.Sequential, *task.plain())
    seen = []
    criterion = seqloss(nn.MSELoss())

    def loss(model, xs, ys, ws):
        seen.append(ys.clone())
        return criterion(model, xs, ys, ws)

    est = plain_regressor(epochs=1, rebatch=False, early_stopping=True, scale_target=False)
    settings = replace(est.resolved_params(), loss=loss, model=lambda: model())
    est.resolved_params = lambda: settings
    est._fit = partial(Estimator._fit, est)  # nothing is chosen
    y = np.where((np.arange(T) >= 5) & (np.arange(T) < 35), task.y, np.nan)
    est.fit(np.where(np.isnan(y[:1]), np.nan, task.x), y, starts=[5], lengths=[30])
    # of 30 steps, a quarter is held out
    assert [tuple(v.shape) for v in seen] == [
        (22, 1, 2),
        (8, 1, 2),
    ]
    assert difference(seen[0][:, 0].T, task.y[:, 0, 5:27]) == 0
    assert difference(seen[1][:, 0].T, task.y[:, 0, 27:35]) == 0


@pytest.mark.parametrize(("settings", "message"), [
    ({"starts": [0, 1]}, r"^starts .*37 integers.*\(2,\) .*int64$"),
    ({"starts": np.full(N, T)}, r"^starts .*T-1=42, got 43 to 43$"),
    ({"starts": np.full(N, -1)}, r"^starts .*T-1=42, got -1 to -1$"),
    ({"starts": np.full(N, 0.5)}, r"^starts .*37 integers.*\(37,\) .*float64$"),
    ({"starts": np.full(N, 3), "lengths": np.full(N, 41)},
     r"^series 0 .*step 3 .*41 steps.*T=43.*starts"),
], ids=str)  # fmt: skip
def test_starts_that_do_not_fit(task, settings, message):
    with pytest.raises(ValueError, match=message):
        Estimator(task.ours(), None, adam, Spec(1, B, S)).fit(task.x, task.y, **settings)
