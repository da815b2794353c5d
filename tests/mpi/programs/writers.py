"""What each of two ranks prints, shows and writes, with hooks that a user gives to every rank."""

import contextlib
import io
import json
import logging

import numpy as np
import torch
from torch import nn

from fluxutils_py import Estimator, export
from fluxutils_py.estimator import model_export
from fluxutils_py.gomlx import Trainer, report_eval
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools import cb
from fluxutils_py.praytools.callbacks import bestmodelselector
from fluxutils_py.reporting import EpochLog, ProgressBar, Track
from fluxutils_py.training import InMemory, Loop

x = np.random.default_rng(0).normal(size=(3, 7, 11)).astype(np.float32)
y = x[:1] + x[1:2]


def estimator(*callbacks, **settings):
    spec = {"epochs": 2, "batchsize": 3, "seqsize": 4}
    return Estimator(
        spec=spec, callbacks=list(callbacks), random_state=0, verbose=False, **settings
    )


def printed(run):
    """What a function writes to stderr and stdout."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        run()
    return text.getvalue()


def select(**settings):
    callback, best = bestmodelselector(nn.Linear(1, 1), lambda: 0.5, show=True)
    text = printed(lambda: estimator(cb(callback), **settings).fit(x, y))
    assert best.value == 0.5  # on every rank
    return [line for line in text.splitlines() if line.startswith("accuracy")]


def log_lines():
    stream, logger = io.StringIO(), logging.getLogger("fluxutils_py")
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        estimator(EpochLog()).fit(x, y)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue().splitlines()


def report(evaluated, **settings):
    inputs = torch.from_numpy(x[:, :, 0].T.copy())
    data, tables = InMemory(inputs, inputs[:, :1], batchsize=4, name="all"), []
    trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.SGD, **settings)
    loop = Loop(trainer)
    results = trainer.eval

    def counted(data):
        evaluated.append(data.name)
        return results(data)

    trainer.eval = counted
    loop.on_end("report", lambda loop: report_eval(trainer, data, printer=tables.append))
    loop.run_epochs(data, 1)
    return tables


def exported(**settings):
    """The names of the files that an export writes."""
    written, write = [], model_export.write_graph
    model_export.write_graph = lambda path, *_: written.append(path)
    try:
        fitted = estimator(**settings).fit(x, y)
        fitted.export("of the method", "torch")
        export(fitted, "of the function", "torch")
    finally:
        model_export.write_graph = write
    return written


class Watch:
    """A callback of scikit-learn, which predicts, and ends the training after the first epoch."""

    def __init__(self):
        self.seen = []

    def setup(self, estimator, context):
        self.seen.append("setup")

    def teardown(self, estimator, context):
        self.seen.append("teardown")

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context, *, X=None, fitted_estimator=None):
        self.seen.append([context.task_name, fitted_estimator.predict(X).shape])
        return True


def watched():
    """What a callback of scikit-learn sees, and the number of epochs."""
    watch = Watch()
    est = estimator().set_callbacks(watch).fit(x, y)
    return [watch.seen, est.n_iter_]


class Tracker:
    """A run with ``log(dict, step=)``."""

    def __init__(self):
        self.steps = []

    def log(self, values, step):
        self.steps.append(step)


def tracked():
    run = Tracker()
    estimator(Track(run, trigger=2)).fit(x, y)
    return run.steps


def main(folder):
    ranks, evaluated = RankGroup.from_comm("auto", "test"), []
    found = {
        "bar": printed(lambda: estimator(ProgressBar()).fit(x, y)),
        "log": log_lines(),
        "shown": select(),
        "table": report(evaluated),
        "evaluated": evaluated,
        "exported": exported(),
        "watched": watched(),
        "tracked": tracked(),
        "alone": [len(select(comm=None)), len(report([], comm=None)), len(exported(comm=None))],
    }
    answers = ranks.allgather(found)
    if ranks.rank == 0:
        (folder / "found.json").write_text(
            json.dumps({name: [a[name] for a in answers] for name in found})
        )
