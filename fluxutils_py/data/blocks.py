"""Cut a large (F, N, T) array into rectangles to pass over it within a bounded memory."""

from __future__ import annotations

import math
from itertools import product

from fluxutils_py.data.parts import indbatch

BLOCK = 1 << 20  # values per rectangle

Rectangle = tuple[slice, slice]  # of series and of steps


def block_slices(n_series: int, n_steps: int, n_features: int = 1) -> list[Rectangle]:
    """Cut (N, T) into rectangles of about a million values.

    They are as close to squares as the axes allow, so that a file is read in long runs whatever its
    memory order.
    """
    room = max(1, BLOCK // max(1, n_features))
    all_series = room // max(1, n_series)  # steps of a rectangle that is as high as the array
    per_step = max(1, min(n_steps, max(math.isqrt(room), all_series)))
    per_series = max(1, room // per_step)
    # indbatch would take a NumPy integer for an array
    return list(product(indbatch(int(n_series), per_series), indbatch(int(n_steps), per_step)))
