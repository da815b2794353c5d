"""Train on maps of HDF5 files, on any number of processes; started again, go on from the last
checkpoint.

    python train.py FOLDER                                  one process
    mpirun -n 4 python train.py FOLDER                      four, under MPI
    torchrun --nproc-per-node 4 train.py FOLDER             four, under torch.distributed

FOLDER, which all nodes see, has a file ``train.h5`` with datasets ``x`` and ``y`` of shape (F, N,
T), as ``h5save`` writes them. Training writes ``checkpoints`` there, and at the end ``model.pt``.
"""

import sys
from pathlib import Path

from torch import nn

from fluxutils_py import Estimator, h5mmap
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps

folder = Path(sys.argv[1])
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 20
x, y = (h5mmap(folder / "train.h5", name) for name in ("x", "y"))  # nothing is read yet


def network(n_in, n_out):  # a function: its initial weights come from random_state
    return nn.Sequential(LSTM(n_in, 64), nn.Linear(64, n_out))


est = Estimator(
    network,
    spec={"epochs": epochs, "batchsize": 64, "seqsize": 100, "shuffle": True},
    callbacks=Checkpointer(folder / "checkpoints", keep=2, trigger=EveryNSteps(500)),
    random_state=0,
    verbose=True,
)
est.fit(x, y)  # SIGTERM and SIGUSR1 save a checkpoint and end the program with status 143 and 138
r2 = est.score(x, y)
est.save(folder / "model.pt")  # rank 0 writes
print(f"R2 {r2:.4f} after {est.n_iter_} epochs")
