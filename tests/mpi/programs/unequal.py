"""Settings of which one differs between two ranks: the error that each rank gets; and checkpoints by time.

Every rank runs all cases; a case in which ranks made other collectives would hang, or end the program.
"""

import itertools
import json

import numpy as np
import torch
from torch import nn

from fluxutils_py import Estimator
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools.functional import train
from fluxutils_py.training import Checkpointer, Loop, StepInfo
from fluxutils_py.training.triggers import EveryNSeconds, EveryNSteps

RANKS = RankGroup.from_comm("auto", "test")
RANK = RANKS.rank
x = np.random.default_rng(0).normal(size=(3, 7, 11))
y = x[:1] + x[1:2]
SETTINGS = {
    "epochs": (2, 3),
    "batchsize": (2, 3),
    "seqsize": (4, 5),
    "overlap": (0, 1),
    "burn_in": (0, 1),
    "clip": (None, 1.0),
    "accumulate": (1, 2),
    "patience": (None, 2),
    "precision": ("float32", "bfloat16"),
    "shuffle": (False, True),
}


def estimator(callbacks=None, **spec):
    spec = {"epochs": 2, "batchsize": 2, "seqsize": 4, **spec}
    return Estimator(spec=spec, callbacks=callbacks, random_state=0, verbose=False)


def error_of(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run_steps(n):
    Loop(lambda batch: StepInfo(float(batch)), RANKS).run_steps([1, 2, 3, 4], n)


def train_parameters():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    batch = torch.ones(4, 3), torch.zeros(4, 1)
    train(lambda a, b: ((model(a) - b) ** 2).mean(), list(model.parameters()), lambda: batch, torch.optim.SGD, 2)


def main(folder):
    fitted = estimator().fit(x, y)
    fitted_more = estimator().fit(x, y)

    def go(train_more):
        if train_more:
            fitted_more.partial_fit(x, y)
        else:
            fitted_more.fit(x, y)

    def saves(trigger):
        return Checkpointer(folder / "never", trigger=trigger)

    weight = np.ones((7, 11))
    cases = {
        name: (lambda name=name, pair=pair: estimator(**{name: pair[RANK % 2]}).fit(x, y))
        for name, pair in SETTINGS.items()
    }
    cases |= {
        "epochs of the call": lambda: estimator().fit(x, y, epochs=1 + RANK % 2),
        "validation x": lambda: estimator().fit(x, y, validation_data=(x, y) if RANK else None),
        "weights": lambda: estimator().fit(x, y, weight if RANK else None),
        "checkpoint": lambda: estimator([saves(None)] if RANK else None).fit(x, y),
        "EveryNSteps": lambda: estimator([saves(EveryNSteps(2 + RANK))]).fit(x, y),
        "goes on": lambda: go(bool(RANK)),
        "different things": lambda: fitted.score(x, y) if RANK else fitted.predict(x),
        "return_state": lambda: fitted.predict(x, return_state=bool(RANK)),
        "sample_weight": lambda: fitted.score(x, y, weight if RANK else None),
        "gradient": lambda: fitted.evaluate(x, y, gradient=bool(RANK)),
        "batch norm": train_parameters,
        "steps": lambda: run_steps(2 + RANK),
    }
    found = {name: error_of(run) for name, run in cases.items()}
    clock = itertools.count(0, 10 if RANK == 0 else 0)  # that of rank 1 stands still
    trigger = EveryNSeconds(5, clock=lambda: float(next(clock)))
    by_time = Checkpointer(folder / "by-time", keep=-1, trigger=trigger)
    found["by time"] = error_of(lambda: estimator([by_time]).fit(x, y))
    answers = RANKS.allgather(found)
    if RANK == 0:
        (folder / "found.json").write_text(json.dumps({name: [a[name] for a in answers] for name in found}))
        (folder / "saved.json").write_text(json.dumps(sorted(p.name for p in (folder / "by-time").iterdir())))
