"""A rank dies in a task that the ranks share: mpirun ends the others."""

import os
import signal
import time

import joblib

from fluxutils_py.parallel import get_communicator


def task(i):
    if get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)


def get_rank():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))


assert get_communicator("auto").size == 2
with joblib.parallel_config("mpi"):
    joblib.Parallel()(joblib.delayed(task)(i) for i in range(20))
