"""Evaluation results, which merge, compare and can be logged; a sample that merges too."""

from __future__ import annotations

import functools
import heapq
import operator
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self, TypeVar

from torch import Tensor

from fluxutils_py.tree import unshard
from fluxutils_py.validation import check_integer

T = TypeVar("T")


@dataclass(frozen=True)
class EvalResults:
    """Base class of evaluation results: a frozen dataclass that merges with results of other data.

    Decorate each subclass with ``@dataclass(frozen=True)``. If its fields hold numbers, tensors,
    arrays, strings, and lists, tuples and mappings of them,
    :func:`fluxutils_py.bobbin.write_pytree_json_file` writes it to JSON. Ranks exchange
    results by pickle, so define the class at the top level of a module.

    A subclass must define :meth:`reduce`. Define :meth:`is_better_than` to keep the best model, and
    :meth:`write_to_tensorboard` to write results to TensorBoard.

    Raises
    ------
    TypeError
        If the class of the new object is not itself a dataclass.

    Notes
    -----
    Results merge in batch order within a rank, then in rank order. :meth:`reduce` must be
    associative; it need not be commutative. Source: ``EvalResults`` of bobbin.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Accuracy(EvalResults):
    ...     right: int = 0
    ...     n: int = 0
    ...
    ...     def reduce(self, other):
    ...         return Accuracy(self.right + other.right, self.n + other.n)
    ...
    ...     def is_better_than(self, other):
    ...         return self.right * other.n > other.right * self.n
    >>> merged = Accuracy(3, 4).reduce(Accuracy(5, 8))
    >>> merged.to_log_message()
    'Accuracy(right=8, n=12)'
    >>> merged.is_better_than(Accuracy(1, 2))
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # without the decorator it would inherit the base's fields and ignore new ones
        if "__dataclass_fields__" not in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} is a subclass of EvalResults: write @dataclass(frozen=True) above "
                "it"
            )
        return super().__new__(cls)

    def reduce(self, other: Self) -> Self:
        """Return the results of both data; the data of ``self`` come first."""
        raise_undefined(self, "reduce(other)")

    def unshard_and_reduce(self) -> Self:
        """Merge results that are stacked along the leading axis of every value, as ``tpmap``
        returns them.

        Raises
        ------
        ShapeError
            If a value has no leading axis, or the axes differ in length.
        """
        return functools.reduce(lambda one, other: one.reduce(other), unshard(self))

    def is_better_than(self, other: Self) -> bool:
        """Return whether this result is better than another result of the same data, so that its
        model is kept.

        Comparisons with NaN are False. To let the next result replace a NaN loss, write
        ``self.loss < other.loss or other.loss != other.loss``.
        """
        raise_undefined(self, "is_better_than(other)")

    def to_log_message(self) -> str:
        """Return a line for the log, by default the fields and their values."""
        return str(self)

    def write_to_tensorboard(self, state: Any, writer: Any) -> None:
        """Write the results to a summary writer, at step ``state.step``."""
        raise_undefined(self, "write_to_tensorboard(state, writer)")


def on_cpu(leaf: object) -> object:
    """Return a tensor detached and in main memory, any other value as it is."""
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def raise_undefined(thing: object, method: str) -> NoReturn:
    """Raise NotImplementedError for a method that the subclass must define."""
    raise NotImplementedError(f"{type(thing).__name__} does not define {method}")


@dataclass(frozen=True)
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
    priorities : sequence of float
        Priorities of ``values``, of which the smallest are kept. By default they are drawn afresh,
        from the operating system; for a sample that a seed gives again, draw them yourself:
        ``found.union(SampledSet(10, [x], [rng.random()]))``. Ranks must draw different numbers.

    Attributes
    ----------
    max_size, values, priorities
        The fields of this frozen dataclass; ``values`` and ``priorities`` are tuples.

    Raises
    ------
    TypeError, ValueError
        If ``max_size`` is no integer of at least 1, or values and priorities differ in number.

    Notes
    -----
    Source: ``SampledSet`` of bobbin, which draws from NumPy's global generator.

    Examples
    --------
    >>> first = SampledSet(2, ["a", "b", "c"], [0.3, 0.9, 0.1])
    >>> list(first.union(SampledSet(2, ["d", "e"], [0.2, 0.5])))
    ['c', 'd']
    """

    max_size: int
    values: Any = ()  # sequences, which the set keeps as tuples
    priorities: Any = ()

    def __post_init__(self) -> None:
        check_integer("max_size", self.max_size, 1)
        rng = random.SystemRandom()  # ranks, copies and forked processes draw other numbers
        pairs: Iterable[tuple[float, T]] = ((rng.random(), x) for x in self.values)
        if len(self.priorities):
            pairs = zip(self.priorities, self.values, strict=True)
        # no list of all pairs: the values may not fit in memory
        smallest = heapq.nsmallest(self.max_size, pairs, key=operator.itemgetter(0))
        # not by assignment: the dataclass is frozen
        vars(self)["values"] = tuple(x for _, x in smallest)
        vars(self)["priorities"] = tuple(float(priority) for priority, _ in smallest)

    def add(self, x: T) -> SampledSet[T]:
        """Return a new set with ``x`` added."""
        return self.union([x])

    def union(self, iterable: Iterable[T]) -> SampledSet[T]:
        """Return a new set of the same ``max_size`` with all elements of another set or an iterable
        added.

        Raises ValueError for a set with a smaller ``max_size``, which may have dropped elements of
        the joint sample.
        """
        n = self.max_size
        other = iterable if isinstance(iterable, SampledSet) else SampledSet(n, iterable)
        if other.max_size < n:
            raise ValueError(
                f"a sample of at most {other.max_size} cannot be united into one of {n}; give both "
                "the same max_size"
            )
        return SampledSet(n, self.values + other.values, self.priorities + other.priorities)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, x: object) -> bool:
        return x in self.values
