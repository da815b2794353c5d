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
    shape, dtype = ranks.allgather(None if values is None else (values.shape, values.dtype))[0]
    values = np.zeros(shape, dtype) if values is None else values
    gather_parts(values, 0, ranks)
    return values


def gather_parts(target: Any, axis: int, ranks: RankGroup) -> None:
    """Fill the array on every rank from the ranks' parts along ``axis``, which must not be the last
    axis.
    """
    if ranks.is_single:
        return
    for root in range(ranks.size):
        part = array_split_slice(target.shape[axis], ranks.size, root)
        # the last axis is cut, so that a message holds at most CHUNK values
        n_values = math.prod(target.shape[:-1]) * (part.stop - part.start)
        step = max(1, CHUNK // max(1, n_values // max(1, target.shape[axis])))
        for start in range(0, target.shape[-1], step):
            place = [slice(None)] * len(target.shape)
            place[axis] = part
            place[-1] = slice(start, start + step)
            _copy_from(root, target, tuple(place), ranks)


def _copy_from(root: int, target: Any, place: tuple[slice, ...], ranks: RankGroup) -> None:
    """Copy a block of the array from one rank to all others."""
    block = np.ascontiguousarray(target[place])
    if block.dtype.kind == "O":
        block = ranks.comm.allgather(block if ranks.rank == root else None)[root]
    elif block.size:
        # as bytes: torch lacks types that NumPy has, such as texts and dates
        ranks.comm.broadcast_(torch.from_numpy(block.reshape(-1).view(np.uint8)), root)
    if ranks.rank != root:
        target[place] = block


def memmap_location(target: object) -> tuple[Any, ...] | None:
    """Return the file and position that an array maps; None for any other array.

    Ranks whose arrays have one location write to the same file.
    """
    if not isinstance(target, np.memmap) or target.filename is None or target.mode == "c":
        return None
    return os.path.realpath(target.filename), target.offset, target.shape, target.strides
