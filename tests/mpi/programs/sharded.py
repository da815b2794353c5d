"""Fits of which each rank has its own series only, in a folder of its own; the first rank writes
what came out.

Imported, it does the same in one process that has all series in the common order, with as large
minibatches.
"""

import json
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceScaler,
    Spec,
    net2vec,
    samples,
)
from fluxutils_py.bobbin import assert_replica_integrity
from fluxutils_py.data import h5mmap, h5save
from fluxutils_py.estimator import fitting
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import get_communicator
from fluxutils_py.training import Checkpointer, EveryNSteps
from fluxutils_py.transformers import SequenceImputer, WinsorScaler
from tests.plain_networks import QuietClassifier, QuietRegressor

B, T = 4, 23
COUNTS = {2: [(0, 7)], 3: [(5, 20, 12), (5, 0, 12)]}


def common_order(counts):
    """The places of all series, in the order that the documentation defines; in exact fractions."""
    series = [(Fraction(2 * j + 1, 2 * n), rank) for rank, n in enumerate(counts) for j in range(n)]
    return sorted(range(sum(counts)), key=lambda i: series[i])


def huber(model, xs, ys):
    """A loss without weights."""
    return F.huber_loss(model(xs), ys)


class Task:
    """Data, of one rank (``rank`` is given), or of all in the common order."""

    def __init__(self, counts, rank=None, folder=None):
        self.counts, self.rank, self.folder = counts, rank, folder
        self.first = np.cumsum([0, *counts])
        self.owner = np.repeat(np.arange(len(counts)), counts)
        rng, n = np.random.default_rng(5), sum(counts)
        self.order = common_order(counts)
        x = rng.standard_normal((3, n, T))
        y = x.cumsum(2).mean(0, keepdims=True) + 0.1 * rng.standard_normal((1, n, T))
        holes = y.copy()
        holes[0, rng.random((n, T)) < 0.3] = np.nan
        holes[0, :2] = np.nan
        lengths = rng.integers(9, T + 1, n)
        classes = np.array(["a", "b", "c", "d"])[np.minimum(rng.integers(0, 3, (1, n, T)), 2)]
        classes[:, -3:] = "d"  # on the last rank only
        self.x, self.y, self.holes, self.lengths = (self.part(a, name) for a, name in (
            (x, "x"), (y, "y"), (holes, "holes"), (lengths, None)
        ))  # fmt: skip
        self.weight = self.part(rng.random((n, T)) * (rng.random((n, T)) > 0.1), None)
        self.classes = self.part(classes, None)
        self.codes = self.part(np.searchsorted(["a", "b", "c", "d"], classes), None)
        self.whole_x = x[:, self.order]
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.LSTM(3, 5), nn.Linear(5, 1))

    def part(self, a, name):
        """The series of this rank; of arrays with a name, as a map of this rank's own file."""
        axis = min(1, a.ndim - 1) if a.ndim != 2 else 0
        if self.rank is None:
            return np.take(a, self.order, axis)
        if not self.counts[self.rank]:
            return None
        own = np.take(a, range(*self.first[self.rank : self.rank + 2]), axis)
        if name is None:
            return own
        path = self.folder / f"of-rank-{self.rank}" / f"{'-'.join(map(str, self.counts))}-{name}.h5"
        path.parent.mkdir(exist_ok=True)
        h5save(path, {name: own})
        return h5mmap(path, name)

    @property
    def how(self):
        return {} if self.rank is None else {"sharded": True}

    @property
    def common(self):
        batchsize = B if self.rank is not None else B * len(self.counts)
        return {"batchsize": batchsize, "comm": None if self.rank is None else "auto"}

    def est(self, model=None, loss=None, **spec):
        common = self.common
        spec = {"epochs": 2, "batchsize": common["batchsize"], "seqsize": 6, **spec}
        model = self.model if model is None else model
        return Estimator(
            model, loss, None, Spec(**spec), comm=common["comm"], random_state=1, verbose=False
        )

    def ready_made(self, kind, **settings):
        # each rank draws its own numbers, and the order of its own series
        settings = {
            "spec": {"shuffle": False},
            "dropout": 0.0,
            "cell": "lstm",
            "seqsize": 6,
            "epochs": 2,
            "random_state": 1,
            "verbose": False,
            "comm": self.common["comm"],
            "batchsize": B * len(self.counts),  # of all ranks together
            **settings,
        }
        return kind(5, **settings)

    def each(self, f, *arrays):
        return None if arrays[0] is None else f(*arrays)

    # each returns a fitted estimator

    def plain(self):
        return self.est().fit(self.x, self.y, **self.how)

    def shuffled(self):
        if self.rank is not None:
            return self.est(shuffle=True).fit(self.x, self.y, **self.how)
        rng, est = np.random.default_rng(1), self.est()
        rng.integers(2**63), rng.integers(2**63)  # for the initial weights, and for dropout
        owner = self.owner[self.order]
        for _ in range(2):
            drawn, order = rng.permutation(len(owner)), np.empty(len(owner), int)
            for rank in range(len(self.counts)):  # each rank keeps its places
                order[owner == rank] = [i for i in drawn if owner[i] == rank]
            est.partial_fit(self.x[:, order], self.y[:, order])
        return est

    def strong(self):
        """As many series in the whole minibatch as there are ranks: some have none of them."""
        est = self.est(batchsize=len(self.counts), accumulate=2, overlap=2)
        return est.set_params(scaling="strong").fit(self.x, self.holes, **self.how)

    def uneven_in_time(self):
        """Ranks have arrays of other lengths in time; every step has a weight, some no target."""
        n = (
            T
            if self.rank is None
            else max(self.lengths, default=0)
            if self.lengths is not None
            else 0
        )
        x, y, w = (None if a is None else a[..., :n] for a in (self.x, self.holes, self.weight))
        est = self.est(overlap=4, burn_in=3, shuffle=False, clip=0.05)
        return est.fit(x, y, w, lengths=self.lengths, **self.how)

    def lists(self):
        def listed(a):
            return [a[:, n, :length] for n, length in enumerate(self.lengths)]

        x, y = self.each(listed, self.x), self.each(listed, self.y)
        return self.est().fit(x, y, validation_data=(x, y), **self.how)

    def folded(self):
        return self.est(rebatch=True, batchsize=self.common["batchsize"] * 30).fit(
            self.x, self.y, **self.how
        )

    def folded_without_weights(self):
        est = self.est(loss=huber, rebatch=True, batchsize=self.common["batchsize"] * 30)
        return est.fit(self.x, self.y, **self.how)

    def watched(self):
        est = self.est(epochs=6, patience=1)
        return est.fit(
            self.x, self.y, validation_data=(self.x, self.each(np.negative, self.holes)), **self.how
        )

    def sales(self):
        y = self.each(lambda a: 1e3 + 50 * np.asarray(a), self.holes)
        est = self.ready_made(QuietRegressor, early_stopping=True)
        with patch.object(fitting, "VALIDATION_FRACTION", 0.3):
            return est.fit(self.x, y, self.weight, lengths=self.lengths, **self.how)

    def names(self):
        est = self.ready_made(QuietClassifier, class_weight="balanced")
        return est.fit(self.x, self.classes, self.weight, **self.how)

    def sums(self):
        est = self.ready_made(QuietClassifier, cell="linear+lstm", class_weight="balanced")
        return est.fit(self.x, self.classes, self.weight, **self.how)

    def name_of_series(self):
        est = self.ready_made(QuietClassifier, early_stopping=True)
        x, y = (
            self.each(samples, self.x),
            self.each(lambda c: np.where(c[0, :, 0] < "d", "low", "high"), self.classes),
        )
        with patch.object(fitting, "VALIDATION_FRACTION", 0.4):
            return est.fit(x, y, **self.how)

    def integers(self):
        est = self.est(loss=F.cross_entropy).set_params(model=None)
        return est.fit(self.x, self.codes, **self.how)

    def pairs(self):
        def two(a):
            return a, a[:2]

        return self.est(TwoInputs).fit(self.each(two, self.x) or None, self.y, **self.how)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = LSTM(5, 4), nn.Linear(4, 1)

    def forward(self, u, v):
        return self.head(self.lstm(torch.cat([u, v], -1)))


NOT_CASES = ("part", "how", "common", "est", "ready_made", "each")
CASES = [name for name in vars(Task) if not name.startswith("_") and name not in NOT_CASES]


def results(counts, rank=None, folder=None):
    task, found = Task(counts, rank, folder), {}
    for name in (
        CASES if counts != COUNTS[3][1] else ["plain", "strong", "shuffled", "lists", "names"]
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "this fit makes [0-9]+ updates? in all")
            warnings.filterwarnings("ignore", "after [0-9]+ updates the loss")
            est = getattr(task, name)()
        found[name] = net2vec(est).numpy()
        found[f"{name} losses"] = np.array([*est.loss_curve_, *est.validation_loss_curve_])
        if name != "shuffled":
            found[f"{name} gradient"] = est.grad_.numpy()
        if rank is not None:
            assert_replica_integrity([est.model_, est.grad_, est.loss_curve_], atol=0, rtol=0)
        if name == "plain":
            loss, gradient = est.evaluate(task.x, task.holes, gradient=True, **task.how)
            scores = (
                est.score(task.x, task.holes, task.weight, **task.how),
                est.score(task.x, task.y, **task.how),
            )
            found |= {"evaluated": np.array([loss, *gradient]), "scores": np.array(scores)}
            found["prediction"] = gathered(task, est.predict(task.x, **task.how))
        if name == "names":
            found["probabilities"] = gathered(task, est.predict_proba(task.x, **task.how))
            found["accuracy"] = np.array(est.score(task.x, task.classes, **task.how))
        if name == "name_of_series":
            x = task.each(samples, task.x)
            found["of series"] = gathered(task, est.predict_proba(x, **task.how), axis=0)
    gaps = task.each(lambda a: np.where(a > 1, np.nan, a), task.x)
    scalers = (
        SequenceScaler().fit(gaps, **task.how),
        SequenceScaler().fit(task.x, None, task.weight, **task.how),
    )
    winsor, imputer = WinsorScaler().fit(gaps, **task.how), SequenceImputer().fit(gaps, **task.how)
    found["scaled"] = np.concatenate(
        [v for s in scalers for v in (s.mean_, s.var_, s.n_samples_seen_)]
    )
    found["winsorised"] = np.concatenate(
        [winsor.lower_, winsor.upper_, winsor.mean_, winsor.scale_]
    )
    found["imputed"] = imputer.statistics_
    return found


def gathered(task, own, axis=1):
    """The results of all ranks in the common order; each has only those of its series."""
    if task.rank is None:
        return own
    parts = get_communicator("auto").allgather(own)
    assert all((part is None) == (n == 0) for part, n in zip(parts, task.counts, strict=True))
    return np.take(
        np.concatenate([part for part in parts if part is not None], axis), task.order, axis
    )


# -- what does not go ------------------------------------------------------------------------------------


def error_of(call):
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def mistakes(counts, rank, folder):
    """What each rank says of calls that cannot go well, by name."""
    task, last = Task(counts, rank, folder), len(counts) - 1
    x, y = task.x, task.y
    fitted = task.est().fit(x, y, sharded=True)

    def nan(a):
        out = np.array(a)
        out[0, 0, 3] = np.nan
        return out

    odd = rank == last  # the last rank always has series
    return {
        "features": error_of(lambda: task.est().fit(x[:2] if odd else x, y, sharded=True)),
        "dtype": error_of(lambda: task.est().fit(x.astype("float32") if odd else x, y, sharded=True)),
        "NaN": error_of(lambda: task.est().fit(nan(x) if odd else x, y, sharded=True)),
        "no weights": error_of(lambda: task.est().fit(x, y, task.weight if odd else None, sharded=True)),
        "nothing": error_of(lambda: task.est().fit(None, None, sharded=True)),
        "not all": error_of(lambda: task.est().fit(x, y, sharded=odd)),
        "not said": error_of(lambda: task.est().fit(task.whole_x[:, : 3 + rank], task.whole_x[:1, : 3 + rank])),
        "rows": error_of(lambda: task.est().fit(None if x is None else x[:, :, 0].T, y, sharded=True)),
        "validation": error_of(
            lambda: task.est().fit(x, y, validation_data=(x, y) if odd else None, sharded=True)
        ),
        "settings": error_of(
            lambda: task.ready_made(QuietRegressor, early_stopping=odd).fit(x, y, sharded=True)
        ),
        "prediction": error_of(lambda: fitted.predict(x[:2] if odd else x, sharded=True)),
        "flag": error_of(lambda: task.est().fit(x, y, sharded="yes")),
    }  # fmt: skip


def resumed(counts, rank, folder):
    """Whether a fit that is stopped and resumed has the bits of one that is not, and what other
    shards say.
    """
    task = Task(counts, rank, folder)

    def stop(loop):
        if loop.step == 5:
            raise RuntimeError("after five steps")

    def fit(*callbacks, comm="auto", **data):
        est = task.est(shuffle=True, epochs=3).set_params(callbacks=list(callbacks), comm=comm)
        x, y = data.get("x", task.x), data.get("y", task.y)
        return est.fit(x, y, sharded=True)

    saves = Checkpointer(folder / f"saves-{'-'.join(map(str, counts))}", trigger=EveryNSteps(1))
    broken = error_of(lambda: fit(saves, stop))
    last = len(counts) - 1
    less = {"x": task.x[:, 1:], "y": task.y[:, 1:]} if rank == last else {}
    refused = error_of(lambda: fit(saves, **less))
    alone = "none" if rank < last else error_of(lambda: fit(saves, comm=None))
    again = fit(saves)
    same = torch.equal(net2vec(again), net2vec(fit()))
    return {
        "same": same,
        "epochs": again.n_iter_,
        "broken": broken,
        "refused": refused,
        "alone": alone,
    }


def main(folder):
    comm = get_communicator("auto")
    for counts in COUNTS[comm.size]:
        name = "-".join(map(str, counts))
        found = results(counts, comm.rank, folder)
        said = comm.allgather(
            (mistakes(counts, comm.rank, folder), resumed(counts, comm.rank, folder))
        )
        if comm.rank == 0:
            np.savez(folder / f"{name}.npz", **found)
            (folder / f"{name}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
