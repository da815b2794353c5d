"""Divide a batch over ranks, and check that all ranks have the same one."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.errors import ShapeError
from fluxutils_py.tree import named_leaves, tree_map

SAMPLE = 4096  # values of an array that its digest reads


def shard(batch: Any, rank: int, size: int, axis: int = 0) -> Any:
    """Return a rank's share of the observations of a batch; None if it is empty.

    Parameters
    ----------
    batch : tree of arrays and tensors
        All with the same length along the axis. Every rank gets the whole of arrays of length 1, or
        without this axis.
    rank, size : int
    axis : int

    Returns
    -------
    tree
        Views of consecutive observations.

    Raises
    ------
    ShapeError
        If arrays differ in their number of observations, or no array has any.
    """
    n = n_observations(batch, axis)
    if not n:
        raise ShapeError(
            f"the batch, a {type(batch).__name__}, holds no arrays that {size} ranks could divide: "
            "give each rank separate batches (batches='per_rank'), or train each process by "
            "itself (comm=None)"
        )
    share = array_split_slice(n, size, rank)
    if share.start == share.stop:
        return None
    index = (slice(None),) * axis + (share,)

    def part(leaf: Any) -> Any:
        divided = _is_array(leaf) and leaf.ndim > axis and leaf.shape[axis] == n
        return leaf[index] if divided else leaf

    return tree_map(part, batch)


def n_observations(batch: object, axis: int = 0) -> int:
    """Return the number of observations of a batch's arrays along an axis; 0 if there are no
    arrays.

    Raises
    ------
    ShapeError
        If the numbers differ; arrays of one observation match any number.
    """
    lengths = {
        leaf.shape[axis] for _, leaf in named_leaves(batch) if _is_array(leaf) and leaf.ndim > axis
    }
    n = max(lengths, default=0)
    if lengths - {1, n}:  # what has one observation belongs to all, such as a scalar weight
        raise ShapeError(
            f"the arrays of the batch have {', '.join(map(str, sorted(lengths)))} observations "
            f"along axis {axis}: give them equally many, or set axis"
        )
    return n


def digest(batch: object) -> int:
    """Return a 24-bit hash of a batch; of a large array it reads only some evenly spaced values.

    >>> (
    ...     digest((np.ones(3), "a")) == digest((np.ones(3), "a")),
    ...     digest(np.ones(3)) == digest(np.zeros(3)),
    ... )
    (True, False)
    """
    crc = 1
    for path, leaf in named_leaves(batch):
        if not _is_array(leaf):
            crc = zlib.crc32(f"{path} {type(leaf).__name__}".encode(), crc)
            continue
        crc = zlib.crc32(f"{path} {tuple(leaf.shape)} {leaf.dtype}".encode(), crc)
        # Equal strides along all axes, for about SAMPLE values spread over the whole array.
        stride = math.ceil((max(1, math.prod(leaf.shape)) / SAMPLE) ** (1 / max(1, leaf.ndim)))
        some = leaf[(slice(None, None, stride),) * leaf.ndim]
        if isinstance(some, Tensor):
            # As bytes: NumPy has no bfloat16.
            some = some.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        crc = zlib.crc32(np.ascontiguousarray(some).tobytes(), crc)
    return crc & 0xFFFFFF


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray | Tensor)
