"""Who takes part: one process, or the ranks that a launcher started."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any, Protocol

from torch import Tensor

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # Open MPI; MPICH, Intel MPI, srun; MVAPICH
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "LOCAL_RANK",
    "SLURM_LOCALID",
)
METHODS = ("rank", "size", "allreduce_", "broadcast_", "allgather", "barrier")


class Communicator(Protocol):
    """What this package asks of the processes that work together.

    Every method is to be called by all ranks, in the same order. An object of one's own with these serves as ``comm``.

    Attributes
    ----------
    rank, size : int
        Which process this is, from 0, of how many.
    """

    rank: int
    size: int

    def allreduce_(self, t: Tensor) -> None:
        """Sum over all ranks, in place; ``t`` is contiguous, in main memory, and of one shape and type everywhere."""

    def broadcast_(self, t: Tensor, root: int = 0) -> None:
        """Overwrite ``t`` with that of rank ``root``; contiguous and alike as for :meth:`allreduce_`."""

    def allgather(self, obj: Any) -> list[Any]:
        """The objects of all ranks, in their order. Pickled: for small things."""

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


def get_communicator(comm: Any) -> Communicator:
    """The communicator that an estimator's ``comm`` argument means.

    Parameters
    ----------
    comm : "auto", "mpi", "torch", None, or a communicator
        ``"auto"`` looks for the variables that ``mpirun``, ``srun`` and ``torchrun`` set, and starts neither MPI nor
        torch.distributed without them. In child processes and threads, such as joblib's workers, it means this
        process alone, since the variables there are those of the parent. None: this process alone.

    Raises
    ------
    ImportError
        If MPI is asked for, or ``mpirun`` started this, and mpi4py is not installed.
    RuntimeError
        For ``"mpi"`` in a child process.
    ValueError
        For anything else.
    """
    if comm == "auto" if isinstance(comm, str) else comm is None:
        comm = detect_launcher() if comm == "auto" else None
        if comm is None:
            return SingleProcessComm()
    if isinstance(comm, str) and comm == "mpi":
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "comm='mpi' in a child process, which is no rank of its own; use comm='auto', which is this process "
                "alone here, or do without child processes (n_jobs=1)"
            )
        from fluxutils_py.parallel.mpi import world  # loads mpi4py, which starts MPI

        return world()
    if isinstance(comm, str) and comm == "torch":
        from fluxutils_py.parallel.torch_distributed import world as torch_world

        return torch_world()
    if not isinstance(comm, str | type) and all(hasattr(comm, name) for name in METHODS):
        return comm
    raise ValueError(
        f"comm must be 'auto', None, 'mpi', 'torch' or a communicator (an object with {', '.join(METHODS)}), "
        f"got {comm!r}"
    )


def detect_launcher() -> str | None:
    """What started the ranks that this process is one of: ``"mpi"``, ``"torch"``, or None if it is on its own."""
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return None
    sizes = [int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdigit()]
    if "PMIX_RANK" in os.environ:  # srun --mpi=pmix
        sizes.append(int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)))
    if max(sizes, default=1) > 1:
        return "mpi"
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return "torch"
    return None


def local_rank() -> int:
    """Which rank of those on this machine this is, as its launcher says; 0 if none does."""
    return next((int(os.environ[name]) for name in LOCAL_RANKS if os.environ.get(name, "").isdigit()), 0)
