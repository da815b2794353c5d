"""At which steps triggers fire, exactly."""

import math
from types import SimpleNamespace

import pytest

from fluxutils_py.bobbin.crontab import CronTab
from fluxutils_py.gomlx.loop_callbacks import EveryNSteps as every_n_steps
from fluxutils_py.gomlx.loop_callbacks import (
    ExponentialCallback,
    NTimesDuringLoop,
    PeriodicCallback,
)
from fluxutils_py.training import Loop, StepInfo
from fluxutils_py.training.triggers import (
    AtFirstNSteps,
    AtNthStep,
    AtSteps,
    EveryNEpochs,
    EveryNSeconds,
    EveryNSteps,
    Exponential,
    ForEachNSteps,
    ForEachTSeconds,
    NTimes,
    OrTrigger,
    Trigger,
)


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Unsized:
    """Passes of the same length, which nobody knows."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def loop_at(step=0, clock=None, seconds=0):
    """A loop that has made some steps; each further one takes so many seconds."""

    def take(batch):
        if clock is not None:
            clock.now += seconds
        return StepInfo(1.0)

    loop = Loop(take)
    loop.step = step
    return loop


def steps_of(trigger, n_steps, start=0, at="step"):
    fired, loop = [], loop_at(start)
    loop.on_step("note", lambda loop: fired.append(getattr(loop, at)), trigger=trigger)
    loop.run_steps(range(n_steps), n_steps)
    return fired


# -- every so many steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "expected"), [(0, [3, 6, 9]), (7, [10, 13, 16])])
def test_every_n_steps_may_count_from_where_it_was_added(start, expected):
    assert steps_of(EveryNSteps(3, relative=True), 11, start) == expected


def test_every_n_steps_of_gomlx_in_a_loop_that_was_resumed():
    fired, loop = [], loop_at(150)
    every_n_steps(loop, 100, "note", 0, lambda loop, metrics: fired.append(loop.step))
    loop.run_steps(range(220), 220)
    assert fired == [250, 350]  # and not at the last step, 370
    assert steps_of(EveryNSteps(100), 220, 150) == [200, 300]


def test_every_n_steps_goes_on_counting_over_runs():
    fired, loop = [], loop_at()
    every_n_steps(loop, 5, "note", 0, lambda loop, metrics: fired.append(loop.step))
    for _ in range(4):
        loop.run_steps(range(3), 3)
    assert fired == [5, 10]


# -- so many times during a run ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 11, 99, 100, 101, 1000])
@pytest.mark.parametrize("n_steps", [1, 2, 7, 10, 100])
def test_n_times_fires_exactly_so_often_and_at_the_last_step(n, n_steps):
    fired = steps_of(NTimes(n), n_steps)
    assert len(fired) == min(n, n_steps) == len(set(fired))
    assert fired[-1] == n_steps
    if n <= n_steps:
        assert fired == [math.ceil(n_steps * k / n) for k in range(1, n + 1)]


def test_n_times_begins_anew_in_each_run():
    fired, loop = [], loop_at()
    NTimesDuringLoop(loop, 3, "note", 0, lambda loop, metrics: fired.append(loop.step))
    loop.run_steps(range(9), 9)
    loop.run_steps(range(3), 3)
    loop.run_epochs(range(6), 2)
    assert fired == [3, 6, 9, 10, 11, 12, 16, 20, 24]


@pytest.mark.parametrize(("n", "epochs"), [(3, 1), (3, 3), (7, 2), (50, 4)])
def test_n_times_over_batches_of_unknown_number(n, epochs):
    fired, loop = [], loop_at()
    loop.on_step("note", lambda loop: fired.append(loop.step), trigger=NTimes(n))
    loop.run_epochs(Unsized(7), epochs)
    assert len(fired) <= n
    assert fired[-1] == 7 * epochs
    assert epochs > 1 or fired == [7]  # nobody knew before
    if (n, epochs) == (3, 3):
        assert fired == [8, 14, 21]


class Growing:
    """Each pass is longer than the one before: any estimate of the end is too low."""

    def __init__(self):
        self.n = 2

    def __iter__(self):
        self.n *= 2
        return iter(range(self.n))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20, 100])
def test_n_times_is_never_exceeded_by_a_run_that_is_longer_than_it_seemed(n):
    fired, loop = [], loop_at()
    loop.on_step("note", lambda loop: fired.append(loop.step), trigger=NTimes(n))
    loop.run_epochs(Growing(), 4)
    assert loop.step == 4 + 8 + 16 + 32
    assert len(fired) <= n
    assert fired[-1] == loop.step


def test_n_times_fires_at_the_end_of_a_run_that_is_stopped():
    fired, loop = [], loop_at()
    loop.on_step("note", lambda loop: fired.append(loop.step), trigger=NTimes(4))
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 11 else None)
    loop.run_steps(range(20), 20)
    assert fired == [5, 10, 11]


# -- further and further apart -------------------------------------------------------------------------


def test_exponential_fires_at_the_steps_of_gomlx():
    assert steps_of(Exponential(100, 1.2), 1400, at="loop_step") == [
        100,
        220,
        364,
        537,
        745,
        995,
        1295,
    ]
    assert steps_of(Exponential(100, 1.2), 300, 300, at="loop_step") == [364, 537]
    assert steps_of(Exponential(100, 1.2), 65, 300, at="loop_step") == [364]
    assert steps_of(Exponential(100, 1.2), 300, 364, at="loop_step")[0] == 364
    assert steps_of(Exponential(100, 1.2), 300, 365, at="loop_step")[0] == 537


def test_halves_are_rounded_up():
    # skips 2 (of 1.5), 3, 5 (4.5)
    assert steps_of(Exponential(1, 1.5), 60, at="loop_step") == [
        1,
        3,
        6,
        11,
        19,
        31,
        49,
    ]


def test_a_factor_of_one_is_a_constant_distance():
    assert steps_of(Exponential(4, 1), 20, at="loop_step") == [4, 8, 12, 16]


@pytest.mark.parametrize(("n_steps", "at_end"), [(12, [6, 12]), (13, [6, 13]), (6, [6])])
def test_exponential_at_the_end(n_steps, at_end):
    fired, loop = [], loop_at()
    ExponentialCallback(loop, 5, 10, True, "note", 0, lambda loop, metrics: fired.append(loop.step))
    loop.run_steps(range(n_steps), n_steps)
    assert fired == at_end  # once only, where a step fires that is the last


# -- by time -------------------------------------------------------------------------------------------


def test_a_period_is_counted_from_the_end_of_the_action():
    clock, started = Clock(), []
    loop = loop_at(clock=clock, seconds=1)

    def slow(loop, metrics):
        started.append(clock.now)
        clock.now += 3

    PeriodicCallback(loop, 5, False, "slow", 0, slow, clock=clock)
    loop.run_steps(range(30), 30)
    # the clock starts at the first step, at 1001
    assert started == [1006 + 8 * k for k in range(len(started))]
    assert len(started) == 5


def test_a_period_of_nothing_fires_at_every_step_but_the_first():
    assert steps_of(EveryNSeconds(0), 4) == [2, 3, 4]


@pytest.mark.parametrize(("seconds", "expected"), [(2, [3, 5, 6]), (1, [2, 3, 4, 5, 6]), (99, [6])])
def test_a_period_at_the_end_is_never_run_twice(seconds, expected):
    clock, fired = Clock(), []
    loop = loop_at(clock=clock, seconds=1)
    PeriodicCallback(
        loop, seconds, True, "note", 0, lambda loop, metrics: fired.append(loop.step), clock=clock
    )
    loop.run_steps(range(6), 6)
    assert fired == expected


def test_a_time_interval_fires_at_once_and_then_strictly_after():
    clock = Clock()
    trigger, found = ForEachTSeconds(7, clock=clock), []
    for clock.now in (10, 15, 19, 25, 27, 34, 34.5):
        found.append(trigger.fires(SimpleNamespace(step=0)))
    assert found == [True, False, True, False, True, False, True]


def test_a_time_interval_counts_from_when_the_action_began():
    clock, started = Clock(), []
    loop = loop_at(clock=clock, seconds=1)

    def slow(loop):
        started.append(clock.now)
        clock.now += 3

    loop.on_step("slow", slow, trigger=ForEachTSeconds(5, clock=clock))
    loop.run_steps(range(12), 12)
    assert started == [1001, 1007, 1013, 1019]


# -- by the loop's steps -------------------------------------------------------------------------------


def scheduled(names, n_steps, start=0):
    fired, loop = [], loop_at(start)
    loop.hooks.attach(CronTab().schedule(lambda loop: fired.append(loop.step), **names))
    loop.run_steps(range(n_steps), n_steps)
    return fired


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        ({"step_interval": 4}, [4, 8, 12]),
        ({"at_step": 5}, [5]),
        ({"at_step": (2, 13, 99)}, [2, 13]),
        ({"at_step": [1]}, [1]),
        ({"at_first_steps": 3}, [1, 2, 3]),
        ({"at_first_steps": 0}, []),
        ({"at_first_steps_of_process": 5}, [1, 2, 3, 4, 5]),
        ({"step_interval": 6, "at_first_steps": 2, "at_step": 6}, [1, 2, 6, 12]),
    ],
)
def test_triggers_by_the_names_of_bobbin(names, steps):
    assert scheduled(names, 13) == steps


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        ({"step_interval": 4}, [8, 12]),
        ({"at_step": (3, 9)}, [9]),
        ({"at_first_steps": 9}, [7, 8, 9]),
        ({"at_first_steps_of_process": 3}, [7, 8, 9]),
    ],
)
def test_what_counts_from_the_first_step_of_training_and_what_from_that_of_the_process(
    names, steps
):
    assert scheduled(names, 7, start=6) == steps


def test_step_zero_is_a_multiple_and_among_the_first():
    at = SimpleNamespace(step=0)
    assert EveryNSteps(3).fires(at)
    assert AtFirstNSteps(0).fires(at)
    assert AtSteps(0).fires(at)


def test_bobbins_own_triggers_and_their_check():
    """As in bobbin's cron_test.py."""
    at = SimpleNamespace(step=0)
    triggers = {
        ForEachNSteps(10): lambda step: step % 10 == 0,
        AtFirstNSteps(10): lambda step: step <= 10,
        AtNthStep(17): lambda step: step == 17,
        AtNthStep((17, 30)): lambda step: step in (17, 30),
        AtFirstNSteps(5) | ForEachNSteps(3): lambda step: step <= 5 or step % 3 == 0,
        OrTrigger(AtNthStep(2), AtNthStep(4)): lambda step: step in (2, 4),
    }
    for at.step in range(100):
        for trigger, expected in triggers.items():
            assert trigger.check(at) == expected(at.step)
    clock = Clock()
    at_zero, later = (
        ForEachTSeconds(7, clock=clock),
        ForEachTSeconds(7, fire_at_zero=False, clock=clock),
    )
    assert (at_zero.check(at), later.check(at)) == (True, False)
    clock.now += 8
    assert at_zero.check(at)
    assert later.check(at)


def test_every_n_seconds_may_fire_at_zero():
    clock = Clock()
    trigger = EveryNSeconds(5, fire_at_zero=True, clock=clock)
    found = []
    for clock.now in (10, 12, 15, 19):
        found.append(trigger.fires(SimpleNamespace(step=0)))
    assert found == [True, False, True, False]


# -- by epochs -----------------------------------------------------------------------------------------


def test_every_n_epochs_goes_by_epochs_over_runs():
    fired, loop = [], loop_at()
    loop.on_step(
        "note",
        lambda loop: fired.append((loop.record["epoch"], loop.step)),
        trigger=EveryNEpochs(2),
    )
    loop.run_epochs(range(3), 3)
    loop.run_epochs(range(3), 2)
    assert fired == [(2, 6), (4, 12)]


def test_steps_and_epochs_are_not_combined():
    with pytest.raises(
        ValueError,
        match=r"^triggers .*steps and by epochs",
    ):
        EveryNSteps(2) | EveryNEpochs(2)


# -- several together ----------------------------------------------------------------------------------


def test_all_triggers_are_asked_though_the_first_fires():
    """Else the first step of the process would be taken for a later one."""
    assert steps_of(AtSteps(1) | AtFirstNSteps(3, of_process=True), 6) == [1, 2, 3]
    assert steps_of(AtSteps(1, 2) | EveryNSteps(3) | AtSteps(4), 7) == [1, 2, 3, 4, 6]


def test_several_fire_at_the_end_if_one_does():
    assert steps_of(AtSteps(2) | NTimes(1), 5) == [2, 5]
    assert steps_of(AtSteps(5) | NTimes(1), 5) == [5]


def test_of_several_only_those_that_fired_are_told_that_the_action_is_over():
    clock, fired = Clock(), []
    loop = loop_at(clock=clock, seconds=1)
    trigger = AtSteps(3) | EveryNSeconds(4, clock=clock)
    loop.on_step("note", lambda loop: fired.append(loop.step), trigger=trigger)
    loop.run_steps(range(10), 10)
    # 5: 4 seconds after the first step, though something else fired meanwhile
    assert fired == [
        3,
        5,
        9,
    ]


def test_only_triggers_can_be_combined():
    with pytest.raises(TypeError):
        EveryNSteps(3) | 4


def test_a_run_that_is_lengthened_after_a_restart_fires_once_more():
    def run(epochs, state=None):
        fired, loop, states = [], loop_at(), []
        loop.on_step("note", lambda loop: fired.append(loop.step), trigger=NTimes(3))
        loop.hooks.add("end", lambda loop: states.append(loop.state_dict()), priority=math.inf)
        if state is not None:
            loop.load_state_dict(state)
        loop.run_epochs(range(3), epochs)
        return fired, states[0]

    fired, state = run(2)
    rest, _ = run(4, state)
    assert (fired, rest) == ([2, 4, 6], [12])


# -- as part of a hook ---------------------------------------------------------------------------------


def test_hooks_that_are_given_one_trigger_count_by_themselves():
    a, b, trigger = [], [], EveryNSteps(2) | AtFirstNSteps(1, of_process=True)
    loop = loop_at()
    loop.on_step("a", lambda loop: a.append(loop.step), trigger=trigger)
    loop.on_step("b", lambda loop: b.append(loop.step), trigger=trigger)
    loop.run_steps(range(5), 5)
    assert a == b == [1, 2, 4]
    assert steps_of(trigger, 5) == [1, 2, 4]  # nor did it count itself


def test_an_action_that_stops_training_is_over_all_the_same():
    fired, loop = [], loop_at()

    def note(loop):
        fired.append(loop.step)
        loop.stop()

    loop.on_step("note", note, trigger=Exponential(1, 2, at_end=True))
    loop.run_steps(range(9), 9)
    assert fired == [2]


def test_nothing_fires_at_the_end_of_a_run_without_steps():
    assert steps_of(NTimes(3), 0) == []


def test_triggers_are_for_steps():
    with pytest.raises(ValueError, match=r"^EveryNSteps .*each step; event 'epoch'"):
        Loop(None).hooks.add("epoch", print, trigger=EveryNSteps(2))


# -- going on ------------------------------------------------------------------------------------------

DETERMINISTIC = [
    EveryNSteps(3),
    NTimes(5),
    NTimes(100),
    Exponential(2, 1.5),
    EveryNSteps(4),
    AtSteps(1, 5, 13),
    AtFirstNSteps(6),
    EveryNSteps(2) | NTimes(3) | AtSteps(7),
]


@pytest.mark.parametrize("trigger", DETERMINISTIC, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("cut", [1, 4, 5, 12, 13])
def test_a_trigger_that_goes_on_fires_as_if_it_had_not_been_interrupted(trigger, cut):
    def run(state=None, until=None):
        fired, loop, states = [], loop_at(), []
        loop.on_step("note", lambda loop: fired.append(loop.step), trigger=trigger)
        loop.on_step("save", lambda loop: states.append(loop.state_dict()), priority=1)
        if state is not None:
            loop.load_state_dict(state)
        loop.run_to_step(range(17), 17)
        return fired, states

    whole, states = run()
    rest, _ = run(states[cut - 1])
    assert rest == [step for step in whole if step > cut]


@pytest.mark.parametrize("kind", [EveryNSeconds, ForEachTSeconds])
def test_time_that_has_passed_is_kept_though_clocks_differ(kind):
    clock, other = Clock(1000), Clock(5)
    first, second = kind(10, clock=clock), kind(10, clock=other)
    at = SimpleNamespace(step=1)
    first.fires(at)
    clock.now += 7
    second.load_state_dict(first.state_dict())
    other.now += 2.5
    assert not second.fires(at)
    other.now += 1
    assert second.fires(at)
    kind(10, clock=clock).load_state_dict(kind(10, clock=clock).state_dict())  # which has not begun


# -- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EveryNSteps(0), ValueError, "n must be a positive integer, got 0"),
        (lambda: EveryNSteps(2.0), TypeError, "n must be a positive integer, got 2.0"),
        (lambda: NTimes(True), TypeError, "n must be a positive integer, got True"),
        (lambda: EveryNSteps(-1), ValueError, "n must be a positive integer, got -1"),
        (lambda: AtSteps(3, -1), ValueError, "a step must be an integer of at least 0, got -1"),
        (lambda: Exponential(0, 2), ValueError, "start must be a positive integer, got 0"),
        (lambda: Exponential(5, 0.9), ValueError, "factor must be at least 1, got 0.9"),
        (lambda: Exponential(5, math.inf), ValueError, "factor must be at least 1, got inf"),
        (
            lambda: EveryNSeconds(-1),
            ValueError,
            "the time must be a number of seconds, 0 or more, got -1",
        ),
        (
            lambda: ForEachTSeconds(math.nan),
            ValueError,
            "the time must be a number of seconds, 0 or more, got nan",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_a_trigger_of_ones_own_needs_one_method():
    class Odd(Trigger):
        def _due(self, at):
            return at.step % 2 == 1

    assert steps_of(Odd() | AtSteps(4), 5) == [1, 3, 4, 5]
    assert isinstance(Odd() | Odd(), OrTrigger)
