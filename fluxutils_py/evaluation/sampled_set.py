"""A random sample of fixed size that can be merged with others."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np

from fluxutils_py.validation import check_integer

T = TypeVar("T")


@dataclass(frozen=True, init=False)
class SampledSet(Collection[T]):
    """A uniform sample, without replacement, of at most ``max_size`` of all elements that were added.

    Every element gets a number when it is added, uniform in [0, 1), its priority; those with the smallest priorities
    are kept. It keeps its priority in a :meth:`union`, so that samples of parts (minibatches, ranks) unite to a sample
    of the whole, however unequal the parts are. Sets do not change: what adds returns another set.

    Elements are in the order of their priorities, so that the first k are a uniform sample too. One that is added
    twice counts twice.

    Parameters
    ----------
    max_size : int
    values : iterable
        The first elements.
    priorities : iterable of float
        Their priorities; drawn if left out.
    rng : numpy.random.Generator, optional, keyword only
        Where priorities are drawn from; by default fresh numbers from the operating system. It is shared with every set
        that comes from this one and moves on with each draw, so that ``add`` gives a new number each time, and a seed
        and an order of calls one result. Give **one** generator to all sets that will be united, and ranks one each:
        ``numpy.random.default_rng([seed, rank])``. A bare seed is refused, for sets that begin from one seed draw the
        same numbers, and their union is no uniform sample.

    Attributes
    ----------
    max_size, values, priorities
        The fields of this frozen dataclass; the latter two are tuples. The generator is no field: a set that was
        pickled, copied or read from JSON has none, lest two of them draw the same numbers, and draws fresh ones.

    Raises
    ------
    TypeError, ValueError
        If ``rng`` is no generator, ``max_size`` is below 1, or values and priorities differ in number.

    Notes
    -----
    Source: ``SampledSet`` of bobbin, which draws from NumPy's global generator.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> first = SampledSet(2, rng=rng).union(["a", "b", "c"])
    >>> list(first.union(SampledSet(2, ["d", "e"], rng=rng)))
    ['d', 'c']
    """

    max_size: int
    values: tuple[T, ...]
    priorities: tuple[float, ...]
    _rng: ClassVar[np.random.Generator | None] = None  # each set has its own in its place, which is no field

    def __init__(
        self,
        max_size: int,
        values: Iterable[T] = (),
        priorities: Iterable[float] = (),
        *,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not (rng is None or isinstance(rng, np.random.Generator)):
            raise TypeError(
                f"rng must be a numpy.random.Generator or None, got {rng!r}; make one with numpy.random.default_rng "
                "and give the same one to all sets that will be united"
            )
        max_size = check_integer("max_size", max_size, 1)
        values, priorities = tuple(values), tuple(map(float, priorities))
        if priorities and len(priorities) != len(values):
            raise ValueError(f"SampledSet: {len(values)} values but {len(priorities)} priorities")
        pairs = zip(priorities, values, strict=True) if priorities else _with_priorities(values, rng)
        kept = heapq.nsmallest(max_size, pairs, key=operator.itemgetter(0))
        for name, value in (
            ("max_size", max_size),
            ("values", tuple(x for _, x in kept)),
            ("priorities", tuple(p for p, _ in kept)),
            ("_rng", rng),
        ):
            object.__setattr__(self, name, value)

    def add(self, x: T) -> SampledSet[T]:
        """A set to which ``x`` was added."""
        return self.union([x])

    def union(self, iterable: Iterable[T]) -> SampledSet[T]:
        """A set of the same ``max_size`` to which all elements of another set or of an iterable were added.

        ValueError for a set with a smaller ``max_size``: it has dropped elements that might belong to the sample.
        """
        if not isinstance(iterable, SampledSet):
            pairs = _with_priorities(iterable, self._rng)
        elif iterable.max_size < self.max_size:
            raise ValueError(
                f"a sample of at most {iterable.max_size} cannot be united into one of {self.max_size}; "
                "give both the same max_size"
            )
        else:
            pairs = zip(iterable.priorities, iterable.values, strict=True)
        mine = zip(self.priorities, self.values, strict=True)
        # not a list of everything: an iterable may be longer than memory
        kept = heapq.nsmallest(self.max_size, chain(mine, pairs), key=operator.itemgetter(0))
        return SampledSet(self.max_size, [x for _, x in kept], [p for p, _ in kept], rng=self._rng)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, x: Any) -> bool:
        return x in self.values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rng"}


def _with_priorities(values: Iterable[T], rng: np.random.Generator | None) -> Iterator[tuple[float, T]]:
    """Values with a new priority each."""
    rng = np.random.default_rng() if rng is None else rng
    return ((rng.random(), x) for x in values)
