"""Fits that are stopped and go on with another number of ranks, again and again, on communicators
of 1 to 4 ranks.

Every rank runs all cases; what each chain of fits ended with is written by rank 0, beside the fit
of one process that was never stopped.
"""

import contextlib
import functools
import io
import json
import os
import time
import warnings

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import Adam, lr_scheduler

from fluxutils_py import Estimator, SequenceRegressor, Spec, net2vec
from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.errors import LoadError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import GRU, LRU, LSTM, TCN, MinGRU, SlidingWindowAttention
from fluxutils_py.parallel import MPIComm
from fluxutils_py.training import Checkpointer, EveryNSteps, Loop, TrainState
from tests.plain_networks import with_spec

EVERY_PAIR = [1, 2, 1, 3, 2, 3, 4, 2, 4, 1, 4, 3, 1]  # every pair of 1 to 4 ranks, both ways
SHORT = [3, 2, 4, 1]
EVERY = 4  # steps from one checkpoint to the next
N, T, B, S = 37, 43, 8, 10
RNG = np.random.default_rng(7)
X = RNG.standard_normal((3, N, T))
Y = X.cumsum(2).mean(0, keepdims=True) / 5 + 0.1 * RNG.standard_normal((1, N, T))
HOLES = np.where(RNG.random(Y.shape) < 0.2, np.nan, Y)
LENGTHS = RNG.integers(5, T + 1, N)
WEIGHT = np.where(RNG.random((N, T)) < 0.1, 0, RNG.random((N, T)))
LONG = RNG.standard_normal((3, 2, 401))


class Boom(Exception):
    pass


class Stops:
    def __init__(self, step):
        self.step = step

    def on_step(self, loop):
        if loop.step >= self.step:
            raise Boom


class Counts:
    """A hook that remembers."""

    name = "counter"

    def __init__(self):
        self.n = 0

    def on_step(self, loop):
        self.n += 1

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Moving(nn.Module):
    """Has a buffer that moves alike on all ranks, and one that counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.scale.mul_(0.99)
            self.n.add_(1)
        return x * (1 + 0.1 * self.scale.to(x.dtype))


def net(*first, n=3, cell=LSTM):
    torch.manual_seed(1)
    return nn.Sequential(*first, cell(n, 4), nn.Linear(4, 1))


def everything(make):
    spec = {
        "shuffle": True,
        "overlap": 3,
        "burn_in": 2,
        "accumulate": 3,
        "clip": 0.1,
        "patience": 5,
        "epochs": 3,
    }
    schedule = {
        "lr_schedule": ("step", functools.partial(lr_scheduler.StepLR, step_size=3)),
    }
    est = make(net(cell=functools.partial(GRU, num_layers=2)), **spec, **schedule)
    return est.fit(
        X, HOLES, WEIGHT, lengths=LENGTHS, validation_data=(X[:, :11, :17], -HOLES[:, :11, :17])
    )


def overlapping(make):
    torch.manual_seed(2)
    layers = TCN(3, 4, n_levels=2), SlidingWindowAttention(4, 4, 2, window=5)
    return make(net(*layers, n=4), overlap=4).fit(X, HOLES, lengths=LENGTHS)


def exact(make):
    torch.manual_seed(2)
    layers = LRU(3, 4), MinGRU(4, 4, trainable_init=True)
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    return make(model, gradient="exact", burn_in=3, shuffle=True).fit(X, HOLES, lengths=LENGTHS)


def folded(make):
    return make(net(Moving()), rebatch="auto", epochs=5, accumulate=2).fit(LONG, LONG[:1])


def single(make):
    return make(shuffle=True, overlap=2).fit(X.astype("float32"), HOLES.astype("float32"))


def ready_made(make):
    est = make(SequenceRegressor, early_stopping=True, patience=1, epochs=4)
    return est.fit(X, 1e3 + 50 * Y)


KINDS = (everything, overlapping, exact, folded, single, ready_made)
CASES = {f.__name__: f for f in KINDS}


def estimator(model=None, *, comm, callbacks=(), scaling="strong", batchsize=B, **spec):
    settings = {
        "comm": comm,
        "callbacks": list(callbacks),
        "random_state": 0,
        "verbose": False,
        "scaling": scaling,
    }
    sizes = {"epochs": 2, "batchsize": batchsize, "seqsize": S, **spec}
    if model is SequenceRegressor:  # which shuffles, and shares the work of one
        del settings["scaling"]
        return model(4, cell="lstm", **with_spec(sizes), **settings)
    opt = functools.partial(Adam, lr=0.01)
    return Estimator(net() if model is None else model, None, opt, Spec(**sizes), **settings)


def outcome(est):
    """Numbers that a fit leaves behind."""
    counts = [est.n_iter_, est.fitted_parts_.n_steps]
    losses = [est.loss_, *est.loss_curve_, *est.validation_loss_curve_, *counts]
    moments = [v for s in est.optimizer_.state_dict()["state"].values() for v in s.values()]
    tensors = [net2vec(est), est.grad_, *est.model_.buffers(), *moments]
    return np.concatenate(
        [np.asarray(losses, float), *(t.double().numpy().ravel() for t in tensors)]
    )


def barrier():
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def chain(folder, comms, case, ranks=SHORT, **settings):
    """Go through a fit on one number of ranks after the other; the last one ends it. What rank 0
    has in the end.
    """
    est, apart = None, EVERY * max(1, 36 // EVERY // (len(ranks) - 1))
    stops = [apart * (i + 1) + 2 for i in range(len(ranks) - 1)] + [10**9]
    for n, stop in zip(ranks, stops, strict=True):
        if comms[n] is not None:
            counts = Counts()
            callbacks = [counts, Stops(stop), Checkpointer(folder, trigger=EveryNSteps(EVERY))]
            made = []

            def make(*args, comm=comms[n], callbacks=callbacks, made=made, **spec):
                made.append(estimator(*args, comm=comm, callbacks=callbacks, **settings, **spec))
                return made[0]

            try:
                est = CASES[case](make)
                assert stop == 10**9, f"{case}: ended before step {stop}"
                assert counts.n == est.fitted_parts_.n_steps
            except Boom:
                assert stop != 10**9
        barrier()
    return outcome(est) if MPI.COMM_WORLD.rank == 0 else None


# -- training without an estimator ---------------------------------------------------------------------


def series_batches():
    """Windows of groups of 7, 7 and 5 series, which follow each other in time."""
    rng, batches = np.random.default_rng(3), []
    for n in (7, 7, 5):
        x = torch.from_numpy(rng.standard_normal((40, n, 3)))
        batches += [
            (x[t : t + 10], x[t : t + 10].cumsum(0).mean(2, keepdim=True)) for t in range(0, 40, 10)
        ]
    return batches


class Follows(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return nn.functional.mse_loss(model(batch[0].transpose(0, 1)), batch[1].transpose(0, 1))


class Windows:
    """Batches with the series first for a task; a group of series begins at every fourth."""

    def __init__(self, axis):
        self.batches = [
            tuple(v.transpose(0, 1) if axis == 0 else v for v in batch)
            for batch in series_batches()
        ]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def by_hand(comm, kind, folder=None, stop=10**9, batches="same"):
    model = net().double()
    if kind == "trainer":
        step = Trainer(
            model,
            nn.MSELoss(),
            Adam,
            comm=comm,
            axis=1,
            stateful=True,
            accumulate=2,
            clip=1.0,
            batches=batches,
        )
        state = {"model": model, "optimizer": step.optimizer}
    else:
        train = TrainState(0, model, Adam(model.parameters()))
        step = TaskStep(Follows(model), train, comm=comm, stateful=True, accumulate=3)
        state = train.parts()
    loop = Loop(step)
    loop.hooks.attach(Forgets(model))
    if folder is not None:
        saves = Checkpointer(folder, trigger=EveryNSteps(EVERY - 1)).track(**state, loop=loop)
        saves.restore()
        loop.hooks.attach(Stops(stop))
        loop.hooks.attach(saves)
    try:
        loop.run_epochs(Windows(1 if kind == "trainer" else 0), 3)
    except Boom:
        return None
    return np.concatenate([net2vec(model).numpy(), [record["loss"] for record in loop.history]])


class Forgets:
    """Resets the model after each group of series, which have other numbers."""

    def __init__(self, model):
        self.model = model

    def on_step(self, loop):
        if loop.epoch_step % 4 == 0:
            for layer in self.model:
                if hasattr(layer, "reset"):
                    layer.reset()


def chain_by_hand(folder, comms, kind):
    found = None
    for i, n in enumerate(SHORT):
        if comms[n] is not None:
            found = by_hand(comms[n], kind, folder, 10**9 if i == len(SHORT) - 1 else 7 * (i + 1))
        barrier()
    return found


def refusal(folder, comms):
    """What is said of checkpoints of ranks with batches of their own, on another number of ranks."""
    said = None
    for n in (2, 1):
        if comms[n] is not None:
            try:
                by_hand(comms[n], "trainer", folder, 6, batches="per_rank")
            except LoadError as error:
                said = str(error)
        barrier()
    return said


def lines(comms):
    """What is written to stderr by three ranks that fit twice, and once silently."""
    text = io.StringIO()
    if comms[3] is not None:
        with contextlib.redirect_stderr(text), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this fit makes [0-9]+ updates? in all")
            for verbose, scaling in (("auto", "strong"), (True, "strong"), (False, "weak")):
                est = estimator(comm=comms[3], scaling=scaling, epochs=1).set_params(
                    verbose=verbose
                )
                est.fit(X[:, :5], Y[:, :5])
    return MPI.COMM_WORLD.allgather(text.getvalue())


def main(folder):
    os.fsync = lambda handle: None  # slow, and against power cuts only
    rank, found, said = MPI.COMM_WORLD.rank, {}, {}
    comms = {}
    for n in (1, 2, 3, 4):
        part = MPI.COMM_WORLD.Split(0 if rank < n else MPI.UNDEFINED, rank)
        comms[n] = None if part == MPI.COMM_NULL else MPIComm(part)
    for case, fit in CASES.items():
        ended = chain(folder / case, comms, case, EVERY_PAIR if case == "everything" else SHORT)
        if rank == 0:
            found[case] = ended, outcome(fit(functools.partial(estimator, comm=None)))
    ended = chain(folder / "weak", comms, "everything", scaling="weak", batchsize=3)
    if rank == 0:
        found["weak"] = (
            ended,
            outcome(CASES["everything"](functools.partial(estimator, comm=None, batchsize=9))),
        )
    for kind in ("trainer", "task"):
        ended = chain_by_hand(folder / kind, comms, kind)
        if comms[4] is not None:
            found[kind] = ended, by_hand(None, kind)
    said["per_rank"], said["lines"] = refusal(folder / "per rank", comms), lines(comms)
    if rank == 0:
        ended, whole = (
            {f"{k} {w}": pair[i] for k, pair in found.items()}
            for i, w in enumerate(("elastic", "whole"))
        )
        np.savez(folder / "found.npz", **ended, **whole)
        (folder / "said.json").write_text(json.dumps(said))
