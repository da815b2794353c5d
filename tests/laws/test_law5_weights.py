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
    return Estimator(task.ours(), loss, opt, spec).fit(
        task.x if x is None else x, task.y if y is None else y, **kw
    )


@pytest.mark.apart
@pytest.mark.few
@pytest.mark.parametrize("shape", [(N,), (N, T), (1, N, T)])
@pytest.mark.parametrize("value", [1, 3.0, 0.01])
def test_constant_weights_are_no_weights(task, shape, value):
    weight = np.full(shape, value)
    assert difference(net2vec(fit(task, sample_weight=weight)), net2vec(fit(task))) < 1e-12
    assert (weight == value).all()  # the user's array is not scaled in place


def weighted_oracle(task, w, x=None, y=None):
    """Plain torch: per window, the sum of weight times loss over live steps, divided by their
    number.
    """
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


@pytest.mark.few
@pytest.mark.parametrize("form", ["(N,)", "(N, T)", "(1, N, T)"])
def test_weights_equal_a_weighted_loop(task, form):
    rng = np.random.default_rng(0)
    w = rng.uniform(0.1, 4, N if form == "(N,)" else (N, T))
    if form != "(N,)":
        w[rng.random((N, T)) < 0.3] = 0
    full = np.broadcast_to(w[:, None], (N, T)) if form == "(N,)" else w
    est = fit(task, sample_weight=w[None] if form == "(1, N, T)" else w)
    assert difference(net2vec(est), weighted_oracle(task, full)) < 1e-12


@pytest.mark.slow
def test_nan_targets_equal_weight_zero_and_inputs_still_count(task):
    dead = np.random.default_rng(0).random((N, T)) < 0.4
    dead[8:16, 20:30] = True  # a window without any target
    y = task.y.copy()
    y[:, dead] = np.nan
    est = fit(task, y=y)
    assert difference(net2vec(est), weighted_oracle(task, (~dead).astype(float))) < 1e-12
    assert np.isfinite(est.loss_curve_).all()
    by_weight = fit(task, sample_weight=(~dead).astype(float))
    assert difference(net2vec(est), net2vec(by_weight)) < 1e-14


def single_outputs_oracle(task, y, w=1.0, loss_of=lambda e: e**2, accumulate=1, opt=adam):
    """Plain torch: per window, the sum of weight times loss over the outputs that are there,
    divided by their number.

    Returns parameters, and losses and numbers of outputs of the windows.
    """
    there = ~np.isnan(y)
    w = np.broadcast_to(w, y.shape) * there
    w = w / w[w > 0].mean()
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt, found = opt(params), []
    waiting, waiting_n = 0.0, 0
    for g in range(0, N, B):
        state = None
        for t in range(0, T, S):
            series = slice(g, g + B)
            h, state = lstm(window(task.x, series, t, t + S), state)
            ws, target = window(w, series, t, t + S), window(np.nan_to_num(y), series, t, t + S)
            total, n = (loss_of(head(h) - target) * ws).sum(), int((ws > 0).sum())
            state = tuple(s.detach() for s in state)
            if n:
                found.append((total.item() / n, n))
                grads = torch.autograd.grad(total, params)
                waiting = (
                    [a + b for a, b in zip(waiting, grads, strict=True)] if waiting else list(grads)
                )
                waiting_n += n
                if len(found) % accumulate == 0:
                    for p, grad in zip(params, waiting, strict=True):
                        p.grad = grad / waiting_n
                    opt.step()
                    waiting, waiting_n = 0.0, 0
    return flat(params), np.array(found)


def with_holes(task):
    """Targets of which many steps lack one of two, some lack both, and some windows lack none."""
    rng = np.random.default_rng(0)
    y = task.y.copy()
    y[rng.random(y.shape) < 0.3] = np.nan
    y[0, :8, :20], y[1, 8:16] = np.nan, np.nan
    y[:, 16:24] = task.y[:, 16:24]
    return y


@pytest.mark.few
@pytest.mark.parametrize("form", ["one target", "several targets", "a loss of one's own"])
@pytest.mark.parametrize("weighted", [False, True])
def test_single_missing_outputs_are_masked_by_themselves(task, form, weighted):
    y = with_holes(task)
    w = np.random.default_rng(1).uniform(0.2, 3, (N, T)) if weighted else None
    expected, windows = single_outputs_oracle(task, y, 1.0 if w is None else w)
    model, loss, target, seen = task.ours(), None, y, []
    if form == "several targets":
        model, target = nn.Sequential(model, Columns()), (y[:1], y[1:])
    if form == "a loss of one's own":

        def loss(model, xs, ys, ws):
            seen.append(tuple(ws.shape))
            return ((model(xs) - ys) ** 2 * ws).sum() / (ws != 0).expand(ys.shape).sum()

    loss_ = seqloss(F.mse_loss) if form == "several targets" else loss
    if form == "several targets":  # the losses of several targets are added
        expected, windows = single_outputs_oracle(
            task, y, 1.0 if w is None else w, lambda e: 2 * e**2
        )
    est = Estimator(model, loss_, adam, spec).fit(task.x, target, w)
    assert difference(net2vec(est), expected) < 1e-12
    assert est.loss_ == pytest.approx(windows[:, 0].mean(), rel=1e-12)
    assert est.loss_curve_[0] == pytest.approx(
        (windows[:, 0] * windows[:, 1]).sum() / windows[:, 1].sum(), rel=1e-12
    )
    if seen:
        # one column where whole steps are there or missing
        assert {shape[2] for shape in seen} == {
            1,
            2,
        }


class Columns(nn.Module):
    def forward(self, x):
        return x[..., :1], x[..., 1:]


@pytest.mark.few
@pytest.mark.parametrize(
    "criterion", [nn.L1Loss(), lambda a, b: (a - b).abs()], ids=["torch", "own"]
)
def test_single_missing_outputs_of_other_criteria(task, criterion):
    y = with_holes(task)
    sgd = partial(torch.optim.SGD, lr=0.1)
    expected, _ = single_outputs_oracle(task, y, loss_of=torch.abs, opt=sgd)
    assert difference(net2vec(fit(task, criterion, sgd, y=y)), expected) < 1e-12


@pytest.mark.slow
def test_single_missing_outputs_and_accumulated_gradients(task):
    y = with_holes(task)
    expected, _ = single_outputs_oracle(task, y, accumulate=5)  # 5 windows of each of 5 groups
    est = fit(task, y=y, spec=Spec(epochs=1, batchsize=B, seqsize=S, accumulate=5))
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.slow
def test_a_criterion_of_whole_steps_passes_over_steps_that_lack_an_output(task):
    y = with_holes(task)
    whole = np.where(np.isnan(y).any(0), np.nan, y)
    norm = lambda a, b: (a - b).square().sum(-1)  # noqa: E731  one value per step
    assert torch.equal(net2vec(fit(task, norm, y=y)), net2vec(fit(task, norm, y=whole)))


@pytest.mark.slow
def test_a_window_whose_steps_are_whole_is_as_if_outputs_were_never_missing(task):
    y = task.y.copy()
    y[:, np.random.default_rng(0).random((N, T)) < 0.3] = np.nan
    shapes = set()

    def loss(model, xs, ys, ws):
        shapes.add(ws.shape[2])
        return (((model(xs) - ys) ** 2).mean(-1, keepdim=True) * ws).sum() / (ws != 0).sum()

    fit(task, loss, y=y)
    assert shapes == {1}


@pytest.mark.few
@pytest.mark.parametrize("weighted", [False, True])
def test_the_score_and_the_validation_loss_leave_out_single_outputs(task, weighted):
    y = with_holes(task)
    w = np.random.default_rng(1).uniform(0.2, 3, (N, T)) if weighted else None
    est = fit(task, opt=still, validation_data=(task.x, y, w))
    out = est.predict(task.x)
    there = ~np.isnan(y)
    ww = np.broadcast_to(1.0 if w is None else w, y.shape) * there
    error = np.where(there, (out - np.nan_to_num(y)) ** 2, 0)
    assert est.validation_loss_curve_[0] == pytest.approx((error * ww).sum() / ww.sum(), rel=1e-12)
    mean = [np.average(y[g][there[g]], weights=ww[g][there[g]]) for g in range(2)]
    spread = sum((ww[g][there[g]] * (y[g][there[g]] - mean[g]) ** 2).sum() for g in range(2))
    assert est.score(task.x, y, w) == pytest.approx(1 - (error * ww).sum() / spread, rel=1e-12)


def test_an_infinite_output_beside_a_missing_one_is_an_error(task):
    y = with_holes(task)
    n, t = np.argwhere(np.isnan(y[0]) & ~np.isnan(y[1]))[0]
    y[1, n, t] = np.inf
    with pytest.raises(ValueError, match=rf"^y is inf at feature 1, series {n}, step {t}; "):
        fit(task, y=y)


@pytest.mark.parametrize("folds", [1, 3])
def test_weights_of_burn_in_steps_do_not_set_the_scale_of_the_loss(task, folds):
    """Mean 1 over the steps that carry loss."""
    steps = np.concatenate([piece[:3] for piece in np.array_split(np.arange(T), folds)])
    w = np.ones(T)
    w[steps] = [*range(1, 101, 99 // (len(steps) - 1))][: len(steps)]
    settings = {"spec": Spec(1, folds * N, S, burn_in=3, rebatch=True), "opt": still}
    weighted, plain = (fit(task, sample_weight=v, **settings) for v in (np.tile(w, (N, 1)), None))
    assert weighted.loss_ == pytest.approx(plain.loss_, rel=1e-12)
    assert weighted.history_[0]["folds"] == folds


@pytest.mark.slow
def test_nan_inputs_of_dead_steps_are_zeros(task):
    dead = np.random.default_rng(1).random((N, T)) < 0.3
    x, y, zeroed = task.x.copy(), task.y.copy(), task.x.copy()
    x[1, dead] = np.nan
    y[:, dead] = np.nan
    zeroed[:, dead] = 0
    est = fit(task, x=x, y=y)
    expected = weighted_oracle(task, (~dead).astype(float), x=zeroed)
    assert difference(net2vec(est), expected) < 1e-12


@pytest.mark.few
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


@pytest.mark.slow
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
    assert (
        difference(net2vec(est), weighted_oracle(task, np.broadcast_to(w[:, None], (N, T)))) < 1e-12
    )
    # without weights it gets ones
    assert difference(net2vec(fit(task, loss)), net2vec(fit(task))) < 1e-12


@pytest.mark.few
@pytest.mark.parametrize(
    "criterion", [nn.L1Loss(), nn.HuberLoss(), F.smooth_l1_loss, nn.MSELoss(reduction="sum")]
)
def test_constant_weights_for_other_criteria(task, criterion):
    small = partial(torch.optim.SGD, lr=1e-4)
    with_weights = fit(task, criterion, opt=small, sample_weight=np.full(N, 2.0))
    assert difference(net2vec(with_weights), net2vec(fit(task, criterion, opt=small))) < 1e-12


@pytest.mark.slow
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


@pytest.mark.slow
def test_labels_to_be_ignored_are_dead_steps(task):
    labels = np.digitize(task.y[:1], [-0.5, 0.5])
    dead = np.random.default_rng(0).random((N, T)) < 0.3
    dead[:8, 10:20] = True  # a whole window
    lstm, _ = task.plain()
    model = nn.Sequential(lstm, nn.Linear(7, 3).double())
    ignored = Estimator(model, nn.CrossEntropyLoss(), still, spec).fit(
        task.x, np.where(dead, -100, labels)
    )
    weighted = Estimator(model, seqloss(F.cross_entropy), still, spec).fit(
        task.x, labels, sample_weight=(~dead).astype(float)
    )
    assert difference(ignored.grad_, weighted.grad_) < 1e-12
    assert ignored.loss_curve_ == pytest.approx(weighted.loss_curve_, rel=1e-12)
    assert ignored.score(task.x, np.where(dead, -100, labels)) == pytest.approx(
        (ignored.predict(task.x).argmax(0) == labels[0])[~dead].mean()
    )
