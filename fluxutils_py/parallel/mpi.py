"""Ranks under MPI, through mpi4py. The only file that imports it, and not before it is needed: that starts MPI."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

PATIENCE = 60.0  # seconds before it is said who has not come
QUIET = 1.0  # seconds of waiting after which a rank writes its name on the board


class MPIComm:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Duplicated, so that messages of the user's own never meet ours. By default ``COMM_WORLD``.
    patience : float
        Seconds after which ranks that do not come are named in a warning, again and again.
    cuda_aware : bool
        Hand tensors on a GPU to MPI as they are. Only for an MPI library that was built for it: others crash.

    Notes
    -----
    A copy is the same communicator. Pickled and read in another process it is what ``comm="auto"`` is there.
    """

    def __init__(self, comm: Any = None, *, patience: float = PATIENCE, cuda_aware: bool = False) -> None:
        MPI = _mpi()
        self.patience, self.cuda_aware = patience, cuda_aware
        origin = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = origin.rank, origin.size
        self._origin = origin
        self._comm: Any = None  # duplicated by the first meeting: that is a collective as well
        self._meetings = 0

    def allreduce_(self, t: Tensor) -> None:
        self._ready().Allreduce(_mpi().IN_PLACE, self._buffer(t))

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        self._ready().Bcast(self._buffer(t), root)

    def allgather(self, obj: Any) -> list[Any]:
        return self._ready().allgather(obj)

    def barrier(self) -> None:
        self._ready().Barrier()

    def monitored_barrier(self, missing: Callable[[list[int] | None, float], None]) -> None:
        """A barrier that calls ``missing(ranks, seconds)`` when some do not come; ``ranks`` is None if unknown."""
        self._meetings += 1
        if self._comm is None:
            self._comm, request = self._origin.Idup()
        else:
            request = self._comm.Ibarrier()
        began, pause, warned = time.monotonic(), 1e-5, 0
        with contextlib.ExitStack() as board:
            on_board = False
            while not request.Test():
                time.sleep(pause)  # Python's signal handlers run between these
                pause = min(2 * pause, 0.02)
                waited = time.monotonic() - began
                if not on_board and waited > min(QUIET, self.patience / 4):
                    board.enter_context(_on_board(self._name(self.rank)))
                    on_board = True
                if waited > self.patience * (warned + 1):
                    warned += 1
                    missing(self._missing(), waited)

    def _missing(self) -> list[int] | None:
        """The ranks whose name is not on the board."""
        MPI, found = _mpi(), []
        try:
            MPI.Lookup_name(self._name(self.rank))
        except MPI.Exception:  # a launcher without a name server
            return None
        for rank in range(self.size):
            try:
                MPI.Lookup_name(self._name(rank))
            except MPI.Exception:
                found.append(rank)
        return found

    def _name(self, rank: int) -> str:
        return f"fluxutils_py meeting {self._meetings} rank {rank} of {self.size}"

    def _ready(self) -> Any:
        if self._comm is None:
            self._comm = self._origin.Dup()
        return self._comm

    def _buffer(self, t: Tensor) -> Any:
        return t if t.is_cuda else t.numpy()

    def __deepcopy__(self, memo: Any) -> MPIComm:
        return self

    def __reduce__(self) -> Any:
        from fluxutils_py.parallel.comm import get_communicator

        return get_communicator, ("auto",)


@functools.cache
def world() -> MPIComm:
    """All ranks that ``mpirun`` started; one communicator per process."""
    return MPIComm()


@contextlib.contextmanager
def abort_on_exception() -> Iterator[None]:
    """End all ranks of a script when one of them fails.

    ``fit``, ``predict`` and ``score`` see to it themselves that an error on one rank is one on all. A rank that fails
    elsewhere, or calls ``sys.exit`` with a status other than 0, would leave the others waiting for it; within this,
    it ends them as it ends itself. The same as ``python -m mpi4py script.py``, for a part of a script.

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
        from fluxutils_py.parallel.comm import detect_launcher

        if detect_launcher() == "mpi" and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _mpi()
            from mpi4py.run import set_abort_status

            set_abort_status(error)  # this process prints its error and ends as usual, and takes the others with it
        raise


@contextlib.contextmanager
def _on_board(name: str) -> Iterator[None]:
    """Have a name looked up by others for a while, if the launcher has a name server."""
    MPI = _mpi()
    try:
        MPI.Publish_name(name, "here")
    except MPI.Exception:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(MPI.Exception):
            MPI.Unpublish_name(name, "here")


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"training over MPI ranks needs mpi4py and an MPI library ({error}): pip install fluxutils_py[mpi]; "
            "or use comm=None to train in each process alone"
        ) from error
    return MPI
