"""Fits of many kinds, on as many ranks as there are; the first rank writes what came out.

Two ranks of mpirun make all fits, in float64. Three make one half in float32 and the other in
float64 with scaling="strong", and ranks of torchrun one half: ``plan``. Imported, it does the same in
one process, with a batchsize that many times as large.
"""

import copy
import functools
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.bobbin import assert_replica_integrity
from fluxutils_py.nn import LRU, LSTM, TCN, MinGRU, SlidingWindowAttention
from fluxutils_py.parallel import get_communicator
from fluxutils_py.parallel.launcher import detect_launcher
from tests.plain_networks import QuietClassifier, QuietRegressor

B, N, T = 4, 13, 23


class TwoOutputs(nn.Module):
    """Two inputs, two outputs, a frozen parameter and one that is never used."""

    def __init__(self):
        super().__init__()
        self.lstm, self.a, self.b = LSTM(5, 6), nn.Linear(6, 1), nn.Linear(6, 2)
        self.unused = nn.Linear(3, 3)
        self.a.bias.requires_grad_(False)

    def forward(self, u, v):
        h = self.lstm(torch.cat([u, v], -1))
        return self.a(h), self.b(h)


def huber(model, xs, ys):
    """A loss without weights."""
    return F.huber_loss(model(xs), ys)


class Task:
    def __init__(self, dtype, factor, comm, scaling):
        self.dtype, self.factor, self.comm, self.scaling = dtype, factor, comm, scaling
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((3, N, T)).astype(dtype)
        self.y = (
            self.x.cumsum(2).mean(0, keepdims=True) + 0.1 * rng.standard_normal((1, N, T))
        ).astype(dtype)
        self.lengths = rng.integers(5, T + 1, N)
        self.weight = rng.random((N, T))
        self.weight[rng.random((N, T)) < 0.1] = 0
        self.holes = self.y.copy()
        self.holes[0, rng.random((N, T)) < 0.3] = np.nan
        self.holes[0, :5] = np.nan  # some ranks have nothing to learn from
        self.pair = np.concatenate([self.y, self.x[:2]])
        self.pair[rng.random(self.pair.shape) < 0.3] = np.nan
        # of some series no output is missing
        self.pair[:, 7:] = np.concatenate([self.y, self.x[:2]])[:, 7:]
        self.starts = rng.integers(0, T - 1, N)
        self.spans = rng.integers(1, T - self.starts + 1)
        self.labels = rng.integers(0, 3, (1, N, T))
        self.labels[rng.random((1, N, T)) < 0.2] = -100
        self.long = rng.standard_normal((3, 2, 101)).astype(dtype)
        torch.manual_seed(3)
        self.model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1))
        self.scores = nn.Sequential(LSTM(3, 5), nn.Linear(5, 3))
        self.two = TwoOutputs()
        self.words = nn.Sequential(
            nn.Embedding(7, 4, sparse=True), nn.Flatten(-2), LSTM(4, 5), nn.Linear(5, 1)
        )

    def est(self, model=None, loss=None, opt=None, *, random_state=1, **spec):
        spec = {"epochs": 2, "batchsize": B * self.factor, "seqsize": 6, **spec}
        return Estimator(
            self.model if model is None else model, loss, opt, Spec(**spec), comm=self.comm,
            random_state=random_state, verbose=False, scaling=self.scaling,
        )  # fmt: skip

    def listed(self, a):
        return [
            a[:, n, start : start + length]
            for n, (start, length) in enumerate(zip(self.starts, self.spans, strict=True))
        ]

    # each returns a fitted estimator

    def plain(self):
        return self.est().fit(self.x, self.y)

    def shuffled(self):
        return self.est(shuffle=True).fit(self.x, self.y)

    def uneven(self):
        return self.est(shuffle=True).fit(self.x, self.holes, self.weight, lengths=self.lengths)

    def far_back(self):
        return self.est(overlap=4, burn_in=3, clip=0.05).fit(self.x, self.holes)

    def layers(self):
        """States of many kinds; the initial one of the last is trained, in some windows only."""
        attention, last = (
            SlidingWindowAttention(4, 4, 2, window=5),
            MinGRU(4, 5, trainable_init=True),
        )
        model = nn.Sequential(LRU(3, 6), TCN(6, 4, n_levels=2), attention, last, nn.Linear(5, 1))
        return self.est(model, overlap=4).fit(self.x, self.holes, lengths=self.lengths)

    def exact(self):
        """Ranks carry how the states of their series depend on the parameters."""
        # small phases: over a past of k steps the second derivative by the logarithm of a phase is
        # about (phase * k)**2, which makes 1e-5 of what Adam's first updates have rounded
        first = LRU(3, 6, max_phase=0.3)
        model = nn.Sequential(first, MinGRU(6, 5, trainable_init=True), nn.Linear(5, 1))
        return self.est(model, gradient="exact", burn_in=2, shuffle=True).fit(
            self.x, self.holes, self.weight, lengths=self.lengths
        )

    def accumulated(self):
        return self.est(accumulate=3, shuffle=True).fit(self.x, self.holes, lengths=self.lengths)

    def stopped_early(self):
        scheduler = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
        opt = functools.partial(torch.optim.SGD, lr=0.05)
        est = self.est(opt=opt, epochs=9, patience=1, lr_schedule=scheduler, clip=1.0)
        return est.fit(
            self.x, self.y, validation_data=(self.x[:, :11, :17], -self.holes[:, :11, :17])
        )

    def folded(self):
        return self.est(epochs=3, rebatch=True).fit(self.long, self.long[:1])

    def folded_without_weights(self):
        return self.est(loss=huber, rebatch=True).fit(self.long, self.long[:1])

    def fewer_series_than_ranks(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of that
            return self.est(rebatch=False).fit(self.x[:, :2], self.y[:, :2])

    def classes(self):
        weight = torch.tensor([1.0, 5.0, 0.5], dtype=getattr(torch, self.dtype))
        est = self.est(self.scores, nn.CrossEntropyLoss(weight=weight), accumulate=2)
        x, y = self.x[:, :6], self.labels[:, 6:12]
        return est.fit(self.x, self.labels, validation_data=(x, y))

    def sums(self):
        opt = functools.partial(torch.optim.SGD, lr=1e-4)
        return self.est(loss=nn.MSELoss(reduction="sum"), opt=opt).fit(self.x, self.y)

    def several(self):
        opt = functools.partial(
            torch.optim.AdamW,
            lr=float(__import__("os").environ.get("LR", "0.01")),
            weight_decay=0.1,
        )
        loss = seqloss(F.mse_loss)
        return self.est(self.two, loss, opt).fit((self.x, self.x[:2]), (self.y, self.x[1:]))

    def single_outputs_missing(self):
        model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 3))
        return self.est(model, accumulate=2).fit(
            self.x, self.pair, self.weight, validation_data=(self.x[:, ::-1], self.pair)
        )

    def single_outputs_of_several_missing(self):
        loss = seqloss(F.mse_loss)
        return self.est(self.two, loss).fit((self.x, self.x[:2]), (self.pair[:1], self.pair[1:]))

    def beginning_late(self):
        est = self.est(overlap=2, burn_in=1, shuffle=True)
        return est.fit(self.x, self.holes, lengths=self.spans, starts=self.starts)

    def lists(self):
        return self.est(shuffle=True).fit(
            self.listed(self.x), self.listed(self.holes), self.listed(self.weight[None])
        )

    def sparse(self):
        words = np.abs(self.x[:1] * 2).astype(int) % 7
        opt = functools.partial(torch.optim.SGD, lr=0.1)
        return self.est(copy.deepcopy(self.words).to(getattr(torch, self.dtype)), None, opt).fit(
            words, self.y
        )

    def default_model(self):
        est = self.est()
        return est.set_params(model=None).fit(self.x, self.y)

    def continued(self):
        est = self.est(shuffle=True).fit(self.x, self.y)
        return est.partial_fit(self.x, self.y).set_params(warm_start=True).fit(self.x, self.y)

    def ready_made(self, kind=QuietRegressor, **settings):
        settings = {
            "batchsize": B,  # on any number of ranks
            "seqsize": 6,
            "comm": self.comm,
            "random_state": 1,
            "dropout": 0.0,  # ranks draw their own
            **settings,
        }
        return kind(5, epochs=2, verbose=False, **settings)

    def sales(self):
        # no target is a sum of inputs: the linear part would leave rounding alone, and Adam makes
        # steps of its own size of that
        y = 1e3 + 50 * (self.pair + 0.3 * self.x**2)
        lengths = {"lengths": self.spans, "starts": self.starts}
        return self.ready_made(early_stopping=True).fit(self.x, y, self.weight, **lengths)

    def names(self):
        y = np.array(["a", "b", "c", None], object)[self.labels % 4]
        y[0, self.x[0] > 1] = None
        est = self.ready_made(QuietClassifier, class_weight="balanced")
        return est.fit(self.listed(self.x), self.listed(y))

    def fixed_kernels(self):
        y = np.array(["a", "b", "c"])[np.arange(N) % 3]
        return self.ready_made(QuietClassifier, cell="kernels").fit(self.x, y, lengths=self.lengths)

    def fixed_lags(self):
        est = self.ready_made(cell="linear")
        return est.fit(self.x, self.holes, self.weight, lengths=self.lengths)

    def linear_and_network(self):
        est = self.ready_made(cell="linear+lstm")
        return est.fit(self.x, self.holes, self.weight, lengths=self.lengths)

    def interval_of_linear_and_network(self):
        """A fifth of the series calibrates."""
        est = self.ready_made(level=80, cell="linear+lstm")
        return est.fit(self.x, self.holes, self.weight, lengths=self.lengths)

    def interval_of_ends(self):
        """The ends of few series calibrate, of which the last rank may have none."""
        est = self.ready_made(level=80, cell="lstm")
        return est.fit(self.x[:, 6:11], 1e3 + 50 * self.pair[:, 6:11])

    def interval_of_classes(self):
        """What the user holds out calibrates."""
        est = self.ready_made(QuietClassifier, level=80, cell="mingru")
        held_out = (self.x[:, :7], self.labels[:, :7], None, self.lengths[:7])
        return est.fit(self.x[:, 7:], self.labels[:, 7:], validation_data=held_out)


CASES = [
    name
    for name in vars(Task)
    if not name.startswith("_") and name not in ("est", "listed", "ready_made")
]


def plan(launcher, size):
    """For each part: dtype, scaling, and fits."""
    if launcher == "torch":
        return [("float64", "weak", CASES[::2])]
    if size == 3:  # strong: 4 series for 3 ranks; for the last group, 1
        return [("float32", "weak", CASES[::2]), ("float64", "strong", CASES[1::2])]
    return [("float64", "weak", CASES)]


def results(dtype, factor, comm, scaling="weak", cases=CASES):
    task, found = Task(dtype, factor, comm, scaling), {}
    for name in cases:
        torch.manual_seed(4)  # of models that a fit draws: whichever fits came before
        est = getattr(task, name)()
        found[f"{dtype} {name}"] = net2vec(est).numpy()
        found[f"{dtype} {name} gradient"] = est.grad_.numpy()
        found[f"{dtype} {name} losses"] = np.array(
            [est.loss_, *est.loss_curve_, *est.validation_loss_curve_]
        )
        if est.fitted_parts_.calibration is not None:
            n_raw = 1 if hasattr(est, "classes_") else est.n_outputs_
            errors = est.fitted_parts_.calibration.errors
            # behind them stand errors relative to ends, whose network has a dropout of each rank
            found[f"{dtype} {name} calibration"] = errors[:n_raw]
        if est.comm is not None:
            assert_replica_integrity([est.model_, est.grad_, est.loss_curve_], atol=0, rtol=0)
            calibration = est.fitted_parts_.calibration
            whole = [] if calibration is None else [calibration.errors]
            assert_replica_integrity(whole, atol=0, rtol=0)
        if name == "plain":
            y, state = est.predict(task.x, return_state=True)
            more = est.predict(task.x[:, :, :7], state=state)
            into = np.full((1, N, T), 7.0)
            est.predict(task.x, out=into, lengths=task.lengths)
            found |= {f"{dtype} prediction": y, f"{dtype} going on": more, f"{dtype} into": into}
            found[f"{dtype} state"] = np.concatenate([s.numpy().ravel() for s in state])
            alone = est.predict(task.listed(task.x))
            assert [a.shape[1] for a in alone] == task.spans.tolist()
            found[f"{dtype} lists of predictions"] = np.concatenate(alone, 1)
            found[f"{dtype} late"] = est.predict(task.x, starts=task.starts, lengths=task.spans)
            found[f"{dtype} prediction of few"] = est.predict(task.x[:, :2])
            found[f"{dtype} score"] = np.array(
                [
                    est.score(task.x, task.holes, task.weight),
                    est.score(task.x[:, :2], task.y[:, :2]),
                ]
            )
            if est.comm is not None:
                assert_replica_integrity(found, atol=0, rtol=0)
    return found


def in_precision(precision, factor, comm):
    """Parameters before and after a fit, gradient, losses. SGD: Adam would enlarge the rounding of
    small gradients.
    """
    task = Task("float32", factor, comm, "weak")
    opt = functools.partial(torch.optim.SGD, lr=0.1)
    est = task.est(opt=opt, precision=precision, shuffle=True, accumulate=2, clip=1.0)
    est.fit(task.x, task.holes, lengths=task.lengths, validation_data=(task.x, task.y))
    assert {p.dtype for p in est.model_.parameters()} == {torch.float32}
    if est.comm is not None:
        assert_replica_integrity([est.model_, est.grad_, est.loss_curve_], atol=0, rtol=0)
    return {
        "before": net2vec(task.model).numpy(),
        "after": net2vec(est).numpy(),
        "gradient": est.grad_.numpy(),
        "losses": np.array(est.loss_curve_ + est.validation_loss_curve_),
    }


def main(folder):
    ranks = get_communicator("auto")
    found = {}
    for dtype, scaling, cases in plan(detect_launcher(), ranks.size):
        found |= results(dtype, 1, "auto", scaling, cases)
    low = in_precision("bfloat16", 1, "auto")
    if ranks.rank == 0:
        np.savez(folder / "found.npz", **found)
        np.savez(folder / "bfloat16.npz", **low)
