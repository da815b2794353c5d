"""Pieces of series: the series, the first step and the length of each row of a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Segments:
    """Rows of a minibatch: row ``i`` is steps ``start[i]`` to ``start[i] + length[i]`` of series
    ``series[i]``.

    An index mapping, never a copy of data.

    Attributes
    ----------
    series, start, length : ndarray of int, shape (B,)
    folds : int
        The largest number of rows that :meth:`fold` cut a series into.
    """

    series: np.ndarray
    start: np.ndarray
    length: np.ndarray
    folds: int = 1

    @classmethod
    def from_lengths(
        cls,
        n_series: int,
        n_steps: int,
        lengths: np.ndarray | None = None,
        starts: np.ndarray | None = None,
    ) -> Segments:
        """Make one row per series: ``lengths`` steps (default: up to ``n_steps``) from step
        ``starts`` (default: 0).
        """
        start = np.zeros(n_series, int) if starts is None else np.asarray(starts)
        if lengths is None:
            lengths = n_steps - start
        return cls(np.arange(n_series), start, np.asarray(lengths))

    @classmethod
    def single_steps(cls, series: np.ndarray, steps: np.ndarray) -> Segments:
        """Make a row of each of these steps of these series."""
        return cls(series, steps, np.ones(len(series), int))

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, which: slice | np.ndarray) -> Segments:
        return Segments(self.series[which], self.start[which], self.length[which])

    @cached_property
    def common_start(self) -> int | None:
        """The step at which all rows start, or None if they differ."""
        first = self.start[0]
        return int(first) if (self.start == first).all() else None

    @cached_property
    def common_series(self) -> slice | None:
        """The series as a slice, or None if they are not consecutive, or none."""
        if not len(self) or (np.diff(self.series) != 1).any():
            return None
        first = int(self.series[0])
        return slice(first, first + len(self))

    @cached_property
    def groups_by_start(self) -> list[tuple[slice | np.ndarray, Segments]]:
        """Group the rows by their start; return each group with its positions, as a slice if evenly
        spaced.
        """
        # usually evenly spaced, as the folds of all series are
        places = [np.flatnonzero(self.start == begin) for begin in np.unique(self.start)]
        return [(_as_even_slice(at), self[at]) for at in places]

    @cached_property
    def max_length(self) -> int:
        return int(self.length.max())

    @cached_property
    def min_length(self) -> int:
        return int(self.length.min())

    @property
    def stop(self) -> np.ndarray:
        """The step after the last one of each row, (B,)."""
        return self.start + self.length

    def fold(self, batchsize: int, least: int | None = None) -> Segments:
        """Fold the time of few long rows so that a minibatch is full.

        If there are at most half as many rows as ``batchsize``, this cuts each in time into ``n =
        batchsize // len(rows)`` consecutive rows, whose lengths differ by at most one, as in
        ``numpy.array_split``; nothing is dropped. Row ``b * n + k`` holds fold ``k`` of row ``b``.
        A row of ``n`` steps or fewer stays whole. With more rows, it returns them unchanged.

        Parameters
        ----------
        batchsize : int
        least : int, optional
            Cut each row into as many folds of at least this many steps as possible, at most ``n``.

        Notes
        -----
        Source: ``rebatch`` of FluxUtils.jl, which drops the last ``T mod n`` steps and copies the
        data.

        Examples
        --------
        >>> r = Segments.from_lengths(n_series=2, n_steps=5).fold(batchsize=4)
        >>> r.series.tolist(), r.start.tolist(), r.length.tolist()
        ([0, 0, 1, 1], [0, 3, 0, 3], [3, 2, 3, 2])
        """
        n = batchsize // len(self)
        if n < 2:  # the rows fill the minibatch as they are
            return self
        if least is None:
            folds = np.where(self.length > n, n, 1)
        else:
            folds = np.clip(self.length // least, 1, n)
        most = int(folds.max())
        if most == 1:
            return self
        row = np.repeat(np.arange(len(self)), folds)
        k = np.concatenate([np.arange(f) for f in folds])  # which fold of its row
        # so many first folds have one step more
        size, n_longer = np.divmod(self.length[row], folds[row])
        offset = k * size + np.minimum(k, n_longer)
        return Segments(
            self.series[row],
            self.start[row] + offset,
            size + (k < n_longer),
            most,
        )

    def step_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Return which steps exist: bool of shape (S, B), or None if all do."""
        if stop <= self.min_length:
            return None
        return np.arange(start, stop)[:, None] < self.length

    def outside(self, which: np.ndarray | slice, steps: np.ndarray) -> np.ndarray:
        """Return which of some steps (S,) of the series are in none of some rows: (B, S)."""
        rows = self[which]
        return np.asarray((steps < rows.start[:, None]) | (steps >= rows.stop[:, None]))

    def last_steps(self) -> Segments:
        """Return the last step of each row, which has one, as a row of its own."""
        return replace(self, start=self.stop - 1, length=np.ones_like(self.length))

    def without_first(self, n: int) -> Segments:
        """Return the rows without their first ``n`` steps, such as a burn-in; those of ``n`` steps
        or fewer are left out.
        """
        longer = self[self.length > n]
        return replace(longer, start=longer.start + n, length=longer.length - n)

    def coverage_mask(self, series: slice, steps: slice) -> np.ndarray | None:
        """Return which steps of some series are in a row: bool (N, T), None if all."""
        # the usual case, without a mask: consecutive series with these steps in common
        common = self.common_series
        first = None if common is None else self.common_start
        if common is not None and first is not None:
            has_series = common.start <= series.start and series.stop <= common.stop
            if has_series and first <= steps.start and steps.stop <= first + self.min_length:
                return None
        size = series.stop - series.start
        length = steps.stop - steps.start
        here = self[(self.series >= series.start) & (self.series < series.stop)]
        # within the window of steps
        begin = np.clip(here.start - steps.start, 0, length)
        end = np.clip(here.stop - steps.start, 0, length)
        # +1 where a row begins and -1 where it ends: the running sum counts the rows at a step
        edges = np.zeros((size, length + 1), int)
        line = here.series - series.start
        np.add.at(edges, (line, begin), 1)
        np.add.at(edges, (line, end), -1)
        covered = edges.cumsum(1)[:, :-1] > 0
        return None if covered.all() else covered


def _as_even_slice(positions: np.ndarray) -> slice | np.ndarray:
    """Return rising positions as a slice if they are evenly spaced: it gives a view."""
    steps = np.diff(positions)
    if (steps != steps[:1]).any():
        return positions
    step = int(steps[0]) if len(steps) else 1
    return slice(int(positions[0]), int(positions[-1]) + 1, step)


@dataclass(frozen=True)
class SeriesShards:
    """The series of all ranks in one order that all ranks know, and which of them this rank can
    read.

    In the common order, the series of each rank keep their order and are spread evenly: series
    ``j`` of the ``n`` of a rank stands at ``(j + 1/2) / n`` of the way; of series at the same
    place, the lower rank's comes first. So a group of consecutive series holds series of every
    rank, in proportion to how many each has. All decisions are those of one process that has all
    series in this order.

    Attributes
    ----------
    rank : int
        This rank.
    all_series : Segments
        All series in the common order, from their first to their last step; ``series`` counts from
        0.
    counts : tuple of int
        The number of series of each rank.
    owner, local : ndarray of int, shape (N,)
        For each series in the common order, the rank that has it, and its number there.

    Examples
    --------
    >>> whole = (
    ...     Segments.from_lengths(n_series=2, n_steps=9),
    ...     Segments.from_lengths(n_series=4, n_steps=7),
    ... )
    >>> shards = SeriesShards.of(whole, rank=1)
    >>> shards.owner.tolist(), shards.local.tolist(), shards.all_series.length.tolist()
    ([1, 0, 1, 1, 0, 1], [0, 0, 1, 2, 1, 3], [7, 9, 7, 7, 9, 7])
    >>> shards.of_rank(shards.all_series[1:4]).series.tolist()
    [1, 2]
    """

    rank: int
    all_series: Segments
    counts: tuple[int, ...]
    owner: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, whole: Sequence[Segments], rank: int) -> Self:
        """Put the series of all ranks, each a segment, in the common order; ``whole`` is in the
        order of ranks.
        """
        counts = tuple(map(len, whole))
        owner = np.repeat(np.arange(len(counts)), counts)
        local = np.concatenate([np.arange(n) for n in counts])
        places = (local + 0.5) / np.array(counts)[owner]
        order = np.lexsort((owner, places))  # by place, at the same place by rank
        starts = np.concatenate([rows.start for rows in whole])
        lengths = np.concatenate([rows.length for rows in whole])
        # numbered anew: the number of a series on its rank says nothing to the others
        in_order = Segments(np.arange(len(order)), starts[order], lengths[order])
        return cls(rank, in_order, counts, owner[order], local[order])

    @property
    def n_steps(self) -> int:
        """The least number of steps of an array that could hold all series."""
        return int(self.all_series.stop.max())

    def of_rank(self, rows: Segments) -> Segments:
        """Return this rank's rows among those of all ranks, series as in its arrays."""
        mine = rows[self.owner[rows.series] == self.rank]
        return replace(mine, series=self.local[mine.series])

    def common_numbers(self, local: np.ndarray) -> np.ndarray:
        """Return the numbers in the common order of series of this rank."""
        numbers: np.ndarray = np.flatnonzero(self.owner == self.rank)[local]
        return numbers

    def in_common_order(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return one value per series in the common order, from the values of each rank."""
        first = np.cumsum([0, *self.counts])
        # a rank may send more than its values: all send arrays of one length
        parts = [v[:n] for v, n in zip(values, self.counts, strict=True)]
        return np.concatenate(parts)[first[self.owner] + self.local]

    def permute_within_ranks(self, order: np.ndarray, rows: Segments) -> np.ndarray:
        """Change a permutation of rows so that every rank keeps the places of its rows, in the
        permutation's order.
        """
        owner = self.owner[rows.series]
        permuted = np.empty_like(order)
        for rank in np.unique(owner):
            permuted[owner == rank] = order[owner[order] == rank]
        return permuted
