"""Data that are kept from training, to see when to stop."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data.segments import Segments
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.estimator.targets import Targets


@dataclass(frozen=True)
class Part:
    """Steps ``start[n]`` to ``stop[n]`` of each series ``n``; none where they are equal.

    Attributes
    ----------
    start, stop : ndarray of int, shape (N,)
    """

    start: np.ndarray
    stop: np.ndarray

    def of(self, rows: Segments) -> Segments:
        """As many rows, without the steps that are not in this part: some may be of length 0."""
        start = np.maximum(rows.start, self.start[rows.series])
        stop = np.minimum(rows.start + rows.length, self.stop[rows.series])
        return Segments(rows.series, start, np.maximum(stop - start, 0))


def hold_out(inputs: Inputs, targets: Targets, fraction: Any, seed: int, stratify: bool) -> tuple[Part, Part]:
    """What to train on, and what to hold out: series drawn by chance, or the last steps of one series or of time.

    Parameters
    ----------
    inputs, targets
        As they are for training on all.
    fraction : float
        How many of the series, or of the steps, to hold out; rounded up.
    seed : int
    stratify : bool
        Whether targets are labels. If there is one per series, each has its share in both parts, where possible.

    Raises
    ------
    ValueError
        If the fraction is none, or nothing would be left to train on.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 < float(fraction) < 1:
        raise ValueError(f"validation_fraction must be a number between 0 and 1, got {fraction!r}")
    whole = inputs.whole()
    zeros, stop = np.zeros(inputs.N, int), whole.start + whole.length
    in_time = inputs.form == "timesteps" or inputs.N == 1
    n = whole.max_length if in_time else inputs.N
    held = math.ceil(n * float(fraction))
    if held >= n:
        raise ValueError(
            f"early_stopping holds out {held} of n_samples={n}{' time steps' if in_time else ''}, which leaves "
            "nothing to train on; give more data, or early_stopping=False"
        )
    if not in_time:
        labels = _labels(inputs, targets) if stratify else None
        strata = labels if labels is not None and _enough(labels, held) else None
        from sklearn.model_selection import train_test_split  # 40 ms that importing the package does without

        _, out = train_test_split(np.arange(n), test_size=held, random_state=seed, stratify=strata)
        is_out = np.isin(np.arange(n), out)
        return Part(zeros, np.where(is_out, 0, stop)), Part(zeros, np.where(is_out, stop, 0))
    if targets.per_series:
        raise ValueError(
            "early_stopping of one series holds out its last steps, but y has one target, at the last step; "
            "give more series, or early_stopping=False"
        )
    cut = whole.start + n - held
    return Part(zeros, cut), Part(cut, stop)


def _labels(inputs: Inputs, targets: Targets) -> np.ndarray | None:
    """Of each series, if it has one."""
    array = targets.series[0].array
    if targets.per_series:
        return array.values[:, 0]
    return np.asarray(array[0, :, 0]) if inputs.T == 1 else None


def _enough(labels: np.ndarray, held: int) -> bool:
    """Whether each label can be in both parts."""
    counts = np.unique(labels, return_counts=True)[1]
    return bool(counts.min() > 1) and len(counts) <= min(held, len(labels) - held)
