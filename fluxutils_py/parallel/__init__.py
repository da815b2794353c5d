"""Processes and threads that train together."""

from fluxutils_py.parallel.andmask import maskedgrad, signalign
from fluxutils_py.parallel.comm import Communicator, SoloComm, get_communicator, local_rank
from fluxutils_py.parallel.gradients import (
    paralelization_stats,
    parallelization_stats,
    pgradient,
    tgradient,
    tree_reduce,
)
from fluxutils_py.parallel.integrity import (
    assert_replica_integrity,
    gather_from_jax_processes,
    gather_from_processes,
)
from fluxutils_py.parallel.mpi import MPIComm, abort_on_exception
from fluxutils_py.parallel.sync import Sync, by_rank
from fluxutils_py.parallel.threads import Threads, n_threads
from fluxutils_py.parallel.torchdist import TorchComm
from fluxutils_py.parallel.tpmap import tpmap

__all__ = [
    "Communicator",
    "MPIComm",
    "SoloComm",
    "Sync",
    "Threads",
    "TorchComm",
    "abort_on_exception",
    "assert_replica_integrity",
    "by_rank",
    "gather_from_jax_processes",
    "gather_from_processes",
    "get_communicator",
    "local_rank",
    "maskedgrad",
    "n_threads",
    "paralelization_stats",
    "parallelization_stats",
    "pgradient",
    "signalign",
    "tgradient",
    "tpmap",
    "tree_reduce",
]
