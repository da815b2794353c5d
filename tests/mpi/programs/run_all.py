"""Run other programs of this folder on the same ranks: starting ranks takes longer than most of
them.

    mpirun -n 3 python run_all.py FOLDER PROGRAM ...
    torchrun --nproc-per-node 2 run_all.py FOLDER PROGRAM ...

Each program has ``main(folder)``, called on every rank with a folder of its own, which holds
``done`` after it.
"""

import importlib
import sys
from pathlib import Path

import fluxutils_py

if __name__ == "__main__":
    assert fluxutils_py.__file__
    assert "mpi4py" not in sys.modules  # importing the package does not start MPI
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        print(f"== {name}", flush=True)
        importlib.import_module(name).main(folder)
        from fluxutils_py.parallel import get_communicator

        comm = get_communicator("auto")
        comm.barrier()
        if comm.rank == 0:
            (folder / "done").touch()
