"""Where an epoch is, and the means of its record, by NumPy."""

import numpy as np
import pytest

from fluxutils_py.training.loop import EpochProgress
from fluxutils_py.training.step_info import StepInfo

LOSSES, LIVE = np.array([3.0, 1.0, 4.0, 1.5]), np.array([2, 7, 1, 3])


def walk(progress, batches, n):
    source = progress.open(batches)
    for _ in range(n):
        i = next(source)
        progress.add(StepInfo(float(LOSSES[i]), int(LIVE[i])))


def test_means_are_over_data_and_over_steps_with_a_loss():
    progress = EpochProgress()
    walk(progress, [0, 1, 2, 3], 4)
    progress.add(StepInfo(None, 99))
    record = progress.record()
    assert record["loss"] == pytest.approx(np.average(LOSSES, weights=LIVE), rel=1e-15)
    assert record["mean_batch_loss"] == pytest.approx(LOSSES.mean(), rel=1e-15)
    assert progress.step == 5


def test_another_progress_goes_on_from_the_state_of_one():
    first, second, batches = EpochProgress(), EpochProgress(), [0, 1, 2, 3]
    walk(first, batches, 3)
    second.load_state_dict(first.state_dict())
    walk(second, batches, 1)
    assert second.record()["loss"] == pytest.approx(np.average(LOSSES, weights=LIVE), rel=1e-15)
    assert second.is_over(batches)
    assert not second.is_over([0])
    second.close()
    assert (second.step, second.record()["loss"]) == (0, None)
