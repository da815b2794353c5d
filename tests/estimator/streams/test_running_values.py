"""What streams keep from step to step: states, resets, and cuts."""

import numpy as np
import pytest

from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.streams.running_values import RunningValues, bounded


class Doubled(RunningValues):
    def _refresh(self):
        self.twice = 2 * self.values


def test_a_state_holds_the_values_and_those_at_the_start():
    kept = Doubled(np.arange(12.0).reshape(2, 2, 3))
    kept.values += 1
    other = Doubled(np.zeros((2, 2, 3)))
    other.load(kept.state)
    np.testing.assert_array_equal(other.twice, 2 * kept.values)
    other.reset(np.array([0, 2]))
    np.testing.assert_array_equal(other.values[:, :, 1], kept.values[:, :, 1])
    np.testing.assert_array_equal(other.values[:, :, ::2], kept.initial[:, :, ::2])
    np.testing.assert_array_equal(other.twice, 2 * other.values)
    assert not np.shares_memory(other.values, kept.values)


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"\(4, 2, 1\); expected \(4, 2, 3\)"):
        RunningValues(np.zeros((2, 2, 3))).load(np.zeros((4, 2, 1)))


def test_bounded_cuts_at_both_signs():
    values = np.array([-3.0, 0.5, 2.0, np.nan])
    np.testing.assert_array_equal(bounded(values, 1.5), np.clip(values, -1.5, 1.5))
