"""Law 2: state is carried from window to window, detached at each boundary, reset for each new
group of series.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, states
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import GRU, LSTM, RNN, Recur

from .conftest import B, S, T, difference, flat, plain_loop, window

# an optimizer that changes nothing: fit then measures gradients
still = partial(torch.optim.SGD, lr=0.0)
sgd = partial(torch.optim.SGD, lr=0.05)


@pytest.mark.few
@pytest.mark.parametrize("seqsize", [T, T + 5, None])
def test_one_window_per_series_is_full_bptt(task, seqsize):
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    gradients = []
    for g in range(0, 37, B):  # the gradient of whole series, in one pass
        h, _ = lstm(window(task.x, slice(g, g + B), 0, T))
        loss = F.mse_loss(head(h), window(task.y, slice(g, g + B), 0, T))
        gradients.append(flat(torch.autograd.grad(loss, params)))
    est = Estimator(task.ours(), None, still, Spec(epochs=1, batchsize=B, seqsize=seqsize)).fit(
        task.x, task.y
    )
    assert difference(est.grad_, torch.stack(gradients).mean(0)) < 1e-14


@pytest.mark.slow
def test_short_windows_see_the_same_losses_and_truncated_gradients(task):
    _, _, grads = plain_loop(task, still)
    est = Estimator(task.ours(), None, still, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    whole = Estimator(task.ours(), None, still, Spec(epochs=1, batchsize=B, seqsize=T)).fit(
        task.x, task.y
    )
    # the state came across
    assert est.loss_curve_[0] == pytest.approx(whole.loss_curve_[0], rel=1e-13)
    assert difference(est.grad_, torch.stack(grads).mean(0)) < 1e-14
    assert difference(est.grad_, whole.grad_) > 1e-3  # the gradient did not


def test_each_group_starts_from_zero(task):
    seen = []

    def loss(model, xs, ys):
        seen.append([s.clone() for s in states(model)])
        return F.mse_loss(model(xs), ys)

    Estimator(task.ours(), loss, still, Spec(epochs=2, batchsize=B, seqsize=S)).fit(task.x, task.y)
    fresh = [all(s.shape[1] == 0 for s in window_states) for window_states in seen]
    assert fresh == ([True] + [False] * 4) * 5 * 2
    assert all(not s.requires_grad for window_states in seen for s in window_states)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
def test_every_recurrent_layer_carries(layer, task):
    torch.manual_seed(0)
    rnn, head = layer(3, 5, num_layers=2).double(), nn.Linear(5, 2).double()
    plain_rnn, plain_head = copy.deepcopy(rnn.module), copy.deepcopy(head)
    params = [*plain_rnn.parameters(), *plain_head.parameters()]
    opt = sgd(params)
    for g in range(0, 37, B):
        state = None
        for t in range(0, T, S):
            h, state = plain_rnn(window(task.x, slice(g, g + B), t, t + S), state)
            loss = F.mse_loss(plain_head(h), window(task.y, slice(g, g + B), t, t + S))
            opt.zero_grad()
            loss.backward()
            opt.step()
            state = tuple(s.detach() for s in state) if layer is LSTM else state.detach()
    est = Estimator(
        nn.Sequential(rnn, head), None, sgd, Spec(epochs=1, batchsize=B, seqsize=S)
    ).fit(task.x, task.y)
    assert difference(net2vec(est), flat(params)) < 1e-12


@pytest.mark.slow
def test_a_recurrent_module_of_ones_own(task):
    class Leaky(nn.Module):
        """h' = a h + W x, a state of one tensor (B, H)."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w, self.a = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.9))

        def forward(self, x, state):
            h = self.w(x) if state is None else self.w(x) + self.a * state
            return h, h

    plain = Leaky().double()
    opt = sgd(plain.parameters())
    for g in range(0, 37, B):
        state = None
        for t in range(0, T, S):
            outs = []
            for x in window(task.x, slice(g, g + B), t, t + S):
                out, state = plain(x, state)
                outs.append(out)
            loss = F.mse_loss(torch.stack(outs), window(task.y, slice(g, g + B), t, t + S))
            opt.zero_grad()
            loss.backward()
            opt.step()
            state = state.detach()
    est = Estimator(Recur(Leaky()), None, sgd, Spec(epochs=1, batchsize=B, seqsize=S)).fit(
        task.x, task.y
    )
    assert difference(net2vec(est), flat(plain.parameters())) < 1e-12
    parts, state = [], None
    for t in range(0, T, 9):
        part, state = est.predict(task.x[:, :, t : t + 9], state=state, return_state=True)
        parts.append(part)
    assert np.array_equal(np.concatenate(parts, 2), est.predict(task.x))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [1, 10, 13, 100])
def test_overlap_reaches_back_from_the_state_as_it_was(task, overlap):
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = sgd(params)
    for g in range(0, 37, B):
        series = slice(g, g + B)
        past = {0: None}  # the state before each step, as it was when last computed
        for t in range(0, T, S):
            begin, end = max(0, t - overlap), min(t + S, T)
            state, outs = past[begin], []
            for k in range(begin, end):  # step by step, so that every state is known
                h, state = lstm(window(task.x, series, k, k + 1), state)
                past[k + 1] = tuple(s.detach() for s in state)
                outs.append(h)
            out = head(torch.cat(outs[t - begin :]))
            loss = F.mse_loss(out, window(task.y, series, t, end))
            opt.zero_grad()
            loss.backward()
            opt.step()
    for model in (task.ours(), StepOnly(*task.plain())):
        spec = Spec(epochs=1, batchsize=B, seqsize=S, overlap=overlap)
        est = Estimator(model, None, sgd, spec).fit(task.x, task.y)
        assert difference(net2vec(est), flat(params)) < 1e-12


class StepOnly(nn.Module):
    takes_windows = False

    def __init__(self, lstm, head):
        super().__init__()
        self.lstm, self.head = Recur(lstm), head

    def forward(self, x):
        assert x.dim() == 2
        return self.head(self.lstm(x))


@pytest.mark.slow
def test_overlap_of_the_whole_past_is_full_bptt_of_each_window(task):
    est = Estimator(
        task.ours(), None, still, Spec(epochs=1, batchsize=B, seqsize=S, overlap=T)
    ).fit(task.x, task.y)
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    grads = []
    for g in range(0, 37, B):
        for t in range(0, T, S):
            h, _ = lstm(window(task.x, slice(g, g + B), 0, t + S))
            loss = F.mse_loss(head(h[t:]), window(task.y, slice(g, g + B), t, t + S))
            grads.append(flat(torch.autograd.grad(loss, params)))
    assert difference(est.grad_, torch.stack(grads).mean(0)) < 1e-14


@pytest.mark.few
@pytest.mark.parametrize(("burn_in", "overlap"), [(7, 0), (10, 0), (23, 0), (7, 4), (12, 30)])
def test_burn_in_moves_the_state_only(task, burn_in, overlap):
    lstm, head = task.plain()
    params = [*lstm.parameters(), *head.parameters()]
    opt = sgd(params)
    for g in range(0, 37, B):
        series = slice(g, g + B)
        with torch.no_grad():
            _, state = lstm(window(task.x, series, 0, burn_in))
        past = {burn_in: state}
        for t in range(burn_in, T, S):
            begin, end = max(burn_in, t - overlap), min(t + S, T)
            state, outs = past[begin], []
            for k in range(begin, end):
                h, state = lstm(window(task.x, series, k, k + 1), state)
                past[k + 1] = tuple(s.detach() for s in state)
                outs.append(h)
            loss = F.mse_loss(head(torch.cat(outs[t - begin :])), window(task.y, series, t, end))
            opt.zero_grad()
            loss.backward()
            opt.step()
    spec = Spec(epochs=1, batchsize=B, seqsize=S, burn_in=burn_in, overlap=overlap)
    est = Estimator(task.ours(), None, sgd, spec).fit(task.x, task.y)
    assert difference(net2vec(est), flat(params)) < 1e-12


@pytest.mark.slow
def test_validation_has_a_state_of_its_own_and_disturbs_nothing(task):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    model.takes_windows = False  # BatchNorm1d is for (B, F)
    spec = Spec(epochs=2, batchsize=B, seqsize=S)
    xv, yv = task.x[:, :11, ::-1], task.y[:, :11, ::-1]
    without = Estimator(model, None, sgd, spec, random_state=0).fit(task.x, task.y)
    with_it = Estimator(model, None, sgd, spec, random_state=0).fit(
        task.x, task.y, validation_data=(xv, yv)
    )
    assert torch.equal(net2vec(without), net2vec(with_it))
    assert all(
        torch.equal(a, b)
        for a, b in zip(without.model_.buffers(), with_it.model_.buffers(), strict=True)
    )
    error = with_it.predict(xv) - yv
    assert with_it.validation_loss_curve_[-1] == pytest.approx((error**2).mean(), rel=1e-9)
    assert all(s.shape[1] == 0 for s in states(with_it))  # the fitted model has no state left


class OwnState(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out, self.hidden = nn.LSTM(3, 4), nn.Linear(4, 1), None

    def forward(self, x):
        h, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(s.detach() for s in hidden)
        return self.out(h)


def test_a_model_whose_state_cannot_be_reset_is_refused_before_training():
    x = np.random.default_rng(0).normal(size=(3, 5, 23)).astype("float32")
    est = Estimator(OwnState, spec={"epochs": 1, "batchsize": 2, "seqsize": 10})
    with pytest.raises(ShapeError, match=r"OwnState.*'rnn'.*Recur"):
        est.fit(x, x[:1])
    assert not hasattr(est, "model_")
