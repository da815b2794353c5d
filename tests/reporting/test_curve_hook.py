"""The numbers that every writer of curves gets."""

import pickle

import pytest

from fluxutils_py.reporting.curve_hook import CurveHook
from fluxutils_py.training import Loop, StepInfo


class Hook(CurveHook):
    def __init__(self, trigger):
        super().__init__(trigger)
        self.found = []

    def on_start(self, loop):
        self.begin(self.keep)

    def keep(self, numbers, step):
        for tag, value in numbers.items():
            if "per_sec" not in tag and "seconds" not in tag:
                self.found.append((tag, value, step))


class Notes:
    def on_epoch(self, loop):
        loop.record.update(validation_loss=7.0, note="no number")


def test_steps_and_epochs_are_written_under_their_tags():
    hook = Hook(2)
    loop = Loop(lambda batch: StepInfo(float(batch)))
    loop.hooks.attach(hook)
    loop.hooks.attach(Notes())
    loop.run_epochs([4, 3, 2], epochs=1)
    assert ("train/batch_loss", 3.0, 2) in hook.found
    assert ("train/loss", 3.0, 3) in hook.found
    assert ("validation/loss", 7.0, 3) in hook.found
    assert [tag for tag, *_ in hook.found if tag == "train/batch_loss"] == ["train/batch_loss"]
    assert not [tag for tag, *_ in hook.found if "note" in tag or "epoch" in tag]
    assert pickle.loads(pickle.dumps(CurveHook(3))).every == 3


def test_nothing_is_written_after_the_run():
    hook = Hook(1)
    loop = Loop(lambda batch: StepInfo(float(batch)))
    loop.hooks.attach(hook)
    loop.run_epochs([4, 3], epochs=1)
    n_written = len(hook.found)
    assert n_written
    hook.on_step(loop)
    hook.on_epoch(loop)
    assert len(hook.found) == n_written


@pytest.mark.parametrize("trigger", [0, -1, True])
def test_wrong_triggers_are_refused(trigger):
    with pytest.raises(ValueError, match=f"trigger.*{trigger}"):
        CurveHook(trigger)
