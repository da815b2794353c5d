"""Callbacks, schedules, early stopping and the record of training."""

import copy
import logging
import math
import re
import sys
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from fluxutils_py import Estimator, Spec, net2grad, net2vec, reset
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.training import StopTraining

N, T = 6, 20  # with batchsize 4 and seqsize 5: 2 groups of 4 windows, 8 steps an epoch
STEPS = 8
X = np.random.default_rng(0).normal(size=(2, N, T))
Y = np.cumsum(X.mean(0, keepdims=True), 2)
XV = np.random.default_rng(1).normal(size=(2, 5, 17))
YV = np.cumsum(XV.mean(0, keepdims=True), 2)


def model():
    torch.manual_seed(1)
    return nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)).double()


def make(callbacks=None, opt=None, warm_start=False, verbose=False, loss=None, **spec):
    spec = Spec(**{"epochs": 3, "batchsize": 4, "seqsize": 5, **spec})
    return Estimator(
        model(),
        loss,
        opt,
        spec,
        callbacks=callbacks,
        warm_start=warm_start,
        verbose=verbose,
        random_state=0,
    )


class Diary:
    """Notes every event."""

    def __init__(self, pages=None, **attributes):
        self.pages = [] if pages is None else pages
        vars(self).update(attributes)

    def write(self, event, loop):
        self.pages.append(
            (event, loop.step, loop.epoch) if not hasattr(self, "name") else (self.name, event)
        )

    def on_start(self, loop):
        self.write("start", loop)

    def on_step(self, loop):
        self.write("step", loop)

    def on_epoch(self, loop):
        self.write("epoch", loop)

    def on_end(self, loop):
        self.write("end", loop)

    def on_close(self, loop):
        self.write("close", loop)


# -- functions, objects, order ------------------------------------------------------------------------------


def test_a_function_is_called_after_every_step():
    steps, losses = [], []

    def watch(loop):
        steps.append(loop.step)
        losses.append(loop.batch_loss)

    est = make(watch).fit(X, Y)
    assert steps == list(range(1, 3 * STEPS + 1))
    assert est.loss_ == pytest.approx(np.mean(losses[-STEPS:]), rel=1e-12)


def test_an_object_is_told_of_all_events():
    diary = Diary()
    make([diary], epochs=2).fit(X, Y)
    steps = [("step", s, s > STEPS) for s in range(1, 2 * STEPS + 1)]
    assert diary.pages == [
        ("start", 0, 0), *steps[:STEPS], ("epoch", STEPS, 0), *steps[STEPS:], ("epoch", 2 * STEPS, 1),
        ("end", 2 * STEPS, 2), ("close", 2 * STEPS, 2),
    ]  # fmt: skip


def test_an_object_needs_only_the_methods_it_uses():
    seen = []
    make([SimpleNamespace(on_epoch=lambda loop: seen.append(loop.epoch)), print_nothing]).fit(X, Y)
    assert seen == [0, 1, 2]


def print_nothing(loop):
    pass


def test_priority_decides_then_the_order_in_which_they_are_given():
    pages = []
    given = [Diary(pages, name="b"), Diary(pages, name="c", priority=5), Diary(pages, name="a", priority=-5),
             Diary(pages, name="d"), Diary(pages, name="e", priority=5)]  # fmt: skip
    make(given, epochs=1).fit(X, Y)
    for event in ("start", "epoch", "end", "close"):
        assert [name for name, e in pages if e == event] == ["a", "b", "d", "c", "e"]
    assert [name for name, e in pages if e == "step"] == ["a", "b", "d", "c", "e"] * STEPS


def test_what_a_hook_finds_in_the_loop():
    seen = []

    def look(loop):
        shared = loop.shared_data
        assert shared["estimator"] is est
        assert shared["model"] is est.model_
        assert shared["optimizer"] is est.optimizer_
        assert (loop.n_epochs, loop.steps_per_epoch) == (3, STEPS)
        assert len(loop.history) == loop.epoch
        with pytest.warns(UserWarning, match=r"no parameter has a gradient.*gradient_norm"):
            assert not net2grad(shared["model"]).any()  # applied and cleared
        seen.append(loop.step)

    def finish(loop):
        assert loop.record["epoch"] == loop.epoch + 1
        assert est.history_[-1] is loop.record  # the attributes are up to date
        assert est.n_iter_ == loop.epoch + 1
        loop.record["note"] = loop.epoch

    est = make([look, SimpleNamespace(on_epoch=finish)])
    est.fit(X, Y)
    assert len(seen) == 3 * STEPS
    assert [record["note"] for record in est.history_] == [0, 1, 2]


@pytest.mark.slow
def test_callbacks_do_not_change_the_result():
    assert torch.equal(net2vec(make([Diary(), print_nothing]).fit(X, Y)), net2vec(make().fit(X, Y)))


def test_the_same_callbacks_serve_several_fits():
    diary = Diary()
    est = make(diary, epochs=1).fit(X, Y).fit(X, Y)
    assert [e for e, *_ in diary.pages].count("start") == 2
    assert est.partial_fit(X, Y).n_iter_ == 2
    assert diary.pages[-1] == ("close", 2 * STEPS, 2)


# -- stopping -------------------------------------------------------------------------------------------------


def stop(loop):
    loop.stop()


def raise_stop(loop):
    raise StopTraining


@pytest.mark.few
@pytest.mark.parametrize("end", [stop, raise_stop])
def test_stopping_in_the_middle_of_an_epoch(end):
    diary = Diary()

    def at_10(loop):
        if loop.step == 10:
            end(loop)

    est = make([at_10, diary]).fit(X, Y)
    assert [p[0] for p in diary.pages[-4:]] == ["step", "epoch", "end", "close"]
    assert diary.pages[-4] == ("step", 10, 1)  # the other hooks of the step are still called
    assert est.n_iter_ == 2
    assert len(est.loss_curve_) == len(est.history_) == 2

    losses = []
    twin = make(lambda loop: losses.append(loop.batch_loss), epochs=2)
    twin.fit(X, Y)
    assert est.loss_curve_[0] == twin.loss_curve_[0]
    assert est.loss_ == pytest.approx(np.mean(losses[8:10]), rel=1e-12)  # of what there was


@pytest.mark.parametrize("end", [stop, raise_stop])
@pytest.mark.parametrize("event", ["start", "epoch", "end"])
def test_stopping_at_other_events(end, event):
    diary = Diary()
    est = make([SimpleNamespace(**{f"on_{event}": end}), diary]).fit(X, Y)
    assert [e for e, *_ in diary.pages].count("epoch") == {"start": 0, "epoch": 1, "end": 3}[event]
    assert [e for e, *_ in diary.pages][-2:] == ["end", "close"]
    assert est.n_iter_ == {"start": 0, "epoch": 1, "end": 3}[event]
    assert np.isfinite(est.predict(X)).all()


def test_gradients_that_wait_are_applied_when_training_is_stopped():
    parameters = []

    def at_4(loop):
        parameters.append(net2vec(loop.shared_data["model"]))
        if loop.step == 4:
            loop.stop()

    est = make(at_4, accumulate=3).fit(X, Y)
    assert torch.equal(parameters[2], parameters[3])
    assert not torch.equal(net2vec(est), parameters[3])


# -- errors and Ctrl-C --------------------------------------------------------------------------------------------


def fails(loop):
    raise ZeroDivisionError("in the hook")


@pytest.mark.parametrize("event", ["start", "step", "epoch", "end", "close"])
def test_an_error_carries_the_name_of_its_hook(event):
    closed = []
    hook = SimpleNamespace(**{f"on_{event}": fails}, name="my hook")
    est = make([SimpleNamespace(on_close=closed.append), hook])
    with pytest.raises(ZeroDivisionError, match="in the hook") as info:
        est.fit(X, Y)
    assert info.value.__notes__ == [f"raised by the on_{event} hook 'my hook'"]
    assert len(closed) == 1
    # where nothing was learnt, nothing is changed
    assert hasattr(est, "model_") is (event != "start")
    if event != "start":
        assert np.isfinite(est.predict(X)).all()


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (fails, "fails"),
        (partial(fails), "partial"),
        (SimpleNamespace(on_step=fails), "SimpleNamespace"),
        (SimpleNamespace(on_step=fails, name="checkpoint"), "checkpoint"),
    ],
)
def test_hooks_have_names(hook, name):
    with pytest.raises(ZeroDivisionError) as info:
        make(hook).fit(X, Y)
    assert info.value.__notes__ == [f"raised by the on_step hook {name!r}"]


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("step", [1, 5, 13, 16])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_interrupted_estimator_can_be_used(error, step, accumulate):
    parameters = []

    def interrupt(loop):
        parameters.append(net2vec(loop.shared_data["model"]))
        if loop.step == step:
            raise error

    diary = Diary()
    est = make([diary, interrupt], accumulate=accumulate, shuffle=True)
    with pytest.raises(error):
        est.fit(X, Y)
    assert diary.pages[-1][0] == "close"
    assert "end" not in [e for e, *_ in diary.pages]
    if step < accumulate:  # nothing was learnt yet
        assert not hasattr(est, "model_")
    else:
        assert torch.equal(net2vec(est), parameters[-1])
        assert torch.isfinite(net2vec(est)).all()
        assert not est.model_.training
        assert all(p.grad is None for p in est.model_.parameters())
        assert est.n_iter_ == len(est.loss_curve_) == len(est.history_) == (step - 1) // STEPS
        first = est.predict(X)
        assert np.isfinite(first).all()
        assert np.array_equal(est.predict(X), first)
        assert math.isfinite(est.score(X, Y))
        est.set_params(callbacks=None)
        assert copy.deepcopy(est).partial_fit(X, Y).n_iter_ == (step - 1) // STEPS + 1
    est.set_params(callbacks=None)
    again = make(accumulate=accumulate, shuffle=True).fit(X, Y)
    assert torch.equal(net2vec(est.fit(X, Y)), net2vec(again))  # as if nothing had been before
    assert est.history_[0]["epoch"] == 1


@pytest.mark.slow
def test_interrupted_while_going_on():
    est = make().fit(X, Y)
    before, history = net2vec(est), copy.deepcopy(est.history_)
    generator = copy.deepcopy(est.fitted_parts_.rng)

    def interrupt(loop):
        if loop.step == 3 * STEPS + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        est.set_params(callbacks=interrupt, warm_start=True).fit(X, Y)
    assert est.history_ == history
    assert est.n_iter_ == 3
    assert not torch.equal(net2vec(est), before)
    assert est.fitted_parts_.rng.bit_generator.state != generator.bit_generator.state
    assert est.set_params(callbacks=None).fit(X, Y).n_iter_ == 6


@pytest.mark.slow
def test_interrupted_within_a_loss():
    calls = []

    def loss(model, xs, ys):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return (run_window(model, xs) - ys).square().mean()

    est = make(loss=loss)
    with pytest.raises(KeyboardInterrupt):
        est.fit(X, Y)
    assert np.isfinite(est.predict(X)).all()
    assert est.n_iter_ == 1
    assert est.fit(X, Y).n_iter_ == 3


# -- learning-rate schedules ----------------------------------------------------------------------------------------

SCHEDULES = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "LinearLR": partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=5),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=100),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.7)],
        [2],
    ),
}
sgd = partial(SGD, lr=0.05, momentum=0.9)


def plain_rates(scheduler, n_updates, every):
    """The learning rate of each update, in a loop without data."""
    opt = sgd([nn.Parameter(torch.zeros(1))])
    schedule, lrs = scheduler(opt), []
    for i in range(n_updates):
        lrs.append(opt.param_groups[0]["lr"])
        opt.step()
        if (i + 1) % every == 0:
            schedule.step()
    return lrs


class Rates:
    """The learning rate of each step: as it is before it."""

    def __init__(self):
        self.lrs = []

    def on_start(self, loop):
        self.now = loop.shared_data["optimizer"].param_groups[0]["lr"]

    def on_step(self, loop):
        self.lrs.append(self.now)
        self.on_start(loop)

    on_epoch = on_start


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("every", ["epoch", "step"])
def test_a_schedule_equals_that_of_a_plain_loop(name, every):
    watch = Rates()
    schedule = SCHEDULES[name] if every == "epoch" else (every, SCHEDULES[name])
    est = make(watch, sgd, epochs=6, lr_schedule=schedule).fit(X, Y)
    expected = plain_rates(SCHEDULES[name], 6 * STEPS, STEPS if every == "epoch" else 1)
    assert watch.lrs == expected
    if every == "epoch":
        assert [record["lr"] for record in est.history_] == expected[::STEPS]
    halves = make(None, sgd, epochs=3, lr_schedule=schedule, warm_start=True)
    halves.fit(X, Y)
    halves.partial_fit(X, Y).partial_fit(X, Y).partial_fit(X, Y)  # the schedule goes on
    assert torch.equal(net2vec(halves), net2vec(est))


@pytest.mark.few
@pytest.mark.parametrize("accumulate", [3, 8, 100])
def test_a_step_of_the_schedule_is_a_step_of_the_optimizer(accumulate):
    watch, steps = Rates(), []
    schedule = SCHEDULES["ExponentialLR"]
    make(
        watch,
        counting(sgd, steps),
        epochs=3,
        accumulate=accumulate,
        lr_schedule=("step", schedule),
    ).fit(X, Y)
    updates = math.ceil(STEPS / accumulate)  # an epoch, the last ones at its end
    expected = plain_rates(schedule, 3 * updates, 1)
    assert steps == expected


def counting(opt, lrs):
    def build(params):
        class Counting(SGD):
            def step(self, closure=None):
                lrs.append(self.param_groups[0]["lr"])
                return super().step(closure)

        return Counting(params, **opt.keywords)

    return build


def test_burn_in_windows_are_no_steps_of_the_schedule():
    steps = []
    schedule = SCHEDULES["ExponentialLR"]
    make(None, counting(sgd, steps), epochs=2, burn_in=10, lr_schedule=("step", schedule)).fit(X, Y)
    assert steps == plain_rates(schedule, 2 * 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("validation", [False, True])
def test_plateau_watches_the_validation_loss(validation):
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.05)
    data = (XV, YV) if validation else None
    est = make(None, sgd, epochs=12, lr_schedule=plateau).fit(X, Y, validation_data=data)
    opt = sgd([nn.Parameter(torch.zeros(1))])
    schedule, expected = plateau(opt), []
    for loss in est.validation_loss_curve_ if validation else est.loss_curve_:
        expected.append(opt.param_groups[0]["lr"])
        schedule.step(loss)
    assert [record["lr"] for record in est.history_] == expected
    assert len(set(expected)) > 2


def test_two_groups_are_scheduled_together():
    m = model()
    opt = SGD([{"params": m[0].parameters(), "lr": 0.2}, {"params": m[1].parameters(), "lr": 0.02}])
    spec = Spec(epochs=3, batchsize=4, lr_schedule=SCHEDULES["ExponentialLR"])
    est = Estimator(m, None, opt, spec).fit(X, Y)
    assert [g["lr"] for g in est.optimizer_.param_groups] == pytest.approx(
        [0.2 * 0.9**3, 0.02 * 0.9**3]
    )
    assert [g["lr"] for g in opt.param_groups] == [0.2, 0.02]  # the user's own


# -- patience -----------------------------------------------------------------------------------------------------


class Keeper:
    def __init__(self):
        self.kept = []

    def on_epoch(self, loop):
        self.kept.append(copy.deepcopy(loop.shared_data["model"].state_dict()))


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def stops_after(losses, patience):
    """Number of epochs, and the index of the best."""
    best = 0
    for i, loss in enumerate(losses):
        if loss < losses[best]:
            best = i
        elif i - best >= patience:
            return i + 1, best
    return len(losses), best


WILD = partial(SGD, lr=0.5, momentum=0.9)


@cache
def wild_fit():
    """Thirty epochs, fitted once; validation does not disturb training."""
    return make(None, WILD, epochs=30, clip=1.0).fit(X, Y, validation_data=(XV, YV))


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("validation", [False, True])
def test_patience_stops_and_restores_the_best_weights(patience, validation):
    data = (XV, YV) if validation else None
    full = wild_fit()
    watched = full.validation_loss_curve_ if validation else full.loss_curve_
    n, best = stops_after(watched, patience)
    keeper = Keeper()
    est = make(keeper, WILD, epochs=30, clip=1.0, patience=patience).fit(X, Y, validation_data=data)
    assert est.n_iter_ == len(keeper.kept) == n < 30
    assert est.loss_curve_ == full.loss_curve_[:n]
    assert same(keeper.kept[best], est.model_.state_dict())
    assert not same(keeper.kept[-1], est.model_.state_dict())


@pytest.mark.slow
def test_best_weights_are_restored_if_epochs_run_out():
    keeper = Keeper()
    est = make(keeper, WILD, epochs=6, clip=1.0, patience=100).fit(X, Y, validation_data=(XV, YV))
    assert est.n_iter_ == 6
    assert same(keeper.kept[int(np.argmin(est.validation_loss_curve_))], est.model_.state_dict())


@pytest.mark.slow
def test_without_patience_the_last_weights_stay():
    keeper = Keeper()
    est = make(keeper, WILD, epochs=6, clip=1.0).fit(X, Y, validation_data=(XV, YV))
    assert same(keeper.kept[-1], est.model_.state_dict())


@pytest.mark.few
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
def test_best_weights_are_restored_if_a_hook_stops_it_but_not_after_an_error(error):
    keeper, last = Keeper(), []

    def end(loop):
        if loop.step == 5 * STEPS + 3:
            last.append(net2vec(loop.shared_data["model"]))
            if error is not None:
                raise error
            loop.stop()

    wild = partial(SGD, lr=0.5, momentum=0.9)
    est = make([keeper, end], wild, epochs=30, clip=1.0, patience=50)
    if error is None:
        est.fit(X, Y, validation_data=(XV, YV))
        assert same(
            keeper.kept[int(np.argmin(est.validation_loss_curve_))], est.model_.state_dict()
        )
        assert not torch.equal(net2vec(est), last[0])
    else:
        with pytest.raises(error):
            est.fit(X, Y, validation_data=(XV, YV))
        assert torch.equal(net2vec(est), last[0])  # what was learnt until then stays


def test_a_validation_loss_that_is_no_number_is_never_the_best():
    keeper = Keeper()
    x, y = XV, np.full_like(YV, np.nan)  # nothing to validate on
    est = make(keeper, epochs=5, patience=2).fit(X, Y, validation_data=(x, y))
    assert est.n_iter_ == 2
    assert np.isnan(est.validation_loss_curve_).all()
    assert same(keeper.kept[-1], est.model_.state_dict())


@pytest.mark.slow
def test_validation_and_patience_do_not_disturb_training():
    plain = make(shuffle=True).fit(X, Y)
    watched = make(shuffle=True, patience=10).fit(X, Y, validation_data=(XV, YV))
    assert watched.loss_curve_ == plain.loss_curve_
    assert len(watched.validation_loss_curve_) == 3


@pytest.mark.slow
def test_the_validation_loss_is_the_loss_of_the_epochs_weights():
    keeper = Keeper()
    est = make(keeper).fit(X, Y, validation_data=(XV, YV))
    for loss, weights in zip(est.validation_loss_curve_, keeper.kept, strict=True):
        est.model_.load_state_dict(weights)
        assert loss == pytest.approx(((est.predict(XV) - YV) ** 2).mean(), rel=1e-12)


# -- the record of training -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_history():
    est = make(opt=sgd, lr_schedule=SCHEDULES["StepLR"]).fit(X, Y, validation_data=(XV, YV))
    assert [r["epoch"] for r in est.history_] == [1, 2, 3]
    assert {frozenset(r) for r in est.history_} == {
        frozenset({"epoch", "loss", "mean_batch_loss", "seconds", "folds", "validation_loss", "lr"})
    }
    assert [r["loss"] for r in est.history_] == est.loss_curve_
    assert [r["validation_loss"] for r in est.history_] == est.validation_loss_curve_
    assert est.history_[-1]["mean_batch_loss"] == est.loss_
    assert all(r["seconds"] > 0 for r in est.history_)
    assert est.n_iter_ == 3
    assert all(type(v) is float for v in [*est.loss_curve_, *est.validation_loss_curve_, est.loss_])


def test_the_curve_weighs_windows_by_their_live_steps_and_loss_does_not():
    infos = []
    y = Y.copy()
    y[:, 0, 3:] = np.nan
    est = make(lambda loop: infos.append(loop.step_info), epochs=1).fit(X, y)
    losses, live = np.array([i.loss for i in infos]), np.array([i.n_live for i in infos])
    assert live.sum() == np.isfinite(y).sum()
    assert est.loss_ == pytest.approx(losses.mean(), rel=1e-12)
    assert est.loss_curve_ == [pytest.approx((losses * live).sum() / live.sum(), rel=1e-12)]
    assert est.loss_ != pytest.approx(est.loss_curve_[0], rel=1e-3)


@pytest.mark.slow
def test_fit_starts_anew_warm_start_goes_on():
    cold = make().fit(X, Y)
    curve = cold.loss_curve_
    assert cold.fit(X, Y).loss_curve_ == curve
    assert (cold.n_iter_, len(cold.history_)) == (3, 3)
    warm = make(warm_start=True).fit(X, Y).fit(X, Y)
    assert warm.loss_curve_[:3] == curve
    assert warm.n_iter_ == len(warm.loss_curve_) == len(warm.history_) == 6
    assert [r["epoch"] for r in warm.history_] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(net2vec(warm), net2vec(make(epochs=6).fit(X, Y)))


@pytest.mark.slow
def test_partial_fit_adds_one_epoch():
    est = make(epochs=7)
    for n in (1, 2, 3):
        est.partial_fit(X, Y)
        assert est.n_iter_ == len(est.history_) == len(est.loss_curve_) == n
    assert torch.equal(net2vec(est), net2vec(make(epochs=3).fit(X, Y)))
    assert est.fit(X, Y).n_iter_ == 7  # from the start
    assert torch.equal(net2vec(est), net2vec(make(epochs=7).fit(X, Y)))


def test_validation_in_some_fits_only():
    est = (
        make(warm_start=True, epochs=2)
        .fit(X, Y)
        .fit(X, Y, validation_data=(XV, YV))
        .partial_fit(X, Y)
    )
    assert ["validation_loss" in r for r in est.history_] == [False, False, True, True, False]
    assert len(est.validation_loss_curve_) == 2
    assert len(est.loss_curve_) == 5


@pytest.mark.slow
def test_a_record_that_was_handed_out_does_not_change():
    est = make(warm_start=True).fit(X, Y)
    history, curve = est.history_, est.loss_curve_
    before = copy.deepcopy(history), list(curve)
    est.fit(X, Y)
    assert (history, curve) == before


def test_epochs_of_one_call():
    est = make(warm_start=True).fit(X, Y, epochs=1)
    assert est.n_iter_ == 1
    assert est.spec.epochs == 3
    assert est.fit(X, Y, epochs=np.int64(2)).n_iter_ == 3


@pytest.mark.slow
def test_grad_is_the_mean_of_the_last_epoch_before_clipping():
    grads = []

    class Remembering(Adam):
        def step(self, closure=None):
            grads.append(
                torch.cat(
                    [p.grad.reshape(-1).clone() for g in self.param_groups for p in g["params"]]
                )
            )
            return super().step(closure)

    est = make(opt=Remembering, epochs=2).fit(X, Y)
    assert len(grads) == 2 * STEPS
    assert torch.allclose(est.grad_, torch.stack(grads[STEPS:]).mean(0), rtol=1e-12, atol=0)
    assert est.grad_.shape == net2vec(est).shape
    first = make(opt=Remembering, epochs=1).fit(X, Y).grad_
    grads.clear()
    clipped = make(opt=Remembering, epochs=1, clip=1e-12).fit(X, Y)
    assert max(g.norm() for g in grads) <= 1e-12
    assert clipped.grad_.norm() > 1e-3
    # nearly the same weights throughout
    assert torch.allclose(clipped.grad_, first, rtol=0.5, atol=0.05)


def test_the_history_is_a_list_of_loss_validation_loss_and_learning_rate():
    halving = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    est = make(opt=partial(SGD, lr=0.1), lr_schedule=halving).fit(X, Y, validation_data=(XV, YV))
    columns = {name: [record[name] for record in est.history_] for name in est.history_[0]}
    assert columns["epoch"] == [1, 2, 3]
    assert columns["loss"] == est.loss_curve_
    assert columns["validation_loss"] == est.validation_loss_curve_
    assert columns["lr"] == pytest.approx([0.1, 0.05, 0.025])
    assert all(isinstance(v, int | float) for column in columns.values() for v in column)


# -- verbose ---------------------------------------------------------------------------------------------------------


def on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def test_the_progress_bar_shows_epoch_step_and_losses(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    make(verbose=True).fit(X, Y, validation_data=(XV, YV))
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.split("\r")[-1]
    assert f"{3 * STEPS}/{3 * STEPS}" in last
    for text in ("epoch=3", "loss=", "validation_loss="):
        assert text in last


@pytest.mark.parametrize("verbose", [False, 0, "auto"])
def test_nothing_is_shown_where_nobody_looks(verbose, capsys):
    make(verbose=verbose).fit(X, Y)
    assert capsys.readouterr() == ("", "")


def test_auto_shows_on_a_terminal(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    make(verbose="auto").fit(X, Y)
    assert "epoch=3" in capsys.readouterr().err


def test_the_bar_is_closed_after_an_error(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        make(fails, verbose=True).fit(X, Y)
    assert capsys.readouterr().err.endswith("\n")


@pytest.mark.slow
def test_the_bar_does_not_change_the_result(capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    assert torch.equal(net2vec(make(verbose=True).fit(X, Y)), net2vec(make().fit(X, Y)))


@pytest.mark.few
@pytest.mark.parametrize("verbose", [True, "auto", 1])
def test_off_a_terminal_each_epoch_is_a_line_in_the_log(verbose, capsys, caplog):
    with caplog.at_level(logging.INFO, "fluxutils_py"):
        est = make(
            verbose=verbose,
            opt=partial(SGD, lr=0.1),
            lr_schedule=partial(lr_scheduler.StepLR, step_size=1),
        )
        est.fit(X, Y, validation_data=(XV, YV))
    assert [(r.name, r.levelname) for r in caplog.records] == [("fluxutils_py", "INFO")] * 3
    first, last = est.history_[0], est.history_[-1]
    numbers = ", ".join(f"{name} {first[name]:.4g}" for name in ("loss", "validation_loss", "lr"))
    assert re.fullmatch(rf"epoch 1: {re.escape(numbers)}, \d+\.\d s", caplog.messages[0])
    assert caplog.messages[-1].startswith(f"epoch 3: loss {last['loss']:.4g}, ")
    assert capsys.readouterr() == ("", "")  # nothing twice


def test_what_logging_would_drop_is_written_to_stderr_if_one_insists(capsys):
    make(verbose=True).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": loss")[0] for line in err.splitlines()] == [
        "epoch 1",
        "epoch 2",
        "epoch 3",
    ]


def test_what_callbacks_add_to_the_record_is_in_the_line(caplog):
    class Adds:
        def on_epoch(self, loop):
            loop.record.update(pieces=4, note="text", r2=0.5)

    with caplog.at_level(logging.INFO, "fluxutils_py"):
        make(Adds(), verbose="auto").fit(X, Y)
    assert ", pieces 4, r2 0.5, " in caplog.messages[0]


@pytest.mark.slow
def test_nothing_is_logged_on_a_terminal_or_without_verbose(caplog, capsys, monkeypatch):
    on_a_terminal(monkeypatch)
    with caplog.at_level(logging.INFO, "fluxutils_py"):
        make(verbose=True).fit(X, Y)
        make(verbose=False).fit(X, Y)
    assert caplog.messages == []


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("recorded", [True, False])  # without a graph, or by torch's
def test_the_norm_of_the_gradient_before_clipping(recorded, clip):
    found = []
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    by_hand = copy.deepcopy(model)
    x = np.random.default_rng(0).normal(size=(3, 5, 9)).astype("float32")
    y = x[:1].cumsum(2)
    loss = nn.MSELoss() if recorded else lambda m, xs, ys: nn.functional.mse_loss(m(xs), ys)
    spec = Spec(epochs=3, batchsize=5, seqsize=9, clip=clip)
    opt = partial(torch.optim.SGD, lr=0.1)
    hook = lambda loop: found.append(loop.trainer.gradient_norm)  # noqa: E731
    Estimator(model, loss, opt, spec, callbacks=hook, verbose=False).fit(x, y)
    expected, optimizer = [], torch.optim.SGD(by_hand.parameters(), lr=0.1)
    xs, ys = (torch.from_numpy(a).permute(2, 1, 0) for a in (x, y))
    for _ in range(3):
        reset(by_hand)
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(xs), ys).backward()
        norm = nn.utils.clip_grad_norm_(by_hand.parameters(), np.inf if clip is None else clip)
        expected.append(float(norm))
        optimizer.step()
    assert found == pytest.approx(expected, rel=1e-4)
