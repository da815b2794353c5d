"""What FluxUtils.jl gives for the rows of ``docs/coming_from/fluxutils_jl.md``: by its formulas, in NumPy
and plain torch.

The page's own data are zeros, so the checks of training run the call's functions once more, on data
of their own whose series and steps do not divide into minibatches.
"""

import contextlib
import copy
import io
import logging
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fluxutils_py import Estimator, h5save, net2vec, seqloss
from fluxutils_py.data.hdf5 import h5load
from fluxutils_py.inputs import as_series
from fluxutils_py.nn import LSTM
from tests.migration import Checks

checks = Checks()

SPEC = {"epochs": 2, "batchsize": 2, "seqsize": 4}
LR = 0.1


class Problem:
    """Five series of 11 steps, in minibatches of 2 series and 4 steps."""

    def __init__(self, n_in=3):
        rng = np.random.default_rng(5)
        self.x = rng.normal(size=(n_in, 5, 11)).astype("float32")
        self.y = rng.normal(size=(1, 5, 11)).astype("float32")
        self.w = rng.uniform(0.5, 2, size=(1, 5, 11)).astype("float32")
        self.model = nn.Sequential(LSTM(n_in, 4), nn.Linear(4, 1))

    def estimator(self, spec=SPEC, **settings):
        loss = settings.pop("loss", seqloss(mse_loss))
        return Estimator(self.model, loss, sgd, spec, verbose=False, **settings)

    def plain(self, model=None):
        """The model's parameters in modules of torch."""
        lstm, linear = nn.LSTM(self.x.shape[0], 4), nn.Linear(4, 1)
        params = [*lstm.parameters(), *linear.parameters()]
        with torch.no_grad():
            for p, q in zip(params, (model or self.model).parameters(), strict=True):
                p.copy_(q)
        return lstm, linear, params

    def train(self, epochs=2, w=None, model=None, lr=LR):
        """``fit!`` in plain torch: mean loss and gradient of the last epoch's minibatches, and the
        parameters.
        """
        lstm, linear, params = self.plain(model)
        scaled = np.ones_like(self.y) if w is None else w / w.mean()
        for _ in range(epochs):
            losses, gradients, state = [], [], None
            for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
                for start in (0, 4, 8):  # time is the inner loop
                    xs, ys, ws = (
                        as_steps(a[:, rows, start : start + 4]) for a in (self.x, self.y, scaled)
                    )
                    out, state = lstm(xs, state if start else None)
                    state = tuple(s.detach() for s in state)
                    loss = (ws * (linear(out) - ys).square()).mean()
                    grads = torch.autograd.grad(loss, params)
                    losses.append(loss.item())
                    gradients.append(torch.cat([g.reshape(-1) for g in grads]))
                    with torch.no_grad():
                        for p, g in zip(params, grads, strict=True):
                            p -= lr * g
        vector = torch.cat([p.detach().reshape(-1) for p in params])
        return np.mean(losses), torch.stack(gradients).mean(0), vector

    def predicted(self, model):
        lstm, linear, _ = self.plain(model)
        with torch.no_grad():
            return linear(lstm(as_steps(self.x))[0]).permute(2, 1, 0).numpy()


def sgd(params):
    return torch.optim.SGD(params, lr=LR)


def as_steps(a):
    """(F, N, T) as torch has it: (T, N, F)."""
    return torch.tensor(a).permute(2, 1, 0)


def same(found, expected, **tolerance):
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(expected), check_dtype=False, **tolerance
    )


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# -- the estimator -------------------------------------------------------------------------------------


@checks.of("est = Estimator(model, loss, opt, spec)")
def _(names, value):
    est = names["est"]
    assert (est.model, est.loss, est.opt, est.spec) == tuple(
        names[name] for name in ("model", "loss", "opt", "spec")
    )
    problem = Problem()
    before = net2vec(problem.model)
    fitted = problem.estimator().fit(problem.x, problem.y)
    same(net2vec(problem.model), before)  # a copy is trained
    same(net2vec(fitted), problem.train()[2])


@checks.of("est.fit(x, y)")
def _(names, value):
    assert value is names["est"]
    problem = Problem()
    est = problem.estimator().fit(problem.x, problem.y)
    loss, gradient, parameters = problem.train()
    assert est.loss_ == pytest.approx(loss, rel=1e-5)
    same(est.grad_, gradient)
    same(net2vec(est), parameters)
    same(net2vec(est.fit(problem.x, problem.y)), parameters)  # afresh


@checks.of("est.fit(x, y, w)")
def _(names, value):
    assert (names["w"] == 1).all()
    problem = Problem()
    w = problem.w.copy()
    loss, gradient, parameters = problem.train(w=problem.w)  # w / mean(w)
    est = problem.estimator().fit(problem.x, problem.y, problem.w)
    assert est.loss_ == pytest.approx(loss, rel=1e-5)
    same(est.grad_, gradient)
    same(net2vec(est), parameters)
    assert np.array_equal(problem.w, w)


@checks.of("est.fit(x, y, epochs=3)")
def _(names, value):
    assert value.n_iter_ == 3
    problem = Problem()
    same(
        net2vec(problem.estimator().fit(problem.x, problem.y, epochs=3)), problem.train(epochs=3)[2]
    )


@checks.of("Estimator(model, loss, opt, spec, callbacks=cb(lambda: None)).fit(x, y)")
def _(names, value):
    problem, calls = Problem(), []
    problem.estimator(callbacks=names["cb"](lambda: calls.append(1))).fit(problem.x, problem.y)
    assert len(calls) == 18  # 2 epochs of 3 groups of series and 3 of steps


@checks.of("value, gradient = est.evaluate(x, y, gradient=True)")
def _(names, value):
    problem = Problem()
    est = problem.estimator().fit(problem.x, problem.y)
    before = net2vec(est)
    found, gradient = est.evaluate(problem.x, problem.y, gradient=True)
    same(gradient, problem.train(epochs=1, model=est.model_, lr=0)[1])  # the mean over minibatches
    errors = problem.predicted(est.model_) - problem.y
    assert found == pytest.approx((errors**2).mean(), rel=1e-5)  # the mean over steps
    same(net2vec(est), before)


@checks.of("value = est.evaluate(x, y)")
def _(names, value):
    problem = Problem()
    est = problem.estimator({"epochs": 1, "batchsize": 5, "seqsize": 11}).fit(problem.x, problem.y)
    lstm, linear, _ = problem.plain(est.model_)
    expected = mse_loss(
        linear(lstm(as_steps(problem.x))[0]), as_steps(problem.y)
    ).item()  # of one minibatch
    assert est.evaluate(problem.x, problem.y) == pytest.approx(expected, rel=1e-5)


@checks.of('StopTraining("enough")')
def _(names, value):
    problem, calls = Problem(), []

    def stop(loop):
        calls.append(loop.step)
        if loop.step == 9:  # the end of the first epoch
            raise value

    est = problem.estimator(callbacks=[stop]).fit(problem.x, problem.y)
    assert calls == list(range(1, 10))
    same(net2vec(est), problem.train(epochs=1)[2])


@checks.of("est.predict(x, out=yhat)")
def _(names, value):
    assert value is names["yhat"]
    problem = Problem()
    est = problem.estimator().fit(problem.x, problem.y)
    found = np.zeros_like(problem.y)
    est.predict(problem.x, out=found)
    same(found, problem.predicted(est.model_))
    same(est.predict(problem.x), found)
    same(
        problem.estimator(SPEC | {"batchsize": 40})
        .fit(problem.x, problem.y)
        .predict(problem.x)
        .shape,
        (1, 5, 11),
    )


@checks.of(
    "head, state = est.predict(x[:, :, :9], return_state=True); tail = est.predict(x[:, :, 9:], "
    "state=state)"
)
def _(names, value):
    assert (names["head"].shape[2], names["tail"].shape[2]) == (9, names["T"] - 9)
    problem = Problem()
    est = problem.estimator().fit(problem.x, problem.y)
    head, state = est.predict(problem.x[:, :, :6], return_state=True)
    tail = est.predict(problem.x[:, :, 6:], state=state)
    same(np.concatenate([head, tail], 2), problem.predicted(est.model_))


@checks.of("Spec(epochs=2, batchsize=20, seqsize=10)")
def _(names, value):
    assert (value.epochs, value.batchsize, value.seqsize) == (2, 20, 10)
    problem = Problem()
    est = problem.estimator(names["Spec"](**SPEC)).fit(problem.x, problem.y)
    same(net2vec(est), problem.train()[2])


@checks.of("Estimator(lambda: Both(), seqloss(mse_loss), spec=spec).fit((x, x), y)")
def _(names, value):
    x = randn(10, 4, 6).numpy()
    lstm, both = nn.LSTM(20, 1), value.model_
    lstm.load_state_dict({name.split(".")[-1]: p for name, p in both.state_dict().items()})
    expected = lstm(torch.cat([as_steps(x), 2 * as_steps(x)], -1))[0].permute(2, 1, 0).detach()
    same(value.predict((x, 2 * x)), expected)


@checks.of("seqloss(mse_loss)")
def _(names, value):
    problem = Problem()
    xs, ys = as_steps(problem.x), as_steps(problem.y)
    lstm, linear, _ = problem.plain()
    outputs, state, total = [], None, 0
    for t in range(len(xs)):
        out, state = lstm(xs[t : t + 1], state)
        outputs.append(linear(out[0]))
        total = total + (outputs[-1] - ys[t]).square().mean()
    same(value(problem.model, xs, ys), total / len(xs))


@checks.of("Estimator(model, verbose=True)")
def _(names, value):
    assert value.verbose is True
    problem, shown = Problem(), io.StringIO()
    handler = logging.StreamHandler(shown)
    log = logging.getLogger("fluxutils_py")
    log.addHandler(handler)
    try:
        with contextlib.redirect_stderr(shown):  # no terminal
            est = Estimator(problem.model, seqloss(mse_loss), sgd, SPEC, verbose=True).fit(
                problem.x, problem.y
            )
    finally:
        log.removeHandler(handler)
    lines = shown.getvalue().splitlines()
    for epoch, record in enumerate(est.history_, 1):
        assert any(f"{epoch}" in line and f"{record['loss']:.4g}"[:5] in line for line in lines), (
            lines
        )


@checks.of("FloatingPointError")
def _(names, value):
    problem, steps = Problem(), []

    def loss(m, xs, ys):
        return seqloss(mse_loss)(m, xs, ys) * (torch.nan if steps else 1)

    est = problem.estimator(
        loss=loss, callbacks=[lambda loop: steps.append((loop.model, net2vec(loop.model)))]
    )
    with pytest.raises(value, match="nan"):
        est.fit(problem.x, problem.y)
    ((model, after_first_step),) = steps
    same(net2vec(model), after_first_step)


# -- arrays and files ----------------------------------------------------------------------------------


@checks.of('x_map = h5mmap("part1.h5", "x")', 'x_map = h5mmap("part1.h5", "x", fallback="lazy")')
def _(names, value):
    julia = names["julia"]
    assert np.array_equal(names["x_map"], julia.transpose())
    assert names["x_map"][1, 2, 3] == julia[3, 2, 1]


@checks.of('h5save("new.h5", {"x": x})')
def _(names, value):
    array = randn(2, 3, 4).numpy()
    names["h5save"]("own.h5", {"x": array, "group": {"n": array[0]}})
    loaded = h5load("own.h5")
    assert np.array_equal(loaded["x"], array)
    assert np.array_equal(loaded["group"]["n"], array[0])
    assert np.array_equal(h5load("new.h5")["x"], names["x"])


@checks.of('arrays = h5load("part1.h5")')
def _(names, value):
    assert set(names["arrays"]) == {"x", "y"}
    for array in names["arrays"].values():
        assert np.array_equal(array, names["julia"].transpose())


def save_two_parts(folder):
    """Files of 3 and 2 series in a new folder; the array of each."""
    os.makedirs(folder)
    first, second = randn(2, 3, 4).numpy(), randn(2, 2, 4).numpy()
    h5save(f"{folder}/b.h5", {"x": second})
    h5save(f"{folder}/a.h5", {"x": first})
    return first, second


@checks.of('h5concat("all.h5", ["part1.h5", "part2.h5"], dims=1)')
def _(names, value):
    page = names["julia"].transpose()
    assert np.array_equal(h5load("all.h5")["y"], np.concatenate([page, page], 1))
    first, second = save_two_parts("listed")
    # in the order of the list
    names["h5concat"]("listed.h5", ["listed/b.h5", "listed/a.h5"], dims=1)
    assert np.array_equal(h5load("listed.h5")["x"], np.concatenate([second, first], 1))


@checks.of('h5concat("glob.h5", "part*.h5", dims=1)')
def _(names, value):
    page = names["julia"].transpose()
    assert np.array_equal(h5load("glob.h5")["x"], np.concatenate([page, page], 1))
    first, second = save_two_parts("globbed")
    names["h5concat"]("globbed.h5", "globbed/*.h5", dims=1)
    assert np.array_equal(h5load("globbed.h5")["x"], np.concatenate([first, second], 1))


@checks.of("part(x, 0, 2)")
def _(names, value):
    assert value.shape == (10, 50, 50)
    x = randn(2, 7, 5).numpy()
    parts = [names["part"](x, rank, 3) for rank in range(3)]
    assert [p.shape[1] for p in parts] == [3, 2, 2]
    assert np.array_equal(np.concatenate(parts, 1), x)


@checks.of("rebatch(x, 20)")
def _(names, value):
    assert value is names["x"]  # more series than 20
    x = randn(2, 3, 14).numpy()
    folded = names["rebatch"](x, 10)  # 10 ÷ 3 = 3 folds, of 5, 5 and 4 steps
    for b in range(3):
        for k, steps in enumerate((slice(0, 5), slice(5, 10), slice(10, 14))):
            row = folded[:, 3 * b + k]
            assert np.array_equal(row[:, : steps.stop - steps.start], x[:, b, steps])
    assert np.isnan(folded).sum() == 6  # 2 features, 3 series: a step that does not count
    assert np.array_equal(names["rebatch"](x[:, :, :12], 10)[:, 4], x[:, 1, 4:8])


@checks.of("list(indbatch(x, 20))")
def _(names, value):
    assert [(s.start, s.stop) for s in value] == [(0, 20), (20, 40), (40, 50)]


@checks.of("minibatch(x, y, 20)")
def _(names, value):
    assert [(x.shape, y.shape) for x, y in value] == [
        ((10, 100, n), (1, 100, n)) for n in (20, 20, 10)
    ]
    x, y = randn(2, 5).numpy(), randn(5).numpy()
    batches = names["minibatch"](x, y, 3)
    assert all(np.shares_memory(a, x) and np.shares_memory(b, y) for a, b in batches)
    assert np.array_equal(np.concatenate([a for a, _ in batches], -1), x)
    assert np.array_equal(np.concatenate([b for _, b in batches]), y)


@checks.of('SequenceWindows(as_series(x, "x"), batchsize=20, seqsize=10)')
def _(names, value):
    assert len(value) == 25  # 5 groups of series, 5 of steps
    x = randn(2, 5, 7).numpy()
    windows = list(names["SequenceWindows"](as_series(x, "x"), batchsize=2, seqsize=3))
    blocks = [x[:, n : n + 2, t : t + 3] for n in (0, 2, 4) for t in (0, 3, 6)]
    for window, block in zip(windows, blocks, strict=True):
        same(window.x[0], as_steps(block))
    assert [w.index.last for w in windows] == [
        False,
        False,
        True,
    ] * 3  # there the state is forgotten


# -- utilities -----------------------------------------------------------------------------------------


@checks.of("notrack(m)")
def _(names, value):
    assert not any(p.requires_grad for p in value.parameters())
    assert all(p.requires_grad for p in names["m"].parameters())
    same(net2vec(value), net2vec(names["m"]))
    assert names["notrack"](value) is value


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


@checks.of("v = net2vec(m)")
def _(names, value):
    same(names["v"], flat(names["m"].parameters()))
    before = flat(names["m"].parameters())
    names["v"].zero_()
    same(flat(names["m"].parameters()), before)


@checks.of("vec2net(m, net2vec(m))")
def _(names, value):
    assert value is names["m"]
    model = copy.deepcopy(names["m"])
    v = torch.arange(float(len(net2vec(model))))
    names["vec2net"](model, v)
    same(flat(model.parameters()), v)
    with pytest.raises(ValueError, match=f"{len(v) + 1}.*{len(v)}"):
        names["vec2net"](model, torch.zeros(len(v) + 1))


@checks.of("g = net2grad(m)")
def _(names, value):
    same(names["g"], flat(p.grad for p in names["m"].parameters()))
    assert names["g"].abs().sum() > 0
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert names["net2grad"](nn.Linear(2, 3)).tolist() == [0.0] * 9


@checks.of("grad2net(m, net2grad(m))")
def _(names, value):
    assert value is names["m"]
    model = copy.deepcopy(names["m"])
    g = torch.arange(float(len(net2vec(model))))
    names["grad2net"](model, g)
    same(flat(p.grad for p in model.parameters()), g)


@checks.of("namedparams(m)")
def _(names, value):
    for (name, p), q in zip(value, names["m"].parameters(), strict=True):
        assert p is q
        assert names["m"].get_parameter(name) is q


@checks.of("s = states(m)")
def _(names, value):
    h, c = names["s"]
    lstm = names["m"][0].module
    expected = lstm(torch.zeros(5, 2, 10))[1]  # the page's call
    same(h, expected[0].detach())
    same(c, expected[1].detach())


@checks.of("loadstates(m, states(m))")
def _(names, value):
    assert value is names["m"]
    model, x = copy.deepcopy(names["m"]), randn(6, 2, 10)
    model[0].reset()
    model(x[:2])
    state = names["states"](model)
    expected = model(x[2:])
    names["loadstates"](model, state)
    same(model(x[2:]), expected)
    with pytest.raises(ValueError, match="1"):
        names["loadstates"](model, state[:1])


@checks.of("reset(m)")
def _(names, value):
    assert value is names["m"]
    x = randn(5, 2, 10)
    same(value(x), value[1](value[0].module(x)[0]))  # from zero
    names["reset"](value)


@checks.of("truncate(m)")
def _(names, value):
    model, x = copy.deepcopy(names["m"]), randn(6, 3, 10)
    model[0].reset()
    lstm = model[0].module
    model(x[:3])
    names["truncate"](model)
    found = torch.autograd.grad(model(x[3:]).sum(), lstm.weight_hh_l0)[0]
    state = tuple(s.detach() for s in lstm(x[:3])[1])
    same(found, torch.autograd.grad(model[1](lstm(x[3:], state)[0]).sum(), lstm.weight_hh_l0)[0])


WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "weight")


@checks.of("sum(p.square().sum() for p in weights(m))")
def _(names, value):
    expected = [p for name, p in names["m"].named_parameters() if name.split(".")[-1] in WEIGHTS]
    assert len(expected) == 3
    same(value, sum(p.square().sum() for p in expected))


@checks.of("namedweights(m)")
def _(names, value):
    assert [name.split(".")[-1] for name, _ in value] == list(WEIGHTS)
    assert all(names["m"].get_parameter(name) is p for name, p in value)


@checks.of("windices(m, maxnorm=True)")
def _(names, value):
    v = net2vec(names["m"])
    named = dict(names["m"].named_parameters())
    rows = [
        row for name, p in named.items() if name.split(".")[-1] in WEIGHTS for row in p.detach()
    ]
    for indices, row in zip(value, rows, strict=True):
        same(v[indices], row)


@checks.of("bmm(np.ones((2, 3, 5)), np.ones((3, 4, 5)))")
def _(names, value):
    assert np.array_equal(value, np.full((2, 4, 5), 3.0))
    a, b = randn(2, 3, 5).numpy(), randn(3, 4, 5).numpy()
    same(names["bmm"](a, b), np.einsum("mkb,knb->mnb", a, b))


@checks.of('batched_gemm("N", "T", 2.0, torch.ones(2, 3, 5), torch.ones(4, 3, 5))')
def _(names, value):
    assert torch.equal(value, torch.full((2, 4, 5), 6.0))
    a, b = randn(3, 2, 5), randn(4, 3, 5)
    same(names["batched_gemm"]("T", "T", 0.5, a, b), torch.einsum("kmb,nkb->mnb", a, b) / 2)


@checks.of(
    'batched_gemm_("N", "N", 1.0, torch.ones(2, 3, 5), torch.ones(3, 4, 5), 0.0, torch.empty(2, 4, 5))',
)
def _(names, value):
    assert torch.equal(value, torch.full((2, 4, 5), 3.0))
    a, b, c = randn(2, 3, 5), randn(3, 4, 5), randn(2, 4, 5)
    expected = 2 * torch.einsum("mkb,knb->mnb", a, b) - 3 * c
    assert names["batched_gemm_"]("N", "N", 2.0, a, b, -3.0, c) is c
    same(c, expected)


@checks.of("contract(torch.ones(2, 3), torch.ones(3, 4))")
def _(names, value):
    assert torch.equal(value, torch.full((2, 4), 3.0))
    a, b = randn(2, 5, 3), randn(3, 4, 2)
    same(names["contract"](a, b), torch.einsum("ijk,klm->ijlm", a, b))


@checks.of("torch.ones(2, 3) + torch.ones(3)")
def _(names, value):
    assert torch.equal(value, torch.full((2, 3), 2.0))


# -- layers --------------------------------------------------------------------------------------------


def outputs_by_steps(layer, x):
    layer.reset()
    return torch.stack([layer(step) for step in x])


@checks.of("LSTM(10, 5)", "GRU(10, 5)", "RNN(10, 5)")
def _(names, value):
    x = randn(7, 3, 10)
    kinds = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
    plain = kinds[type(value).__name__](10, 5)
    plain.load_state_dict(value.module.state_dict())
    expected = plain(x)[0]
    same(outputs_by_steps(value, x), expected)  # the state is carried
    value.reset()
    same(value(x), expected)


@checks.of("LSTM(10, 5, trainable_init=True)")
def _(names, value):
    x = randn(7, 3, 10)
    h, c = [p for name, p in value.named_parameters() if "init" in name]
    with torch.no_grad():
        h.fill_(0.5)
        c.fill_(-1.0)
    plain = nn.LSTM(10, 5)
    plain.load_state_dict(value.module.state_dict())
    expected = plain(x, (torch.full((1, 3, 5), 0.5), torch.full((1, 3, 5), -1.0)))[0]
    found = value(x)
    same(found, expected)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(found.sum(), [h, c]))


@checks.of("Recur(nn.LSTMCell(10, 5))")
def _(names, value):
    x, state, expected = randn(7, 3, 10), None, []
    for step in x:
        state = value.module(step, state)
        expected.append(state[0])
    same(outputs_by_steps(value, x), torch.stack(expected))


@checks.of("RNNStack(10, 5, 2, 0.1)")
def _(names, value):
    assert [type(layer).__name__ for layer in value] == ["LSTM", "Dropout", "LSTM"]
    assert value[1].p == 0.1
    x, value = randn(7, 3, 10), value.eval()
    same(value(x), value[2].module(value[0].module(x)[0])[0])


def psigmoid(x):
    """Of FluxUtils.jl, by its cases."""
    x = x / 4.1
    return torch.where(x > 1, 1.0, torch.where(x < -1, 0.0, 0.5 + x * (1 - 0.5 * x.abs())))


def ptanh(x):
    middle = torch.where(
        x > 0, 0.96016 - 0.26037 * (x - 1.92033) ** 2, 0.26037 * (x + 1.92033) ** 2 - 0.96016
    )
    return torch.where(x > 1.92033, 0.96016, torch.where(x < -1.92033, -0.96016, middle))


def check_cell(layer, step, n_states=1):
    """A layer against the formula of a step: ``step(x, states, weight_ih, weight_hh, bias)``
    returns the states.
    """
    cell = layer.module.cells[0]
    with torch.no_grad():
        for k, p in enumerate(cell.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)))
        x, state, expected = randn(7, 3, 10), (torch.zeros(3, 5),) * n_states, []
        for row in x:
            state = step(row, state, cell.weight_ih, cell.weight_hh, cell.bias)
            expected.append(state[0])
        layer.reset()
        same(layer(x), torch.stack(expected))
        same(outputs_by_steps(layer, x), torch.stack(expected))
    layer.reset()
    gradients = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)  # all of it is trained


@checks.of("FLSTM(10, 5)")
def _(names, value):
    forget = value.module.cells[0].bias[5:10]
    assert (forget == 1).all()

    def step(x, state, wi, wh, b):
        h, c = state
        i, f, g, o = (x @ wi.T + h @ wh.T + b).split(5, 1)
        c = psigmoid(f) * c + psigmoid(i) * ptanh(g)
        return psigmoid(o) * ptanh(c), c

    check_cell(value, step, n_states=2)


@checks.of("SGRU(10, 5)")
def _(names, value):
    def step(x, state, wi, wh, b):
        (h,) = state
        r, z = psigmoid(h @ wh[:10].T + b[:10]).split(5, 1)
        new = ptanh(x @ wi.T + r * (h @ wh[10:].T) + b[10:])
        return ((1 - z) * new + z * h,)

    check_cell(value, step)


@checks.of("MGU(10, 5)")
def _(names, value):
    def step(x, state, wi, wh, b):
        (h,) = state
        z = psigmoid(x @ wi[:5].T + h @ wh[:5].T + b[:5])
        new = ptanh(x @ wi[5:].T + z * (h @ wh[5:].T) + b[5:])
        return ((1 - z) * new + z * h,)

    check_cell(value, step)


@checks.of("SMGU(10, 5)")
def _(names, value):
    def step(x, state, wi, wh, b):
        (h,) = state
        z = psigmoid(h @ wh[:5].T + b[:5])
        new = ptanh(x @ wi.T + z * (h @ wh[5:].T) + b[5:])
        return ((1 - z) * new + z * h,)

    check_cell(value, step)


@checks.of("HFGRU(10, 5)")
def _(names, value):
    def step(x, state, wi, wh, b):
        (h,) = state
        r, z = torch.sigmoid(x @ wi[:10].T + h @ wh[:10].T + b[:10]).split(5, 1)
        new = torch.tanh(x @ wi[10:].T + r * (h @ wh[10:].T) + b[10:])
        return (z * new + (1 - z) * h,)  # z reversed

    check_cell(value, step)


X = torch.linspace(-6, 6, 100, dtype=torch.float64)  # even: not at 0, where ptanh jumps


@checks.of("psigmoid(torch.zeros(3))")
def _(names, value):
    assert value.tolist() == [0.5] * 3
    same(names["psigmoid"](X), psigmoid(X))


@checks.of("ptanh(torch.zeros(3))")
def _(names, value):
    same(value, torch.zeros(3), atol=1e-5, rtol=0)
    same(names["ptanh"](X), ptanh(X))


def slope(f):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


@checks.of("dpsigmoid(torch.zeros(3))")
def _(names, value):
    same(value, torch.full((3,), 1 / 4.1))
    same(names["dpsigmoid"](X), slope(psigmoid))


@checks.of("dptanh(torch.zeros(3))")
def _(names, value):
    same(value, torch.full((3,), 2 * 0.26037 * 1.92033))
    same(names["dptanh"](X), slope(ptanh))


@checks.of("GaussianNoise(0.1)")
def _(names, value):
    x = randn(100_000)
    assert (value(x) - x).std().item() == pytest.approx(0.1, rel=0.02)
    assert value.eval()(x) is x
    assert names["GaussianNoise"](0.0)(x) is x


@checks.of("DenseReLU(10, 5)")
def _(names, value):
    x, (w, b) = randn(3, 10), value.parameters()
    same(value(x), (x @ w.T + b).clamp(min=0))


@checks.of("WinsorNorm().fit(np.random.default_rng(0).normal(size=(3, 5, 20)))")
def _(names, value):
    x = np.random.default_rng(0).normal(size=(3, 100))
    low, high = np.quantile(x, [0.01, 0.99], axis=1)[..., None]
    clamped = x.clip(low, high)
    expected = (clamped - clamped.mean(1, keepdims=True)) / clamped.std(1, ddof=1, keepdims=True)
    same(value(torch.tensor(x.T)), expected.T)


# -- optimisers ----------------------------------------------------------------------------------------


class Quadratic:
    """Two parameters and 30 steps on gradients that are their distances from a target."""

    def __init__(self):
        self.start = [
            torch.tensor([6.0, -0.1, 3.0], dtype=torch.float64),
            torch.tensor([0.3, 0.2]).double(),
        ]

    def by(self, factory, steps=30):
        params = [nn.Parameter(p.clone()) for p in self.start]
        opt = factory(params)
        for _ in range(steps):
            for p in params:
                p.grad = p.detach() - 0.05
            opt.step()
        return [p.detach() for p in params]

    def by_adam(self, lr, decay=0.0, clip=None, betas=(0.9, 0.999), steps=30):
        """Adam of Flux.jl in plain arithmetic; ``clip`` changes a gradient, ``decay`` is not times
        the rate.
        """
        found = []
        for p in self.start:
            p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
            for t in range(1, steps + 1):
                g = p - 0.05
                g = g if clip is None else clip(g)
                m = betas[0] * m + (1 - betas[0]) * g
                v = betas[1] * v + (1 - betas[1]) * g * g
                update = lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8)
                p = p - update - decay * p
            found.append(p)
        return found


def half(g):
    return g.clamp(-0.5, 0.5)


def unit(g):
    return g * min(1.0, 1.0 / g.norm().item())


def close_all(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@checks.of("ADAM32(1e-3, (0.9, 0.999))")
def _(names, value):
    close_all(Quadratic().by(value), Quadratic().by_adam(1e-3))
    close_all(
        Quadratic().by(names["ADAM32"](0.1, (0.5, 0.8))), Quadratic().by_adam(0.1, betas=(0.5, 0.8))
    )


@checks.of("ADAMW32(1e-3, 1e-3, 0.5)")
def _(names, value):
    close_all(Quadratic().by(value), Quadratic().by_adam(1e-3, 1e-3, half))


@checks.of("Chain(Clip(0.5), torch.optim.Adam)")
def _(names, value):
    close_all(Quadratic().by(value), Quadratic().by_adam(1e-3, clip=half))


@checks.of("Chain(ClipNorm(1.0), torch.optim.Adam)")
def _(names, value):
    close_all(Quadratic().by(value), Quadratic().by_adam(1e-3, clip=unit))  # parameter by parameter


@checks.of("Chain(torch.optim.Adam, WeightDecay(1e-4))")
def _(names, value):
    close_all(Quadratic().by(value), Quadratic().by_adam(1e-3, 1e-4))
