"""Resolve the ``comm`` argument, and tell which process writes."""

from __future__ import annotations

import multiprocessing
from typing import Any

from fluxutils_py.parallel.communicator import METHODS, Communicator, SingleProcessComm
from fluxutils_py.parallel.launcher import detect_launcher
from fluxutils_py.parallel.mpi import MPIComm
from fluxutils_py.parallel.torch_distributed import TorchComm


def get_communicator(comm: Any) -> Communicator:
    """Return the communicator for a ``comm`` argument.

    Parameters
    ----------
    comm : "auto", "mpi", "torch", None, or a communicator
        ``"auto"`` looks for the environment variables that ``mpirun``, ``srun`` and ``torchrun``
        set; without them it starts neither MPI nor torch.distributed. In child processes and
        threads, such as joblib's workers, it means this process alone, and so does None.

    Raises
    ------
    ImportError
        If ``comm`` is "mpi", or ``mpirun`` started this process, and mpi4py is not installed.
    RuntimeError
        For ``"mpi"`` in a child process.
    ValueError
        For anything else.
    """
    if isinstance(comm, str) and comm == "auto":
        comm = detect_launcher()
    name = comm if isinstance(comm, str) else ""  # arrays and the like have no single truth of ==
    if comm is None:
        return SingleProcessComm()
    if name == "mpi":
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "comm='mpi' in a child process, which is no rank of its own; use comm='auto', "
                "which is this process alone here, or do without child processes (n_jobs=1)"
            )
        return MPIComm.world()
    if name == "torch":
        return TorchComm.world()
    if not isinstance(comm, str | type) and all(hasattr(comm, name) for name in METHODS):
        return comm
    raise ValueError(
        "comm must be 'auto', None, 'mpi', 'torch' or a communicator (an object with "
        f"{', '.join(METHODS)}), got {comm!r}"
    )


def is_main_process(state: Any = None, comm: Any = "auto") -> bool:
    """Whether this process writes files and prints: rank 0 does so for all.

    Parameters
    ----------
    state : optional
        A :class:`Loop`, or another object with ``ranks``: rank 0 of those writes. Objects without
        it are ignored.
    comm : "auto", "mpi", "torch", None or Communicator
        The ranks to use if ``state`` has none. None: every process writes.
    """
    ranks = getattr(state, "ranks", None)
    return (get_communicator(comm) if ranks is None else ranks).rank == 0
