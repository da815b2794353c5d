"""Truncated backpropagation through time as the documents of the package describe it, slowly.

One window at a time, one step at a time, in float64, in plain torch and NumPy: the other side of
the comparison. The series of a minibatch are columns, and each has what it would have alone.
Nothing here is imported from the package. Each rule stands where it is followed, as DESIGN.md and
the docstrings of ``Spec``, ``Estimator`` and ``seqloss`` put it.
"""

import copy
import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch


@dataclass
class Data:
    """Series as their users see them.

    ``x`` and ``y`` are tuples of arrays (F, N, T), ``y`` in float64 with NaN where there is no
    target (label targets too). Series ``n`` has the steps ``starts[n]`` to ``starts[n] +
    lengths[n]``, without padding; ``given`` are both with it. ``w`` (N, T) are weights, or None.
    """

    x: tuple
    y: tuple
    starts: np.ndarray
    lengths: np.ndarray
    w: np.ndarray | None
    given: tuple[np.ndarray, np.ndarray]

    @property
    def n_series(self):
        return self.x[0].shape[1]

    @property
    def n_steps(self):
        return self.x[0].shape[2]

    @functools.cached_property
    def _x(self):
        """A step whose input is missing in any feature counts as zeros."""
        return [
            torch.tensor(np.where(np.isnan(a).any(0), 0, a), dtype=torch.float64) for a in self.x
        ]

    @functools.cached_property
    def _targets(self):
        """Of [n][t]."""
        arrays = [torch.tensor(a, dtype=torch.float64).unbind(1) for a in self.y]
        return [
            list(zip(*(series.unbind(1) for series in n), strict=True))
            for n in zip(*arrays, strict=True)
        ]

    def inputs(self, rows, begin, end):
        """For each step of the rows from ``begin`` to ``end`` a tuple of (F, B); the last step
        stands past an end.
        """
        n = torch.tensor([[n] for n, _, _ in rows])
        t = torch.tensor([[min(a + t, b - 1) for t in range(begin, end)] for _, a, b in rows])
        return list(zip(*(x[:, n, t].unbind(2) for x in self._x), strict=True))

    def targets(self, n, t):
        return self._targets[n][t]

    def share(self, n, t):
        """How much a step counts: 1, 0 without a target or with a weight of 0, the share of its
        outputs in between.
        """
        return self._shares[n][t]

    @functools.cached_property
    def _shares(self):
        t = np.arange(self.n_steps)
        counts = (t >= self.starts[:, None]) & (t < (self.starts + self.lengths)[:, None])
        if self.w is not None:
            counts &= self.w != 0
        return (counts * np.mean([np.mean(~np.isnan(a), axis=0) for a in self.y], axis=0)).tolist()


class Elementwise:
    """A criterion of differences, of which a step has the mean over its outputs; those without a
    target add nothing.
    """

    def __init__(self, f):
        self.f = f

    def window(self, items, n_steps):
        """The sum of weight times loss over the live steps, divided by their number; several
        targets are added.
        """
        total = 0
        for out, y, w in stacked(items):
            difference = torch.where(y.isnan(), 0, out - y)  # at 0 every loss is 0
            total = total + (w[:, None] * self.f(difference)).sum() / y.shape[1]
        return total / sum(share for *_, share in items)


class Summed(Elementwise):
    """A criterion that sums: over series and outputs; the mean over the steps of the window."""

    def window(self, items, n_steps):
        return sum((w[:, None] * self.f(out - y)).sum() for out, y, w in stacked(items)) / n_steps


class CrossEntropy:
    """Of scores and labels; with class weights a weighted mean, as torch's own."""

    def __init__(self, class_weight=None):
        self.class_weight = class_weight

    def window(self, items, n_steps):
        total = 0
        for out, y, w in stacked(items):
            label = y[:, 0].long()
            shares = (
                torch.ones_like(w)
                if self.class_weight is None
                else torch.tensor(self.class_weight)[label]
            )
            losses = -torch.log_softmax(out, 1)[torch.arange(len(label)), label]
            total = total + (w * shares * losses).sum() / shares.sum()
        return total


def stacked(items):
    """For each target: outputs and targets (steps, G), and weights."""
    outputs, targets, weights, _ = zip(*items, strict=True)
    w = torch.tensor(weights, dtype=torch.float64)
    pairs = zip(zip(*outputs, strict=True), zip(*targets, strict=True), strict=True)
    return [(torch.stack(out), torch.stack(y), w) for out, y in pairs]


class Oracle:
    """A model, an optimizer, and what became of them.

    Parameters
    ----------
    net : Net or Convolution
    initial : list of Tensor
        In float64; copied.
    criterion : Elementwise, Summed or CrossEntropy
    make_optimizer, make_scheduler : callable
    spec : object
        With all fields of ``Spec``.
    equal_lengths : bool
        A loss of one's own that takes no weights sees rows of equal length only, the longest first.
    scaled : bool
        Whether targets are learnt at mean 0 and variance 1, those of the first fit.
    class_weight : "balanced", "sqrt_balanced", list of K numbers, or None
        Of the first of several parts of a fit. Probabilities are without them.
    """

    def __init__(
        self,
        net,
        initial,
        criterion,
        make_optimizer,
        spec,
        make_scheduler=None,
        equal_lengths=False,
        scaled=False,
        to_last_target=False,
        class_weight=None,
    ):
        self.net, self.criterion, self.spec, self.equal_lengths = (
            net,
            criterion,
            spec,
            equal_lengths,
        )
        self.params = [p.clone().requires_grad_() for p in initial]
        self.optimizer = make_optimizer(self.params)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.loss_curve, self.validation_loss_curve, self.learning_rates, self.folds = [], [], [], 1
        self.scaled, self.target_mean, self.target_scale = scaled, None, None
        self.to_last_target = to_last_target
        self.class_weight, self.of_class = class_weight, None
        self.planned, self.updates = math.inf, 0
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    # -- which steps, in which order -------------------------------------------------------------------

    def rows(self, data, fold):
        """(series, first step, step after the last): each series, or its pieces. Ready-made
        estimators train up to the last step that counts.
        """
        if fold and self.to_last_target:
            shape = data.n_series, data.n_steps
            counts = np.array([data.share(n, t) > 0 for n, t in np.ndindex(shape)]).reshape(shape)
            last = data.n_steps - counts[:, ::-1].argmax(1)
            ends = np.where(counts.any(1), last, data.starts + 1)
            data = replace(data, lengths=np.maximum(ends - data.starts, 1))
        rows = [
            (n, int(s), int(s + k))
            for n, (s, k) in enumerate(zip(data.starts, data.lengths, strict=True))
        ]
        return [piece for row in rows for piece in self.pieces(row, len(rows))] if fold else rows

    def pieces(self, row, n_rows):
        """A row, or where there are few long ones, what time is cut into: each begins from the zero
        state.
        """
        n, a, b = row
        wanted, seqsize = self.spec.batchsize // n_rows, self.spec.seqsize
        if self.spec.rebatch == "auto" and self.spec.gradient == "exact":
            wanted = 1
        elif self.spec.rebatch == "auto":  # every piece keeps at least 8 * seqsize steps
            wanted = min(wanted, (b - a) // (8 * seqsize)) if seqsize else 1
        elif not self.spec.rebatch or b - a <= wanted:
            wanted = 1
        cut = np.array_split(np.arange(a, b), max(wanted, 1))
        self.folds = max(self.folds, len(cut))
        return [(n, int(piece[0]), int(piece[-1]) + 1) for piece in cut]

    def groups(self, rows):
        """Minibatches of rows."""
        lengths = sorted({b - a for _, a, b in rows}, reverse=True)
        kinds = (
            [[r for r in rows if r[2] - r[1] == k] for k in lengths]
            if self.equal_lengths
            else [rows]
        )
        size = self.spec.batchsize
        return [kind[i : i + size] for kind in kinds for i in range(0, len(kind), size)]

    def windows(self, n_steps):
        """(start, stop, whether it carries a loss) of each window of a group."""
        burn, size = min(self.spec.burn_in, n_steps), self.spec.seqsize or n_steps
        found = [(a, min(a + size, burn), False) for a in range(0, burn, size)]
        return found + [(a, min(a + size, n_steps), True) for a in range(burn, n_steps, size)]

    def weight_scale(self, data, rows):
        """Weights have mean 1 over the steps that carry a loss."""
        if data.w is None:
            return 1.0
        steps = self.steps_with_loss(rows)
        return sum(data.share(n, t) for n, t in steps) / sum(
            data.share(n, t) * data.w[n, t] for n, t in steps
        )

    def steps_with_loss(self, rows):
        """All that is learnt from targets is learnt from these, if they have a target."""
        return [(n, t) for n, a, b in rows for t in range(a + self.spec.burn_in, b)]

    # -- one window ----------------------------------------------------------------------------------

    def forward(self, data, group, past, start, stop, lead, exact=False):
        """Run the rows from their states ``lead`` steps before ``start``; outputs by (row, step).

        ``past[t]`` are the detached states before step ``t``, as they were last computed; columns
        are rows. ``exact``: those after the last step still depend on parameters.
        """
        begin = start - lead
        columns = [p[:, None] if p.ndim == 1 else p for p in self.params]
        state = past[begin] if begin else self.net.initial_state(columns, len(group))
        outputs, states = self.net.run(columns, data.inputs(group, begin, stop), state)
        for t, s in enumerate(states, begin):
            past[t] = [tuple(v.detach() for v in layer) for layer in s]
        if exact:
            past[stop] = self.net.following(self.params, states[-1])
        found = {}
        for t in range(start, stop):
            of_rows = zip(*(o.unbind(1) for o in outputs[t - begin]), strict=True)
            found |= {(i, t): out for i, out in enumerate(of_rows) if t < group[i][2] - group[i][1]}
        return found

    def lead(self, start):
        """Earlier steps that are computed again. Of a model with state, not those of the burn-in."""
        first = 0 if self.net.context else self.spec.burn_in
        return max(0, min(self.spec.overlap, start - first))

    def live_items(self, data, group, outputs, scale):
        """(outputs, targets, weight, share) of the steps that count."""
        items = []
        for (i, t), out in outputs.items():
            n, a, _ = group[i]
            if share := data.share(n, a + t):
                weight = 1.0 if data.w is None else data.w[n, a + t] * scale
                items.append((out, data.targets(n, a + t), weight, share))
        return items

    # -- training ------------------------------------------------------------------------------------

    def plan(self, data, epochs):
        """The epochs of a fit; sets how many updates they may make."""
        rows, count = self.rows(data, fold=True), 0
        for group in self.groups(rows):
            lengths = [b - a for _, a, b in group]
            for start, stop, carries in self.windows(max(lengths)):
                ends = any(start < length <= stop for length in lengths)
                count += carries and (ends or not self.spec.only_ends)
        per_epoch = -(-count // self.spec.accumulate)
        self.updates, most = 0, self.spec.max_updates
        self.planned = min(epochs * per_epoch, most or math.inf)
        return min(epochs, -(-most // per_epoch)) if most and per_epoch else epochs

    def set_rate(self):
        """The rate of the next update, if it follows the length of the fit."""
        rise = round(0.2 * self.planned) if self.spec.lr_schedule == "onecycle" else 0
        if self.updates < rise:
            share = self.updates / rise
        elif self.updates >= self.planned:
            share = 0.0
        else:
            way = (self.updates - rise) / (self.planned - rise)
            share = (1 + math.cos(math.pi * way)) / 2
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = share * lr

    def fit(self, data, epochs, validation=None, orders=None, is_part=False):
        """``orders`` are the rows of each epoch in the order in which a shuffled fit took them.
        A ``partial_fit`` ``is_part``: nothing tells the length of the whole.
        """
        self.is_part = is_part
        if not is_part:
            epochs = self.plan(data, epochs)
        if self.spec.lr_schedule:
            for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = lr
        steps = self.steps_with_loss(self.rows(data, fold=True))
        if self.class_weight is not None:
            if self.of_class is None or not is_part:
                self.of_class = weights_of_classes(
                    self.class_weight, data, steps, self.net.splits[0]
                )
            data, validation = self.weighted(data), validation and self.weighted(validation)
        if self.scaled:
            if self.target_mean is None:
                self.target_mean, self.target_scale = mean_and_scale(data, steps)
            data, validation = self.standardised(data), validation and self.standardised(validation)
        best, worse, saved = math.inf, 0, None
        for epoch in range(epochs):
            self.epoch(data, None if orders is None else orders[epoch])
            monitored = self.loss_curve[-1]
            if validation is not None:
                monitored = self.validation_loss(validation)
                self.validation_loss_curve.append(monitored)
            self.learning_rates.append(self.optimizer.param_groups[0]["lr"])
            if self.scheduler is not None and self.spec.schedule_every == "epoch":
                plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                self.scheduler.step(*[monitored] if plateau else [])
            if monitored < best:
                best, worse, saved = monitored, 0, copy.deepcopy([p.detach() for p in self.params])
            else:
                worse += 1
            if self.spec.patience is not None and worse >= self.spec.patience:
                break
        if self.spec.patience is not None and saved is not None:
            self.set(saved)
        return self

    def is_over(self):
        return not self.is_part and self.spec.max_updates == self.updates

    def epoch(self, data, order=None):
        rows = self.rows(data, fold=True)
        if order is not None:
            assert sorted(order) == sorted(rows), "a shuffled epoch takes each row once"
        scale = self.weight_scale(data, rows)
        losses, live, self.gradients, waiting = [], [], [], []
        for group in self.groups(order or rows):
            past = {}
            for start, stop, carries in self.windows(max(b - a for _, a, b in group)):
                if self.is_over():
                    break
                lead = self.lead(start) if carries else 0
                exact = carries and self.spec.gradient == "exact"
                outputs = self.forward(data, group, past, start, stop, lead, exact)
                items = self.live_items(data, group, outputs, scale) if carries else []
                if not items:  # the state moves on, nothing is learnt
                    continue
                loss = self.criterion.window(items, stop - start)
                losses.append(loss.item())
                live.append(sum(share for *_, share in items))
                waiting.append(
                    (torch.autograd.grad(loss, self.params, allow_unused=True), live[-1])
                )
                if len(waiting) == self.spec.accumulate:
                    self.update(waiting)
                    waiting = []
        if waiting:
            self.update(waiting)
        self.loss = float(np.mean(losses))
        self.loss_curve.append(float(np.average(losses, weights=live)))
        self.gradient = torch.stack(self.gradients).mean(0)

    def update(self, waiting):
        """One step of the optimizer on the mean over windows, weighted by their live steps."""
        if self.spec.lr_schedule and not self.is_part:
            self.set_rate()
        self.updates += 1
        total = sum(n for _, n in waiting)
        for i, p in enumerate(self.params):  # torch's optimizers pass over what no loss depends on
            shares = [g[i] * n / total for g, n in waiting if g[i] is not None]
            p.grad = sum(shares) if shares else None
        flat = torch.cat(
            [
                torch.zeros(p.numel()).double() if p.grad is None else p.grad.reshape(-1)
                for p in self.params
            ]
        )
        self.gradients.append(flat)
        if self.spec.clip is not None and flat.norm() > self.spec.clip:
            for p in self.params:
                if p.grad is not None:
                    p.grad = p.grad * self.spec.clip / (flat.norm() + 1e-6)  # as clip_grad_norm_
        self.optimizer.step()
        if self.scheduler is not None and self.spec.schedule_every == "step":
            self.scheduler.step()

    def set(self, params):
        with torch.no_grad():
            for p, value in zip(self.params, params, strict=True):
                p.copy_(value)

    def weighted(self, data):
        """Weights of steps times those of their classes; burn-in may hold other labels."""
        codes, n_classes = data.y[0][0].astype(int), len(self.of_class)
        is_class = (codes >= 0) & (codes < n_classes)
        of_class = np.append(self.of_class, 1.0)[np.where(is_class, codes, n_classes)]
        return replace(data, w=of_class if data.w is None else data.w * of_class)

    def standardised(self, data):
        return replace(data, y=((data.y[0] - self.target_mean) / self.target_scale,))

    # -- without training ------------------------------------------------------------------------------

    def validation_loss(self, data):
        """Never folded. The mean over windows, weighted by live steps."""
        rows, losses, live = self.rows(data, fold=False), [], []
        scale = self.weight_scale(data, rows)
        with torch.no_grad():
            for group in self.groups(rows):
                past = {}
                for start, stop, carries in self.windows(max(b - a for _, a, b in group)):
                    lead = self.lead(start) if self.net.context else 0
                    outputs = self.forward(data, group, past, start, stop, lead)
                    items = self.live_items(data, group, outputs, scale) if carries else []
                    if items:
                        losses.append(self.criterion.window(items, stop - start).item())
                        live.append(sum(share for *_, share in items))
        return float(np.average(losses, weights=live))

    def loss_of_whole_series(self, data):
        """As in validation, without burn-in."""
        spec = self.spec
        self.spec = SimpleNamespace(**{**vars(spec), "burn_in": 0})
        try:
            return self.validation_loss(data)
        finally:
            self.spec = spec

    def probabilities(self, scores):
        """(K, N, T) of the data, from scores of the weighted steps."""
        p = np.exp(scores)
        if self.of_class is not None:
            p = p / self.of_class[:, None, None]
        return p / p.sum(0)

    def predict(self, data):
        """A list of (G, N, T), NaN where there is no step or no input, and the state of all series
        at their ends.
        """
        found = [np.full((g, data.n_series, data.n_steps), np.nan) for g in self.net.splits]
        there = np.all([np.isfinite(a).all(0) for a in data.x], 0)
        rows, longest = self.rows(data, fold=False), int(max(data.lengths))
        past, size = {}, self.spec.seqsize or longest
        with torch.no_grad():
            for start in range(0, longest, size):
                lead = min(self.spec.overlap, start) if self.net.context else 0
                outputs = self.forward(data, rows, past, start, min(start + size, longest), lead)
                for (n, t), out in outputs.items():
                    if there[n, t := t + data.starts[n]]:
                        for whole, o in zip(found, out, strict=True):
                            whole[:, n, t] = o.numpy()
        ends = [[tuple(v[..., n] for v in layer) for layer in past[b - a]] for n, a, b in rows]
        if self.scaled:
            found = [found[0] * self.target_scale + self.target_mean]
        return found, ends


def weights_of_classes(class_weight, data, steps, n_classes):
    """(K,), from how often each class occurs at the steps that carry a loss, by their weights."""
    if isinstance(class_weight, list):
        return np.array(class_weight)
    counts = np.zeros(n_classes)
    for step in steps:
        counts[int(data.y[0][0][step])] += 1.0 if data.w is None else data.w[step]
    occurs = counts > 0
    balanced = np.ones(n_classes)  # of a class that occurs in the first fit alone
    balanced[occurs] = counts.sum() / (occurs.sum() * counts[occurs])
    return balanced if class_weight == "balanced" else np.sqrt(balanced)


def mean_and_scale(data, steps):
    """Of each output, (G, 1, 1), over the steps that count, with their weights; a constant is not
    scaled.
    """
    found = []
    for y in data.y[0]:
        counted = [step for step in steps if data.share(*step)]
        values = np.array([y[n, t] for n, t in counted if not np.isnan(y[n, t])])
        w = np.array(
            [1.0 if data.w is None else data.w[n, t] for n, t in counted if not np.isnan(y[n, t])]
        )
        if not w.any():  # no step of this output counts
            found.append((0.0, 1.0))
            continue
        mean = np.average(values, weights=w)
        scale = math.sqrt(np.average((values - mean) ** 2, weights=w))
        found.append((mean, scale if np.ptp(values[w > 0]) else 1.0))
    return np.array(found).T[:, :, None, None]


def pooled_r2(predicted, data):
    """1 - sum w (y - yhat)^2 / sum w (y - mean y)^2 over series, time and features; the mean of
    several outputs.
    """
    scores = []
    for out, y in zip(predicted, data.y, strict=True):
        w = np.ones(y.shape) if data.w is None else np.broadcast_to(data.w, y.shape)
        there = _there(data)[None] & ~np.isnan(y) & ~np.isnan(out) & (w > 0)
        w = np.where(there, w, 0)
        y, out = np.where(there, y, 0), np.where(there, out, 0)
        total = w.sum((1, 2), keepdims=True)
        mean = (w * y).sum((1, 2), keepdims=True) / np.where(total > 0, total, 1)
        residual, spread = (w * (y - out) ** 2).sum(), (w * (y - mean) ** 2).sum()
        scores.append(1 - residual / spread if spread > 1e-12 else math.nan)
    return float(np.mean(scores))


def accuracy(predicted, data):
    """The weighted share of live steps whose largest score is at the label."""
    (y,), (out,) = data.y, predicted
    w = np.ones(y.shape[1:]) if data.w is None else data.w
    live = _there(data) & ~np.isnan(y[0]) & ~np.isnan(out[0]) & (w > 0)
    return float((w * (out.argmax(0) == y[0]))[live].sum() / w[live].sum())


def _there(data):
    t = np.arange(data.n_steps)
    return (t >= data.starts[:, None]) & (t < (data.starts + data.lengths)[:, None])
