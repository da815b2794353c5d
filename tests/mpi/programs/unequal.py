"""Settings of which one differs between two ranks: the error that each rank gets; and checkpoints
by time.

Every rank runs all cases; a case in which ranks made other collectives would hang, or end the
program.
"""

import itertools
import json
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from fluxutils_py import Estimator, SequenceScaler
from fluxutils_py.bobbin import BaseTrainTask
from fluxutils_py.bobbin.train_task import TaskStep
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools.functional import itrain, ptrain, train
from fluxutils_py.training import Checkpointer, Loop, StepInfo, TrainState
from fluxutils_py.training.triggers import EveryNSeconds, EveryNSteps
from fluxutils_py.transformers import SequenceImputer, WinsorScaler

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

OF_FORECASTER = {
    "h": (2, 3),
    "season_length": (7, (7,)),
    "freq": (1, None),
    "quantiles": ((), (0.1,)),
    "transform": ("none", "auto"),
    "loss": ("mae", nn.L1Loss()),
    "network": ("lstm", "gru"),
    "hidden_size": (4, 5),
    "n_models": (1, 2),
    "max_steps": (2, 300),
    "batchsize": (2, 3),
    "seqsize": (8, 9),
    "lr": (0.01, 0.02),
    "futr_exog_list": ((), ("promo",)),
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


class Squares(BaseTrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        a, b = batch
        return (model(a) - b).square().mean()


def linear():
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def run_by(function, iterations=3, opt=torch.optim.SGD, **settings):
    """Train a model by a function, and require that an error leaves it as it was."""
    model, rng = linear(), np.random.default_rng(5)
    before = model.weight.detach().clone()

    def samples():
        a = torch.from_numpy(rng.normal(size=(7, 3)).astype(np.float32))
        return a, a.sum(1, keepdim=True)

    try:
        function(
            lambda a, b: (model(a) - b).square().mean(), model, samples, opt, iterations, **settings
        )
    except Exception:
        assert torch.equal(model.weight, before)
        raise


def run_task(n_batches, run=None, **settings):
    """Train a task in a loop over some batches, and require that an error leaves its model as it
    was.
    """
    model = linear()
    before = model.weight.detach().clone()
    state = TrainState(0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = TaskStep(Squares(), state, **settings)
    loop = Loop(step)
    batches = [(torch.ones(5, 3) * i, torch.ones(5, 1)) for i in range(n_batches)]
    try:
        (run or (lambda loop, batches: loop.run_epochs(batches, 2)))(loop, batches)
    except Exception:
        assert torch.equal(model.weight, before)
        raise


def train_parameters():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    batch = torch.ones(4, 3), torch.zeros(4, 1)
    train(
        lambda a, b: ((model(a) - b) ** 2).mean(),
        list(model.parameters()),
        lambda: batch,
        torch.optim.SGD,
        2,
    )


class Own(LSTM):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)


def forecaster(**settings):
    given = {
        "h": 2,
        "season_length": 7,
        "freq": 1,
        "hidden_size": 4,
        "max_steps": 2,
        "batchsize": 2,
        "verbose": False,
    }
    return Forecaster(**(given | settings))


def forecasting_cases(saves):
    """Cases of forecasters, by name: a setting, an argument of the call, or data of which one
    differs.
    """
    import pandas as pd

    df = pd.DataFrame({"unique_id": [*"aab" * 30], "ds": np.arange(90), "y": 20 + x.ravel()[:90]})
    df = df.assign(promo=df.ds % 2, size=df.unique_id.map({"a": 1, "b": 2}))
    df["ds"] = df.groupby("unique_id").cumcount()
    mine, first = RANK % 2, df[df.ds < 20]
    fitted = forecaster().fit(first)
    cases = {
        f"forecaster {name}": (
            lambda name=name, pair=pair: forecaster(**{name: pair[mine]}).fit(df)
        )
        for name, pair in OF_FORECASTER.items()
    }

    def walk(**arguments):
        return forecaster().cross_validation(df, **arguments)

    def walk_alone():
        if RANK == 0:
            return walk()
        fitted.cross_validation(df, refit=None)
        return fitted.fit(first)

    def predict_and_update():
        """Forecasts of each rank need no other ranks: data and settings may differ."""
        own = forecaster().fit(first)
        own.set_params(max_steps=2 + RANK)
        if RANK == 0:
            own.update(df[df.ds >= 20])
        own.predict()

    return cases | {
        "n_windows": lambda: walk(n_windows=1 + mine),
        "step_size": lambda: walk(n_windows=2, step_size=[None, 3][mine]),
        "refit": lambda: walk(refit=bool(mine)),
        "refit=None": walk_alone,
        "max_steps of a walk": lambda: forecaster(max_steps=2 + mine).cross_validation(df),
        "callbacks": lambda: forecaster(callbacks=[saves(None)] if RANK else None).fit(df),
        "static": lambda: forecaster(stat_exog_list=["size"]).fit(
            df.assign(size=df["size"] + mine)
        ),
        "inferred freq": lambda: forecaster(freq=None).fit(df.assign(ds=df.ds * (1 + mine))),
        "frame": lambda: forecaster(freq=None).fit(df if RANK else x[:1]),
        "functions": lambda: forecaster(loss=nn.L1Loss(), network=Own).fit(df),
        "of its own": predict_and_update,
    }


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
        "weights of shards": lambda: estimator().fit(x, y, weight if RANK else None, sharded=True),
        "validation of shards": lambda: estimator().fit(
            x, y, validation_data=(x, y) if RANK else None, sharded=True
        ),
        "features of shards": lambda: estimator().fit(x[: 2 + RANK], y, sharded=True),
        "scored weights of shards": lambda: fitted.score(
            x, y, weight if RANK else None, sharded=True
        ),
        "evaluated weights": lambda: fitted.evaluate(x, y, weight if RANK else None),
        "evaluated weights of shards": lambda: fitted.evaluate(
            x, y, weight if RANK else None, sharded=True
        ),
        "evaluated gradient of shards": lambda: fitted.evaluate(
            x, y, gradient=bool(RANK), sharded=True
        ),
        "with_mean": lambda: SequenceScaler(with_mean=bool(RANK)).fit(x, sharded=True),
        "with_std": lambda: SequenceScaler(with_std="no" if RANK else True).fit(x, sharded=True),
        "weights of a scaler": lambda: SequenceScaler().fit(
            x, None, weight if RANK else None, sharded=True
        ),
        "features of a scaler": lambda: SequenceScaler().fit(x[: 2 + RANK], sharded=True),
        "features of a winsor scaler": lambda: WinsorScaler().fit(x[: 2 + RANK], sharded=True),
        "different transformers": lambda: (WinsorScaler() if RANK else SequenceScaler()).fit(
            x, sharded=True
        ),
        "strategy": lambda: SequenceImputer("ffill" if RANK else "mean").fit(x, sharded=True),
        "fill_value": lambda: SequenceImputer("constant", fill_value=float(RANK)).fit(
            x, sharded=True
        ),
        "filled ahead": lambda: SequenceImputer("ffill", fill_value=7 if RANK else None).fit(
            x, sharded=True
        ),
        "features of an imputer": lambda: SequenceImputer().fit(x[: 2 + RANK], sharded=True),
        "iterations of train": lambda: run_by(train, 3 + RANK),
        "iterations of ptrain": lambda: run_by(ptrain, 3 + RANK, bs=2),
        "iterations of own batches": lambda: run_by(train, 3 + RANK, batches="per_rank"),
        "accumulate of train": lambda: run_by(train, accumulate=2 + RANK),
        "precision of train": lambda: run_by(train, precision=("float32", "bfloat16")[RANK % 2]),
        "clip of train": lambda: run_by(train, clip=(None, 0.5)[RANK % 2]),
        "batches of train": lambda: run_by(train, batches=("same", "per_rank")[RANK % 2]),
        "optimizer of train": lambda: run_by(
            train, opt=(torch.optim.SGD, torch.optim.Adam)[RANK % 2]
        ),
        "lr of train": lambda: run_by(train, opt=lambda p: torch.optim.SGD(p, lr=0.1 + RANK)),
        "tau of itrain": lambda: run_by(itrain, tau=RANK / 2),
        "axis of train": lambda: run_by(train, axis=RANK),
        "batches of a task": lambda: run_task(3 + RANK),
        "own batches of a task": lambda: run_task(3 + RANK, batches="per_rank"),
        "steps of a task": lambda: run_task(
            5, lambda loop, batches: loop.run_steps(batches, 2 + RANK)
        ),
        "no steps": lambda: run_task(5, lambda loop, batches: loop.run_steps(batches, 2 * RANK)),
        "last step of a task": lambda: run_task(
            5, lambda loop, batches: loop.run_to_step(batches, 3 * RANK)
        ),
        "batch norm": train_parameters,
        "steps": lambda: run_steps(2 + RANK),
    }
    if find_spec("pandas"):
        cases |= forecasting_cases(saves)
    found = {name: error_of(run) for name, run in cases.items()}
    clock = itertools.count(0, 10 if RANK == 0 else 0)  # that of rank 1 stands still
    trigger = EveryNSeconds(5, clock=lambda: float(next(clock)))
    by_time = Checkpointer(folder / "by-time", keep=-1, trigger=trigger)
    found["by time"] = error_of(lambda: estimator([by_time]).fit(x, y))
    answers = RANKS.allgather(found)
    if RANK == 0:
        (folder / "found.json").write_text(
            json.dumps({name: [a[name] for a in answers] for name in found})
        )
        (folder / "saved.json").write_text(
            json.dumps(sorted(p.name for p in (folder / "by-time").iterdir()))
        )
