"""Where an epoch is, and the means of its record."""

import pytest

from fluxutils_py.training.epoch_progress import EpochProgress
from fluxutils_py.training.step_info import StepInfo


def test_the_record_has_both_means():
    progress = EpochProgress()
    for loss, n in [(1.0, 1), (4.0, 3), (None, 0)]:
        progress.add(StepInfo(loss, n))
    record = progress.record()
    assert record["loss"] == pytest.approx((1 + 12) / 4)  # over live steps
    assert record["mean_batch_loss"] == pytest.approx(2.5)  # over batches
    assert progress.step == 3


def test_an_epoch_without_losses_has_no_mean():
    record = EpochProgress().record()
    assert (record["loss"], record["mean_batch_loss"]) == (None, None)


def test_another_progress_continues_in_the_middle():
    batches, progress, later = ["a", "b", "c"], EpochProgress(), EpochProgress()
    assert next(progress.open(batches)) == "a"
    progress.add(StepInfo(2.0, 5))
    later.load_state_dict(progress.state_dict())
    assert list(later.open(batches)) == ["b", "c"]
    assert later.record()["loss"] == 2.0


def test_other_batches_begin_another_epoch():
    progress = EpochProgress()
    next(progress.open(["a", "b"]))
    progress.add(StepInfo(2.0))
    assert list(progress.open(["c", "d"])) == ["c", "d"]
    assert progress.step == 0
