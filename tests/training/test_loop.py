"""The loop's own bookkeeping: counters, and means over each epoch."""

import numpy as np
import pytest

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


def test_an_epochs_loss_weighs_steps_by_their_data_and_the_window_loss_does_not():
    losses, counts = np.random.default_rng(0).uniform(size=5), np.array([7, 1, 30, 2, 5])
    loop = Loop(identity)
    loop.run_epochs([(float(v), int(n)) for v, n in zip(losses, counts, strict=True)], 2)
    for i, record in enumerate(loop.history):
        assert record["epoch"] == i + 1
        assert record["loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-14)
        assert record["window_loss"] == pytest.approx(losses.mean(), rel=1e-14)
        assert record["seconds"] >= 0
    assert abs(np.average(losses, weights=counts) - losses.mean()) > 1e-3


def test_steps_without_a_loss_count_in_no_mean():
    loop = Loop(identity)
    loop.run_epochs([(None, 100), (2.0, 3), (None, 0), (4.0, 1)], 1)
    assert loop.step == 4
    assert loop.record["loss"] == 10 / 4
    assert loop.record["window_loss"] == 3
    loop.run_epochs([(None, 0)], 1)
    assert loop.record["loss"] is loop.record["window_loss"] is None
    loop.run_epochs([], 1)
    assert loop.record["loss"] is loop.record["window_loss"] is None
    assert (loop.step, loop.epoch) == (5, 3)


def test_hooks_see_the_counters_as_they_stand():
    seen = []
    loop = Loop(identity)
    loop.on_start(
        "start", lambda loop: seen.append(("start", loop.step, loop.epoch, loop.n_epochs, loop.steps_per_epoch))
    )
    loop.on_step("step", lambda loop: seen.append((loop.step, loop.epoch, loop.info.loss)))
    loop.on_epoch("epoch", lambda loop: seen.append((loop.step, loop.epoch, loop.record["epoch"], len(loop.history))))
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
        *[("start", 2), ("end", 2), ("close", 2)],
        *[("start", 2), ("step", 3), ("step", 4), ("step", 5), ("end", 5), ("close", 5)],
    ]
    assert (loop.epoch, loop.history) == (0, [])


def test_steps_end_with_the_batches_or_when_stopped():
    loop = Loop(lambda batch: StepInfo(1.0))
    loop.run_steps("abc", 10)
    assert loop.step == 3
    loop.on_step("stop", lambda loop: loop.stop() if loop.step == 5 else None)
    loop.run_steps("abc", 10)
    assert loop.step == 5
