"""Fit and predict with the package and with the oracle, and say where they differ."""

import contextlib
import itertools
import math
import tempfile
import warnings
from dataclasses import replace

import numpy as np
import torch

from fluxutils_py import SequenceRegressor, net2vec, samples
from fluxutils_py.nn import native_kernels
from fluxutils_py.nn.states import batch_dims

from . import ours
from .arrays import GARBAGE, IGNORED, NAMES, Place, cut, make_data
from .cases import CLASSIFIERS, MORE_STEPS, NO_WEIGHTS, OF_CELLS, READY_MADE
from .loop import Oracle, accuracy, pooled_r2
from .ridge import Ridge


class Given:
    """Arguments of ``fit``, ``score`` and ``predict`` for some data, in the memory and the types of
    a case.
    """

    def __init__(self, case, data, place):
        self.case, self.data = case, data
        self._before = []  # arrays, and their bytes as they are given
        T = data.n_steps
        t = np.arange(T)
        starts, lengths = data.given
        self.exists = (t >= starts[:, None]) & (t < (starts + lengths)[:, None])
        x = [self._fill(a.astype(case["dtype"])) for a in data.x]
        self.x = self._form([place(a) for a in x], data.x)
        self.y = self._targets(place)
        self.weight = None
        if data.w is not None:
            shape = data.n_series + data.n_steps
            w = data.w[:, 0] if case["weights"] == "series" else data.w
            self.weight = w[None] if w.ndim == 2 and shape % 2 else w
            self._keep([self.weight])
        self.ends = {}
        if not case["listed"]:
            if case["starts"]:
                self.ends["starts"] = data.starts
            if case["lengths"]:
                self.ends["lengths"] = data.lengths

    def _keep(self, arrays):
        in_memory = [a for a in arrays if isinstance(a, np.ndarray | torch.Tensor)]
        self._before += [(a, np.asarray(a).tobytes()) for a in in_memory]

    def is_unchanged(self):
        return all(np.asarray(a).tobytes() == before for a, before in self._before)

    def _fill(self, a):
        if self.case["lengths"] or self.case["starts"]:
            a[:, ~self.exists] = GARBAGE["i" if a.dtype.kind == "i" else "f"]
        return a

    def _form(self, placed, arrays):
        case, data = self.case, self.data
        self._keep(placed)
        if case["listed"]:
            placed = [
                [cut(a, np.s_[:, n, : data.given[1][n]]) for n in range(data.n_series)]
                for a in placed
            ]
        if case["view"]:
            placed = [samples(a) for a in placed]
        return placed[0] if len(placed) == 1 else tuple(placed)

    def _targets(self, place):
        case, data = self.case, self.data
        if case["outputs"] == "last":
            last = sum(data.given) - 1
            y = data.y[0][:, np.arange(data.n_series), last].T
            return y[:, 0] if case["targets"] == 1 and case["data"] % 2 else y
        if case["estimator"] in CLASSIFIERS:
            return NAMES[data.y[0].astype(int)]
        if case["outputs"] == "labels":
            y = [np.where(np.isnan(a), IGNORED, a).astype("int64") for a in data.y]
        else:
            y = [a.astype(case["y_dtype"] or case["dtype"]) for a in data.y]
        return self._form([place(self._fill(a)) for a in y], data.y)

    def validation(self):
        found = [self.x, self.y, self.weight, self.ends.get("lengths"), self.ends.get("starts")]
        while found[-1] is None:
            found.pop()
        return tuple(found)


class Comparison:
    """Numbers of both sides, and those that differ: ``found`` is a list of texts."""

    def __init__(self, tolerance):
        self.tolerance, self.found = tolerance, []

    def __call__(self, what, got, wanted):
        got, wanted = np.asarray(got), np.asarray(wanted)
        if got.shape != wanted.shape:
            self.found.append(f"{what}: shape {got.shape}, expected {wanted.shape}")
        elif got.dtype.kind in "OU":
            if not (got == wanted).all():
                self.found.append(f"{what}: {(got != wanted).sum()} of {got.size} labels differ")
        elif not np.array_equal(np.isnan(got), np.isnan(wanted)):
            self.found.append(
                f"{what}: NaN at {np.isnan(got).sum()} places, expected {np.isnan(wanted).sum()}"
            )
        elif got.size and not np.isnan(wanted).all():
            error = float(np.nanmax(np.abs(got.astype(float) - wanted)))
            if not error <= self.tolerance * (1 + float(np.nanmax(np.abs(wanted)))):
                self.found.append(
                    f"{what}: off by {error:.2e}; {_short(got)}, expected {_short(wanted)}"
                )


def _short(a):
    return np.array2string(np.ravel(a)[:4], precision=6)


def run(case):
    """A list of differences, empty if there are none."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "this fit makes [0-9]+ updates? in all")
        warnings.filterwarnings("ignore", "after [0-9]+ updates the loss")
        warnings.filterwarnings("ignore", "spec.gradient='exact'")  # of layers not diagonal
        warnings.filterwarnings("ignore", "feature [0-9]+ of [xy] has values of about")
        warnings.filterwarnings("ignore", ".* is a matrix, each of whose rows")
        with native_kernels(case["kernels"]):
            return _run(case, folder)


def _run(case, folder):
    place = Place(case["order"], folder)
    same = Comparison(1e-9 if case["dtype"] in ("float64", ">f8") else 5e-4)
    orders = ours.Orders() if case["shuffle"] else None
    train = make_data(case, 1)
    given = Given(case, train, place)
    held_out = held_out_given = None
    if case["validation"]:
        held_out = make_data(
            case, 2, more_series=case["data"] % 3, more_steps=case["data"] % MORE_STEPS
        )
        held_out_given = Given(case, held_out, place)

    if case["estimator"] == "linear":
        return _run_linear(case, given, place)
    start = ours.Start()
    est = _fit(case, given, held_out_given, start, orders, folder)
    oracle = Oracle(
        ours.build_net(case),
        start.params,
        ours.criterion(case),
        ours.make_optimizer(case),
        ours.plain_spec(case),
        ours.SCHEDULERS.get(case["scheduler"]),
        equal_lengths=case["loss"] in NO_WEIGHTS,
        scaled=case["estimator"] == "SequenceRegressor",
        to_last_target=case["estimator"] in READY_MADE,
        class_weight=case["class_weight"],
    )
    rows = None if orders is None else orders.rows(oracle.rows(train, fold=True))
    oracle.fit(train, case["epochs"], held_out, rows)
    _same_fit(same, "fit", est, oracle)

    if case["then"] in ("partial_fit", "warm_start"):
        more = make_data(case, 3, more_series=case["data"] % 2, more_steps=case["data"] % 3)
        more_given = Given(case, more, place)
        if orders is not None:
            orders.forget(more)
        again = est.partial_fit if case["then"] == "partial_fit" else est.fit
        again(more_given.x, more_given.y, more_given.weight, **more_given.ends)
        rows = None if orders is None else orders.rows(oracle.rows(more, fold=True))
        is_part = case["then"] == "partial_fit"
        oracle.fit(more, 1 if is_part else case["epochs"], None, rows, is_part)
        _same_fit(same, case["then"], est, oracle)

    _same_predictions(same, case, est, oracle, given, "train")
    other = Given(
        case,
        make_data(
            case, 4, more_series=case["data"] % 4, more_steps=case["data"] % (MORE_STEPS + 1)
        ),
        place,
    )
    predicted = _same_predictions(same, case, est, oracle, other, "other")
    if case["outputs"] != "last" and not case["view"]:
        _same_chunks(same, case, est, oracle, other, predicted)
    same("given arrays are unchanged", given.is_unchanged() and other.is_unchanged(), True)
    return same.found


def _run_linear(case, given, place):
    """A closed form of float64 rounds more than a step of a network."""
    same = Comparison(1e-6 if case["dtype"] in ("float64", ">f8") else 2e-3)
    y, w = given.data.y[0], given.data.w
    counts = given.exists & ~np.isnan(y) & (True if w is None else w > 0)
    if not counts.any((1, 2)).all() or counts.sum((1, 2)).max() < 2:
        return []  # is refused
    est = SequenceRegressor(
        cell="linear", batchsize=case["batchsize"], seqsize=case["seqsize"], verbose=False
    ).fit(given.x, given.y, given.weight, **given.ends)
    oracle = Ridge(given.data)
    _same_predictions(same, case, est, oracle, given, "train")
    more = make_data(case, 4, more_series=case["data"] % 4, more_steps=case["data"] % MORE_STEPS)
    other = Given(case, more, place)
    _same_predictions(same, case, est, oracle, other, "other")
    same("given arrays are unchanged", given.is_unchanged() and other.is_unchanged(), True)
    return same.found


def _fit(case, given, held_out, start, orders, folder):
    validation = {} if held_out is None else {"validation_data": held_out.validation()}
    arguments = (given.x, given.y, given.weight)

    def fit(*callbacks):
        est = ours.build_estimator(case, [start, *callbacks], orders)
        return est.fit(*arguments, **validation, **given.ends)

    if orders is not None:
        orders.forget(given.data)
    if case["then"] != "resume":
        est = fit()
        if case["then"] == "refit":
            if orders is not None:
                orders.forget(given.data)
            est.fit(*arguments, **validation, **given.ends)
        return est
    every, step = 1 + case["data"] % 3, 1 + case["data"] % 11
    saves = ours.checkpointer(folder + "/checkpoints", every)
    with contextlib.suppress(ours.Killed):
        fit(ours.KillAt(step), saves)
    return fit(ours.checkpointer(folder + "/checkpoints", every))


def _same_fit(same, when, est, oracle):
    same(f"loss_curve_ after {when}", est.loss_curve_, oracle.loss_curve)
    same(
        f"validation_loss_curve_ after {when}",
        est.validation_loss_curve_,
        oracle.validation_loss_curve,
    )
    same(f"loss_ after {when}", est.loss_, oracle.loss)
    same(f"grad_ after {when}", est.grad_, oracle.gradient)
    same(
        f"parameters after {when}",
        net2vec(est),
        torch.cat([p.detach().reshape(-1) for p in oracle.params]),
    )
    same(f"n_iter_ after {when}", est.n_iter_, len(oracle.loss_curve))
    if when == "fit":
        same(f"folds after {when}", est.history_[0]["folds"], oracle.folds)
    if oracle.scheduler is not None and oracle.spec.schedule_every == "epoch":
        same(
            f"lr in history_ after {when}",
            [record["lr"] for record in est.history_],
            oracle.learning_rates,
        )


def _same_predictions(same, case, est, oracle, given, name):
    """Returns what the oracle predicts."""
    data = given.data
    predicted = outputs, _ = oracle.predict(data)
    got = est.predict(given.x, **given.ends)
    what = f"predict of {name}"
    if case["estimator"] in CLASSIFIERS:
        same(what, got, NAMES[outputs[0].argmax(0)][None])
        same(
            f"predict_proba of {name}",
            est.predict_proba(given.x, **given.ends),
            oracle.probabilities(outputs[0]),
        )
    elif case["outputs"] == "last":
        rows = outputs[0][:, np.arange(data.n_series), data.starts + data.lengths - 1].T
        same(what, got, rows[:, 0] if given.y.ndim == 1 else rows)
    elif case["view"]:
        same(what, got, np.asarray(samples(outputs[0])))
    else:
        for k, (g, wanted) in enumerate(zip(_tuple(got), outputs, strict=True)):
            if case["listed"]:
                for n, length in enumerate(data.given[1]):
                    same(f"{what}, output {k}, series {n}", g[n], wanted[:, n, :length])
            else:
                same(f"{what}, output {k}", g, wanted)
    by_loss = str(case["loss"]).startswith("custom")
    if by_loss and case["nan_inputs"]:  # a loss has no value there
        return predicted
    score = est.score(given.x, given.y, given.weight, **given.ends)
    if by_loss:
        right = -oracle.loss_of_whole_series(data)
    elif case["outputs"] == "labels":
        right = accuracy(outputs, data)
    else:
        right = pooled_r2(outputs, data)
    if not math.isnan(right):
        same(f"score of {name}", score, right)
    return predicted


def _tuple(a):
    return a if isinstance(a, tuple) else (a,)


def _same_chunks(same, case, est, oracle, given, predicted):
    """Chunks of time, each with the state of the one before; the state is the model's own."""
    data = given.data
    outputs, _ = predicted
    # behind the last input, a series may go on: a step without input is a gap
    starts, lengths = data.given
    missing = np.isnan(np.concatenate(data.x)).all(0) & (not given.ends)  # which would tell
    empty = np.array(
        [of_one[a : a + k].all() for of_one, a, k in zip(missing, starts, lengths, strict=True)]
    )
    if "leaky" in case["net"] and empty.any():
        return  # without empty_state()
    _, ends = oracle.predict(replace(data, lengths=starts + lengths - data.starts))
    predict, state = est.predict, None
    if case["estimator"] in CLASSIFIERS:
        predict, outputs = est.predict_proba, [oracle.probabilities(outputs[0])]
    if given.ends or case["listed"]:
        _, state = predict(given.x, return_state=True, **given.ends)
    else:
        T, rng, found = data.n_steps, np.random.default_rng(case["data"]), []
        n_cuts = min(T - 1, int(rng.integers(0, 5))) if case["chunks"] else 0
        cuts = sorted(rng.choice(np.arange(1, T), size=n_cuts, replace=False))
        if "leaky" in case["net"]:  # without empty_state(): all series begin in the first chunk
            cuts = [cut for cut in cuts if cut > data.starts.max()]
        if "relu" in case["net"] and case["nan_inputs"]:  # a state that died looks like none
            cuts = []
        cuts = [0, *cuts, T]
        for a, b in itertools.pairwise(cuts):
            x = tuple(cut(part, np.s_[:, :, a:b]) for part in _tuple(given.x))
            out, state = predict(x if len(x) > 1 else x[0], state=state, return_state=True)
            if rng.random() < 0.5:  # any copy is as good
                state = [s.clone() for s in state]
            found.append(_tuple(out))
        if case["net"] == "conv" and case["overlap"] < ours.KERNEL - 1:  # then windows matter
            found = []
        for k, parts in enumerate(zip(*found, strict=True)):
            same(f"chunks, output {k}", np.concatenate(parts, axis=2), outputs[k])
    if case["net"] == "conv":
        if case["nan_inputs"]:
            return
        wanted = _last_inputs(data, case["overlap"])
    else:
        wanted = [s[0] if case["net"] in OF_CELLS else s for s in oracle.net.stacked(ends)]
        if case["net"] == "gru_leaky":
            wanted[1:] = [s[0] for s in wanted[1:]]
    same("number of states", len(state), len(wanted))
    for k, (got, right) in enumerate(zip(state, wanted, strict=True)):
        if empty.any():  # a series without any input has not begun
            right.index_fill_(batch_dims(est.model_)[k], torch.from_numpy(empty.nonzero()[0]), 0)
        same(f"state {k}", got, right)


def _last_inputs(data, overlap):
    """The state of a model without one: the last inputs, (k, N, F) of each input, NaN where a
    series has fewer.
    """
    ends, k = data.starts + data.lengths, min(overlap, data.lengths.max())
    found = [np.full((k, data.n_series, len(a)), np.nan) for a in data.x]
    for state, a in zip(found, data.x, strict=True):
        for n, seen in enumerate(np.minimum(k, data.lengths)):
            state[k - seen :, n] = a[:, n, ends[n] - seen : ends[n]].T
    return found
