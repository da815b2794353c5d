"""Schedules of the learning rate (lr_schedules), against the formula of gomlx."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.gomlx import Trainer
from fluxutils_py.optim import cosine
from fluxutils_py.training import Loop


def gomlx_rate(step, end, cycles, low, high, warm_up):
    """The rate of a step, counted from 0, of a run that ends at step ``end``."""
    if step < warm_up:
        return low + (high - low) * step / warm_up
    share = (step - warm_up) / ((end - warm_up) / cycles) % 1
    return low + (high - low) * (1 + math.cos(share * math.pi)) / 2


def rates_of(schedule, n, run, lr=0.8):
    trainer = Trainer(
        nn.Linear(1, 1), nn.MSELoss(), functools.partial(torch.optim.SGD, lr=lr), scheduler=schedule
    )
    loop, rates = Loop(trainer), []
    trainer.add_per_step_update(lambda model: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    run(loop, [(torch.zeros(1, 1), torch.zeros(1, 1))] * n)
    return rates


@pytest.mark.slow
@pytest.mark.parametrize(("cycles", "low", "warm_up"), [(1, 0.0, 0), (3, 0.1, 0), (2, 0.05, 7)])
def test_a_cosine_of_cycles_knows_the_length_of_the_run(cycles, low, warm_up):
    expected = [gomlx_rate(step, 100, cycles, low, 0.8, warm_up) for step in range(100)]
    schedule = cosine(min_lr=low, cycles=cycles, warm_up=warm_up)
    assert rates_of(schedule, 100, lambda loop, data: loop.run_steps(data, 100)) == pytest.approx(
        expected
    )
    assert rates_of(schedule, 25, lambda loop, data: loop.run_epochs(data, 4)) == pytest.approx(
        expected
    )


@pytest.mark.slow
def test_the_rate_after_50_of_100_steps_is_half_of_the_first():
    found = rates_of(cosine(cycles=1), 100, lambda loop, data: loop.run_steps(data, 100))
    assert found[50] == pytest.approx(0.4)
    assert rates_of(cosine(100), 100, lambda loop, data: loop.run_steps(data, 100))[
        50
    ] == pytest.approx(0.4)


def test_a_period_may_begin_after_a_warm_up():
    found = rates_of(cosine(10, warm_up=3), 16, lambda loop, data: loop.run_steps(data, 16))
    assert found[:4] == pytest.approx([0, 0.8 / 3, 1.6 / 3, 0.8])
    assert found[8] == pytest.approx(0.4)
    assert found[13] == pytest.approx(0.8)


def test_a_run_of_unknown_length_is_refused_before_its_first_step():
    trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD, scheduler=cosine(cycles=2))
    loop = Loop(trainer)
    with pytest.raises(ValueError, match="cycles=2"):
        loop.run_epochs(iter([(torch.zeros(1, 1), torch.zeros(1, 1))]), 1)
    assert loop.step == 0


@pytest.mark.parametrize(("every", "n"), [("step", 12), ("epoch", 4)])
def test_an_estimator_tells_the_schedule_its_length(every, n):
    x = np.random.default_rng(0).normal(size=(2, 3, 30)).astype("float32")
    spec = Spec(
        epochs=4,
        batchsize=3,
        seqsize=10,
        rebatch=False,
        lr_schedule=cosine(cycles=1) if every == "epoch" else (every, cosine(cycles=1)),
    )
    rates = []
    opt = functools.partial(torch.optim.SGD, lr=0.8)
    est = Estimator(nn.Linear(2, 1), opt=opt, spec=spec, random_state=0, verbose=False)
    est.set_params(callbacks=[lambda loop: rates.append(loop.optimizer.param_groups[0]["lr"])])
    est.fit(x, x[:1])
    assert len(rates) == 12
    expected = [gomlx_rate(k * n // 12, n, 1, 0, 0.8, 0) for k in range(12)]
    # callbacks see the rate of the next step
    found = [0.8, *rates[:-1]] if every == "step" else rates
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "settings", [{}, {"period": 3, "cycles": 1}, {"cycles": 2, "factor": 2}, {"cycles": 0}]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"period|cycles|factor"):
        cosine(**settings)


def test_an_optimizer_in_place_of_the_period_is_refused():
    with pytest.raises(TypeError, match=r"cosine\(100\)\(optimizer\)"):
        cosine(torch.optim.SGD(nn.Linear(1, 1).parameters()), 100)
