"""Losses that are read one step behind: the same training to the last bit, and errors that change
nothing.
"""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fluxutils_py.estimator.fit_loop as fit_loop
from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps, Loop, StepInfo
from fluxutils_py.training.gradient_step import supports_found_inf
from fluxutils_py.training.step_info import PendingLoss
from fluxutils_py.training.window_step import WindowStep

F, N, T = 3, 13, 43
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused = partial(torch.optim.AdamW, lr=0.01, fused=True)


def data():
    x = np.random.default_rng(0).normal(size=(F, N, T)).astype("float32")
    return x, 0.5 * x.mean(0, keepdims=True)


def estimator(callbacks=None, loss=None, opt=fused, **spec):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(F, 5), nn.Dropout(0.2), nn.Linear(5, 1))
    spec = Spec(**{"epochs": 3, "batchsize": 5, "seqsize": 10, **spec})
    return Estimator(model, loss, opt, spec, device=DEVICE, callbacks=callbacks, random_state=0)


@pytest.fixture
def late(monkeypatch):
    """``late(yes)``: fits read their losses late, or not."""
    return lambda yes: monkeypatch.setattr(fit_loop, "WindowStep", partial(WindowStep, defer=yes))


SCHEDULER = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)


@pytest.mark.few
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"clip": 0.05, "shuffle": True},
        {"overlap": 4, "burn_in": 3},
        {"lr_schedule": ("step", SCHEDULER)},
        {"patience": 1},
        {"accumulate": 3, "clip": 0.05},
        {"accumulate": 4, "lr_schedule": ("step", SCHEDULER), "overlap": 4},
    ],
)
def test_training_is_the_same_to_the_last_bit(late, spec):
    found = []
    for yes in (True, False):
        late(yes)
        found.append(estimator(**spec).fit(*data()))
    a, b = found
    assert torch.equal(net2vec(a), net2vec(b))
    assert torch.equal(a.grad_, b.grad_)
    assert a.loss_curve_ == b.loss_curve_
    assert a.loss_ == b.loss_
    assert a.optimizer_.state_dict()["state"].keys() == b.optimizer_.state_dict()["state"].keys()
    assert not hasattr(a.optimizer_, "found_inf")


def test_a_loss_is_read_when_the_next_step_is_at_work_or_when_a_hook_asks(late, monkeypatch):
    late(True)
    log, real, call = [], PendingLoss.__float__, WindowStep.__call__
    monkeypatch.setattr(PendingLoss, "__float__", lambda self: log.append("read") or real(self))
    monkeypatch.setattr(
        WindowStep, "__call__", lambda self, batch: log.append("step") or call(self, batch)
    )
    estimator(epochs=1, batchsize=13, seqsize=10).fit(*data())
    assert log == ["step", "step", "read", "step", "read", "step", "read", "step", "read", "read"]
    seen = []
    est = estimator(lambda loop: seen.append(loop.batch_loss), epochs=1, batchsize=13).fit(*data())
    assert [type(loss) for loss in seen] == [float] * 5
    assert np.mean(seen) == pytest.approx(est.loss_, rel=1e-12)


def broken(model, xs, ys, *, at, where):
    """A mean squared error, infinite, or with an infinite gradient, at one window."""
    out = model(xs)
    loss = (out - ys).square().mean()
    broken.calls += 1
    if broken.calls != at:
        return loss
    return loss * math.inf if where == "loss" else loss + (out - out.detach()).abs().sqrt().sum()


@pytest.mark.few
@pytest.mark.parametrize("where", ["loss", "gradient norm"])
@pytest.mark.parametrize(("at", "accumulate"), [(1, 1), (4, 1), (15, 1), (5, 3), (6, 3), (14, 4)])
def test_what_is_not_finite_is_an_error_that_changes_no_parameter(late, where, at, accumulate):
    found = []
    for yes in (True, False):
        late(yes)
        broken.calls = 0
        est = estimator(loss=partial(broken, at=at, where=where), epochs=1, accumulate=accumulate)
        with pytest.raises(FloatingPointError) as error:
            est.fit(*data())
        # nothing was learnt: as if it had not been tried
        assert hasattr(est, "optimizer_") == (at > 1)
        moments = est.optimizer_.state_dict()["state"] if at > 1 else {}
        found.append((str(error.value), net2vec(est), copy.deepcopy(moments)))
        broken.calls = 100
        est.partial_fit(*data())  # it can go on
        found[-1] += (net2vec(est),)
    (told, vector, moments, after), (told_, vector_, moments_, after_) = found
    told, told_ = (
        text.replace(", in the gradient of parameter '2.bias'", "") for text in (told, told_)
    )
    assert told == told_  # gradients are gone when a loss is read late
    assert told.startswith(f"{where} is ")
    assert torch.equal(vector, vector_)
    for p, state in moments_.items():
        assert all(torch.equal(moments[p][k], v) for k, v in state.items())
    assert after.isfinite().all()
    assert (after - after_).abs().max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_checkpoint_knows_all_losses_and_is_never_of_a_step_that_failed(
    late, tmp_path, accumulate
):
    late(True)
    whole = estimator(shuffle=True, accumulate=accumulate).fit(*data())

    class Killed(Exception):
        pass

    def kill(loop):
        if loop.step == 23:
            raise Killed

    saves = Checkpointer(tmp_path, trigger=EveryNSteps(7))
    with pytest.raises(Killed):
        estimator([saves, kill], shuffle=True, accumulate=accumulate).fit(*data())
    again = estimator([saves, lambda loop: None], shuffle=True, accumulate=accumulate).fit(*data())
    assert torch.equal(net2vec(again), net2vec(whole))
    assert again.loss_curve_ == whole.loss_curve_

    late(True)
    broken.calls = 0
    saves = Checkpointer(tmp_path / "other", keep=-1, trigger=EveryNSteps(1))
    with pytest.raises(FloatingPointError):
        estimator(
            saves, loss=partial(broken, at=4, where="loss"), epochs=1, accumulate=accumulate
        ).fit(*data())
    assert saves.latest_step() == 3


def test_only_an_optimizer_that_can_skip_a_step_is_told_late():
    params = [nn.Parameter(torch.ones(2, device=DEVICE))]
    assert supports_found_inf(torch.optim.AdamW(params, fused=True))
    assert supports_found_inf(torch.optim.SGD(params, lr=0.1, fused=True))
    assert not supports_found_inf(torch.optim.AdamW(params))
    assert not supports_found_inf(torch.optim.RMSprop(params))


def test_a_loop_waits_for_what_is_late_before_what_is_not():
    def never(loss):
        assert math.isfinite(loss)

    losses = iter(
        [
            PendingLoss([torch.tensor(2.0)], never),
            4.0,
            PendingLoss([torch.tensor(3.0)], never),
            None,
        ]
    )
    loop = Loop(lambda batch: StepInfo(next(losses)))
    loop.run_epochs(range(4), 1)
    assert loop.history[0]["mean_batch_loss"] == 3.0
    assert loop.batch_loss is None
