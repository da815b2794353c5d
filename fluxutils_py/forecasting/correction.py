"""Correct the outputs of networks: weights between network and baselines by step of the horizon,
and quantiles that hold what they say. ``calibration.py`` learns both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.forecasting.features import BASELINE_NAMES, Array

SOURCES = ("network", "seasonal naive", *BASELINE_NAMES)


@dataclass(frozen=True)
class Correction:
    """What is done to the outputs of networks before they are converted to values.

    All in units of the series' scale, so that bands are as wide as each series varies. It depends
    on a series' past as the outputs do, and on nothing else.

    Attributes
    ----------
    weights : ndarray of shape (sources, h)
        Of each of SOURCES in the point forecast; they add up to 1.
    spread : ndarray of shape (h,)
        Factor of the distances between quantiles and point forecast.
    offsets : ndarray of shape (Q, h)
        Added to the quantiles then.
    trust : ndarray of shape (h,)
        Share of what the held-out end taught in all of them, from 0 to 1; the rest is the network
        as it is.
    """

    weights: np.ndarray
    spread: np.ndarray
    offsets: np.ndarray
    trust: np.ndarray

    def apply(self, out: Array, baselines: Array, xp: Any) -> Array:
        """Return corrected outputs (..., 1 + Q, h), for baselines (..., B, h)."""
        as_array = np.asarray if xp is np else xp.as_tensor
        network = out[..., :1, :]
        others = as_array(self.weights[2:]) * baselines
        point = as_array(self.weights[:1]) * network + others.sum(-2)[..., None, :]
        distances = as_array(self.spread) * (out[..., 1:, :] - network)
        levels = point + distances + as_array(self.offsets)
        rows = [point]
        for i in range(len(self.offsets)):
            row = levels[..., i : i + 1, :]
            # never below the quantile before
            rows.append(row if i == 0 else xp.maximum(rows[-1], row))
        return xp.concatenate(rows, -2)
