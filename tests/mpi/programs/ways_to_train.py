"""Every way to train ends on several ranks as on one process: with the same batches, and each with
its own.
"""

import copy
import itertools

import torch
from torch import nn

from fluxutils_py.bobbin import TaskStep, TrainTask
from fluxutils_py.errors import RankError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.gomlx.running_metrics import EMAMetric, MeanMetric
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools.functional import autotrain, itrain, ptrain, train, ttrain
from fluxutils_py.training import InMemory, Loop, TrainState

N, F, H = 23, 3, 5
RANK = RankGroup.from_comm("auto", "test").rank


def net(seed=1, recurrent=False):
    torch.manual_seed(seed)
    first = LSTM(F, H) if recurrent else nn.Linear(F, H)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(H, 1)).double()


def arrays(n=N, seed=0, steps=()):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*steps, n, F, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(-1, keepdim=True)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def absolute(prediction, label):
    return (prediction - label).abs()


class Squares(TrainTask):
    def compute_loss(self, model, batch, *, step, rng):
        x, y = batch if isinstance(batch, tuple) else (batch.x, batch.y)
        return (model(x) - y).square().mean(), {"n": len(x)}


def with_trainer(comm, model, **settings):
    metrics = {"train_metrics": [EMAMetric(absolute)], "eval_metrics": [MeanMetric(absolute)]}
    trainer = Trainer(model, nn.MSELoss(), adam, **metrics, comm=comm, **settings)
    loop = Loop(trainer)
    data = InMemory(*arrays(), batchsize=7, shuffle=True, random_state=4)
    loop.run_epochs(data, 3)
    found = trainer.eval(InMemory(*arrays(5, 9), batchsize=2))
    return [r["loss"] for r in loop.history] + [
        loop.metrics["ema_loss"],
        found["loss"],
        found["absolute"],
    ]


def with_series(comm, model):
    """Time-major pieces of the same series, one after the other."""
    trainer = Trainer(model, nn.MSELoss(), adam, comm=comm, axis=1, stateful=True)
    x, y = arrays(7, steps=(12,))
    loop = Loop(trainer)
    loop.run_epochs([(x[t : t + 5], y[t : t + 5]) for t in range(0, 12, 5)], 3)
    return [r["loss"] for r in loop.history]


def with_task(comm, model, **settings):
    task = Squares(model)
    state = task.initialize_train_state(0, adam)
    loop = Loop(TaskStep(task, state, comm=comm, **settings))
    loop.run_epochs(InMemory(*arrays(), batchsize=7), 3)
    model.load_state_dict(state.model.state_dict())
    return [r["loss"] for r in loop.history]


def by_hand(comm, model):
    task, losses = Squares(model), []
    state = task.initialize_train_state(0, adam)
    step = task.make_training_step_fn(comm=comm)
    for batch in InMemory(*arrays(), batchsize=7):
        state, info = step(state, (batch.x, batch.y), 0)
        losses.append(info.loss)
    model.load_state_dict(state.model.state_dict())
    return losses


def samples(n=N):
    seeds = itertools.count()
    return lambda: arrays(n, next(seeds))


def with_functions(function, **settings):
    def run(comm, model):
        losses = []
        loss = lambda x, y: (model(x) - y).square().mean()  # noqa: E731
        prepare = settings.get("prepare", samples)()
        sizes = (N,) if function is autotrain else ()
        keywords = {k: v for k, v in settings.items() if k != "prepare"}
        function(loss, model, prepare, *sizes, adam, 5, cby=losses.append, comm=comm, **keywords)
        return losses

    return run


def environments():
    seeds = itertools.count()
    return lambda: tuple(arrays(4 + k, next(seeds)) for k in range(3))


def divided():
    prepare = samples()
    return lambda: [
        tuple(v[i : i + 6] for v in batch) for batch in [prepare()] for i in range(0, N, 6)
    ]


def drawn():
    """From torch's default generator, which gives each thread numbers of its own."""
    torch.manual_seed(3)
    return lambda: (x := torch.randn(7, F).double(), x.sum(-1, keepdim=True))


STATS = [{"parts": 1, "time": 2.0}, {"parts": 3, "time": 1.0}]
CASES = {
    "trainer": with_trainer,
    "trainer, clipped and accumulated": lambda comm, model: with_trainer(
        comm, model, clip=0.3, accumulate=3
    ),
    "trainer on series": with_series,
    "task": with_task,
    "task, clipped and accumulated": lambda comm, model: with_task(
        comm, model, clip=0.3, accumulate=2
    ),
    "task by hand": by_hand,
    "train": with_functions(train),
    "train, clipped": with_functions(train, clip=0.1, accumulate=2),
    "ptrain": with_functions(ptrain, bs=2),
    "ptrain, divided": with_functions(ptrain, bs=None, prepare=divided),
    "ttrain": with_functions(ttrain, n=3, prepare=drawn),
    "itrain": with_functions(itrain, prepare=environments),
    "autotrain": with_functions(autotrain, stats=STATS),
}


def differences(name, run):
    """Between ranks with other initial weights and one process with those of rank 0."""
    recurrent = "series" in name
    model, alone = net(1 + RANK, recurrent), net(1, recurrent)
    found, expected = run("auto", model), run(None, alone)
    pairs = [*zip(found, expected, strict=True)]
    pairs += [(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return max(
        float((torch.as_tensor(a) - torch.as_tensor(b)).detach().abs().max()) for a, b in pairs
    )


def own_batches(ranks):
    """Batches of one's own, unequally many: in each step those that are left make up the batch."""
    x, y = arrays(120)
    parts = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 120, 4)]
    counts = [2 + 2 * rank for rank in range(ranks.size)]
    mine = [parts[ranks.size * k + ranks.rank] for k in range(counts[ranks.rank])]
    whole = []
    for k in range(max(counts)):
        left = [parts[ranks.size * k + rank] for rank in range(ranks.size) if k < counts[rank]]
        whole.append(tuple(torch.cat(v) for v in zip(*left, strict=True)))
    model, alone = net(), net()
    for trained, batches, comm in ((model, mine, "auto"), (alone, whole, None)):
        loop = Loop(Trainer(trained, nn.MSELoss(), adam, comm=comm, batches="per_rank"))
        loop.run_epochs(batches, 1)
        assert loop.step == max(counts), (loop.step, counts)
        task = Squares(trained)
        state = task.initialize_train_state(0, adam)
        loop = Loop(TaskStep(task, state, comm=comm, batches="per_rank"))
        loop.run_epochs(batches, 1)
        trained.load_state_dict(state.model.state_dict())
        left = iter(batches)
        loss = lambda x, y, model=trained: (model(x) - y).square().mean()  # noqa: E731
        train(loss, trained, lambda left=left: next(left), adam, 100, comm=comm, batches="per_rank")
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )


def refused(run):
    """The error of what differs between ranks and must not."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    try:
        run(model)
    except (RankError, ValueError) as error:
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        return str(error)
    return "nothing"


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def not_finite_on_rank_1(value):
    """The error of a batch whose root is taken, on the second rank of the number ``value``."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False).double(), Root())
    nn.init.ones_(model[0].weight)
    x = torch.full((3, 1), value if RANK == 1 else 4.0, dtype=torch.float64)
    try:
        train(
            lambda x: model(x).mean(), model, lambda: (x,), torch.optim.SGD, 2, batches="per_rank"
        )
    except FloatingPointError as error:
        assert float(model[0].weight.detach()) == 1.0
        return str(error)
    return "nothing"


def fit_task(model, batches):
    state = TrainState(0, model, adam(model.parameters()))
    Loop(TaskStep(Squares(model), state)).run_epochs(batches, 1)


def main(folder):
    ranks = RankGroup.from_comm("auto", "test")
    for name, run in CASES.items():
        difference = differences(name, run)
        assert difference < 1e-12, f"{name}: {difference}"
    assert own_batches(ranks) < 1e-12
    other = arrays(N, seed=RANK)
    message = refused(lambda model: Trainer(model, nn.MSELoss(), adam).train_step(other))
    assert message.startswith("ranks were given different batches"), message
    message = refused(lambda model: fit_task(model, iter([arrays()] * ranks.rank)))
    assert "unequally many" in message, message
    if ranks.size > 1:
        message = ranks.allgather(not_finite_on_rank_1(-1.0))
        assert "loss is nan" in message[0], message
        assert all("first given by module '1' (Root)" in text for text in message[:2]), message
        # the root is finite, its derivative is not
        message = ranks.allgather(not_finite_on_rank_1(0.0))
        assert "gradient norm on rank 1" in message[0], message
        assert all("in the gradient of parameter '0.weight'" in text for text in message), message
    norm = nn.Sequential(nn.BatchNorm1d(F).double(), net())
    message = refused(lambda _: Trainer(norm, nn.MSELoss(), adam).train_step(arrays()))
    assert "normalises over the whole minibatch" in message, message
