"""Batches divided over threads, for a Trainer and the functional family, against one thread."""

import threading

import pytest
import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.errors import ShapeError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import Threads
from fluxutils_py.training import Loop, TrainState
from fluxutils_py.training.gradient_step import BatchLoss
from fluxutils_py.training.running_metrics import MeanMetric
from fluxutils_py.training.threaded_loss import ThreadedLoss, join_parts, shares

# 3 threads: nothing divides, and one batch has fewer observations than threads
SIZES = (
    8,
    5,
    1,
    7,
)


def sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def data(recurrent=False):
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 5, 3)] * 4 if recurrent else [(n, 3) for n in SIZES]
    xs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(x, x.sum(-1, keepdim=True)) for x in xs]


def net(recurrent=False):
    torch.manual_seed(0)
    return nn.Sequential(LSTM(3, 4) if recurrent else nn.Linear(3, 4), nn.Linear(4, 1)).double()


class Seen:
    """A metric that is no mean: what it was given."""

    name = short_name = metric_type = "seen"

    def __init__(self):
        self.pairs = []

    def update(self, prediction, label):
        self.pairs.append((prediction, label))

    def compute(self):
        return float(len(self.pairs))

    def reset(self):
        pass


def trained(n_jobs, recurrent=False, loss_fn=None, by_loop=True, **settings):
    model, seen = net(recurrent), Seen()
    trainer = Trainer(
        model,
        loss_fn or nn.MSELoss(),
        sgd,
        [MeanMetric(nn.functional.l1_loss, name="mae"), seen],
        n_jobs=n_jobs,
        axis=int(recurrent),
        **settings,
    )
    losses = []
    if by_loop:
        loop = Loop(trainer)
        loop.on_step("note", lambda loop: losses.append((loop.batch_loss, loop.metrics["mae"])))
        loop.run_epochs(data(recurrent), 2)
    else:
        losses = [
            (info.batch_loss, info.metrics["mae"])
            for info in map(trainer.train_step, data(recurrent))
        ]
    return (
        torch.cat([p.detach().flatten() for p in model.parameters()]),
        torch.tensor(losses),
        seen.pairs,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"by_loop": False},
        {"clip": 0.1, "accumulate": 3},
        {"loss_fn": nn.MSELoss(reduction="sum"), "clip": 0.1},
        {"recurrent": True},
        {"recurrent": True, "stateful": True},
    ],
)
def test_a_trainer_in_three_threads_is_that_in_one(settings):
    (vector, losses, seen), *others = (trained(n, **settings) for n in (1, 3, 3))
    for vector_3, losses_3, seen_3 in others:
        assert (vector - vector_3).abs().max() < 1e-12
        assert (losses - losses_3).abs().max() < 1e-12
        for one, three in zip(seen, seen_3, strict=True):
            for a, b in zip(one, three, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(others[0][0], others[1][0])


@pytest.mark.slow
def test_dropout_has_the_same_bits_in_every_run():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(1, 1).double())
        torch.manual_seed(4)
        Loop(Trainer(model, nn.MSELoss(), sgd, n_jobs=2)).run_epochs(data(), 2)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_what_cannot_be_divided_is_refused():
    x, y = data()[0]
    with pytest.raises(
        ShapeError,
        match=r"^2 threads .*: the arrays .*axis=",
    ):
        Trainer(net(), nn.MSELoss(), sgd, n_jobs=2).train_step((x, y[:5]))
    with pytest.raises(ValueError, match=r"whole minibatch, .*over threads"):
        Trainer(
            nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), nn.MSELoss(), sgd, n_jobs=2
        ).train_step((x, y))
    with pytest.raises(ValueError, match=r"^a compiled model .*several threads"):
        Trainer(net(), nn.MSELoss(), sgd, n_jobs=2, compile=True)


def test_parts_without_anything_to_learn_count_nothing():
    p = nn.Parameter(torch.tensor(2.0))

    def compute(part, model, i):
        return (
            None if part.sum() == 0 else BatchLoss((p * part).mean(), len(part), numbers=[float(i)])
        )

    cut = shares(lambda batch, i, n: batch[i::2] if i < 2 else None)
    with Threads(3) as threads:
        loss = ThreadedLoss(compute, None, threads, cut)
        found = loss(torch.tensor([0.0, 1.0, 0.0, 3.0]), [p])
        assert (found.loss, found.n_live, found.numbers) == (4.0, 2, [1.0])
        assert found.gradients[0] == 2
        assert loss(torch.zeros(4), [p]) is None


def test_parts_of_predictions_are_joined():
    a, b = torch.ones(2, 3), torch.zeros(1, 3)
    assert join_parts([a], 0) is a
    (found, text), mapped = join_parts([((a, "x"), {"p": [a]}), ((b, "x"), {"p": [b]})], 0)
    for whole in found, mapped["p"][0]:
        assert whole.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert text == "x"


class Task(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        x, y = batch
        noise = self.noise * torch.rand(x.shape, generator=rng, dtype=x.dtype)
        out = nn.functional.dropout(model(x + noise), self.noise)
        return (out - y).square().mean()

    def batch_weight(self, batch):
        return float(len(batch[0]))


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("kind", ["task", "trainer"])
def test_threads_end_with_the_run_and_torch_has_its_own_back(kind):
    model, names = net(), []
    if kind == "task":
        task, state = Task(model), TrainState(0, model, sgd(model.parameters()))
        task.noise = 0.0
        loop = Loop(TaskStep(task, state, n_jobs=3))
    else:
        loop = Loop(Trainer(model, nn.MSELoss(), sgd, n_jobs=3))

    def ours():
        return {t.name for t in threading.enumerate() if t.name.startswith("fluxutils")}

    loop.on_step("note", lambda loop: names.append((len(ours()), torch.get_num_threads())))
    before = ours()
    loop.run_epochs(data(), 1)
    assert (len(before) + 2, 1) in names
    assert ours() <= before
    assert torch.get_num_threads() == 2


@pytest.mark.few
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("by_loop", [True, False])
def test_a_task_in_three_threads_is_that_in_one_and_has_the_same_bits_in_every_run(noise, by_loop):
    found = []
    for n in (1, 3, 3):
        torch.manual_seed(7)
        model, losses = net(), []
        task, state = Task(model), TrainState(0, model, sgd(model.parameters()))
        task.noise = noise
        if by_loop:
            loop = Loop(TaskStep(task, state, seed=5, n_jobs=n, clip=1.0))
            loop.on_step("note", lambda loop, losses=losses: losses.append(loop.batch_loss))
            loop.run_epochs(data(), 2)
        else:
            step = task.make_training_step_fn(n_jobs=n)
            for batch in data():
                state, info = step(state, batch, 5)
                losses.append(info.batch_loss)
        found.append(
            (torch.cat([p.detach().flatten() for p in model.parameters()]), losses, state.step)
        )
    (vector, losses, steps), (vector_3, losses_3, steps_3), again = found
    assert steps == steps_3 == (8 if by_loop else 4)
    assert torch.equal(vector_3, again[0])
    assert losses_3 == again[1]
    if not noise:
        assert (vector - vector_3).abs().max() < 1e-12
        assert losses == pytest.approx(losses_3, abs=1e-12)
