"""The interface of communicators, the single process, and names of ranks for messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

METHODS = ("rank", "size", "allreduce_", "broadcast_", "allgather", "barrier")

ERROR_LENGTH = 10_000  # characters of an error that other ranks get


class Communicator(Protocol):
    """Processes that work together. Any object with these members can be given as ``comm``.

    All ranks call the same methods in the same order.

    Attributes
    ----------
    rank, size : int
        The number of this process, from 0, and the number of processes.
    """

    rank: int
    size: int

    def allreduce_(self, t: Tensor) -> None:
        """Sum over all ranks, in place; ``t`` is contiguous, in main memory, of one shape and dtype
        everywhere.
        """

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        """Overwrite ``t`` with the ``t`` of rank ``root``; ``t`` is as for :meth:`allreduce_`."""

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks; they are pickled, so keep them
        small.
        """

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class SingleProcessComm:
    """One process: rank 0 of 1.

    >>> SingleProcessComm().allgather("me")
    ['me']
    """

    rank = 0
    size = 1

    def allreduce_(self, t: Tensor) -> None:
        pass

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        pass

    def allgather(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        pass


@dataclasses.dataclass
class Link:
    """State that all calls over one communicator share."""

    registry: ClassVar[dict[int, Link]] = {}

    comm: Communicator
    group: Any = None  # RankGroup of the last training step in a user-written loop
    # takes such a step without a batch; None if no rank has one
    take_part: Callable[[], Any] | None = None
    ended: Sequence[int] = ()  # ranks that have ended the program
    is_used: bool = False
    is_broken: bool = False

    @classmethod
    def of(cls, comm: Communicator) -> Link:
        """Return the link of a communicator, the same for every call."""
        return cls.registry.setdefault(id(comm), cls(comm))

    def leave_steps(self) -> None:
        """Take part in the training steps of other ranks until none has a batch."""
        while self.take_part is not None:
            self.take_part()


def describe_by_rank(values: Sequence[Any]) -> str:
    """Describe the values of all ranks in words, with equal ones together.

    >>> describe_by_rank(["a", "b", "a"])
    'a on ranks 0 and 2, b on rank 1'
    """
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in words.

    >>> name_ranks([0, 2, 3])
    'ranks 0, 2 and 3'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_error(error: BaseException) -> str:
    """Return the type and text of any exception as a plain string of bounded length.

    It never fails itself.
    """
    name = type(error).__name__
    for make_text in (str, repr):
        try:
            text = str.__str__(make_text(error))
        # whatever a user's class raises: the ranks that wait must hear of the first error
        except BaseException:
            continue
        rest = len(text) - ERROR_LENGTH
        if rest > 0:
            text = f"{text[:ERROR_LENGTH]}... and {rest} more characters"
        return f"{name}: {text}"
    return f"{name}: (its text cannot be made)"


def mean_of_buffers(
    buffers: Sequence[dict[Any, Tensor]], weights: Sequence[float]
) -> dict[Any, Tensor]:
    """Return the weighted means of buffers that differ between ranks; integers take the values of
    rank 0.
    """
    shares = torch.tensor(weights, dtype=torch.float64)
    if not shares.sum():  # no rank has data: all count alike
        shares = torch.ones_like(shares)
    shares = shares / shares.sum()
    means = dict(buffers[0])
    for name, first in buffers[0].items():
        values = [of_rank[name] for of_rank in buffers]
        # equal ones to the last bit, which a mean may lose
        if first.is_floating_point() and not all(torch.equal(first, value) for value in values):
            # the buffer of a rank without data may be anything
            pairs = zip(values, shares, strict=True)
            parts = [value.double() * share for value, share in pairs if share]
            means[name] = sum(parts[1:], parts[0]).to(first.dtype)
    return means
