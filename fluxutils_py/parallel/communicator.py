"""The interface of communicators, the single process, and what MPI and torch.distributed have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from fluxutils_py.parallel.launcher import detect_launcher

METHODS = ("rank", "size", "allreduce_", "broadcast_", "allgather", "barrier")
PATIENCE = 60.0  # seconds of waiting before a warning names the missing ranks
PUBLISH_AFTER = 1.0  # seconds of waiting after which a rank publishes that it is here
OnMissing = Callable[[list[int] | None, float], None]


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
        """Sum over all ranks, in place; ``t`` is contiguous, in main memory, of one shape and dtype everywhere."""

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        """Overwrite ``t`` with that of rank ``root``; ``t`` is as for :meth:`allreduce_`."""

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks; they are pickled, so keep them small."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class SingleProcessComm:
    """One process: rank 0 of 1.

    >>> SingleProcessComm().allgather("me")
    ['me']
    """

    rank, size = 0, 1

    def allreduce_(self, t: Tensor) -> None:
        pass

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        pass

    def allgather(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        pass


class LaunchedComm(ABC):
    """The ranks that a launcher started: a barrier that names missing ranks, copying and pickling."""

    launcher: ClassVar[str]  # as detect_launcher returns it
    rank: int
    size: int
    patience: float
    _n_barriers = 0

    @classmethod
    @functools.cache
    def world(cls) -> Self:
        """All ranks that the launcher started; one communicator per process."""
        return cls()

    def monitored_barrier(self, on_missing: OnMissing) -> None:
        """Wait at a barrier, calling ``on_missing(ranks, seconds)`` every ``patience`` seconds meanwhile.

        ``ranks`` is None if the launcher cannot tell which ranks are missing.
        """
        self._n_barriers += 1
        is_complete = self._start_barrier()
        began, pause, n_calls = time.monotonic(), 1e-5, 0
        with contextlib.ExitStack() as published:
            is_published = False
            while not is_complete():
                time.sleep(pause)  # Python's signal handlers run between these
                pause = min(2 * pause, 0.02)
                seconds = time.monotonic() - began
                if not is_published and seconds > min(PUBLISH_AFTER, self.patience / 4):
                    published.enter_context(self._publish(self._key(self.rank)))
                    is_published = True
                if seconds > self.patience * (n_calls + 1):
                    n_calls += 1
                    on_missing(self._missing_ranks(), seconds)

    def _missing_ranks(self) -> list[int] | None:
        if not self._is_published(self._key(self.rank)):  # there is no name server
            return None
        return [rank for rank in range(self.size) if not self._is_published(self._key(rank))]

    def _key(self, rank: int) -> str:
        return f"fluxutils_py {self._name} barrier {self._n_barriers} rank {rank} of {self.size}"

    _name = ""  # of this communicator, the same on all ranks

    @abstractmethod
    def is_open(self) -> bool:
        """Whether collectives are still possible."""

    @abstractmethod
    def _start_barrier(self) -> Callable[[], bool]:
        """Enter a barrier without waiting; returns a function that says whether it is complete."""

    @abstractmethod
    def _publish(self, key: str) -> contextlib.AbstractContextManager[Any]:
        """Let other ranks look up a key for a while, where the launcher can do that."""

    @abstractmethod
    def _is_published(self, key: str) -> bool:
        """Whether a rank has published a key."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return _world_of, (type(self),)


def _world_of(kind: type[LaunchedComm]) -> LaunchedComm | SingleProcessComm:
    """Return the communicator to use in the process that unpickles one."""
    return kind.world() if detect_launcher() == kind.launcher else SingleProcessComm()


@dataclasses.dataclass
class Link:
    """What all calls over one communicator have in common."""

    registry: ClassVar[dict[int, Link]] = {}

    comm: Communicator
    group: Any = None  # the RankGroup whose training steps a loop of the user's own took last
    take_part: Callable[[], Any] | None = None  # in further such steps, without a batch; None if no rank has a batch
    ended: Sequence[int] = ()  # ranks that have ended the program
    is_used: bool = False
    is_broken: bool = False

    @classmethod
    def of(cls, comm: Communicator) -> Link:
        """The link of a communicator; one process alone needs none that is kept."""
        return cls(comm) if comm.size == 1 else cls.registry.setdefault(id(comm), cls(comm))

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
