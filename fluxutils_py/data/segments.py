"""Pieces of series: the series, the first step and the length of each row of a minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Segments:
    """Rows of a minibatch: row ``i`` is steps ``start[i]`` to ``start[i] + length[i]`` of series ``series[i]``.

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
        cls, n_series: int, n_steps: int, lengths: np.ndarray | None = None, starts: np.ndarray | None = None
    ) -> Segments:
        """Make one row per series: ``lengths`` steps (default: up to ``n_steps``) from step ``starts`` (default: 0)."""
        start = np.zeros(n_series, int) if starts is None else np.asarray(starts)
        return cls(np.arange(n_series), start, n_steps - start if lengths is None else np.asarray(lengths))

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, which: slice | np.ndarray) -> Segments:
        return Segments(self.series[which], self.start[which], self.length[which])

    @cached_property
    def common_start(self) -> int | None:
        """The step at which all rows start, or None if they differ."""
        return int(self.start[0]) if (self.start == self.start[0]).all() else None

    @cached_property
    def common_series(self) -> slice | None:
        """The series as a slice, or None if they are not consecutive."""
        if (np.diff(self.series) == 1).all():
            return slice(int(self.series[0]), int(self.series[-1]) + 1)
        return None

    @cached_property
    def groups_by_start(self) -> list[tuple[slice | np.ndarray, Segments]]:
        """Group the rows by their start; return each group with its positions, as a slice if evenly spaced."""
        groups: list[tuple[slice | np.ndarray, Segments]] = []
        for begin in np.unique(self.start):
            at = np.flatnonzero(self.start == begin)
            steps = np.diff(at)
            even = len(at) == 1 or (steps == steps[0]).all()
            where = slice(int(at[0]), int(at[-1]) + 1, int(steps[0]) if len(at) > 1 else 1) if even else at
            groups.append((where, self[at]))
        return groups

    @cached_property
    def max_length(self) -> int:
        return int(self.length.max())

    @cached_property
    def min_length(self) -> int:
        return int(self.length.min())

    def fold(self, batchsize: int, least: int | None = None) -> Segments:
        """Fold the time of few long rows so that a minibatch is full.

        If there are at most half as many rows as ``batchsize``, this cuts each in time into ``n = batchsize //
        len(rows)`` consecutive rows, whose lengths differ by at most one, as in ``numpy.array_split``; nothing is
        dropped. Row ``b * n + k`` holds fold ``k`` of row ``b``. A row of ``n`` steps or fewer stays whole. With more
        rows, it returns them unchanged.

        Parameters
        ----------
        batchsize : int
        least : int, optional
            Cut each row into as many folds of at least this many steps as possible, at most ``n``.

        Notes
        -----
        Source: ``rebatch`` of FluxUtils.jl, which drops the last ``T mod n`` steps and copies the data.

        Examples
        --------
        >>> r = Segments.from_lengths(n_series=2, n_steps=5).fold(batchsize=4)
        >>> r.series.tolist(), r.start.tolist(), r.length.tolist()
        ([0, 0, 1, 1], [0, 3, 0, 3], [3, 2, 3, 2])
        """
        n = batchsize // len(self)
        if n < 2:
            return self
        folds = np.where(self.length > n, n, 1) if least is None else np.clip(self.length // least, 1, n)
        if folds.max() == 1:
            return self
        k = np.concatenate([np.arange(f) for f in folds])
        b = np.repeat(np.arange(len(self)), folds)
        size, longer = self.length[b] // folds[b], self.length[b] % folds[b]  # the first `longer` have one step more
        return Segments(
            self.series[b], self.start[b] + k * size + np.minimum(k, longer), size + (k < longer), int(folds.max())
        )

    def step_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Which steps exist: bool of shape (S, B), or None if all do."""
        if stop <= self.min_length:
            return None
        return np.arange(start, stop)[:, None] < self.length[None, :]

    def coverage_mask(self, series: slice, steps: slice, skip: int = 0) -> np.ndarray | None:
        """Return which steps of some series are in a row, without its first ``skip``: bool (N, T), None if all."""
        size, length = series.stop - series.start, steps.stop - steps.start
        here = self[(self.series >= series.start) & (self.series < series.stop)]
        stop = here.start + here.length
        begin = np.clip(np.minimum(here.start + skip, stop) - steps.start, 0, length)
        end = np.clip(stop - steps.start, 0, length)
        if (end - begin).sum() == size * length and len(np.unique(here.series)) == len(here):
            return None
        edges = np.zeros((size, length + 1), int)
        np.add.at(edges, (here.series - series.start, begin), 1)
        np.add.at(edges, (here.series - series.start, end), -1)
        covered = edges.cumsum(1)[:, :-1] > 0
        return None if covered.all() else covered
