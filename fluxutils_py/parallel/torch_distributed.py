"""Ranks under torch.distributed, started by ``torchrun``."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fluxutils_py.parallel.communicator import PATIENCE, LaunchedComm


class TorchComm(LaunchedComm):
    """The ranks of torch.distributed, initialised with gloo unless it already is.

    Parameters
    ----------
    patience : float
        A warning names missing ranks every so many seconds.

    Notes
    -----
    It has a separate gloo group, so that your own messages never meet those of the package. A copy is the same
    communicator. Unpickling gives the communicator of ``comm="auto"`` in that process.
    """

    launcher = "torch"

    def __init__(self, *, patience: float = PATIENCE) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            atexit.register(dist.destroy_process_group)
        self.patience = patience
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()  # not promised by torch
        self._name = f"group {next(_numbers)}"
        _alive.add(self)

    def allreduce_(self, t: Tensor) -> None:
        dist.all_reduce(t, group=self._group)

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        dist.broadcast(t, root, group=self._group)

    def allgather(self, obj: Any) -> list[Any]:
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, obj, group=self._group)
        return objects

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def is_open(self) -> bool:
        return dist.is_initialized()

    def _start_barrier(self) -> Callable[[], bool]:
        work = dist.barrier(group=self._group, async_op=True)
        return lambda: work.is_completed() and work.wait()

    @contextlib.contextmanager
    def _publish(self, key: str) -> Iterator[None]:
        if self._store is not None:
            self._store.set(key, "here")
        yield

    def _is_published(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])


_numbers = itertools.count()
_alive: weakref.WeakSet[TorchComm] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """End gloo's threads before the interpreter exits: one that still cleans up after a message would abort it."""
    TorchComm.world.cache_clear()
    for comm in list(_alive):
        del comm._group
