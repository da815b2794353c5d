"""Ranks under torch.distributed, started by ``torchrun``."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import platform
import signal
import weakref
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from fluxutils_py.parallel.launched_comm import STATUS, LaunchedComm, Place, Request


class TorchComm(LaunchedComm):
    """The ranks of torch.distributed, initialised with gloo unless it already is.

    Parameters
    ----------
    patience : float, optional
        A rank that waits for others in a call, such as ``fit``, warns every so many seconds which
        ranks are missing. The default is the environment variable ``FLUXUTILS_PATIENCE``, or 60.
    abort_after : float, optional
        A rank that waits so many seconds in a call ends the job, with a message. The default is the
        environment variable ``FLUXUTILS_ABORT_AFTER``; without it ranks wait forever, and gloo for
        half an hour. Choose more than the longest time that one rank works alone, such as for
        writing a checkpoint.

    Notes
    -----
    It has a separate gloo group, so that your messages never meet those of the package. A copy
    is the same communicator. Unpickling gives the communicator of ``comm="auto"`` in that process.

    ``abort_after`` ends this process with exit status 75, and kills the missing ranks on its
    machine, to which ``torchrun`` would give half a minute. ``torchrun`` then ends the others and
    reports status 1.
    """

    launcher = "torch"

    def __init__(self, *, patience: float | None = None, abort_after: float | None = None) -> None:
        super().__init__(patience, abort_after)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            atexit.register(dist.destroy_process_group)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        # not promised by torch: without it, no rank learns where the others wait
        self._store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
        self._name = f"fluxutils_py group {next(_numbers)}"
        _alive.add(self)

    def is_open(self) -> bool:
        return dist.is_initialized()

    def _start_connecting(self) -> Request:
        return _poll_work(dist.barrier(group=self._group, async_op=True))

    def _start_allreduce(self, t: Tensor) -> Request:
        return _poll_work(dist.all_reduce(t, group=self._group, async_op=True))

    def _start_broadcast(self, t: Tensor, root: int) -> Request:
        return _poll_work(dist.broadcast(t, root, group=self._group, async_op=True))

    def _start_allgather(self, part: Tensor, everything: Tensor) -> Request:
        parts = list(everything.chunk(self.size))
        return _poll_work(dist.all_gather(parts, part, group=self._group, async_op=True))

    @contextlib.contextmanager
    def _announce_wait(self, n: int) -> Iterator[None]:
        if self._store is not None:
            self._store.set(self._rank_key(self.rank), str(n))
        yield

    def _announced_ranks(self, n: int) -> set[int] | None:
        if self._store is None:
            return None
        waiting = set()
        for rank in range(self.size):
            key = self._rank_key(rank)
            # get would wait for a key that is not there
            if self._store.check([key]) and self._store.get(key) == b"%d" % n:
                waiting.add(rank)
        return waiting

    def _rank_key(self, rank: int) -> str:
        return f"{self._name} rank {rank} of {self.size}"

    def _abort_job(self, missing: list[Place]) -> None:
        for host, process in missing:
            # ranks on other machines are out of reach
            if host == platform.node():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process, signal.SIGKILL)
        os._exit(STATUS)

    def release_group(self) -> None:
        """End the threads of the group; no collective is possible afterwards."""
        del self._group


def _poll_work(work: dist.Work) -> Request:
    def is_complete() -> bool:
        if not work.is_completed():
            return False
        work.wait()  # raises the error of the collective, if it failed
        return True

    return is_complete


_numbers = itertools.count()
_alive: weakref.WeakSet[TorchComm] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """End gloo's threads before the interpreter exits: one that still cleans up after a message
    would abort it.
    """
    TorchComm.world.cache_clear()
    for comm in list(_alive):
        comm.release_group()
