"""In which order hooks run, and what becomes of their errors."""

import random
from types import SimpleNamespace

import pytest

from fluxutils_py.bobbin import CronTab
from fluxutils_py.gomlx import EveryNSteps as EveryNStepsOfGomlx
from fluxutils_py.praytools import cb
from fluxutils_py.training import Loop, StepInfo, StopTraining
from fluxutils_py.training.hooks import EVENTS, Hooks
from fluxutils_py.training.triggers import EveryNSteps


def loop_of(log):
    def step(batch):
        log.append(batch)
        return StepInfo(1.0)

    return Loop(step)


def test_hooks_run_by_priority_and_then_by_registration():
    names = [(p, i) for p in (-5, 0, 0.5, 7, float("inf"), -float("inf")) for i in range(4)]
    shuffled = names.copy()
    random.shuffle(shuffled)
    hooks, log = Hooks(), []
    for n, (priority, i) in enumerate(shuffled):
        hooks.add("step", lambda loop, n=n: log.append(n), name=f"{i}", priority=priority)
    hooks.run("step", None)
    assert log == sorted(range(len(shuffled)), key=lambda n: (shuffled[n][0], n))


def test_events_are_run_by_themselves():
    hooks, log = Hooks(), []
    for event in EVENTS:
        hooks.add(event, lambda loop, event=event: log.append((event, loop)))
    for event in reversed(EVENTS):
        hooks.run(event, "the loop")
    assert log == [(event, "the loop") for event in reversed(EVENTS)]


class Everything:
    priority = -1

    def __init__(self, log):
        self.log = log

    def on_start(self, loop):
        self.log.append("start")

    def on_step(self, loop):
        self.log.append(("step", loop.step))

    def on_epoch(self, loop):
        self.log.append(("epoch", loop.record["epoch"]))

    def on_end(self, loop):
        self.log.append("end")

    def on_close(self, loop):
        self.log.append("close")


def test_an_object_is_asked_for_every_event():
    log = []
    loop = loop_of(log)
    loop.hooks.attach(Everything(log))
    loop.run_epochs(["a", "b"], 2)
    assert log == [
        *("start", "a", ("step", 1), "b", ("step", 2), ("epoch", 1)),
        *("a", ("step", 3), "b", ("step", 4), ("epoch", 2), "end", "close"),
    ]


def test_a_function_is_called_after_every_step():
    log = []
    loop = loop_of(log)
    loop.hooks.attach(lambda loop: log.append(loop.step))
    loop.hooks.attach(Everything([]))
    loop.run_epochs(["a", "b"], 1)
    assert log == ["a", 1, "b", 2]


def test_the_priority_of_an_object_counts_against_functions():
    log = []
    loop = loop_of([])
    loop.hooks.attach(lambda loop: log.append("function"))
    loop.hooks.attach(Everything(log))
    loop.on_step("later", lambda loop: log.append("later"), priority=0.1)
    loop.on_step("first", lambda loop: log.append("first"), priority=-2)
    loop.run_epochs(["a"], 1)
    assert log == ["start", "first", ("step", 1), "function", "later", ("epoch", 1), "end", "close"]


@pytest.mark.parametrize("hook", [3, "step", object(), [print]])
def test_what_is_no_callback_is_refused(hook):
    with pytest.raises(TypeError, match="on_start, on_step, on_epoch"):
        Hooks().attach(hook)


def test_a_class_that_was_not_built_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"Everything is a class; .*Everything\("):
        Hooks().attach(Everything)


# -- stopping and failing ------------------------------------------------------------------------------


def stop(loop):
    raise StopTraining


@pytest.mark.parametrize(
    ("event", "steps", "epochs"),
    [("start", 0, 0), ("step", 1, 1), ("epoch", 3, 1), ("end", 6, 2), ("close", 6, 2)],
)
def test_stop_training_ends_the_run_cleanly(event, steps, epochs):
    log = []
    loop = loop_of([])
    loop.hooks.add(event, stop, priority=-1)
    loop.hooks.add(event, lambda loop: log.append("the others run"))
    loop.hooks.attach(Everything(log))
    loop.run_epochs("abc", 2)
    assert (loop.step, loop.epoch) == (steps, epochs)
    assert log[-1] == "close" or event == "close"
    assert "end" in log
    assert "the others run" in log


def test_a_stopped_loop_can_run_again():
    loop = loop_of([])
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 2 else None)
    loop.run_epochs("abc", 5)
    assert (loop.step, loop.epoch) == (2, 1)
    loop.run_epochs("abc", 2)
    assert (loop.step, loop.epoch) == (8, 3)


@pytest.mark.parametrize("event", EVENTS)
def test_an_error_names_the_hook_and_its_event(event):
    def explode(loop):
        raise KeyError("boom")

    loop = loop_of([])
    loop.hooks.add(event, explode, name="fireworks")
    with pytest.raises(KeyError, match="boom") as caught:
        loop.run_epochs("abc", 2)
    assert caught.value.__notes__ == [f"raised by the on_{event} hook 'fireworks'"]


def test_hooks_have_the_names_that_they_were_given_or_came_with():
    class Named:
        name = "my hook"

        def on_step(self, loop):
            raise LookupError

    class Unnamed:
        def on_step(self, loop):
            raise LookupError

    def function(loop):
        raise LookupError

    for hook, name in ((Named(), "my hook"), (Unnamed(), "Unnamed"), (function, "function")):
        loop = loop_of([])
        loop.hooks.attach(hook)
        with pytest.raises(LookupError) as caught:
            loop.run_epochs("a", 1)
        assert caught.value.__notes__ == [f"raised by the on_step hook {name!r}"]


def test_an_error_keeps_the_other_hooks_of_its_event_from_running():
    log = []
    loop = loop_of([])
    loop.on_step("fails", lambda loop: 1 / 0)
    loop.on_step("never", lambda loop: log.append("never"))
    with pytest.raises(ZeroDivisionError):
        loop.run_epochs("abc", 2)
    assert log == []
    assert (loop.step, loop.epoch, loop.history) == (1, 0, [])


@pytest.mark.parametrize("event", ["start", "step", "epoch", "end", "batch", "data", "interrupt"])
def test_close_always_runs(event):
    log = []

    def fail(_):
        raise KeyboardInterrupt if event == "interrupt" else RuntimeError

    def data():
        yield "a"
        raise RuntimeError

    loop = Loop(fail if event in ("batch", "interrupt") else lambda batch: StepInfo(1.0))
    if event in EVENTS:
        loop.hooks.add(event, fail)
    loop.hooks.attach(Everything(log))
    with pytest.raises(KeyboardInterrupt if event == "interrupt" else RuntimeError):
        loop.run_epochs(data() if event == "data" else "ab", 1)
    assert log[-1] == "close"
    assert log.count("close") == 1
    assert "end" not in log or event == "end"


def test_every_close_hook_runs_though_one_fails():
    log = []
    loop = loop_of([])
    loop.hooks.add("close", lambda loop: 1 / 0, name="fails", priority=-1)
    loop.hooks.add("close", lambda loop: [][1], name="fails too", priority=-1)
    loop.hooks.attach(Everything(log))
    with pytest.raises(ZeroDivisionError) as caught:
        loop.run_epochs("a", 1)
    assert caught.value.__notes__ == ["raised by the on_close hook 'fails'"]
    assert log[-1] == "close"


def test_an_error_while_closing_does_not_hide_the_first():
    loop = Loop(lambda batch: 1 / 0)
    loop.hooks.add("close", lambda loop: [][1], name="fails too")
    with pytest.raises(IndexError) as caught:
        loop.run_epochs("a", 1)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


class Ranks:
    """Rank 0 of two, on which nobody else is."""

    rank, size, is_single, stopped, error_is_shared = 0, 2, False, False, False
    error = None

    def guard(self, f, *args, collective=False):
        try:
            return f(*args)
        except Exception as error:
            self.error = self.error or error
            return None


class Saver:
    """A collective action, told by its class, that notes whether an error is pending as it begins."""

    collective = True

    def __init__(self, done):
        self.done = done

    def save(self, loop):
        self.done.append(("save", loop.ranks.error is not None))


def test_a_rank_that_failed_takes_part_in_collective_actions_and_in_no_others():
    done, hooks, loop = [], Hooks(), SimpleNamespace(ranks=Ranks(), step=1, start_step=0, stop=None)
    hooks.add("step", Saver(done).save, priority=-5)
    hooks.add("step", lambda loop: 1 / 0, name="fails")
    hooks.add("step", lambda loop: done.append("alone"))
    hooks.add("step", Saver(done).save, trigger=EveryNSteps(1))
    hooks.add("close", lambda loop: done.append("closed"))
    hooks.run("step", loop)
    assert done == [("save", False), ("save", True)]
    assert loop.ranks.error.__notes__ == ["raised by the on_step hook 'fails'"]
    hooks.run("close", loop)
    assert done[2:] == ["closed"]


def test_an_action_with_something_to_open_and_close_does_so_around_each_run():
    log = []

    class Opens(Everything):
        def __call__(self, loop):
            self.log.append(loop.step)

    loop = loop_of([])
    loop.on_step("opens", Opens(log), trigger=EveryNSteps(2))
    loop.run_epochs("abc", 1)
    assert log == ["start", 2, "close"]


class OnEpochOfNothing:
    def on_epoch(self):
        pass


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (lambda: None, "<lambda>"),
        (lambda loop, other: None, "<lambda>"),
        (OnEpochOfNothing(), "OnEpochOfNothing"),
    ],
)
def test_a_callback_that_does_not_take_the_loop_is_refused(hook, name):
    with pytest.raises(TypeError) as caught:
        Hooks().attach(hook)
    assert f"the callback {name!r}, " in str(caught.value)
    assert "must be a function of the loop (" in str(caught.value)


@pytest.mark.parametrize(
    ("add", "told"),
    [
        # the order of gomlx
        (lambda loop: loop.on_step("n", 0, lambda loop, metrics: None), "'n', 0, "),
        (
            lambda loop: loop.on_step("n", lambda a, b: None),
            "function of the loop .missing a required argument: 'b'",
        ),
        (lambda loop: loop.on_start("n", lambda: None), "function of the loop "),
        (lambda loop: loop.on_epoch("n", lambda: None), "function of the loop "),
        (lambda loop: loop.on_end("n", None), "'n', None, "),
        (
            lambda loop: EveryNStepsOfGomlx(loop, 1, "n", 0, lambda loop: None),
            "function of the loop and the metrics",
        ),
        (
            lambda loop: loop.hooks.attach(
                CronTab().schedule(lambda state, *, step_info: None, name="n", step_interval=1)
            ),
            "function of the loop .*step_info=loop.step_info",
        ),
    ],
)
def test_hooks_with_other_arguments_are_refused_when_they_are_attached(add, told):
    loop = loop_of([])
    with pytest.raises(TypeError, match=told):
        add(loop)
    loop.run_epochs("abc", 1)


def test_a_callback_may_take_more_arguments_that_have_defaults():
    for hook in (lambda loop, n=3: None, lambda *args: None, print, cb(lambda: None)):
        Hooks().attach(hook)
