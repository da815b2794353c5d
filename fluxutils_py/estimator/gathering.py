"""Gather predictions, of which each rank has a part, on every rank."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch

from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.parallel import RankGroup

CHUNK = 1 << 23  # largest number of values in a message


def gather_rows(values: np.ndarray | None, ranks: RankGroup) -> np.ndarray:
    """Gather an array, of whose rows each rank has filled its part, on every rank.

    A rank without rows may pass None; it then takes shape and dtype from rank 0.
    """
    form = None if values is None else (values.shape, values.dtype)
    of_ranks = ranks.allgather(form)
    if values is None:
        # rank 0 has rows whenever any rank has: parts are dealt from the first rank on
        shape, dtype = of_ranks[0]
        values = np.zeros(shape, dtype)
    gather_parts(values, 0, ranks)
    return values


def gather_parts(target: Any, axis: int, ranks: RankGroup) -> None:
    """Fill the array on every rank from the ranks' parts along ``axis``, which must not be the last
    axis.
    """
    if ranks.is_single:
        return
    *leading, n_last = target.shape
    n_axis = target.shape[axis]
    for root in range(ranks.size):
        part = array_split_slice(n_axis, ranks.size, root)
        n_part = part.stop - part.start
        # the last axis is cut, so that a message holds at most CHUNK values
        n_values = math.prod(leading) * n_part // max(1, n_axis)
        step = max(1, CHUNK // max(1, n_values))
        for start in range(0, n_last, step):
            place = [slice(None)] * len(leading)
            place[axis] = part
            steps = slice(start, start + step)
            _copy_from(root, target, (*place, steps), ranks)


def _copy_from(root: int, target: Any, place: tuple[slice, ...], ranks: RankGroup) -> None:
    """Copy a block of the array from one rank to all others."""
    block = np.ascontiguousarray(target[place])
    is_root = ranks.rank == root
    if block.dtype.kind == "O":
        sent = block if is_root else None
        block = ranks.comm.allgather(sent)[root]
    elif block.size:
        # as bytes: torch lacks types that NumPy has, such as texts and dates
        raw = block.reshape(-1).view(np.uint8)
        ranks.comm.broadcast_(torch.from_numpy(raw), root)
    if not is_root:
        target[place] = block


def memmap_location(target: object) -> tuple[Any, ...] | None:
    """Return the path, offset, shape and strides of what an array maps; None for any other array.

    Ranks whose arrays have one location write to the same file.
    """
    if not isinstance(target, np.memmap):
        return None
    if target.filename is None or target.mode == "c":  # in memory, or a private copy
        return None
    path = os.path.realpath(target.filename)
    return path, target.offset, target.shape, target.strides
