"""Ranks under MPI. Only this file imports mpi4py, and only when needed, because the import starts MPI."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fluxutils_py.parallel.communicator import PATIENCE, LaunchedComm
from fluxutils_py.parallel.launcher import detect_launcher


class MPIComm(LaunchedComm):
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        It is duplicated, so that your own messages never meet those of the package. The default is ``COMM_WORLD``.
    patience : float
        A warning names missing ranks every so many seconds.
    cuda_aware : bool
        Hand tensors on a GPU to MPI directly. Only for an MPI library that was built for it: others crash.

    Notes
    -----
    A copy is the same communicator. Unpickling gives the communicator of ``comm="auto"`` in that process.
    """

    launcher = "mpi"

    def __init__(self, comm: Any = None, *, patience: float = PATIENCE, cuda_aware: bool = False) -> None:
        self.patience, self.cuda_aware = patience, cuda_aware
        self._original = _mpi().COMM_WORLD if comm is None else comm
        self.rank, self.size = self._original.rank, self._original.size
        self._duplicate: Any = None  # made by the first collective, since it is one itself

    def allreduce_(self, t: Tensor) -> None:
        self._comm.Allreduce(_mpi().IN_PLACE, _buffer(t))

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        self._comm.Bcast(_buffer(t), root)

    def allgather(self, obj: Any) -> list[Any]:
        return self._comm.allgather(obj)

    def barrier(self) -> None:
        self._comm.Barrier()

    @contextlib.contextmanager
    def executor(self) -> Iterator[Any]:
        """Run functions on all other ranks: a ``concurrent.futures.Executor`` on rank 0; the others serve it, get None.

        All ranks enter the block together. Functions travel by name.
        """
        from mpi4py.futures import MPICommExecutor

        with MPICommExecutor(self._comm, 0) as executor:
            yield executor

    @property
    def _comm(self) -> Any:
        if self._duplicate is None:
            self._duplicate = self._original.Dup()
        return self._duplicate

    def is_open(self) -> bool:
        return not _mpi().Is_finalized()

    def _start_barrier(self) -> Callable[[], bool]:
        if self._duplicate is None:
            self._duplicate, request = self._original.Idup()
        else:
            request = self._duplicate.Ibarrier()
        return request.Test

    @contextlib.contextmanager
    def _publish(self, key: str) -> Iterator[None]:
        MPI = _mpi()
        try:
            MPI.Publish_name(key, "here")
        except MPI.Exception:  # a launcher without a name server
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(MPI.Exception):
                MPI.Unpublish_name(key, "here")

    def _is_published(self, key: str) -> bool:
        MPI = _mpi()
        try:
            MPI.Lookup_name(key)
        except MPI.Exception:
            return False
        return True


@contextlib.contextmanager
def abort_on_exception() -> Iterator[None]:
    """End all ranks of a script when one of them fails.

    Functions of this package that take ``comm`` raise an error of one rank on all ranks by themselves. A rank that
    fails elsewhere, or calls ``sys.exit`` with a status other than 0, may leave the others waiting; inside this block
    it ends them too. This is ``python -m mpi4py script.py`` for a part of a script.

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
        if detect_launcher() == "mpi" and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _mpi()
            from mpi4py.run import set_abort_status

            set_abort_status(error)  # this process prints its error and ends as usual, and takes the others with it
        raise


def require_script_on_all_ranks() -> None:
    """Raise RuntimeError if only rank 0 runs the script, and the others serve it."""
    core = sys.modules.get("mpi4py.futures._core")
    if core is not None and core.SharedPool is not None:
        raise RuntimeError(
            "python -m mpi4py.futures runs the script on rank 0 only, but all ranks must run it: "
            "mpirun -n 4 python script.py"
        )


def _buffer(t: Tensor) -> Any:
    return t if t.is_cuda else t.numpy()


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"training over MPI ranks needs mpi4py and an MPI library ({error}): pip install fluxutils_py[mpi]; "
            "or use comm=None to train in each process alone"
        ) from error
    return MPI
