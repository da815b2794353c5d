"""What streams keep of the errors of each series from step to step."""

from __future__ import annotations

import numpy as np

from fluxutils_py.errors import ShapeError


class RunningValues:
    """Numbers of each output and series that steps change, and those after the calibration.

    Parameters
    ----------
    values : ndarray of shape (R, G, N)
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.initial = values.copy()
        self._refresh()

    @property
    def state(self) -> np.ndarray:
        """Copy of both, one behind the other, (2 * R, G, N)."""
        return np.concatenate([self.values, self.initial])

    def load(self, state: np.ndarray) -> None:
        """Continue from a state."""
        expected = (2 * len(self.values), *self.values.shape[1:])
        if state.shape != expected:
            raise ShapeError(f"state: a tensor has shape {state.shape}; expected {expected}")
        self.values, self.initial = np.split(state.copy(), 2)
        self._refresh()

    def reset(self, series: np.ndarray) -> None:
        """Start some series, given as indices, from the calibration."""
        self.values[:, :, series] = self.initial[:, :, series]
        self._refresh()

    def _refresh(self) -> None:
        """Compute anew what depends on the values."""


def bounded(values: np.ndarray, limit: np.ndarray | float) -> np.ndarray:
    """Return values cut at limits of both signs: for few numbers, faster than ``np.clip``."""
    return np.minimum(np.maximum(values, -limit), limit)
