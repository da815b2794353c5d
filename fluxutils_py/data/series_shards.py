"""Series that are divided over ranks, each of which can read only its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fluxutils_py.data.segments import Segments


@dataclass(frozen=True)
class SeriesShards:
    """The series of all ranks in one order that all ranks know, and which of them this rank can read.

    In the common order, the series of each rank keep their order and are spread evenly: series ``j`` of the ``n`` of a
    rank stands at ``(j + 1/2) / n`` of the way; of series at the same place, the lower rank's comes first. So a group
    of consecutive series holds series of every rank, in proportion to how many each has. All decisions are those of one
    process that has all series in this order.

    Attributes
    ----------
    rank : int
        This rank.
    whole : Segments
        All series in the common order, from their first to their last step; ``series`` counts from 0.
    counts : tuple of int
        The number of series of each rank.
    owner, local : ndarray of int, shape (N,)
        For each series in the common order, the rank that has it, and its number there.

    Examples
    --------
    >>> whole = Segments.from_lengths(n_series=2, n_steps=9), Segments.from_lengths(n_series=4, n_steps=7)
    >>> shards = SeriesShards.of(whole, rank=1)
    >>> shards.owner.tolist(), shards.local.tolist(), shards.whole.length.tolist()
    ([1, 0, 1, 1, 0, 1], [0, 0, 1, 2, 1, 3], [7, 9, 7, 7, 9, 7])
    >>> shards.own(shards.whole[1:4]).series.tolist()
    [1, 2]
    """

    rank: int
    whole: Segments
    counts: tuple[int, ...]
    owner: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, whole: Sequence[Segments], rank: int) -> Self:
        """Put the series of all ranks, each a segment, in the common order; ``whole`` is in the order of ranks."""
        counts = tuple(len(rows) for rows in whole)
        owner = np.repeat(np.arange(len(counts)), counts)
        local = np.concatenate([np.arange(n) for n in counts])
        order = np.lexsort((owner, (local + 0.5) / np.array(counts)[owner]))
        starts, lengths = (np.concatenate([getattr(rows, name) for rows in whole]) for name in ("start", "length"))
        n = np.arange(len(order))
        return cls(rank, Segments(n, starts[order], lengths[order]), counts, owner[order], local[order])

    @property
    def n_steps(self) -> int:
        """The least number of steps of an array that could hold all series."""
        return int((self.whole.start + self.whole.length).max())

    def own(self, rows: Segments) -> Segments:
        """Return this rank's rows among those of all ranks, with series numbered as in its arrays."""
        mine = rows[self.owner[rows.series] == self.rank]
        return replace(mine, series=self.local[mine.series])

    def in_common_order(self, values: Sequence[Any]) -> np.ndarray:
        """Return one value per series in the common order, from the arrays of values of all ranks."""
        first = np.cumsum([0, *self.counts])[:-1]
        parts = [v[:n] for v, n in zip(values, self.counts, strict=True)]
        return np.concatenate(parts)[first[self.owner] + self.local]

    def permute_within_ranks(self, order: np.ndarray, rows: Segments) -> np.ndarray:
        """Change a permutation of rows so that every rank keeps the places of its rows, in the permutation's order."""
        owner = self.owner[rows.series]
        permuted = np.empty_like(order)
        for rank in np.unique(owner):
            permuted[owner == rank] = order[owner[order] == rank]
        return permuted
