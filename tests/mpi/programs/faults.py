"""Everything that can go wrong on one rank: all ranks must hear of it in the same step, and be able
to go on.

Every rank runs all cases; what each raised, and what was left, is written by rank 0 for the test to
read.
"""

import functools
import json
import os
import signal
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.bobbin import assert_replica_integrity, gather_from_processes
from fluxutils_py.nn import LSTM
from fluxutils_py.training import Checkpointer, EveryNSteps, StopTraining

rank = MPI.COMM_WORLD.rank
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 13, 30))
y = x.mean(0, keepdims=True)
torch.manual_seed(rank)  # models differ until they are broadcast
# on 3 ranks 9 steps per epoch: windows of 3 groups of series
SPEC = Spec(epochs=2, batchsize=2, seqsize=10)


def model():
    return nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)).double()


class Boom(Exception):
    pass


def on(event, n, action, only=1):
    """A callback that does something on one rank at the n-th event."""

    class Callback:
        def __init__(self):
            self.n = 0

    def method(self, loop):
        self.n += 1
        if self.n == n and rank == only:
            action(loop)

    setattr(Callback, f"on_{event}", method)
    return Callback()


def boom(*_):
    raise Boom("here")


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def mute(*_):
    raise Mute


def shout(*_):
    raise Boom("!" * 10**7)


class Together:
    """A callback that all ranks call together."""

    collective = True

    def __init__(self, trigger):
        self.trigger = trigger

    def on_step(self, loop):
        loop.ranks.allgather()


def leave(*_):
    sys.exit(3)


def stop(*_):
    raise StopTraining


def send(number):
    return lambda *_: os.kill(os.getpid(), number)


class Loss:
    """Mean squared error, with an accident in the n-th call on one rank."""

    def __init__(self, n, accident, only=1):
        self.n, self.accident, self.only, self.calls = n, accident, only, 0

    def __call__(self, m, xs, ys):
        value = F.mse_loss(m(xs), ys)
        self.calls += 1
        return self.accident(value) if self.calls == self.n and rank == self.only else value

    def __repr__(self):
        return "Loss()"


class NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("nan")


class Unreadable:
    """An array of which one rank cannot read all."""

    def __init__(self, a, reads):
        self.a, self.shape, self.dtype, self.reads = a, a.shape, a.dtype, reads

    def __getitem__(self, key):
        self.reads -= 1
        if self.reads < 0 and rank == 1:
            raise OSError("disk on fire")
        return self.a[key]


class Optimizer(torch.optim.Adam):
    """Fails on one rank, half done."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made == 3 and rank == 1:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
            boom()
        return super().step(closure)


def est(m=None, loss=F.mse_loss, opt=None, spec=SPEC, verbose=False, **kw):
    return Estimator(
        model() if m is None else m, loss, opt, spec, random_state=0, verbose=verbose, **kw
    )


def fit(e, xs=x, ys=y, **kw):
    return e, lambda: e.fit(xs, ys, **kw)


def refit(e):
    return e, lambda: e.fit(x, y).fit(x, y)


def method(e):
    return e, lambda: only1(e.fit, e.partial_fit)(x, y)


def only1(a, b):
    return b if rank == 1 else a


def raising(value):
    raise Boom("here")


LAST = 3 * -(-13 // (2 * MPI.COMM_WORLD.size))  # steps of an epoch
CASES = {
    "loss": fit(est(loss=Loss(5, raising))),
    "loss of two": fit(est(loss=Loss(5, raising, only=max(rank, 1)))),
    "first step": fit(est(loss=Loss(1, raising))),
    "accumulating": fit(est(loss=Loss(5, raising), spec=Spec(2, 2, 10, accumulate=2))),
    "nan loss": fit(est(loss=Loss(5, lambda v: v * float("nan")))),
    "nan gradient": fit(est(loss=Loss(5, NaNGradient.apply))),
    "nan gradient accumulated": fit(
        est(loss=Loss(5, NaNGradient.apply), spec=Spec(2, 2, 10, accumulate=2))
    ),
    "interrupt in the loss": fit(
        est(loss=Loss(5, lambda v: [os.kill(os.getpid(), signal.SIGINT), v][1]))
    ),
    "interrupt": fit(est(callbacks=on("step", 4, send(signal.SIGINT)))),
    "terminate": fit(est(callbacks=on("step", 4, send(signal.SIGTERM)))),
    "exit": fit(est(callbacks=on("step", 4, leave))),
    "on_start": fit(est(callbacks=on("start", 1, boom))),
    "on_step": fit(est(callbacks=on("step", 4, boom))),
    "last step of an epoch": fit(est(callbacks=on("step", LAST, boom))),
    "last step": fit(est(callbacks=on("step", 2 * LAST, boom))),
    "on_epoch": fit(est(callbacks=on("epoch", 1, boom)), validation_data=(x, y)),
    "on_end": fit(est(callbacks=on("end", 1, boom))),
    "on_close": fit(est(callbacks=on("close", 1, boom))),
    "refit": refit(est(callbacks=on("step", 2 * LAST + 4, boom))),
    "refit interrupted": refit(est(callbacks=on("step", 2 * LAST + 4, send(signal.SIGINT)))),
    "optimizer": fit(est(opt=Optimizer)),
    "reading": fit(est(), Unreadable(x, 12)),
    "reading at the start": fit(est(), Unreadable(x, 0)),
    "validation": fit(est(), validation_data=(x, Unreadable(y, 5))),
    "arguments": fit(est(), only1(x, x[:, :, :7])),
    "no model": fit(est(m=only1(model(), 5))),
    "other model": fit(est(only1(model(), nn.Sequential(LSTM(3, 5), nn.Linear(5, 1)).double()))),
    "other order": fit(est(only1(model(), nn.Sequential(nn.Identity(), *model())))),
    "other dtype": fit(est(), only1(x, x.astype("float32"))),
    "other spec": fit(est(spec=only1(SPEC, Spec(2, 3, 10)))),
    "other data": fit(est(), x + rank),
    "other sizes": fit(est(), only1(x, x[:, :12]), only1(y, y[:, :12])),
    "other optimizer": fit(
        est(opt=only1(torch.optim.Adam, functools.partial(torch.optim.Adam, lr=0.1)))
    ),
    "other validation": fit(est(), validation_data=only1((x, y), None)),
    "other epochs": fit(est(spec=only1(SPEC, Spec(5, 2, 10)))),
    "other epochs of fit": fit(est(), epochs=only1(2, 3)),
    "other method": method(est()),
    "other checkpoints": fit(
        est(callbacks=only1([], [Checkpointer(os.path.join(tempfile.gettempdir(), "one"))]))
    ),
    "other triggers": fit(est(callbacks=[Together(only1(EveryNSteps(2), EveryNSteps(3)))])),
    "other hooks": fit(est(callbacks=only1([Together(EveryNSteps(2))], []))),
    "own hooks": fit(
        est(callbacks=only1([], [lambda loop: None]))
    ),  # not called together: they may differ
    "own verbosity": fit(est(verbose=only1(False, 1))),
    "other return_state": (None, lambda: good.predict(x, return_state=only1(False, True))),
    "other gradient": (None, lambda: good.evaluate(x, y, gradient=only1(False, True))),
    "error without text": fit(est(loss=Loss(5, mute))),
    "error of any length": fit(est(loss=Loss(5, shout))),
    "other call": (None, lambda: good.predict(x) if rank == 1 else good.score(x, y)),
    "stop": fit(est(callbacks=on("step", 4, stop))),
    "loop.stop()": fit(est(callbacks=on("step", 4, lambda loop: loop.stop()))),
    "stop while accumulating": fit(
        est(callbacks=on("step", 4, stop), spec=Spec(2, 2, 10, accumulate=3))
    ),
    "stop on_epoch": fit(est(callbacks=on("epoch", 1, stop))),
    "predict": (None, lambda: good.predict(only1(x, x[:2]))),
    "predict reading": (None, lambda: good.predict(Unreadable(x, 0))),
    "score": (None, lambda: good.score(x, only1(y, y[:, :3]))),
}


def outcome(e, call):
    """What a case raised here, and how many updates there are in what is left."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    error, updates = None, 0
    try:
        call()
    except BaseException as caught:  # SystemExit and KeyboardInterrupt are cases too
        error = (
            "Mute without text"
            if isinstance(caught, Mute)
            else f"{type(caught).__name__}: {caught}"
        )
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    if hasattr(e, "model_"):
        assert torch.isfinite(net2vec(e)).all()
        assert all(p.grad is None for p in e.model_.parameters())
        state = [v for s in e.optimizer_.state.values() for v in s.values()]
        assert_replica_integrity([e.model_, state, e.n_iter_, e.loss_curve_], atol=0, rtol=0)
        updates = int(state[0])
    return error, updates


def main(folder):
    found = {}
    for name, case in CASES.items():
        found[name] = gather_from_processes(outcome(*case))
        again = est(m=good.model, spec=short).fit(x, y)  # the same communicator goes on working
        assert torch.equal(net2vec(again), expected), name
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


short = Spec(1, 2, 30)
good = est(spec=short).fit(x, y)
expected = net2vec(good)
