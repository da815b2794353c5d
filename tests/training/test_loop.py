"""The loop's own bookkeeping: counters, and means over each epoch."""

import math
import time

import numpy as np
import pytest
import torch

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.training import Loop, StepInfo


def identity(batch):
    return StepInfo(*batch)


class Batches:
    """Sized, and counting how often it is walked through."""

    def __init__(self, *batches):
        self.batches, self.passes = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


def test_every_batch_of_every_epoch_is_stepped_through_in_order():
    log = []

    def step(batch):
        log.append(batch)
        return StepInfo(0.0)

    loop, batches = Loop(step), Batches("a", "b", "c")
    loop.run_epochs(batches, 3)
    assert log == list("abc" * 3)
    assert batches.passes == 3
    assert (loop.step, loop.epoch) == (9, 3)
    assert (loop.n_epochs, loop.steps_per_epoch) == (3, 3)
    loop.run_to_step(batches, 11)  # a run without epochs
    assert (loop.n_epochs, loop.steps_per_epoch) == (None, None)


def test_an_epochs_loss_weighs_steps_by_their_data_and_the_mean_batch_loss_does_not():
    losses, counts = np.random.default_rng(0).uniform(size=5), np.array([7, 1, 30, 2, 5])
    loop = Loop(identity)
    loop.run_epochs([(float(v), int(n)) for v, n in zip(losses, counts, strict=True)], 2)
    for i, record in enumerate(loop.history):
        assert record["epoch"] == i + 1
        assert record["loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-14)
        assert record["mean_batch_loss"] == pytest.approx(losses.mean(), rel=1e-14)
        assert record["seconds"] >= 0
    assert abs(np.average(losses, weights=counts) - losses.mean()) > 1e-3


def test_steps_without_a_loss_count_in_no_mean():
    loop = Loop(identity)
    loop.run_epochs([(None, 100), (2.0, 3), (None, 0), (4.0, 1)], 1)
    assert loop.step == 4
    assert loop.record["loss"] == 10 / 4
    assert loop.record["mean_batch_loss"] == 3
    loop.run_epochs([(None, 0)], 1)
    assert loop.record["loss"] is loop.record["mean_batch_loss"] is None
    loop.run_epochs([], 1)
    assert loop.record["loss"] is loop.record["mean_batch_loss"] is None
    assert (loop.step, loop.epoch) == (5, 3)


def test_hooks_see_the_counters_as_they_stand():
    seen = []
    loop = Loop(identity)
    loop.on_start(
        "start",
        lambda loop: seen.append(
            ("start", loop.step, loop.epoch, loop.n_epochs, loop.steps_per_epoch)
        ),
    )
    loop.on_step("step", lambda loop: seen.append((loop.step, loop.epoch, loop.batch_loss)))
    loop.on_epoch(
        "epoch",
        lambda loop: seen.append((loop.step, loop.epoch, loop.record["epoch"], len(loop.history))),
    )
    loop.on_end("end", lambda loop: seen.append(("end", loop.step, loop.epoch, len(loop.history))))
    loop.run_epochs([(1.0, 1), (2.0, 1)], 2)
    assert seen == [
        ("start", 0, 0, 2, 2),
        *((1, 0, 1.0), (2, 0, 2.0), (2, 0, 1, 0)),
        *((3, 1, 1.0), (4, 1, 2.0), (4, 1, 2, 1)),
        ("end", 4, 2, 2),
    ]


def test_what_hooks_add_to_a_record_is_kept():
    loop = Loop(identity)
    loop.on_epoch("judge", lambda loop: loop.record.update(judged=loop.record["loss"] * 10))
    loop.run_epochs([(1.0, 1)], 2)
    assert [r["judged"] for r in loop.history] == [10, 10]
    assert loop.history[0] is not loop.history[1]


def test_counters_go_on_over_runs():
    loop = Loop(identity)
    loop.run_epochs([(1.0, 1), (1.0, 1)], 2)
    loop.run_epochs([(3.0, 1)], 1)
    assert (loop.step, loop.epoch, loop.n_epochs, loop.steps_per_epoch) == (5, 3, 1, 1)
    assert [r["epoch"] for r in loop.history] == [1, 2, 3]
    assert loop.history[-1]["loss"] == 3


def test_batches_of_unknown_number_are_walked_through():
    loop = Loop(identity)
    loop.run_epochs(iter([(1.0, 1), (3.0, 3)]), 1)
    assert loop.steps_per_epoch is None
    assert loop.record["loss"] == 2.5


def test_an_epoch_that_is_broken_off_is_recorded_over_what_was_done():
    loop, batches = Loop(identity), Batches((1.0, 1), (3.0, 3), (100.0, 1))
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 5 else None)
    ended = []
    loop.on_end("end", lambda loop: ended.append(loop.step))
    loop.run_epochs(batches, 9)
    assert (loop.step, loop.epoch, batches.passes) == (5, 2, 2)
    assert [r["loss"] for r in loop.history] == [(1 + 9 + 100) / 5, 2.5]
    assert ended == [5]


# -- runs of so many steps -----------------------------------------------------------------------------


def logging(log):
    def step(batch):
        log.append(batch)
        return StepInfo(1.0)

    return Loop(step)


def test_runs_of_steps_go_on_where_the_last_one_ended():
    log, batches = [], Batches(*"abcdefgh")
    loop = logging(log)
    loop.run_steps(batches, 3)
    assert (loop.step, loop.start_step, loop.end_step, loop.epoch, loop.epoch_step) == (
        3,
        0,
        3,
        0,
        3,
    )
    loop.run_steps(batches, 2)
    assert (loop.step, loop.start_step, loop.end_step) == (5, 3, 5)
    loop.run_to_step(batches, 7)
    assert (loop.step, loop.start_step, loop.end_step) == (7, 5, 7)
    loop.run_to_step(batches, 4)  # it is past that
    assert log == list("abcdefg")
    assert batches.passes == 1
    assert (loop.epoch, loop.history) == (0, [])


def test_a_run_of_no_steps_takes_nothing():
    log, source = [], iter("ab")
    loop = logging(log)
    loop.run_steps(source, 0)
    loop.run_steps(source, 1)
    loop.run_steps(source, 0)
    loop.run_steps(source, 1)
    assert log == ["a", "b"]


def test_an_epoch_that_steps_began_is_finished_by_a_run_of_epochs():
    log, batches = [], Batches(*"abcde")
    loop = logging(log)
    loop.run_steps(batches, 2)
    loop.run_epochs(batches, 2)
    assert log == list("abcde" * 2)
    assert (loop.step, loop.epoch, loop.epoch_step, loop.end_step) == (10, 2, 0, 10)
    assert batches.passes == 2


def test_other_batches_begin_with_their_first():
    log, batches = [], Batches(*"abcde")
    loop = logging(log)
    loop.run_steps(batches, 3)
    loop.run_steps(Batches(*"uvw"), 1)
    loop.run_steps(batches, 2)
    assert log == list("abcuab")


def test_batches_that_end_before_the_steps_are_an_error():
    log, batches = [], Batches(*"abc")
    loop = logging(log)
    loop.run_steps(batches, 2)
    message = "the batches ended after 1 of 4 steps; give more of them, or run_epochs to go through them again"
    with pytest.raises(DataError) as caught:
        loop.run_steps(batches, 4)
    assert str(caught.value) == message
    loop.run_steps(batches, 1)
    assert log == list("abca")


def test_a_run_of_steps_can_be_stopped_and_go_on():
    log, batches = [], Batches(*"abcdef")
    loop = logging(log)
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 2 else None)
    loop.run_steps(batches, 5)
    assert log == ["a", "b"]
    loop.run_steps(batches, 3)
    assert log == list("abcde")


def test_a_run_of_no_steps_calls_no_hooks():
    log, loop = [], logging([])
    for event in ("start", "end", "close"):
        loop.hooks.add(event, lambda loop: log.append(loop.step))
    loop.run_steps(iter("ab"), 0)
    loop.run_to_step(iter("ab"), 0)
    assert log == []


def test_after_a_restart_n_steps_are_n_more():
    log, states = [], []
    loop = logging(log)
    loop.hooks.add("step", lambda loop: states.append(loop.state_dict()))
    loop.run_steps(Batches(*"abcdefgh"), 3)
    for state in states:
        rest = logging(log := [])
        rest.load_state_dict(state)
        rest.run_steps(Batches(*"abcdefgh"), 4)
        assert log == list("abcdefgh"[state["step"] :][:4])
        assert (rest.start_step, rest.end_step) == (state["step"], state["step"] + 4)
        rest.load_state_dict(state)
        rest.run_to_step(Batches(*"abcdefgh"), 3)
        assert (rest.step, rest.start_step) == (3, 0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_restart_after_the_last_step_of_an_epoch_ends_it_first(epochs):
    """The state of a save in that step, as that of ``PeriodicCallback``, whose run ended there."""

    def run(log):
        def step(batch):
            log.append(batch)
            return StepInfo(float(ord(batch)))

        loop = Loop(step)
        loop.on_epoch("note", lambda loop: log.append(("end of", loop.epoch, loop.record["loss"])))
        return loop

    def losses(loop):
        return [(record["epoch"], record["loss"]) for record in loop.history]

    states, whole = [], run(log_of_whole := [])
    whole.on_step("save", lambda loop: states.append(loop.state_dict()))
    whole.run_epochs(Batches(*"abc"), 2)
    state = states[3 * epochs - 1]
    tail = log_of_whole[4 * epochs - 1 :]

    rest = run(log := [])
    rest.load_state_dict(state)
    assert (rest.epoch, rest.step) == (epochs, 3 * epochs)
    assert rest.state_dict()["epoch"] == state["epoch"]
    rest.run_epochs(Batches(*"abc"), 2)
    assert (log, rest.epoch, losses(rest)) == (tail, 2, losses(whole))

    rest = run(log := [])
    rest.load_state_dict(state)
    rest.run_steps(Batches(*"abc"), 2)
    assert log == [tail[0], "a", "b"]
    assert (rest.epoch, rest.step) == (epochs, state["step"] + 2)
    assert losses(rest) == losses(whole)[:epochs]


def test_epochs_are_counted_over_runs_and_from_the_start_of_each():
    seen, loop = [], logging([])
    loop.on_epoch("note", lambda loop: seen.append((loop.epoch, loop.epoch - loop.start_epoch)))
    loop.run_epochs("ab", 2)
    loop.run_epochs("ab", 2)
    assert seen == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_the_loop_carries_what_hooks_need():
    model = torch.nn.Linear(3, 1)
    trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.Adam)
    loop, x, seen = Loop(trainer), torch.randn(7, 3), []
    assert loop.trainer is trainer

    def look(loop):
        seen.append(
            (
                loop.step,
                loop.batch_loss,
                loop.metrics["batch_loss"],
                loop.state.step,
                loop.batches is data,
            )
        )

    data = [(x, x[:, :1])]
    loop.on_step("look", look)
    loop.run_epochs(data, 2)
    assert [s[0] for s in seen] == [s[3] for s in seen] == [1, 2]
    assert all(loss == metric and own for _, loss, metric, _, own in seen)
    assert (loop.model, loop.optimizer) == (model, trainer.optimizer)
    assert (loop.state.model, loop.state.opt) == (model, trainer.optimizer)


# -- what is known of a run ----------------------------------------------------------------------------


class Unsized:
    def __init__(self, n):
        self.n, self.resets = n, 0

    def __iter__(self):
        return iter([(1.0, 1)] * self.n)

    def reset(self):
        self.resets += 1


@pytest.mark.parametrize("batches", [[(1.0, 1)] * 7, Unsized(7)], ids=["sized", "unsized"])
def test_steps_are_counted_from_zero_while_they_are_under_way(batches):
    seen, ends = [], []
    loop = Loop(lambda batch: (seen.append(("in", loop.loop_step)), StepInfo(1.0))[1])
    loop.on_step(
        "note",
        lambda loop: (seen.append(("hook", loop.loop_step, loop.step)), ends.append(loop.end_step)),
    )
    loop.run_epochs(batches, 3)
    assert seen == [note for i in range(21) for note in (("in", i), ("hook", i, i + 1))]
    assert ends == ([21] * 21 if isinstance(batches, list) else [None] * 7 + [21] * 14)
    assert (loop.loop_step, loop.start_step, loop.end_step) == (21, 0, 21)


def test_data_are_reset_after_every_epoch():
    loop, batches, seen = Loop(identity), Unsized(2), []
    loop.on_epoch("note", lambda loop: seen.append(batches.resets))
    loop.run_epochs(batches, 3)
    assert seen == [1, 2, 3]
    loop.run_steps(batches, 2)
    assert batches.resets == 3


def test_what_can_be_gone_through_once_makes_one_epoch():
    log = []
    loop = logging(log)
    message = (
        "the batches are a generator, which can be iterated over only once, not in 2 epochs; "
        "give a list, or an object that can be iterated over again"
    )
    with pytest.raises(DataError) as caught:
        loop.run_epochs((c for c in "abc"), 2)
    assert str(caught.value) == message
    assert log == []
    loop.run_epochs((c for c in "abc"), 1)
    assert log == list("abc")


def test_a_loader_without_a_length_is_gone_through():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(5))

    log = []
    loop = logging(log)
    loop.run_epochs(torch.utils.data.DataLoader(Stream(), batch_size=None), 2)
    assert log == [0, 1, 2, 3, 4] * 2
    assert (loop.steps_per_epoch, loop.end_step) == (None, 10)


def test_step_durations_are_of_the_steps_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    def data():
        for seconds in (5, 1, 2, 4):
            tick(100)
            yield seconds

    loop = Loop(lambda seconds: (tick(seconds), StepInfo(1.0))[1])
    loop.on_step("slow", lambda loop: tick(1000))
    assert loop.median_train_step_duration() == 0.001
    loop.run_epochs(data(), 1)
    # in the order of the steps, also after the median
    assert list(loop.train_step_durations) == [
        5,
        1,
        2,
        4,
    ]
    assert loop.median_train_step_duration() == 3
    assert list(loop.train_step_durations) == [5, 1, 2, 4]
    assert loop.record["seconds"] == 4 * 1100 + 12
    loop.run_steps([7], 1)
    assert list(loop.train_step_durations) == [7]  # of this run


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run_before_any_hook(loss):
    seen, loop = [], Loop(identity)
    loop.on_step("save", lambda loop: seen.append(loop.step))
    with pytest.raises(FloatingPointError) as caught:
        loop.run_epochs([(1.0, 1), (2.0, 1), (loss, 1), (3.0, 1)], 1)
    assert str(caught.value) == f"the loss of step 3 is {loss}"
    assert seen == [1, 2]
    assert loop.step == 2


def test_a_run_after_a_failed_one_begins_the_epoch_anew():
    log = []

    def step(batch):
        log.append(batch)
        if len(log) == 3:
            raise KeyError("boom")
        return StepInfo(float(batch))

    loop, batches = Loop(step), Batches(1, 2, 4, 8)
    with pytest.raises(KeyError):
        loop.run_epochs(batches, 1)
    assert (loop.step, loop.epoch, loop.epoch_step) == (2, 0, 0)
    loop.run_epochs(batches, 1)
    assert log == [1, 2, 4, 1, 2, 4, 8]
    assert loop.history[0]["loss"] == 15 / 4


def test_a_generator_of_the_callers_stays_open():
    source, log = (c for c in "abcd"), []
    loop = logging(log)
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 2 else None)
    loop.run_epochs(source, 1)
    assert list(source) == ["c", "d"]


def test_what_reads_ahead_is_closed_when_an_epoch_is_broken_off():
    closed = []

    class Reading:
        def __iter__(self):
            try:
                yield from "abc"
            finally:
                closed.append(True)

    loop = logging([])
    loop.on_step("stop", lambda loop: loop.stop())
    batches = Reading()
    loop.run_epochs(batches, 1)
    assert closed == [True]


def test_steps_go_on_where_an_iterator_stands():
    taken, log = [], []
    loop = Loop(lambda batch: taken.append(batch) or StepInfo(1.0))
    for event in ("start", "step", "epoch", "end", "close"):
        loop.hooks.add(event, lambda loop, event=event: log.append((event, loop.step)))
    batches = iter("abcdefg")
    loop.run_steps(batches, 2)
    loop.run_steps(batches, 0)
    loop.run_steps(batches, 3)
    assert taken == list("abcde")
    assert next(batches) == "f"  # none too many was drawn
    assert loop.step == 5
    assert log == [
        *[("start", 0), ("step", 1), ("step", 2), ("end", 2), ("close", 2)],
        *[("start", 2), ("step", 3), ("step", 4), ("step", 5), ("end", 5), ("close", 5)],
    ]
    assert (loop.epoch, loop.history) == (0, [])


def test_a_run_returns_the_metrics_of_its_last_step():
    loop = Loop(lambda batch: StepInfo(float(batch), metrics={"twice": 2 * batch}))
    assert loop.run_steps([1, 2, 3, 4], 3) == {"twice": 6}
    assert loop.run_to_step([5, 6], 5) == {"twice": 12}
    assert loop.run_to_step([5, 6], 5) == {}
    assert loop.run_steps([1], 0) == {}
    assert loop.run_epochs([7], 2) == {"twice": 14}
