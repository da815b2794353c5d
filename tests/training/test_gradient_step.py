"""The one gradient step, and all ways to train that go through it, against plain torch."""

import copy
import math

import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.errors import ShapeError
from fluxutils_py.gomlx import Trainer, WeightedLoss
from fluxutils_py.gomlx.running_metrics import MeanMetric
from fluxutils_py.nn import LSTM
from fluxutils_py.praytools.functional import itrain, ptrain, train, ttrain
from fluxutils_py.training import Loop, TrainState
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.gradient_step import BatchLoss, GradientStep

SIZES, CLIP = (7, 4, 5, 6, 2), 0.2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in SIZES]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def mean_square(model, x, y):
    return (model(x) - y).square().mean()


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        return mean_square(model, *batch)


def by_trainer(model, data, **settings):
    Loop(Trainer(model, nn.MSELoss(), sgd, **settings)).run_epochs(data, 1)


def by_task(model, data, **settings):
    Loop(
        TaskStep(Squares(model), TrainState(0, model, sgd(model.parameters())), **settings)
    ).run_epochs(data, 1)


def by_function(model, data, **settings):
    left = iter(data)
    train(lambda x, y: mean_square(model, x, y), model, lambda: next(left), sgd, 100, **settings)


def by_threads(model, data, **settings):
    left = iter(data)
    ptrain(
        lambda x, y: mean_square(model, x, y), model, lambda: next(left), sgd, 100, bs=2, **settings
    )


def by_hand(model, data, accumulate, clip):
    """The mean of the gradients of some batches, each counting by its size, clipped by torch."""
    opt = sgd(model.parameters())
    for start in range(0, len(data), accumulate):
        group = data[start : start + accumulate]
        n = sum(len(x) for x, _ in group)
        opt.zero_grad()
        for x, y in group:
            (mean_square(model, x, y) * len(x) / n).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()


WAYS = [by_trainer, by_task, by_function, by_threads]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, CLIP), (2, None), (3, CLIP)])
def test_every_way_clips_and_accumulates_as_a_loop_by_hand(way, accumulate, clip):
    model, expected = net(), net()
    way(model, batches(), accumulate=accumulate, clip=clip)
    by_hand(expected, batches(), accumulate, clip)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_tells_of_what_is_not_finite_in_the_same_words(way):
    model, data = net(), batches()
    way(model, data[:2])
    before, broken = copy.deepcopy(model.state_dict()), [(data[2][0] * math.nan, data[2][1])]
    with pytest.raises(FloatingPointError) as caught:
        way(model, broken)
    place = " at iteration 1" if way in (by_function, by_threads) else ""
    assert f"loss is nan{place}; " in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_an_infinite_gradient_is_an_error_in_its_own_step_while_others_wait():
    p = nn.Parameter(torch.ones(2))
    losses = {1: lambda: p.sum(), 2: lambda: (p - p.detach()).abs().sqrt().sum()}
    step = BatchStep(lambda model, k: losses[k](), opt=sgd([p]), accumulate=5)
    step(1)
    with pytest.raises(FloatingPointError, match=r"^gradient norm is nan; "):
        step(2)
    assert p.tolist() == [1, 1]


def test_without_an_optimizer_gradients_are_observed_and_nothing_changes():
    p, seen = nn.Parameter(torch.tensor([1.0, 2.0])), []

    class Observed(GradientStep):
        def compute_loss(self, batch):
            return BatchLoss((p * batch).sum())

        def observe(self, gradient):
            seen.append(gradient.clone())

    step = Observed(None, params=[p])
    info = step(torch.tensor([3.0, 4.0]))
    assert (info.batch_loss, step.n_updates) == (11, 0)
    assert torch.equal(seen[0], torch.tensor([3.0, 4.0]))
    assert p.tolist() == [1, 2]


@pytest.mark.parametrize("way", [by_trainer, by_task, by_function])
@pytest.mark.parametrize("stateful", [False, True])
def test_recurrent_state_follows_one_rule(way, stateful):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)).double()
    x = torch.randn(9, 5, 3, dtype=torch.float64)
    y = x.sum(-1, keepdim=True)
    expected, state = copy.deepcopy(model), None
    opt = sgd(expected.parameters())
    for t in range(0, 9, 3):  # truncated backpropagation by hand
        out, state = expected[0].module(x[t : t + 3], state if stateful else None)
        loss = (expected[1](out) - y[t : t + 3]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        state = tuple(s.detach() for s in state)
    way(model, [(x[t : t + 3], y[t : t + 3]) for t in range(0, 9, 3)], stateful=stateful)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12)


def test_the_schedule_of_a_trainer_goes_by_updates():
    model = net()
    warm_up = lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=4)  # noqa: E731
    trainer = Trainer(model, nn.MSELoss(), sgd, accumulate=2, scheduler=warm_up)
    rates = []
    loop = Loop(trainer)
    loop.on_step("note", lambda loop: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    loop.run_epochs(batches(), 1)
    opt = sgd(net().parameters())
    plain, expected = warm_up(opt), []
    for k in range(5):
        if k % 2:
            opt.step()
            plain.step()
        expected.append(opt.param_groups[0]["lr"])
    assert rates == expected


@pytest.mark.parametrize("function", [ptrain, ttrain])
@pytest.mark.parametrize(
    ("layer", "why"), [(nn.BatchNorm1d(3), "normalises over"), (LSTM(3, 3), "carries a state")]
)
def test_models_that_threads_would_change_at_once_are_refused(function, layer, why):
    model = nn.Sequential(layer, nn.Linear(3, 1))
    x = torch.randn(8, 3)
    settings = {"bs": 2} if function is ptrain else {"n": 2}
    with pytest.raises(ValueError, match=why):
        function(lambda x: model(x).square().mean(), model, lambda: (x,), sgd, 1, **settings)
    train(lambda x: model(x).square().mean(), model, lambda: (x,), sgd, 2)


def test_shapes_that_torch_would_broadcast_are_refused():
    model, (x, y) = net(), batches()[0]
    told = r"^\w+ is given predictions of shape \(7, 1\) and labels of shape \(7,\), which torch would broadcast"
    with pytest.raises(ShapeError, match=told):
        Trainer(model, nn.MSELoss(), sgd).train_step((x, y[:, 0]))
    with pytest.raises(ShapeError, match=told):
        MeanMetric(nn.functional.l1_loss).update(model(x), y[:, 0])
    with pytest.raises(ShapeError, match=told):
        WeightedLoss(nn.MSELoss())(model(x), (y[:, 0],))


def test_batches_are_the_same_or_each_ranks_own():
    with pytest.raises(ValueError, match=r"^batches .*'per_rank', got 'mine'$"):
        Trainer(net(), nn.MSELoss(), sgd, batches="mine")


def with_optimizer(way, model, opt, data, loss=mean_square):
    """Train by an optimizer that was made beforehand."""
    left = iter(data)
    run = {"train": train, "ptrain": ptrain, "ttrain": ttrain, "itrain": itrain}.get(way)
    if way == "trainer":
        Loop(Trainer(model, lambda p, y: (p - y).square().mean(), opt)).run_epochs(data, 1)
    elif way == "task":
        Loop(TaskStep(Squares(model), TrainState(0, model, opt))).run_epochs(data, 1)
    else:
        more = {"bs": 2} if way == "ptrain" else {"n": 1} if way == "ttrain" else {}
        prepare = (lambda: [next(left)]) if way == "itrain" else (lambda: next(left))
        run(lambda x, y: loss(model, x, y), model, prepare, opt, 100, **more)


@pytest.mark.parametrize("way", ["trainer", "task", "train", "ptrain", "ttrain", "itrain"])
def test_an_optimizer_of_another_model_is_refused_and_one_of_a_part_trains_this_part(way):
    model, other = net(), net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"4 parameters \(\(5, 3\), .*none .*model\.parameters\(\)"
    ):
        with_optimizer(way, model, sgd(other.parameters()), batches())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with_optimizer(way, model, sgd(model[2].parameters()), batches())
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"2.weight", "2.bias"}


@pytest.mark.parametrize("way", ["train", "ptrain", "ttrain", "itrain"])
def test_a_parameter_of_the_loss_in_the_optimizer_is_trained_as_by_hand(way):
    def run(train_by):
        model, scale = net(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        opt = sgd([*model.parameters(), scale])
        train_by(model, opt, lambda model, x, y: (model(x) - scale * y).square().mean())
        return torch.cat([p.detach().flatten() for p in (*model.parameters(), scale)])

    def by_hand(model, opt, loss):
        for x, y in batches():
            opt.zero_grad()
            loss(model, x, y).backward()
            opt.step()

    found = run(lambda model, opt, loss: with_optimizer(way, model, opt, batches(), loss))
    torch.testing.assert_close(found, run(by_hand), rtol=1e-12, atol=1e-12)
