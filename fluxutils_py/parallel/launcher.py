"""Detect the launcher by the variables that ``mpirun``, ``srun`` and ``torchrun`` set."""

from __future__ import annotations

import multiprocessing
import os
import threading

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # Open MPI; MPICH, Intel MPI, srun; MVAPICH
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "LOCAL_RANK",
    "SLURM_LOCALID",
)


def detect_launcher() -> str | None:
    """Which launcher started the ranks that this process is one of: ``"mpi"``, ``"torch"``, or None.

    None in child processes and in threads other than the main one: the variables there are those of the parent.
    """
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
    """The number of this rank among those on the same machine, as the launcher says; 0 without a launcher."""
    return next((int(os.environ[name]) for name in LOCAL_RANKS if os.environ.get(name, "").isdigit()), 0)
