"""Memory for the values that a kernel saves for its backward pass, used again by the next window."""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

SMALLEST, LARGEST = 1 << 20, 32 << 20  # bytes of a block; malloc keeps smaller ones well, and returns larger ones
MOST_SPARE = 8  # blocks that wait for use

# A deque, whose methods are atomic: a garbage collection may return a block while another is taken.
_spare: deque[mmap.mmap] = deque(maxlen=MOST_SPARE)
_private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows has none


def empty_saved(n: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor of n values; once nothing refers to it, its memory serves a later one.

    These are the largest tensors of a training step. From malloc they come and go between many smaller ones, and the
    gaps that they leave let a process grow to twice what it uses.
    """
    size = n * dtype.itemsize
    if not SMALLEST <= size <= LARGEST:
        return torch.empty(n, dtype=dtype)
    block = _take_spare(size) or mmap.mmap(-1, size, **_private)
    values = np.frombuffer(block, np.uint8, size)
    weakref.finalize(values, _spare.append, block).atexit = False
    return torch.from_numpy(values).view(dtype)


def _take_spare(size: int) -> mmap.mmap | None:
    for _ in range(len(_spare)):
        try:
            block = _spare.popleft()
        except IndexError:  # another thread was faster
            return None
        if size <= len(block) <= 2 * size:
            return block
        _spare.append(block)
    return None
