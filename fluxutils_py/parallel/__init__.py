"""Training on several processes (ranks)."""

from fluxutils_py.parallel.communicator import Communicator
from fluxutils_py.parallel.mpi import MPIComm, abort_on_exception
from fluxutils_py.parallel.rank_group import RankGroup, get_communicator
from fluxutils_py.parallel.rank_group import is_main_process as is_main_process  # for other rooms
from fluxutils_py.parallel.torch_distributed import TorchComm

__all__ = [
    "Communicator",
    "MPIComm",
    "RankGroup",
    "TorchComm",
    "abort_on_exception",
    "get_communicator",
]
