"""Law 3 for models without state: the steps before a window are in the same call, and nothing
depends on seqsize.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, Spec, net2vec, seqloss
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.training import predictor

from .conftest import B, N, S, T, difference, flat, make_task, window

OVERLAP = 6  # the receptive field of Causal less one


class Causal(nn.Module):
    """Two dilated causal convolutions: each step's output depends on it and the six steps before
    it.
    """

    takes_windows = True

    def __init__(self, n_in=3, n_out=2):
        super().__init__()
        self.first, self.second = nn.Conv1d(n_in, 5, 3), nn.Conv1d(5, n_out, 3, dilation=2)

    def forward(self, x):  # (S, B, F)
        h = torch.tanh(self.first(F.pad(x.permute(1, 2, 0), (2, 0))))
        return self.second(F.pad(h, (4, 0))).permute(2, 0, 1)


class Undeclared(Causal):
    """Does not say what it takes, but runs on windows only."""

    takes_windows = None


class Attention(nn.Module):
    """Attends to the last seven steps."""

    takes_windows = True

    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(3, 1), nn.Linear(3, 2)

    def forward(self, x):
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        return self.head(
            self.attend(x, x, x, attn_mask=(back < 0) | (back > OVERLAP), need_weights=False)[0]
        )


MODELS = {"causal": Causal, "undeclared": Undeclared, "attention": Attention}


def whole(est, x):
    """The outputs of a fitted model that is given the whole series in one call."""
    with torch.no_grad():
        return est.model_(torch.tensor(x.transpose(2, 1, 0).copy())).numpy().transpose(2, 1, 0)


def fitted(model, **spec):
    task = make_task()
    torch.manual_seed(3)
    settings = {"epochs": 1, "batchsize": B, "seqsize": S, "overlap": OVERLAP} | spec
    return Estimator(model(), None, torch.optim.Adam, Spec(**settings), random_state=0).fit(
        task.x, task.y
    ), task


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_predictions_depend_neither_on_seqsize_nor_on_chunks(kind, monkeypatch):
    est, task = fitted(MODELS[kind])
    expected = whole(est, task.x)
    for seqsize in (1, 4, 100):
        est.set_params(spec=Spec(epochs=1, batchsize=B, seqsize=seqsize, overlap=OVERLAP))
        assert difference(est.predict(task.x), expected) < 1e-12
        for cuts in ([3, 5, 30], *([[*range(1, T)]] if seqsize == 4 else [])):
            state, parts = None, []
            for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
                part, state = est.predict(task.x[:, :, start:stop], state=state, return_state=True)
                parts.append(part)
            assert difference(np.concatenate(parts, 2), expected) < 1e-12
        (inputs,) = state
        assert np.array_equal(inputs, task.x[:, :, -OVERLAP:].transpose(2, 1, 0))
    monkeypatch.setattr(predictor, "MAX_ACTIVATION_BYTES", 1)
    assert difference(est.predict(task.x), expected) < 1e-12


@pytest.mark.few
@pytest.mark.parametrize("kind", MODELS)
def test_scores_do_not_depend_on_seqsize(kind):
    est, task = fitted(MODELS[kind])
    y, found = task.y, whole(est, task.x)
    mean = y.mean((1, 2), keepdims=True)
    expected = 1 - ((y - found) ** 2).sum() / ((y - mean) ** 2).sum()
    for seqsize in (4, 10, None):
        est.set_params(spec=Spec(epochs=1, batchsize=B, seqsize=seqsize, overlap=OVERLAP))
        assert abs(est.score(task.x, y) - expected) < 1e-12


def loop(task, model, overlap=OVERLAP, burn_in=0, loss=F.mse_loss):
    """The loop by hand: each window is computed together with the steps before it."""
    opt, losses = torch.optim.Adam(model.parameters()), []
    for g in range(0, N, B):
        for t in range(burn_in, T, S):
            lead = min(overlap, t)
            series = slice(g, g + B)
            out = model(window(task.x, series, t - lead, min(t + S, T)))[lead:]
            value = loss(out, window(task.y, series, t, min(t + S, T)))
            opt.zero_grad()
            value.backward()
            opt.step()
            losses.append(value.item())
    return flat(model.parameters()), losses


@pytest.mark.few
@pytest.mark.parametrize("overlap", [0, 3, OVERLAP, 13])
@pytest.mark.parametrize("burn_in", [0, 4])
def test_fit_is_the_loop_whose_windows_begin_with_the_steps_before(overlap, burn_in):
    task = make_task()
    model = Causal().double()
    expected, losses = loop(task, copy.deepcopy(model), overlap, burn_in)
    spec = Spec(epochs=1, batchsize=B, seqsize=S, overlap=overlap, burn_in=burn_in)
    est = Estimator(model, None, torch.optim.Adam, spec).fit(task.x, task.y)
    assert difference(net2vec(est), expected) < 1e-12
    assert abs(est.loss_ - np.mean(losses)) < 1e-12


def huber(model, xs, ys):
    return F.huber_loss(model(xs), ys) + 0.01 * sum(p.square().sum() for p in model.parameters())


def by_window(model, xs, ys, ws):
    assert len(xs) == len(ys)
    each = F.huber_loss(run_window(model, xs), ys, reduction="none").mean(-1, keepdim=True)
    return (each * ws).sum() / (ws != 0).sum()


@pytest.mark.few
@pytest.mark.parametrize("loss", [huber, by_window])
def test_a_loss_of_ones_own_calls_the_model_on_the_window_alone(loss):
    task, model = make_task(), Causal().double()
    twin = copy.deepcopy(model)

    def plain(out, y):
        penalty = 0.01 * sum(p.square().sum() for p in twin.parameters())
        return F.huber_loss(out, y) + (penalty if loss is huber else 0)

    expected, _ = loop(task, twin, loss=plain)
    spec = Spec(epochs=1, batchsize=B, seqsize=S, overlap=OVERLAP)
    est = Estimator(model, loss, torch.optim.Adam, spec).fit(task.x, task.y)
    assert difference(net2vec(est), expected) < 1e-12
    assert not est.model_._forward_hooks


def test_the_gradient_of_an_epoch_does_not_depend_on_seqsize():
    task, model = make_task(), Causal().double()
    found = []
    for seqsize in (T, 10, 4):
        spec = Spec(epochs=1, batchsize=N, seqsize=seqsize, overlap=OVERLAP, accumulate=100)
        found.append(Estimator(model, None, torch.optim.SGD, spec).fit(task.x, task.y).grad_)
    assert difference(found[0], found[1]) < 1e-12
    assert difference(found[0], found[2]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_validation_does_not_depend_on_seqsize(kind):
    task = make_task()
    for seqsize in (4, 10, None):
        torch.manual_seed(0)
        spec = Spec(epochs=1, batchsize=B, seqsize=seqsize, overlap=OVERLAP)
        est = Estimator(MODELS[kind](), seqloss(F.mse_loss), None, spec)
        est.fit(task.x, task.y, validation_data=(task.x, task.y))
        expected = np.square(whole(est, task.x) - task.y).mean()
        assert abs(est.validation_loss_curve_[-1] - expected) < 1e-12


@pytest.mark.slow
def test_series_of_unequal_length_each_have_their_own_last_inputs():
    est, task = fitted(Causal)
    lengths = np.random.default_rng(0).integers(1, T + 1, N)
    lengths[:3] = 1, 4, T
    _, state = est.predict(task.x, lengths=lengths, return_state=True)
    (inputs,) = state
    more = np.random.default_rng(1).normal(size=(3, N, 5))
    rest = est.predict(more, state=[inputs.numpy()])
    for n, length in enumerate(lengths):
        series = np.concatenate([task.x[:, n : n + 1, :length], more[:, n : n + 1]], 2)
        assert difference(rest[:, n : n + 1], whole(est, series)[:, :, length:]) < 1e-12
        kept = min(OVERLAP, length)
        assert np.array_equal(inputs[OVERLAP - kept :, n].T, task.x[:, n, length - kept : length])
        assert inputs[: OVERLAP - kept, n].isnan().all()


def test_groups_of_short_series_have_fewer_last_inputs():
    est, task = fitted(Causal)
    lengths = np.full(N, T)
    lengths[B : 2 * B] = 3  # a whole group
    _, (inputs,) = est.predict(task.x, lengths=lengths, return_state=True)
    assert inputs.shape == (OVERLAP, N, 3)
    assert np.array_equal(inputs[-3:, B : 2 * B], task.x[:, B : 2 * B, :3].transpose(2, 1, 0))
    assert inputs[:-3, B : 2 * B].isnan().all()
    assert not inputs[:, 2 * B :].isnan().any()


@pytest.mark.slow
def test_without_overlap_the_state_is_empty():
    est, task = fitted(Causal, overlap=0)
    _, state = est.predict(task.x, lengths=1 + np.arange(N), return_state=True)
    assert [tuple(s.shape) for s in state] == [(0, N, 3)]
    assert np.array_equal(est.predict(task.x, state=state), est.predict(task.x))


@pytest.mark.slow
def test_integer_inputs_have_no_place_for_a_shorter_history():
    class Tokens(nn.Module):
        takes_windows = True

        def __init__(self):
            super().__init__()
            self.embed, self.conv = nn.Embedding(5, 3), Causal()

        def forward(self, k):
            return self.conv(self.embed(k[..., 0]))

    k = np.random.default_rng(0).integers(0, 5, size=(1, N, T))
    y = np.random.default_rng(0).normal(size=(2, N, T)).astype("float32")
    est = Estimator(Tokens(), spec=Spec(epochs=1, batchsize=B, seqsize=S, overlap=OVERLAP)).fit(
        k, y
    )
    first, state = est.predict(k[:, :, :20], return_state=True)
    rest = est.predict(k[:, :, 20:], state=state)
    assert state[0].dtype == torch.int64
    assert difference(np.concatenate([first, rest], 2), whole(est, k)) < 2e-6
    lengths = np.where(np.arange(N) == 5, 2, T)
    with pytest.raises(
        ValueError,
        match=r"^return_state .*overlap=6 .* has 2$",
    ):
        est.predict(k, lengths=lengths, return_state=True)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            [],
            r"the last inputs \(k, N, F\) .* got \[\]",
        ),
        (
            [np.zeros((6, N, 4))],
            r"\(k, N, F\) .* for F of \[3\] .* got \[\(6, 37, 4, torch.float64\)\]",
        ),
        ([np.zeros((6, 5, 3))], r"^state\[0\] .*5 series, .*37$"),
        (
            [np.zeros((6, N, 3), int)],
            r"the types of the inputs; got \[\(6, 37, 3, torch.int64\)\]",
        ),
        ([None], r"^state\[0\] .*tensor .* got a NoneType"),
    ],
)
def test_states_that_do_not_fit_are_named(state, message):
    est, task = fitted(Causal)
    with pytest.raises(ValueError, match=message):
        est.predict(task.x, state=state)


@pytest.mark.slow
def test_classifiers_too():
    task = make_task()
    y = (task.y[:1] > 0).astype(int)
    spec = Spec(epochs=1, batchsize=B, seqsize=S, overlap=OVERLAP)
    est = EstimatorClassifier(Causal(3, 2), spec=spec).fit(task.x, y)
    expected = np.exp(whole(est, task.x)[1]) / np.exp(whole(est, task.x)).sum(0)
    assert difference(est.predict_proba(task.x)[1], expected) < 1e-12
    est.fit(task.x, y[0, :, -1])  # one label for each series
    last = torch.softmax(torch.tensor(whole(est, task.x)[:, :, -1].T), -1)
    assert difference(est.predict_proba(task.x), last) < 1e-12
