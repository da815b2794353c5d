"""Fits in which one rank hangs for a while; what each rank was told meanwhile is written by rank 0."""

import json
import time
import warnings

import numpy as np
import torch.nn.functional as F

from fluxutils_py import Estimator, Spec
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import Checkpointer

PATIENCE, LONG = 0.3, 0.8  # seconds
COMM = get_communicator("auto")
X = np.random.default_rng(0).standard_normal((2, 9, 12))
SPEC = Spec(epochs=2, batchsize=1, seqsize=4)  # 9 steps per epoch on three ranks


class Hang:
    """Hangs on one rank, in the n-th call."""

    def __init__(self, rank, n):
        self.rank, self.n, self.calls = rank, n, 0

    def __call__(self):
        self.calls += 1
        if COMM.rank == self.rank and self.calls == self.n:
            time.sleep(LONG)


class Slow:
    """An array whose reading hangs."""

    def __init__(self, a, hang):
        self.a, self.shape, self.dtype, self.hang = a, a.shape, a.dtype, hang

    def __getitem__(self, key):
        self.hang()
        return self.a[key]


class SlowDisk(Checkpointer):
    """Hangs while rank 0 writes for the first time."""

    hang = Hang(0, 1)

    def write(self, *args, **kwargs):
        self.hang()
        return super().write(*args, **kwargs)


def hook(event, hang):
    return type("Hook", (), {f"on_{event}": lambda self, loop: hang()})()


def loss_with(hang):
    def loss(model, xs, ys):
        hang()
        return F.mse_loss(model(xs), ys)

    return loss


def fit(x=X, loss=None, **data):
    return lambda *callbacks: Estimator(
        None, loss, spec=SPEC, callbacks=callbacks, verbose=False
    ).fit(x, X[:1], **data)


def cases(folder):
    """By name: the rank that hangs, and a call."""
    steps, starts, ends = (
        hook("step", Hang(1, 4)),
        hook("start", Hang(0, 1)),
        hook("epoch", Hang(2, 1)),
    )
    good = Estimator(spec=SPEC, verbose=False).fit(X, X[:1])
    return {
        "loss": (1, fit(loss=loss_with(Hang(1, 3)))),
        "loss of rank 0": (0, fit(loss=loss_with(Hang(0, 3)))),
        "reading": (2, fit(Slow(X, Hang(2, 12)))),
        "validation": (1, fit(validation_data=(Slow(X, Hang(1, 8)), X[:1]))),
        "hook": (1, lambda: fit()(steps)),
        "hook at the start": (0, lambda: fit()(starts)),
        "hook of epochs": (2, lambda: fit()(ends)),
        "checkpoint": (0, lambda: fit()(SlowDisk(folder / "saves", keep=1))),
        "prediction": (1, lambda: good.predict(Slow(X, Hang(1, 1)))),
    }  # fmt: skip


def main(folder):
    assert COMM.patience == 60.0
    found = {}
    for name, (rank, call) in cases(folder).items():
        COMM.patience = PATIENCE
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            COMM.patience = 60.0
        found[name] = (
            rank,
            COMM.allgather([str(w.message) for w in caught if w.category is RuntimeWarning]),
        )
    if COMM.rank == 0:
        places = [f"process {process} on {host}" for host, process in COMM.places]
        (folder / "found.json").write_text(json.dumps({"found": found, "places": places}))
