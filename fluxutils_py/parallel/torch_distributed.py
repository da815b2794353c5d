"""Ranks under torch.distributed, as ``torchrun`` starts them."""

from __future__ import annotations

import atexit
import functools
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fluxutils_py.parallel.mpi import PATIENCE


class TorchComm:
    """The ranks of torch.distributed, which is initialised with gloo if it is not yet.

    Parameters
    ----------
    patience : float
        Seconds after which ranks that do not come are named in a warning, again and again.

    Notes
    -----
    Has a gloo group of its own, so that traffic of the user's own never meets ours. A copy is the same communicator.
    Pickled and read in another process it is what ``comm="auto"`` is there.
    """

    def __init__(self, *, patience: float = PATIENCE) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            atexit.register(dist.destroy_process_group)
        self.patience = patience
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        _alive.add(self)
        self._number = next(_numbers)
        self._meetings = 0

    def allreduce_(self, t: Tensor) -> None:
        dist.all_reduce(t, group=self._group)

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        dist.broadcast(t, root, group=self._group)

    def allgather(self, obj: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, obj, group=self._group)
        return found

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def monitored_barrier(self, missing: Callable[[list[int] | None, float], None]) -> None:
        """A barrier that calls ``missing(ranks, seconds)`` when some do not come; ``ranks`` is None if unknown."""
        self._meetings += 1
        store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()  # not promised by torch
        if store is not None:
            store.set(self._name(self.rank), "here")
        request = dist.barrier(group=self._group, async_op=True)
        began, pause, warned = time.monotonic(), 1e-5, 0
        while not request.is_completed():
            time.sleep(pause)  # Python's signal handlers run between these
            pause = min(2 * pause, 0.02)
            waited = time.monotonic() - began
            if waited > self.patience * (warned + 1):
                warned += 1
                ranks = range(self.size)
                missing(None if store is None else [r for r in ranks if not store.check([self._name(r)])], waited)
        request.wait()

    def _name(self, rank: int) -> str:
        return f"fluxutils_py group {self._number} meeting {self._meetings} rank {rank}"

    def __deepcopy__(self, memo: Any) -> TorchComm:
        return self

    def __reduce__(self) -> Any:
        from fluxutils_py.parallel.comm import get_communicator

        return get_communicator, ("auto",)


@functools.cache
def world() -> TorchComm:
    """All ranks of torch.distributed; one communicator per process."""
    return TorchComm()


_numbers = itertools.count()


_alive: weakref.WeakSet[TorchComm] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """Have the threads of gloo end before the interpreter: one that still cleaned up after a message would abort it."""
    world.cache_clear()
    for comm in list(_alive):
        del comm._group
