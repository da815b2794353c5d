"""Cut a large (F, N, T) array into rectangles to pass over it within a bounded memory."""

from __future__ import annotations

import math

BLOCK = 1 << 20  # values per rectangle

Rectangle = tuple[slice, slice]  # of series and of steps


def block_slices(n_series: int, n_steps: int, n_features: int = 1) -> list[Rectangle]:
    """Cut (N, T) into rectangles of about a million values.

    They are as close to squares as the axes allow, so that a file is read in long runs whatever its
    memory order.
    """
    room = max(1, BLOCK // max(1, n_features))
    per_step = max(1, min(n_steps, max(math.isqrt(room), room // max(1, n_series))))
    per_series = max(1, room // per_step)
    return [
        (slice(n, min(n + per_series, n_series)), slice(t, min(t + per_step, n_steps)))
        for n in range(0, n_series, per_series)
        for t in range(0, n_steps, per_step)
    ]
