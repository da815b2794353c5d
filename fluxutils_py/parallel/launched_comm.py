"""Communicators of launched ranks: how a rank waits for the others, names those that hang, and ends
the job.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fluxutils_py.errors import warn
from fluxutils_py.parallel.communicator import SingleProcessComm, name_ranks
from fluxutils_py.parallel.launcher import detect_launcher

# environment variables
PATIENCE = "FLUXUTILS_PATIENCE"
ABORT_AFTER = "FLUXUTILS_ABORT_AFTER"

LOOKS = 50  # polls in a row, before the rank yields the processor between polls
# seconds of waiting, before the rank sleeps between polls: waking up takes .1 ms and more
YIELDING = 0.05
YIELDING_SHARED = 1e-3  # the same where another program has taken the processor meanwhile
TAKEN = 1e-4  # seconds that offering the processor takes, if another program takes it
LONGEST_PAUSE = 0.02  # seconds
ANNOUNCED_AFTER = 1.0  # seconds of waiting after which a rank tells the others where it waits
FRAME = 512  # bytes; smaller objects of all ranks travel in one collective
GATHERED_AT_ONCE = 1 << 26  # bytes; larger objects travel one by one
# exit status of a job that abort_after ended: "temporary failure, try again" in sysexits.h
STATUS = 75

# polls whether a collective is complete; keeps the memory of the collective alive
Request = Callable[[], bool]
Place = tuple[str, int]  # where a rank runs: host and process
# requests after an error while waiting, kept because they may still write into their memory
_abandoned: list[Request] = []


class LaunchedComm(ABC):
    """The ranks that a launcher started, waiting in collectives.

    A rank polls each collective until it is complete: first in a tight loop, then yielding the
    processor between polls, then sleeping for a twentieth of the time waited so far. After every
    ``patience`` seconds of waiting it warns which ranks are missing. After ``abort_after`` seconds
    it ends the job.

    Parameters
    ----------
    patience : float, optional
        By default the environment variable ``FLUXUTILS_PATIENCE``, or 60 seconds.
    abort_after : float, optional
        By default the environment variable ``FLUXUTILS_ABORT_AFTER``; without it the rank waits
        forever.

    Attributes
    ----------
    describe_wait : callable, optional
        Returns the call that this rank waits in, and advice, both for messages. While it is None or
        returns None, a rank waits in silence and as long as it takes.

    Notes
    -----
    A subclass starts the requests. It calls ``__init__`` and sets ``rank`` and ``size``.
    """

    launcher: ClassVar[str]  # as detect_launcher returns it
    rank: int
    size: int

    def __init__(self, patience: float | None = None, abort_after: float | None = None) -> None:
        self.patience = _read_seconds("patience", patience, PATIENCE) or 60.0
        self.abort_after = _read_seconds("abort_after", abort_after, ABORT_AFTER)
        self.describe_wait: Callable[[], tuple[str, str] | None] | None = None
        self.places: list[Place] = []  # of all ranks, once they have met
        self._has_met = False
        self._n_waits = 0  # the same on all ranks: collectives come in the same order

    @classmethod
    @functools.cache
    def world(cls) -> Self:
        """All ranks that the launcher started; one communicator per process."""
        return cls()

    # -- collectives -------------------------------------------------------------------------------

    def allreduce_(self, t: Tensor) -> None:
        self._connect_once()
        self._wait_until(self._start_allreduce(t))

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        self._connect_once()
        self._wait_until(self._start_broadcast(t, root))

    def barrier(self) -> None:
        self.allreduce_(torch.zeros(1))

    def allgather(self, obj: Any) -> list[Any]:
        self._connect_once()
        data = pickle.dumps(obj)
        frames = self._allgather_bytes(len(data).to_bytes(8, "little") + data[: FRAME - 8], FRAME)
        sizes = [int.from_bytes(frame[:8], "little") for frame in frames]
        if max(sizes) <= FRAME - 8:
            pickles = [frame[8:] for frame in frames]
        elif max(sizes) * self.size <= GATHERED_AT_ONCE:
            pickles = self._allgather_bytes(data, max(sizes))
        else:
            # sent by one rank after the other
            owners = enumerate(sizes)
            parts = [_as_tensor(data if r == self.rank else b"", size) for r, size in owners]
            for root, part in enumerate(parts):
                self._wait_until(self._start_broadcast(part, root))
            pickles = [part.numpy().tobytes() for part in parts]
        # bytes behind the end of a pickle are ignored
        return [pickle.loads(content) for content in pickles]

    def _allgather_bytes(self, data: bytes, size: int) -> list[bytes]:
        everything = torch.empty(self.size * size, dtype=torch.uint8)
        self._wait_until(self._start_allgather(_as_tensor(data, size), everything))
        flat = everything.numpy().tobytes()
        return [flat[r * size : (r + 1) * size] for r in range(self.size)]

    def _connect_once(self) -> None:
        """Connect the ranks at their first collective, and exchange their places."""
        if not self._has_met:
            self._wait_until(self._start_connecting())
            self._has_met = True
            self.places = self.allgather((platform.node(), os.getpid()))

    # -- waiting -----------------------------------------------------------------------------------

    def _wait_until(self, is_complete: Request) -> None:
        self._n_waits += 1
        try:
            for _ in range(LOOKS):
                if is_complete():
                    return
            self._wait_longer(is_complete)
        except BaseException:
            _abandoned.append(is_complete)
            raise

    def _wait_longer(self, is_complete: Request) -> None:
        began = time.monotonic()
        n_warnings = 0
        is_announced = False
        yielding = YIELDING
        with contextlib.ExitStack() as announced:
            while not is_complete():  # Python's signal handlers run between these
                seconds = time.monotonic() - began
                if seconds < yielding:
                    _offer_processor()
                    if time.monotonic() - began - seconds > TAKEN:
                        yielding = YIELDING_SHARED
                    continue
                time.sleep(min(seconds / 20, LONGEST_PAUSE))
                if not is_announced and seconds > min(ANNOUNCED_AFTER, self.patience / 4):
                    announced.enter_context(self._announce_wait(self._n_waits))
                    is_announced = True
                if self.abort_after is not None and seconds > self.abort_after:
                    self._end_job(seconds)
                elif seconds > self.patience * (n_warnings + 1):
                    n_warnings += 1
                    text = self._describe_delay(seconds, self._missing_ranks())
                    if text is not None:
                        warn(text, RuntimeWarning)

    def _missing_ranks(self) -> list[int] | None:
        """Return the ranks that do not wait in this collective; None if that is unknown."""
        announced = self._announced_ranks(self._n_waits)
        if announced is None:
            return None
        return [r for r in range(self.size) if r != self.rank and r not in announced]

    def _describe_delay(self, seconds: float, missing: list[int] | None) -> str | None:
        described = None if self.describe_wait is None else self.describe_wait()
        if described is None:
            return None
        if missing is None:
            who = "for other ranks"
        elif not missing:
            who = "though all ranks are there, so the network may be down"
        else:
            who = f"for {name_ranks(missing)}"
            if self.places:
                places = [self.places[r] for r in missing]
                who += f" ({', '.join(f'process {n} on {host}' for host, n in places)})"
        call, advice = described
        return f"rank {self.rank} has been waiting in {call} for {seconds:.0f} s, {who}. {advice}"

    def _end_job(self, seconds: float) -> None:
        missing = self._missing_ranks()
        text = self._describe_delay(seconds, missing)
        if text is None:
            return
        sys.stdout.flush()
        print(
            f"fluxutils_py ends the job: {text} (abort_after={self.abort_after:g})",
            file=sys.stderr,
            flush=True,
        )
        self._abort_job([self.places[r] for r in missing or () if self.places])

    # -- to be defined by subclasses ---------------------------------------------------------------

    @abstractmethod
    def is_open(self) -> bool:
        """Whether collectives are still possible."""

    @abstractmethod
    def _start_connecting(self) -> Request:
        """Start the first collective, in which ranks only meet."""

    @abstractmethod
    def _start_allreduce(self, t: Tensor) -> Request: ...

    @abstractmethod
    def _start_broadcast(self, t: Tensor, root: int) -> Request: ...

    @abstractmethod
    def _start_allgather(self, part: Tensor, everything: Tensor) -> Request: ...

    @abstractmethod
    def _announce_wait(self, n: int) -> contextlib.AbstractContextManager[Any]:
        """Tell the other ranks that this one waits in its ``n``-th collective."""

    @abstractmethod
    def _announced_ranks(self, n: int) -> set[int] | None:
        """Return the ranks known to wait in the ``n``-th collective; None if there is no way to
        know.
        """

    @abstractmethod
    def _abort_job(self, missing: list[Place]) -> None:
        """End all ranks with exit status ``STATUS``."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        return _world_of, (type(self),)


def _world_of(comm_class: type[LaunchedComm]) -> LaunchedComm | SingleProcessComm:
    """Return the communicator to use in the process that unpickles one."""
    if detect_launcher() == comm_class.launcher:
        return comm_class.world()
    return SingleProcessComm()


def _read_seconds(name: str, given: float | None, variable: str) -> float | None:
    """Return a number of seconds as given, or from an environment variable; None without either."""
    text = os.environ.get(variable, "").strip()
    if given is None and not text:
        return None
    try:
        seconds = float(text if given is None else given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        value = f"{variable}={text!r} in the environment" if given is None else repr(given)
        raise ValueError(f"{name} must be a number of seconds above 0, got {value}")
    return seconds


def _as_tensor(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


_offer_processor = getattr(os, "sched_yield", functools.partial(time.sleep, 0))
