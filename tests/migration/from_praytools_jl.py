"""What PrayTools.jl gives for rows of ``docs/coming_from/other_systems.md``: by its formulas and its tests."""

import contextlib
import copy
import io
import json
import threading

import numpy as np
import torch
from torch import nn

from fluxutils_py.training import Loop, StepInfo
from tests.migration import Checks

checks = Checks()


class Problem:
    """Three minibatches of 20, 20 and 7 rows, one after another, and a linear model of them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.samples = [
            (torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator))
            for n in (20, 20, 7)
        ]
        self.model = nn.Linear(3, 1)
        self.first = copy.deepcopy(self.model)
        self.ps = list(self.model.parameters())
        self.prepared = 0
        self.callers = set()
        self.lock = threading.Lock()

    def loss(self, x, y, model=None):
        return nn.functional.mse_loss((model or self.model)(x), y)

    def prepare(self):
        with self.lock:
            self.callers.add(threading.get_ident())
            sample = self.samples[self.prepared % 3]
            self.prepared += 1
        return sample

    def trained(self, losses_of_steps):
        """The first model after steps of plain torch, and the loss of each step."""
        model, losses = copy.deepcopy(self.first), []
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for loss_of_step in losses_of_steps:
            value = loss_of_step(model)
            opt.zero_grad()
            value.backward()
            opt.step()
            losses.append(value.item())
        return list(model.parameters()), losses

    def trained_on_samples(self):
        return self.trained(
            [lambda model, sample=sample: self.loss(*sample, model) for sample in self.samples]
        )


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def close(found, expected):
    torch.testing.assert_close([p.detach() for p in found], [p.detach() for p in expected])


def mean_gradient(names, samples):
    """The mean of the gradients of samples of one size, by plain torch."""
    found = [torch.autograd.grad(names["loss"](*sample), names["ps"]) for sample in samples]
    return [sum(parts) / len(found) for parts in zip(*found, strict=True)]


# -- training ------------------------------------------------------------------------------------------


@checks.of("train(loss, ps, preparesamples, opt, iterations, cb=lambda: None, cby=print)")
def _(names, value):
    problem, calls = Problem(), []
    names["train"](
        problem.loss,
        problem.ps,
        problem.prepare,
        sgd,
        3,
        cb=lambda: calls.append("cb"),
        cby=calls.append,
    )
    expected, losses = problem.trained_on_samples()
    close(problem.ps, expected)
    assert calls[::2] == ["cb"] * 3  # after each update, and before cby
    np.testing.assert_allclose(calls[1::2], losses, rtol=1e-5)


@checks.of("ptrain(loss, ps, preparesamples, opt, iterations, bs=2)")
def _(names, value):
    problem, losses = Problem(), []
    names["ptrain"](problem.loss, problem.ps, problem.prepare, sgd, 3, bs=2, cby=losses.append)
    # 7 rows too: 4 and 3 count by their size
    expected, expected_losses = problem.trained_on_samples()
    close(problem.ps, expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert problem.callers == {threading.get_ident()}  # a single thread prepares


@checks.of("ttrain(loss, ps, preparesamples, opt, iterations)")
def _(names, value):
    problem, losses, together = Problem(), [], threading.Barrier(3, timeout=300)

    def prepare():
        together.wait()  # passes only if three threads prepare at once
        return problem.prepare()

    def mean(model):
        return sum(problem.loss(*sample, model) for sample in problem.samples) / 3

    names["ttrain"](problem.loss, problem.ps, prepare, sgd, 2, n=3, cby=losses.append)
    expected, expected_losses = problem.trained([mean, mean])
    close(problem.ps, expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert (problem.prepared, len(problem.callers)) == (6, 3)


@checks.of("itrain(loss, ps, lambda: environments, opt, iterations, tau=0.5)")
def _(names, value):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    # these are the gradients
    environments = (
        (torch.tensor([2.0, 3.0]),),
        (torch.tensor([4.0, -1.0]),),
    )
    losses = []
    names["itrain"](
        lambda x: (weight * x).sum(),
        [weight],
        lambda: environments,
        sgd,
        1,
        tau=0.5,
        cby=losses.append,
    )
    # 1 - .1 * (2 + 4) / 2; signs differ
    torch.testing.assert_close(weight.detach(), torch.tensor([0.7, 2.0]))
    assert losses == [5.0]  # (8 + 2) / 2


@checks.of("autotrain(loss, ps, preparesamples, 20, opt, iterations)")
def _(names, value):
    problem = Problem()
    stats = [{"parts": 1, "time": 2.0}, {"parts": 2, "time": 1.0}]
    names["autotrain"](problem.loss, problem.ps, problem.prepare, 20, sgd, 3, stats=stats)
    close(problem.ps, problem.trained_on_samples()[0])  # whatever the number of parts
    measured = Problem()
    names["autotrain"](measured.loss, measured.ps, lambda: measured.samples[0], 20, sgd, 1, steps=1)
    close(
        measured.ps, measured.trained([lambda model: measured.loss(*measured.samples[0], model)])[0]
    )


@checks.of("cb(lambda: None)")
def _(names, value):
    calls, loop = [], Loop(lambda batch: StepInfo(2.0 * batch))
    loop.hooks.attach(names["cb"](lambda: calls.append(loop.step)))
    loop.run_epochs([1.5, 2.5], 2)
    assert calls == [1, 2, 3, 4]


@checks.of("cby(print)")
def _(names, value):
    losses, loop = [], Loop(lambda batch: StepInfo(2.0 * batch))
    loop.hooks.attach(names["cby"](losses.append))
    loop.run_epochs([1.5, 2.5], 2)
    assert losses == [3.0, 5.0, 3.0, 5.0]


# -- gradients -----------------------------------------------------------------------------------------


@checks.of("value, grads = tgradient(loss, ps, preparesamples)")
def _(names, value):
    problem = Problem()
    found, grads = names["tgradient"](problem.loss, problem.ps, problem.prepare, 3)
    # equal weights, whatever their sizes
    mean = sum(problem.loss(*sample) for sample in problem.samples) / 3
    assert np.isclose(found, mean.item(), rtol=1e-5)
    close(grads, torch.autograd.grad(mean, problem.ps))
    assert [g.shape for g in names["grads"]] == [p.shape for p in names["ps"]]


@checks.of("value, grads = igradient(loss, ps, environments, tau=0.5)")
def _(names, value):
    one, other = (
        torch.autograd.grad(names["loss"](*sample), names["ps"]) for sample in names["environments"]
    )
    for found, a, b in zip(names["grads"], one, other, strict=True):
        agree = a.sign() == b.sign()  # of two signs, the mean is 1 or 0
        torch.testing.assert_close(found, torch.where(agree, (a + b) / 2, 0.0))
    losses = [names["loss"](*sample).item() for sample in names["environments"]]
    assert np.isclose(names["value"], np.mean(losses), rtol=1e-5)


@checks.of("value, grads = pgradient(loss, ps, environments)")
def _(names, value):
    samples = names["environments"]
    losses = [float(names["loss"](*sample).detach()) for sample in samples]
    assert np.isclose(float(names["value"]), np.mean(losses), rtol=1e-5)
    for found, expected in zip(names["grads"], mean_gradient(names, samples), strict=True):
        torch.testing.assert_close(found, expected)


@checks.of("total = addgrad(gs, gs)")
def _(names, value):
    for found, one in zip(names["total"], names["gs"], strict=True):
        assert torch.equal(found, 2 * one)


@checks.of("parts = dividebatch(2, *preparesamples())")
def _(names, value):
    assert [(tuple(x.shape), tuple(y.shape)) for x, y in names["parts"]] == [((10, 3), (10, 1))] * 2
    for x, y in names["parts"]:  # a row's label stays beside it
        torch.testing.assert_close(y, x.sum(1, keepdim=True))


@checks.of("stats = paralelization_stats(loss, ps, preparesamples, 20)")
def _(names, value):
    assert [row["parts"] for row in names["stats"]] == [1, 1, 2, 4, 8, 16]
    assert all(row["time"] > 0 for row in names["stats"])


@checks.of("signalign([np.ones(3), -np.ones(3)], 0.5)")
def _(names, value):
    assert np.asarray(value).tolist() == [0, 0, 0]  # the signs agree nowhere
    xs = [np.array([1.0, x, -1.0]) for x in (-1.0, 1.0, 1.0)]  # PrayTools.jl's own test
    for tau, middle in ((1.0, 0.0), (0.5, 0.0), (0.0, 1 / 3)):
        np.testing.assert_allclose(names["signalign"](xs, tau), [1.0, middle, -1.0])


@checks.of("maskedgrad([gs, gs], 0.5)")
def _(names, value):
    for found, one in zip(value, names["gs"], strict=True):
        torch.testing.assert_close(found, one)


@checks.of("nan, inf, largest, l2 = gradinfo(gs)")
def _(names, value):
    flat = torch.cat([g.reshape(-1) for g in names["gs"]]).double().numpy()
    assert (int(names["nan"]), int(names["inf"])) == (0, 0)
    assert np.isclose(float(names["largest"]), np.abs(flat).max())
    assert np.isclose(float(names["l2"]), (flat**2).sum(), rtol=1e-5)


# -- data and evaluation -------------------------------------------------------------------------------


@checks.of("loader = BackgroundDataLoader(preparesamples, 4); x, y = loader.take(); loader.close()")
def _(names, value):
    torch.testing.assert_close(names["y"], names["x"].sum(1, keepdim=True))
    loads, lock = [], threading.Lock()

    def load():
        with lock:
            loads.append(len(loads))
            return loads[-1]

    # of several workers, the one that begins first need not be the one that counts first
    with names["BackgroundDataLoader"](load, 4, workers=1) as loader:
        taken = [loader.take() for _ in range(10)]
    assert taken == list(range(10))
    assert 10 <= len(loads) <= 14  # never more than 4 ahead


@checks.of("classindexes(targets)")
def _(names, value):
    assert {name: list(rows) for name, rows in value.items()} == {"a": [0, 3], "b": [1, 2, 4]}


@checks.of("balanced_sample(ci, 4)")
def _(names, value):
    rows = sorted(int(row) for row in value)
    assert {0, 3} < set(rows)  # both of "a", two of "b"
    assert len(set(rows)) == 4


@checks.of("x, y = initbatchprovider(data, targets, 4)()")
def _(names, value):
    assert np.asarray(names["x"]).shape == (3, 4)
    assert np.asarray(names["y"]).sum() == 4


@checks.of("x, y = initbatchprovider(data, targets, [0, 1, 2], 2)()")
def _(names, value):
    data = names["data"]
    x, y = np.asarray(names["x"]), np.asarray(names["y"])
    assert y.tolist() == [[1.0, 0.0], [0.0, 1.0]]  # one sample of "a", then one of "b"
    assert np.array_equal(x[:, 0], data[:, 0])  # the only "a" of the three
    assert any(np.array_equal(x[:, 1], data[:, k]) for k in (1, 2))


@checks.of(
    'cby, history = initevalcby(steps=50, accuracy=accuracy, resultdir="results", model=model)'
)
def _(names, value):
    losses, lines = np.random.default_rng(0).uniform(size=7), io.StringIO()
    cby, history = names["initevalcby"](3, lambda: {"auc": 0.5}, "own results", names["model"])
    with contextlib.redirect_stdout(lines):
        for loss in losses:
            cby(loss)
    assert [(record["step"], record["auc"]) for record in history] == [(3, 0.5), (6, 0.5)]
    np.testing.assert_allclose(
        [record["loss"] for record in history], [losses[:3].mean(), losses[3:6].mean()]
    )
    assert [line.split(":")[0] for line in lines.getvalue().splitlines()] == ["3", "6"]
    with open("own results/history.json") as file:
        assert json.load(file) == history
    saved = torch.load("own results/model_6.pt", weights_only=True)
    close(saved.values(), names["model"].state_dict().values())
    assert names["history"] == []  # the page's has not been called


@checks.of("cb, best = bestmodelselector(model, accuracy); cb(); best.restore()")
def _(names, value):
    assert names["best"].value < 0  # minus a squared error
    model, scores = nn.Linear(1, 1), [-3.0, -1.0, -1.0, -2.0]  # an equal score is no improvement
    left = iter(scores)
    cb, best = names["bestmodelselector"](model, lambda: next(left))
    for step in range(4):
        model.weight.data.fill_(step)
        cb()
    best.restore()
    assert (best.value, model.weight.item()) == (-1.0, 1.0)


@checks.of("ffnn(3, 8, 2, torch.relu)")
def _(names, value):
    x, (w1, b1, w2, b2) = torch.randn(7, 3), [p.detach() for p in value.parameters()]
    assert [p.shape for p in (w1, b1, w2, b2)] == [(8, 3), (8,), (8, 8), (8,)]
    torch.testing.assert_close(value(x), ((x @ w1.T + b1).clamp(min=0) @ w2.T + b2).clamp(min=0))
