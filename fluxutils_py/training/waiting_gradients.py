"""Gradients of batches that wait for more batches before an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fluxutils_py.parallel.gradient_vector import GradientVector


class WaitingGradients:
    """The sum of the gradients since the last update, which ranks sum once per update and not in every batch.

    Parameters
    ----------
    vector : GradientVector
        Holds the gradient of a batch before :meth:`add`, and the mean of all of them after :meth:`take_mean`.

    Attributes
    ----------
    n : int
        Number of batches that wait; the same on all ranks.
    """

    def __init__(self, vector: GradientVector) -> None:
        self.n, self._n_live = 0, 0.0
        self._vector = vector
        self._sum = torch.zeros_like(vector.values)  # of this rank
        self._layouts = [0] * len(vector.params)

    def add(self, n_live: float, factor: float | None) -> None:
        """Add this rank's gradient times a factor, None if it has no gradient; ``n_live`` is the data of all ranks."""
        if not self.n:
            self._sum.zero_()
            self._layouts = [0] * len(self._layouts)
        if factor is not None:
            self._sum.add_(self._vector.values, alpha=factor)
            self._layouts = list(map(max, self._layouts, self._vector.own_layouts()))
        self.n += 1
        self._n_live += n_live

    def take_mean(self) -> Sequence[int]:
        """Write the mean over batches and ranks into the vector, and forget the sum; return the layouts."""
        torch.div(self._sum, self._n_live, out=self._vector.values)
        self.clear()
        if self._vector.ranks.is_single:
            return self._layouts
        self._vector.sum_up(self._layouts)
        return self._vector.layouts()

    def clear(self) -> None:
        """Forget the sum."""
        self.n, self._n_live = 0, 0.0

    def state_dict(self) -> Any:
        """Return this rank's sum as plain data; None if nothing waits."""
        return (self.n, self._n_live, self._sum, self._layouts) if self.n else None

    def load_state_dict(self, state: Any) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.clear()
        if state is not None:
            self.n, self._n_live, total, layouts = state
            self._sum.copy_(total)
            self._layouts = list(layouts)

    @staticmethod
    def reshard(states: Sequence[Any], rank: int) -> Any:
        """Return the state for a rank among another number of ranks, from those of all ranks: rank 0 gets the sum."""
        if states[0] is None:
            return None
        n, n_live, first, _ = states[0]
        if rank:
            return n, n_live, torch.zeros_like(first), [0] * len(states[0][3])
        layouts = [max(of_one) for of_one in zip(*(layouts for *_, layouts in states), strict=True)]
        return n, n_live, sum((total for _, _, total, _ in states[1:]), first), layouts
