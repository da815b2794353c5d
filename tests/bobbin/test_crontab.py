"""When the actions of a table are done, by hand and as hooks, and what comes of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator
from fluxutils_py.bobbin import CronTab
from fluxutils_py.gomlx import Trainer
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import SingleProcessComm
from fluxutils_py.training import Loop, StepInfo, StopTraining
from fluxutils_py.training.hooks import Hooks
from fluxutils_py.training.triggers import (
    AtSteps,
    EveryNSeconds,
    EveryNSteps,
    Exponential,
)


def steps_of(cron, n, start=0):
    """At which of n steps each action is done, by hand."""
    found = {}
    for step in range(start + 1, start + n + 1):
        for name in cron.run(SimpleNamespace(step=step)):
            found.setdefault(name, []).append(step)
    return found


def nothing(*_):
    return None


class Thing:
    def __call__(self, state):
        return None

    def method(self, state):
        return None


def test_actions_are_done_at_their_steps():
    cron = CronTab()
    cron.schedule(nothing, name="interval", step_interval=5)
    cron.schedule(nothing, name="at", at_step=(3, 11)).schedule(nothing, name="one", at_step=7)
    cron.schedule(nothing, name="first", at_first_steps=2).schedule(
        nothing, name="trigger", trigger=EveryNSteps(6)
    )
    cron.schedule(nothing, name="both", trigger=EveryNSteps(6), at_step=1)
    found = steps_of(cron, 12)
    assert found == {
        "interval": [5, 10],
        "at": [3, 11],
        "one": [7],
        "first": [1, 2],
        "trigger": [6, 12],
        "both": [1, 6, 12],
    }


def test_one_trigger_of_a_row_hides_nothing_from_the_others():
    cron = CronTab().schedule(nothing, name="a", at_step=1, at_first_steps_of_process=5)
    assert steps_of(cron, 9) == {"a": [1, 2, 3, 4, 5]}
    assert steps_of(
        CronTab().schedule(nothing, name="a", at_first_steps_of_process=5), 9, start=100
    ) == {"a": [101, 102, 103, 104, 105]}


def test_a_process_that_begins_in_the_middle_goes_by_the_step():
    cron = (
        CronTab()
        .schedule(nothing, name="e", trigger=Exponential(100, 1.2))
        .schedule(nothing, name="n", step_interval=200)
    )
    assert steps_of(cron, 500, start=300) == {"e": [365, 538, 746], "n": [400, 600, 800]}


def test_actions_are_given_the_state_and_all_else_and_results_are_by_name():
    cron = CronTab().schedule(lambda *args, **kwargs: (args, kwargs), name="a", step_interval=1)
    cron.schedule(lambda *_, **__: "b", name="b", at_step=2)
    state = SimpleNamespace(step=1)
    assert cron.run(state, 5, k=6) == {"a": ((state, 5), {"k": 6})}
    state.step = 2
    assert cron.run(state) == {"a": ((state,), {}), "b": "b"}
    state.step = 3
    cron.run(state, 7)
    assert cron.results == {"a": ((state, 7), {}), "b": "b"}  # the last of each


def test_names_are_the_actions_own_and_never_the_same():
    cron = CronTab().schedule(nothing, step_interval=1).schedule(nothing, step_interval=1)
    cron.schedule(Thing(), step_interval=1).schedule(Thing().method, step_interval=1)
    assert list(cron.run(SimpleNamespace(step=1))) == [
        "nothing",
        "nothing (2)",
        "Thing",
        "Thing.method",
    ]
    with pytest.raises(ValueError, match=r"already .*'a'.* another name"):
        cron.schedule(nothing, name="a", at_step=1).schedule(nothing, name="a", at_step=2)


def test_what_cannot_be_scheduled_says_why():
    cron = CronTab()
    with pytest.raises(TypeError, match=r"^an action .*function.* got 3$"):
        cron.schedule(3, at_step=1)
    names = "step_interval, at_step, at_first_steps, at_first_steps_of_process, time_interval"
    with pytest.raises(
        TypeError,
        match=rf"^schedule\(\) .*'each_step'; .*{names}$",
    ):
        cron.schedule(nothing, each_step=1)
    with pytest.raises(ValueError, match=r"^schedule\(\) needs .*step_interval.*time_interval"):
        cron.schedule(nothing)
    assert cron.run(SimpleNamespace(step=1)) == {}


def test_rows_count_by_themselves_though_they_are_given_one_trigger():
    every = EveryNSteps(3, relative=True)
    cron = (
        CronTab()
        .schedule(nothing, name="a", trigger=every)
        .schedule(nothing, name="b", trigger=every)
    )
    assert steps_of(cron, 7) == {"a": [3, 6], "b": [3, 6]}
    assert every.origin is None


def test_an_action_of_bobbins_form_is_a_hook_of_a_loop():
    trainer = Trainer(nn.Linear(2, 1), nn.MSELoss(), torch.optim.SGD)
    seen = []

    def act(train_state, *, step_info):
        seen.append((train_state.step, train_state.model, list(train_state.params), step_info.loss))

    loop = Loop(trainer)
    cron = CronTab().schedule(
        lambda loop: act(loop.state, step_info=loop.step_info), step_interval=2
    )
    loop.hooks.attach(cron)
    x = torch.ones(6, 2)
    loop.run_epochs([(x[i : i + 2], x[i : i + 2, :1]) for i in range(0, 6, 2)], 1)
    assert seen == [(2, trainer.model, ["weight", "bias"], seen[0][3])]
    assert isinstance(seen[0][3], float)


def test_a_clock_goes_on_from_when_an_action_is_over():
    now = SimpleNamespace(time=0.0)
    cron = CronTab().schedule(nothing, name="c", trigger=EveryNSeconds(7, clock=lambda: now.time))
    found = []
    for step in range(1, 9):
        now.time += 3
        if cron.run(SimpleNamespace(step=step)):
            found.append(now.time)
    assert found == [12.0, 21.0]  # the clock starts with the first step, at 3


def test_as_hooks_the_same_actions_are_done_at_the_same_steps():
    found = []
    cron = CronTab().schedule(
        lambda loop: found.append(loop.step), name="a", step_interval=3, at_step=4
    )
    loops = [Loop(lambda batch: StepInfo(1.0)) for _ in range(2)]
    for loop in loops:  # a table may be given to several
        loop.hooks.attach(cron)
        loop.run_epochs(range(7), 1)
    assert found == [3, 4, 6] * 2


def test_actions_come_by_priority_also_that_of_their_object_and_results_stay():
    order = []

    class Together:
        collective, priority = True, -5

        def __call__(self, loop):
            order.append("called")
            return loop.step

        def save(self, loop):
            order.append("saved")

    thing = Together()
    cron = CronTab().schedule(thing, name="t", at_step=2).schedule(thing.save, name="s", at_step=2)
    cron.schedule(lambda state: order.append("alone"), name="alone", at_step=2)
    loop = Loop(lambda batch: StepInfo(1.0))
    loop.hooks.attach(cron)
    loop.run_epochs(range(3), 1)
    assert order == ["called", "saved", "alone"]
    assert cron.results == {"t": 2, "s": None, "alone": None}
    steps_of(cron, 3)
    assert order == ["called", "saved", "alone"] * 2


def test_an_action_that_has_something_to_open_and_close_does_so_around_each_run():
    class Opens:
        def __init__(self):
            self.seen = []

        def on_start(self, loop):
            self.seen.append("opened")

        def __call__(self, loop):
            self.seen.append(loop.step)

        def on_close(self, loop):
            self.seen.append("closed")

    action = Opens()
    loop = Loop(lambda batch: StepInfo(1.0))
    loop.hooks.attach(CronTab().schedule(action, step_interval=2))
    loop.run_epochs(range(3), 1)
    loop.run_epochs(range(2), 1)
    assert action.seen == ["opened", 2, "closed", "opened", 4, "closed"]


def test_an_action_ends_training_with_stop_training():
    def enough(loop):
        raise StopTraining

    loop = Loop(lambda batch: StepInfo(1.0))
    loop.hooks.attach(CronTab().schedule(enough, at_step=4))
    loop.run_epochs(range(10), 2)
    assert loop.step == 4


def test_a_table_is_a_callback_of_an_estimator():
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype("float32")
    cron = CronTab().schedule(
        lambda loop: (loop.step, loop.model is not None), name="a", trigger=AtSteps(2, 3)
    )
    est = Estimator(
        spec={"epochs": 1, "batchsize": 5, "seqsize": 3}, callbacks=[cron], random_state=0
    ).fit(x, x)
    assert est.n_iter_ == 1
    assert cron.results == {"a": (3, True)}


class TwoRanks(SingleProcessComm):
    """Two ranks: the other one, rank 0 or rank 1, changes what this one says."""

    size = 2

    def __init__(self, rank, of_rank_0):
        self.rank, self.of_rank_0 = rank, of_rank_0

    def allgather(self, obj):
        *head, value = obj
        other = (*head, self.of_rank_0 if isinstance(value, bool) else value)
        return [other, obj] if self.rank else [obj, other]


@pytest.mark.parametrize(
    ("rank", "of_rank_0", "expected"), [(0, False, [2, 3]), (1, False, []), (1, True, [1, 2, 3])]
)
def test_the_clock_of_rank_0_decides_when_several_ranks_do_something_together(
    rank, of_rank_0, expected
):
    acted, time = [], iter(range(100))
    hooks = Hooks()
    trigger = EveryNSeconds(0, clock=lambda: float(next(time)))
    hooks.attach(
        CronTab().schedule(lambda loop: acted.append(loop.step), name="look", trigger=trigger)
    )
    ranks = RankGroup(TwoRanks(rank, of_rank_0))
    with ranks:
        hooks.agree(ranks)
        for step in (1, 2, 3):
            hooks.run("step", SimpleNamespace(step=step, ranks=ranks))
    assert acted == expected
