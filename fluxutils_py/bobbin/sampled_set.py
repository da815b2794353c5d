"""A uniform random sample of bounded size that merges with other samples."""

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
    """Uniform sample, without replacement, of at most ``max_size`` of all elements added.

    Each added element draws a priority, uniform in [0, 1); the set keeps the elements with the
    smallest priorities. A :meth:`union` keeps the priorities, so samples of parts (minibatches,
    ranks) unite to a uniform sample of the whole, even if the parts differ in size. Sets are
    immutable: :meth:`add` and :meth:`union` return new sets.

    Elements are sorted by priority, so the first k are a uniform sample too. An element added twice
    counts twice.

    Parameters
    ----------
    max_size : int
        Maximum number of elements, at least 1.
    values : iterable
        The first elements.
    priorities : iterable of float
        Priorities of ``values``; drawn by default.
    rng : numpy.random.Generator, optional, keyword only
        Generator of the priorities; by default a fresh one, seeded by the operating system. All
        sets derived from this one share the generator, so each ``add`` draws a new number and the
        same seed and calls give the same result. Give **one** generator to all sets that you unite,
        and one to each rank: ``numpy.random.default_rng([seed, rank])``. A seed is not accepted:
        sets with the same seed draw the same priorities, and their union is not a uniform sample.

    Attributes
    ----------
    max_size, values, priorities
        The fields of this frozen dataclass; ``values`` and ``priorities`` are tuples. The generator
        is not a field. A pickled or copied set, or one read from JSON, has no generator, so that no
        two sets draw the same numbers.

    Raises
    ------
    TypeError, ValueError
        If ``rng`` is not a generator, ``max_size`` is below 1, or values and priorities differ in
        number.

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
    _rng: ClassVar[np.random.Generator | None] = (
        None  # default; __init__ sets an instance attribute, not a field
    )

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
                f"rng must be a numpy.random.Generator or None, got {rng!r}; make one with "
                "numpy.random.default_rng and give the same one to all sets that will be united"
            )
        max_size = check_integer("max_size", max_size, 1)
        values, priorities = tuple(values), tuple(map(float, priorities))
        if priorities and len(priorities) != len(values):
            raise ValueError(f"SampledSet: {len(values)} values but {len(priorities)} priorities")
        pairs = (
            zip(priorities, values, strict=True) if priorities else _with_priorities(values, rng)
        )
        smallest = heapq.nsmallest(max_size, pairs, key=operator.itemgetter(0))
        for name, value in (
            ("max_size", max_size),
            ("values", tuple(x for _, x in smallest)),
            ("priorities", tuple(p for p, _ in smallest)),
            ("_rng", rng),
        ):
            object.__setattr__(self, name, value)

    def add(self, x: T) -> SampledSet[T]:
        """Return a new set with ``x`` added."""
        return self.union([x])

    def union(self, iterable: Iterable[T]) -> SampledSet[T]:
        """Return a new set of the same ``max_size`` with all elements of another set or an iterable
        added.

        Raises ValueError for a set with a smaller ``max_size``, which may have dropped elements of
        the joint sample.
        """
        if not isinstance(iterable, SampledSet):
            pairs = _with_priorities(iterable, self._rng)
        elif iterable.max_size < self.max_size:
            raise ValueError(
                f"a sample of at most {iterable.max_size} cannot be united into one of "
                f"{self.max_size}; give both the same max_size"
            )
        else:
            pairs = zip(iterable.priorities, iterable.values, strict=True)
        mine = zip(self.priorities, self.values, strict=True)
        # no list of all pairs: the iterable may not fit in memory
        smallest = heapq.nsmallest(self.max_size, chain(mine, pairs), key=operator.itemgetter(0))
        return SampledSet(
            self.max_size, [x for _, x in smallest], [p for p, _ in smallest], rng=self._rng
        )

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, x: Any) -> bool:
        return x in self.values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rng"}


def _with_priorities(
    values: Iterable[T], rng: np.random.Generator | None
) -> Iterator[tuple[float, T]]:
    """Yield each value with a new priority."""
    rng = np.random.default_rng() if rng is None else rng
    return ((rng.random(), x) for x in values)
