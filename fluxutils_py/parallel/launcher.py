"""Detect the launcher by the variables that ``mpirun``, ``srun`` and ``torchrun`` set."""

from __future__ import annotations

import multiprocessing
import os
import threading

# of Open MPI; of MPICH, Intel MPI and srun; of MVAPICH
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "LOCAL_RANK",
    "SLURM_LOCALID",
)


def detect_launcher() -> str | None:
    """Return the launcher that started this process as one of several ranks: ``"mpi"``,
    ``"torch"``, or None.

    None in child processes and threads other than the main one, which inherit the variables.
    """
    is_child = multiprocessing.parent_process() is not None
    if is_child or threading.current_thread() is not threading.main_thread():
        return None
    size = int(os.environ.get("WORLD_SIZE", 1))
    # first, as srun or mpirun may have started one torchrun on each node
    if "TORCHELASTIC_RUN_ID" in os.environ and size > 1:
        return "torch"
    sizes = [int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdigit()]
    if "PMIX_RANK" in os.environ:  # srun --mpi=pmix
        sizes.append(int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)))
    return "mpi" if max(sizes, default=1) > 1 else None


def local_rank() -> int:
    """Return the index of this rank on its machine; 0 without a launcher."""
    texts = (os.environ.get(name, "") for name in LOCAL_RANKS)
    return next((int(text) for text in texts if text.isdigit()), 0)
