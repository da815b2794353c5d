"""Splitting off validation data."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from fluxutils_py.data.segments import Segments
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.estimator.targets import Targets


def intersect(segments: Segments, bounds: Segments) -> Segments:
    """The part of each segment that lies within the bounds of its series; some may be of length 0.

    ``bounds`` has one segment for each series, in order.
    """
    start = np.maximum(segments.start, bounds.start[segments.series])
    stop = np.minimum(segments.start + segments.length, (bounds.start + bounds.length)[segments.series])
    return Segments(segments.series, start, np.maximum(stop - start, 0))


def hold_out(inputs: Inputs, targets: Targets, fraction: Any, seed: int, stratify: bool) -> tuple[Segments, Segments]:
    """Split the data: series at random, or, of one series and of ``timesteps``, the last steps.

    Parameters
    ----------
    inputs : Inputs
    targets : Targets
    fraction : float
        Share of the series, or of the steps, to hold out; the number is rounded up.
    seed : int
    stratify : bool
        Whether targets are labels. Labels of whole series are then divided in proportion, where that is possible.

    Returns
    -------
    training, validation : Segments
        One segment for each series, of length 0 if it has no part in it.

    Raises
    ------
    ValueError
        If the fraction is not between 0 and 1, or leaves nothing to train on.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 < float(fraction) < 1:
        raise ValueError(f"validation_fraction must be a number between 0 and 1, got {fraction!r}")
    whole = inputs.whole()
    in_time = inputs.form == "timesteps" or inputs.N == 1
    n = whole.max_length if in_time else inputs.N
    n_held = math.ceil(n * float(fraction))
    if n_held >= n:
        raise ValueError(
            f"early_stopping holds out {n_held} of n_samples={n}{' time steps' if in_time else ''}, which leaves "
            "nothing to train on; give more data, or early_stopping=False"
        )
    if not in_time:
        labels = _labels(inputs, targets) if stratify else None
        strata = labels if labels is not None and _enough(labels, n_held) else None
        from sklearn.model_selection import train_test_split  # 40 ms that importing the package does without

        _, out = train_test_split(np.arange(n), test_size=n_held, random_state=seed, stratify=strata)
        is_out = np.isin(whole.series, out)
        n_training, n_validation = np.where(is_out, 0, whole.length), np.where(is_out, whole.length, 0)
        return Segments(whole.series, whole.start, n_training), Segments(whole.series, whole.start, n_validation)
    if targets.per_series:
        raise ValueError(
            "early_stopping of one series holds out its last steps, but y has one target, at the last step; "
            "give more series, or early_stopping=False"
        )
    # the step of the cut counts from each series' own start
    n_before = np.minimum(n - n_held, whole.length)
    return (
        Segments(whole.series, whole.start, n_before),
        Segments(whole.series, whole.start + n_before, whole.length - n_before),
    )


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
