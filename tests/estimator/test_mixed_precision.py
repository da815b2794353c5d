"""Fits, validation, prediction and resuming in bfloat16."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, Spec, net2vec, stream
from fluxutils_py.errors import SpecError
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import plain_classifier, plain_regressor

N, T, B, S = 37, 43, 8, 10
LOW = {"bfloat16": torch.bfloat16}


def data(dtype="float32"):
    x = np.random.default_rng(0).normal(size=(3, N, T)).astype(dtype)
    return x, 0.5 * x.mean(0, keepdims=True)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), LSTM(6, 5), nn.Linear(5, 1))


def estimator(precision, callbacks=None, loss=None, **spec):
    spec = Spec(
        **{"epochs": 2, "batchsize": B, "seqsize": S, "clip": 1.0, **spec}, precision=precision
    )
    opt = partial(torch.optim.AdamW, lr=0.01, fused=True)
    return Estimator(model(), loss, opt, spec, callbacks=callbacks, random_state=0)


def by_hand(x, y, precision, opt, epochs=2):
    """Truncated backpropagation by plain torch, with autocast and GradScaler."""
    net, (xs, ys) = model(), (torch.from_numpy(a.transpose(2, 1, 0).copy()) for a in (x, y))
    opt = opt(net.parameters())
    for _ in range(epochs):
        for n in range(0, N, B):
            net[1].reset()
            for t in range(0, T, S):
                with torch.autocast("cpu", LOW[precision]):
                    out = net(xs[t : t + S, n : n + B])
                F.mse_loss(out.float(), ys[t : t + S, n : n + B]).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                net[1].truncate()
    return net


@pytest.mark.few
@pytest.mark.parametrize("precision", LOW)
def test_a_fit_is_the_loop_of_torch_with_autocast(precision):
    x, y = data()
    est = estimator(precision).fit(x, y)
    expected = by_hand(x, y, precision, partial(torch.optim.AdamW, lr=0.01, fused=True))
    assert (net2vec(est) - net2vec(expected)).abs().max() < 1e-6
    assert {p.dtype for p in est.model_.parameters()} == {torch.float32}
    with torch.no_grad(), torch.autocast("cpu", LOW[precision]):
        out = (
            expected.eval()(torch.from_numpy(x.transpose(2, 1, 0).copy()))
            if not expected[1].reset()
            else None
        )
    assert np.abs(est.predict(x) - out.float().numpy().transpose(2, 1, 0)).max() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOW)
def test_accumulation_and_overlap_change_no_more_than_rounding(precision):
    x, y = data()
    for spec in ({"accumulate": 3}, {"overlap": 3, "burn_in": 2}):
        low, exact = (estimator(name, **spec).fit(x, y) for name in (precision, "float32"))
        assert (net2vec(low) - net2vec(exact)).abs().max() < 0.02
        assert low.loss_ == pytest.approx(exact.loss_, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOW)
def test_resuming_ends_with_the_bits_of_an_uninterrupted_fit(tmp_path, precision):
    # overflows
    far = {
        "loss": lambda net, xs, ys: 1e4 * (net(xs).float() - ys).square().mean(),
        "accumulate": 2,
    }
    whole = estimator(precision, shuffle=True, **far).fit(*data())

    def kill(loop):
        if loop.step == 17:
            raise KeyboardInterrupt

    saves = Checkpointer(tmp_path, trigger=EveryNSteps(5))
    with pytest.raises(KeyboardInterrupt):
        estimator(precision, [saves, kill], shuffle=True, **far).fit(*data())
    again = estimator(precision, [saves, lambda loop: None], shuffle=True, **far).fit(*data())
    assert torch.equal(net2vec(again), net2vec(whole))
    assert again.loss_curve_ == whole.loss_curve_


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOW)
def test_validation_prediction_scores_streams_and_states(precision):
    x, y = data("float64")  # computed in float32 whatever the data
    est = estimator(precision, patience=2).fit(x, y, validation_data=(x, y))
    exact = estimator("float32", patience=2).fit(x, y, validation_data=(x, y))
    assert est.validation_loss_curve_ == pytest.approx(exact.validation_loss_curve_, rel=0.02)
    whole, state = est.predict(x, return_state=True)
    assert whole.dtype == np.float32
    assert {s.dtype for s in state} == {torch.float32}
    first, state = est.predict(x[..., :20], return_state=True)
    second = est.predict(x[..., 20:], state=state)
    assert np.abs(np.concatenate([first, second], 2) - whole).max() < 0.01
    live = stream(est, N)
    assert (
        np.abs(np.stack([live.step(x[:, :, t]) for t in range(5)], 2) - whole[..., :5]).max() < 0.01
    )
    assert est.score(x, y) == pytest.approx(exact.score(x, y), abs=0.02)
    loss, gradient = est.evaluate(x, y, gradient=True)
    assert np.isfinite(loss)
    assert gradient.dtype == torch.float32


@pytest.mark.slow
def test_ready_made_estimators_take_it():
    x, y = data()
    reg = plain_regressor(4, epochs=2, seqsize=S, precision="bfloat16").fit(x, y)
    assert reg.predict(x).dtype == np.float32
    labels = np.where(y[0, :, -1] > 0, "up", "down")
    cla = plain_classifier(4, epochs=2, precision="bfloat16").fit(x, labels)
    assert cla.predict_proba(x).sum(1) == pytest.approx(np.ones(N), abs=1e-6)
    spec = {"epochs": 1, "precision": "bfloat16"}
    own = EstimatorClassifier(spec=spec).fit(x, labels)
    assert own.set_params(spec__precision="float32").predict(x).shape == (N,)
    with pytest.raises(SpecError, match=r"^spec.precision .*'bfloat16', .*got 'bf16'$"):
        plain_regressor(4, precision="bf16").fit(x, y)


@pytest.mark.slow
def test_a_model_of_float64_is_not_continued_in_bfloat16():
    x, y = data("float64")
    est = estimator("float32").fit(x, y)
    before = net2vec(est)
    with pytest.raises(ValueError, match=r"precision='bfloat16' .*float32"):
        est.set_params(spec__precision="bfloat16").partial_fit(x, y)
    assert torch.equal(net2vec(est), before)
