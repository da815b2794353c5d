"""Optimizers of FluxUtils, against torch's and hand-written NumPy; and as ``opt`` of an estimator."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adam, AdamW, NAdam, lr_scheduler

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.errors import SpecError
from fluxutils_py.nn import LSTM
from fluxutils_py.optim import (
    ADAM32,
    ADAMW32,
    Chain,
    ChainedOptimizer,
    Clip,
    ClipNorm,
    Transform,
    WeightDecay,
    by_name,
    cosine,
    inverse_sqrt,
    load_optimizer_state,
)

SHAPES = [(5, 3), (7,), (2, 3, 4)]
X = np.random.default_rng(0).normal(size=(2, 6, 20))
Y = X.mean(0, keepdims=True)
SPEC = Spec(epochs=2, batchsize=4, seqsize=5, shuffle=True)


def params(scale=1.0):
    torch.manual_seed(0)
    return [(scale * torch.randn(s, dtype=torch.float64)).requires_grad_() for s in SHAPES]


def gradients(step, scale=1.0):
    rng = np.random.default_rng(step)
    return [scale * rng.normal(size=s) for s in SHAPES]


def run(optimizer, ps, steps=30, scale=1.0, before=lambda ps: None):
    for k in range(steps):
        for p, g in zip(ps, gradients(k, scale), strict=True):
            p.grad = torch.from_numpy(g)
        before(ps)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in ps]


def assert_near(a, b, bound=1e-13):
    for u, v in zip(a, b, strict=True):
        np.testing.assert_allclose(u, v, rtol=0, atol=bound)


def adamw32_by_hand(xs, steps, lr, decay, thresh, beta=(0.9, 0.999), eps=1e-8):
    """Clip, Adam times the learning rate, plus decay times the parameter: subtracted."""
    xs = [x.copy() for x in xs]
    m, v = [np.zeros_like(x) for x in xs], [np.zeros_like(x) for x in xs]
    for k in range(steps):
        for i, g in enumerate(gradients(k)):
            g = g.clip(-thresh, thresh)
            m[i] = beta[0] * m[i] + (1 - beta[0]) * g
            v[i] = beta[1] * v[i] + (1 - beta[1]) * g**2
            delta = (
                m[i]
                / (1 - beta[0] ** (k + 1))
                / (np.sqrt(v[i] / (1 - beta[1] ** (k + 1))) + eps)
                * lr
            )
            xs[i] = xs[i] - (delta + decay * xs[i])
    return xs


# -- values ------------------------------------------------------------------------------------------------


def test_adamw32_is_value_clipping_and_adamw_and_its_formula():
    lr, decay, thresh = 1e-2, 3e-3, 0.4
    ours, theirs = params(), params()
    start = [p.detach().numpy().copy() for p in ours]
    found = run(ADAMW32(lr, decay, thresh)(ours), ours)
    expected = run(
        AdamW(theirs, lr, weight_decay=decay / lr),
        theirs,
        before=lambda ps: clip_grad_value_(ps, thresh),
    )
    assert_near(found, expected)
    assert_near(found, adamw32_by_hand(start, 30, lr, decay, thresh))
    naive = params()
    naive = run(
        AdamW(naive, lr, weight_decay=decay), naive, before=lambda ps: clip_grad_value_(ps, thresh)
    )
    assert max(abs(a - b).max() for a, b in zip(found, naive, strict=True)) > 1e-2


def test_defaults_of_adamw32_are_the_references():
    ours = params()
    start = [p.detach().numpy().copy() for p in ours]
    assert_near(run(ADAMW32()(ours), ours), adamw32_by_hand(start, 30, 1e-3, 1e-3, 0.5))


def test_without_a_learning_rate_adamw32_only_decays():
    ours = params()
    start = [p.detach().numpy().copy() for p in ours]
    assert_near(run(ADAMW32(0.0, 0.1)(ours), ours, 3), [0.9**3 * x for x in start])


def test_a_schedule_changes_the_learning_rate_of_adamw32_and_not_its_decay():
    ours = params()
    optimizer = ADAMW32(1.0, 0.1)(ours)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)
    start = [p.detach().numpy().copy() for p in ours]
    assert_near(run(optimizer, ours, 2), [0.9**2 * x for x in start])
    schedule.step()
    assert schedule.get_last_lr() == [0.0]


def test_adam32_is_adam():
    ours, theirs = params(), params()
    assert_near(
        run(ADAM32(2e-2, (0.8, 0.99))(ours), ours), run(Adam(theirs, 2e-2, (0.8, 0.99)), theirs), 0
    )
    assert ADAM32().keywords == {"lr": 1e-3, "betas": (0.9, 0.999)}


def test_clip_is_torchs_clipping_by_value():
    ours, theirs = params(), params()
    found = run(Chain(Clip(0.3), partial(SGD, lr=0.1))(ours), ours)
    assert_near(
        found, run(SGD(theirs, 0.1), theirs, before=lambda ps: clip_grad_value_(ps, 0.3)), 0
    )


def test_clip_norm_is_of_each_parameter():
    ps = [
        torch.zeros(3, dtype=torch.float64, requires_grad=True),
        torch.zeros(1, dtype=torch.float64, requires_grad=True),
    ]
    ps[0].grad = torch.tensor([4.0, 4.0, 2.0], dtype=torch.float64)  # norm 6
    ps[1].grad = torch.tensor([0.3], dtype=torch.float64)
    Chain(ClipNorm(1.0), partial(SGD, lr=1.0))(ps).step()
    assert torch.linalg.vector_norm(ps[0]).item() == pytest.approx(1, abs=1e-15)
    assert ps[1].item() == -0.3
    ps[0].grad.zero_()
    Chain(ClipNorm(1.0), partial(SGD, lr=1.0))(ps).step()  # 0 / 0 is nothing
    assert torch.linalg.vector_norm(ps[0]).item() == pytest.approx(1, abs=1e-15)


def test_the_order_of_a_chain_matters():
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=7), 3 * rng.normal(size=7)
    sgd = partial(SGD, lr=0.1)
    for chain, expected in (
        (Chain(WeightDecay(0.2), Clip(0.5), sgd), x - 0.1 * (g + 0.2 * x).clip(-0.5, 0.5)),
        (Chain(Clip(0.5), WeightDecay(0.2), sgd), x - 0.1 * (g.clip(-0.5, 0.5) + 0.2 * x)),
        (Chain(Clip(0.5), sgd, WeightDecay(0.2)), x - (0.1 * g.clip(-0.5, 0.5) + 0.2 * x)),
        (Chain(sgd, Clip(0.05)), x - (0.1 * g).clip(-0.05, 0.05)),
        (Chain(sgd, WeightDecay(0.2), ClipNorm(0.5)), x - limited(0.1 * g + 0.2 * x, 0.5)),
        (Chain(sgd), x - 0.1 * g),
    ):
        p = torch.from_numpy(x.copy()).requires_grad_()
        p.grad = torch.from_numpy(g.copy())
        chain([p]).step()
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-15)


def limited(delta, thresh):
    return delta * min(1, thresh / np.linalg.norm(delta))


def test_parameters_without_a_gradient_and_closures():
    ps = params()
    optimizer = ADAMW32(0.1, 0.1)(ps)

    def closure():
        optimizer.zero_grad()
        loss = ps[0].square().sum()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in ps]
    assert optimizer.step(closure) == before[0].square().sum()
    assert not torch.equal(ps[0], before[0])
    assert torch.equal(ps[1], before[1])


# -- as an optimizer of torch ------------------------------------------------------------------------------


def test_state_goes_into_another_and_into_copies():
    ours, theirs = params(), params()
    one, other = ADAMW32(0.1)(ours), ADAMW32(0.3)(theirs)
    run(one, ours, 5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.param_groups[0]["lr"] == 0.1
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            p.copy_(q)
    twin = copy.deepcopy((ours, one))
    again = pickle.loads(pickle.dumps((ours, one)))
    expected = run(one, ours, 4)
    assert_near(run(other, theirs, 4), expected, 0)
    for ps, optimizer in (twin, again):
        assert_near(run(optimizer, ps, 4), expected, 0)
        assert optimizer.inner.param_groups is optimizer.param_groups
    assert set(one.state_dict()) == {"state", "param_groups"}
    one.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": 5.0})
    assert [g["lr"] for g in one.inner.param_groups] == [0.1, 5.0]


def test_a_chain_of_an_instance_is_an_optimizer_at_once():
    ours, theirs = params(), params()
    optimizer = Chain(Clip(0.3), SGD(ours, 0.1))
    assert isinstance(optimizer, ChainedOptimizer)
    expected = run(Chain(Clip(0.3), partial(SGD, lr=0.1))(theirs), theirs)
    assert_near(run(optimizer, ours), expected, 0)


def test_what_is_no_chain():
    for links in ((Clip(1.0),), (Adam, SGD), (Clip(1.0), 3), ()):
        with pytest.raises(TypeError) as info:
            Chain(*links)
        assert str(info.value) == (
            "a chain has one optimizer (a class of torch.optim, a functools.partial of one, a "
            "function of the parameters, or an instance) among transforms such as Clip(0.5); got "
            f"{links!r}"
        )


def test_what_a_chain_shows():
    assert (
        repr(ADAMW32(0.01))
        == "Chain(Clip(thresh=0.5), functools.partial(<class 'torch.optim.adam.Adam'>, lr=0.01, "
        "betas=(0.9, 0.999)), WeightDecay(decay=0.001))"
    )


# -- in an estimator ---------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)).double()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["factory", "partial", "instance", "set_params"])
def test_an_estimator_learns_with_it_as_with_adamw(how, tmp_path):
    m = model()
    opt = {
        "factory": ADAMW32(0.02, 0.001, 0.05),
        "partial": partial(ADAMW32(0.5, 0.001), lr=0.02, thresh=0.05),
        "instance": ADAMW32(0.02, 0.001, 0.05)(m.parameters()),
        "set_params": ADAMW32(0.5, 0.5, 0.5),
    }[how]
    est = Estimator(m, None, opt, SPEC, random_state=0)
    if how == "set_params":
        est.set_params(opt__lr=0.02, opt__decay=0.001, opt__thresh=0.05)
    est = clone(est).fit(X, Y)
    clipped = Estimator(
        m, None, lambda ps: ClippedAdamW(ps, 0.02, weight_decay=0.05), SPEC, random_state=0
    ).fit(X, Y)
    torch.testing.assert_close(net2vec(est), net2vec(clipped), rtol=0, atol=1e-13)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    first = copy.deepcopy(loaded)
    for one in (est, loaded):
        one.partial_fit(X, Y).partial_fit(X, Y)
    assert torch.equal(net2vec(est), net2vec(loaded))
    assert isinstance(loaded.optimizer_, ChainedOptimizer)
    assert (loaded.optimizer_.before, loaded.optimizer_.after) == (
        (Clip(0.05),),
        (WeightDecay(0.001),),
    )
    anew = clone(first).fit(X, Y)  # the chain, not only its state, is in the file
    assert anew.optimizer_.before == (Clip(0.05),)
    assert anew.optimizer_.param_groups[0]["lr"] == 0.02


class ClippedAdamW(AdamW):
    def step(self, closure=None):
        clip_grad_value_([p for g in self.param_groups for p in g["params"]], 0.05)
        return super().step(closure)


def test_its_settings_are_found_by_name():
    est = Estimator(opt=ADAMW32(0.01))
    found = {
        k: v
        for k, v in est.get_params().items()
        if k.startswith("opt__") and k[5:] in ("lr", "decay", "thresh")
    }
    assert found == {"opt__lr": 0.01, "opt__decay": 0.001, "opt__thresh": 0.5}
    with pytest.raises(SpecError, match=r"Valid parameters are: .*thresh"):
        est.set_params(opt__tresh=1.0)
    both = Estimator(opt=Chain(Clip(1.0), ClipNorm(2.0), SGD))
    assert both.get_params()["opt__thresh"] == 1.0  # of the first that has one
    assert both.get_params()["opt__lr"] == 1e-3


@pytest.mark.slow
def test_a_schedule_goes_on_after_loading(tmp_path):
    spec = Spec(2, 4, 5, lr_schedule=partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40))
    est = Estimator(model(), None, ADAMW32(0.02), spec, random_state=0).fit(X, Y)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    for one in (est, loaded):
        one.partial_fit(X, Y)
    assert torch.equal(net2vec(est), net2vec(loaded))
    assert est.history_[-1]["lr"] == loaded.history_[-1]["lr"]


class Halve(Transform):
    def __call__(self, delta, x):
        delta.mul_(0.5)


def test_a_transform_of_ones_own_is_not_stored(tmp_path):
    est = Estimator(model(), None, Chain(Halve(), partial(SGD, lr=0.2)), SPEC, random_state=0).fit(
        X, Y
    )
    plain = Estimator(model(), None, partial(SGD, lr=0.1), SPEC, random_state=0).fit(X, Y)
    torch.testing.assert_close(net2vec(est), net2vec(plain), rtol=0, atol=1e-13)
    est.save(tmp_path / "est")
    loaded = Estimator.load(tmp_path / "est")
    assert np.array_equal(loaded.predict(X), est.predict(X))
    with pytest.raises(ValueError, match=r"opt \(fluxutils_py.optim.ChainFactory\)"):
        loaded.fit(X, Y)


# -- by name -----------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "settings", "same"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.5}, partial(SGD, lr=0.1, momentum=0.5)),
        ("Adam", {"eps": 1e-7}, partial(Adam, eps=1e-7)),
        ("adamax", {}, torch.optim.Adamax),
        ("adamw", {"weight_decay": 0.004}, partial(AdamW, weight_decay=0.004)),
        ("adam32", {"lr": 0.02}, partial(Adam, lr=0.02)),
        ("adamw32", {"lr": 0.02, "thresh": 0.1}, ADAMW32(0.02, thresh=0.1)),
    ],
)
def test_an_optimizer_by_name_is_that_optimizer(name, settings, same):
    opt, ps, qs = by_name(name, **settings), params(), params()
    assert_near(run(opt(ps), ps), run(same(qs), qs), 0)
    est, other = (Estimator(opt=o, spec=SPEC, random_state=0).fit(X, Y) for o in (opt, same))
    assert torch.equal(net2vec(est), net2vec(other))
    assert type(pickle.loads(pickle.dumps(opt))(params())) is type(same(params()))


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="no optimizer") as caught:
        by_name("rmspro")
    said, _, listed = str(caught.value).partition(" Known are ")
    assert said == "there is no optimizer 'rmspro'."
    known = listed.split(", ")
    assert known == sorted(known)
    assert {"sgd", "adam", "adamax", "adamw", "rmsprop", "adam32", "adamw32"} <= set(known)
    assert "optimizer" not in known
    with pytest.raises(ValueError, match=r"optimizer 'zzz'.* Known are a"):
        by_name("zzz")


def test_an_unknown_setting_is_refused_at_once():
    for name in ("sgd", "adamw32"):
        with pytest.raises(TypeError, match=r"unexpected .*'learning_rate'"):
            by_name(name, learning_rate=0.1)


def rates(schedule, n, lr=1.0):
    optimizer = SGD(params(), lr=lr)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_cosine_falls_within_its_period_and_begins_anew():
    found = rates(cosine(10), 21)
    assert [found[k] for k in (0, 5, 9, 10, 20)] == pytest.approx([1, 0.5, 0.0245, 1, 1], abs=5e-5)
    low = rates(cosine(4, min_lr=0.2, factor=2), 13)
    expected = [0.2 + 0.4 * (1 + np.cos(np.pi * k / n)) for n in (4, 8) for k in range(n)]
    assert low == pytest.approx([*expected, 1.0])


def test_the_inverse_square_root_counts_steps_from_1():
    found = rates(inverse_sqrt, 100, lr=0.1)
    assert [found[k - 1] for k in (1, 4, 100)] == pytest.approx([0.1, 0.05, 0.01])


@pytest.mark.parametrize("scheduler", [cosine(3), inverse_sqrt])
def test_schedules_serve_an_estimator(scheduler):
    spec = Spec(epochs=4, batchsize=4, seqsize=5, lr_schedule=scheduler)
    est = Estimator(opt=partial(SGD, lr=0.1), spec=spec, random_state=0).fit(X, Y)
    assert [record["lr"] for record in est.history_] == pytest.approx(rates(scheduler, 4, lr=0.1))


# -- saved and loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "kind",
    [NAdam, partial(NAdam, decoupled_weight_decay=True), lambda p: Chain(Clip(1.0), NAdam)(p)],
)
def test_nadam_goes_on_bit_for_bit_from_its_state(kind, dtype):
    def run(steps, reload_at=None):
        torch.manual_seed(0)
        p = torch.randn(5, dtype=dtype, requires_grad=True)
        optimizer = kind([p])
        for k in range(steps):
            if k == reload_at:
                state = optimizer.state_dict()
                optimizer = kind([p])
                load_optimizer_state(optimizer, copy.deepcopy(state))
            p.grad = torch.sin(p.detach() + k)
            optimizer.step()
        return p.detach()

    assert torch.equal(run(9), run(9, reload_at=4))


def test_a_chain_comes_back_from_a_pickle():
    chain = Chain(ClipNorm(0.5), partial(SGD, lr=0.1))
    again = pickle.loads(pickle.dumps(chain))
    assert repr(again) == repr(chain)
    ps, qs = params(), params()
    assert_near(run(again(ps), ps), run(chain(qs), qs), 0)
