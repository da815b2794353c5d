"""Find where the targets of each series end: what follows is nothing to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.segments import Segments
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.inputs.targets import SeriesReader, Targets


def steps_to_learn_from(
    inputs: Inputs, targets: Targets, weight: SampleWeight | None, reader: SeriesReader
) -> Segments | None:
    """Return all series, each up to its last step with a target and a weight; None if all end so.

    A series without such a step keeps its first step. Missing labels are marked.
    """
    own = inputs.local_series()
    lengths = _lengths(own, targets.series, weight)
    whole = inputs.all_series()
    if inputs.shards is not None:
        lengths = inputs.shards.in_common_order(reader.gather(lengths))
    if (lengths == whole.length).all():
        return None
    return replace(whole, length=lengths)


def _lengths(rows: Segments, ys: Sequence[SeriesArray], weight: SampleWeight | None) -> np.ndarray:
    """Return the steps of each row, one per series, up to the last that counts."""
    if _all_end_with_target(rows[rows.length > 0], ys, weight):
        return rows.length
    n_series = len(rows)
    stops = rows.start + rows.length
    last = np.zeros(n_series, int)
    for series, steps in block_slices(n_series, ys[0].T):
        numbers = np.arange(steps.start, steps.stop)
        counts = _counting(series, steps, ys, weight)
        counts &= (numbers >= rows.start[series, None]) & (numbers < stops[series, None])
        of_block = np.where(counts, numbers + 1, 0).max(1)
        last[series] = np.maximum(last[series], of_block)
    return np.clip(last - rows.start, np.minimum(rows.length, 1), rows.length)


def _all_end_with_target(
    rows: Segments, ys: Sequence[SeriesArray], weight: SampleWeight | None
) -> bool:
    """Return whether the last step of each row counts, as in most data, reading only these."""
    ends = rows.last_steps()
    if not len(ends):
        return True
    missing = [y.missing_mask(y.read(ends, 0, 1)) for y in ys]
    if not any(mask is None for mask in missing):
        of_step = [mask.all(2) for mask in missing if mask is not None]
        if np.logical_and.reduce(of_step).any():
            return False
    return weight is None or bool((weight.read(ends, 0, 1) > 0).all())


def _counting(
    series: slice, steps: slice, ys: Sequence[SeriesArray], weight: SampleWeight | None
) -> np.ndarray:
    """Return at which steps (B, S) any target is there, and a weight."""
    counts = np.zeros((series.stop - series.start, steps.stop - steps.start), bool)
    for y in ys:
        missing = y.missing_mask(y.stored_block(series, steps))
        counts |= True if missing is None else ~missing.all(0)
    return counts if weight is None else counts & (weight.block(series, steps) > 0)
