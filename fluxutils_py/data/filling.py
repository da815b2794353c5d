"""Fill in missing values with the last one before them."""

from __future__ import annotations

import numpy as np


def last_positions(present: np.ndarray) -> np.ndarray:
    """Return, for each place along the last axis, the last one up to it that is present; -1 where
    there is none.
    """
    places = np.where(present, np.arange(present.shape[-1]), -1)
    return np.maximum.accumulate(places, axis=-1)


def forward_fill(
    block: np.ndarray,
    state: np.ndarray,
    start: np.ndarray,
) -> np.ndarray:
    """Fill in the missing values of a block (F, N, S) in place; return its last values (F, N), or
    NaN.

    Parameters
    ----------
    block : ndarray of shape (F, N, S)
    state : ndarray of shape (F, N)
        The last values before the block; NaN where there is none.
    start : ndarray of shape (F,)
        Value to use where there is none before.
    """
    missing = np.isnan(block)
    if not missing.any():
        return block[:, :, -1].copy()
    at = last_positions(~missing)
    filled = np.take_along_axis(block, np.maximum(at, 0), 2)
    filled = np.where(at < 0, state[:, :, None], filled)
    # without the start, which is no value of the series: it is not to be carried on
    first = start[:, None, None].astype(block.dtype)
    complete = np.where(np.isnan(filled), first, filled)
    block[missing] = complete[missing]
    return filled[:, :, -1]


def last_values(block: np.ndarray) -> np.ndarray:
    """Return the last values (F, N) of a block (F, N, S), NaN where there is none."""
    backwards = block[:, :, ::-1]
    at = (~np.isnan(backwards)).argmax(2)  # 0 where there is none: the last value, which is NaN
    return np.take_along_axis(backwards, at[:, :, None], 2)[:, :, 0]
