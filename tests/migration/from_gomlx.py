"""What gomlx gives for the rows of ``docs/coming_from/other_systems.md``: by its formulas, its documents and its
tests.
"""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.gomlx import Trainer
from fluxutils_py.training import Checkpointer, InMemory, Loop, StepInfo
from fluxutils_py.training.added_losses import add_loss, collected_losses, get_losses
from fluxutils_py.training.minibatch import Minibatch
from tests.migration import Checks

checks = Checks()


def numbers(batch):
    """A step that does nothing but count."""
    return StepInfo(float(batch), metrics={"number": batch})


def steps_of(add, n=100, first=0):
    """The steps, counted from 0 as ``loop.LoopStep``, at which a callback that ``add(loop, fn)``
    adds is called.
    """
    loop, found = Loop(numbers), []
    loop.step = loop.loop_step = first
    add(loop, lambda loop, *metrics: found.append(loop.loop_step))
    loop.run_steps(range(n), n)
    return found


def rows(dataset):
    return torch.cat([batch.inputs[0] for batch in dataset])


def same_rows(found, expected):
    return sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


def mse(names):
    """The mean squared error of the page's trainer over the page's data, as its model is now."""
    x, model = names["x"], names["trainer"].model
    return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


# -- trainer -------------------------------------------------------------------------------------------


@checks.of("Trainer(model, nn.MSELoss(), torch.optim.Adam)")
def _(names, value):
    assert [metric.short_name for metric in value.train_metrics] == ["loss+", "~loss+", "~loss"]
    assert [metric.short_name for metric in value.eval_metrics] == ["#loss+", "#loss"]


@checks.of("info = trainer.train_step((x[:8], x[:8, :1]))")
def _(names, value):
    info = names["info"]
    assert list(info.metrics)[:3] == ["batch_loss", "ema_loss", "ema_loss_fn"]
    assert info.metrics["batch_loss"] == info.batch_loss


@checks.of("metrics = trainer.eval_step((x[:8], x[:8, :1]))")
def _(names, value):
    assert set(names["metrics"]) == {"loss", "loss_fn"}


@checks.of("metrics = trainer.eval(ds)")
def _(names, value):
    # batches of 8 and one of 2
    assert names["metrics"]["loss"] == pytest.approx(mse(names), rel=1e-5)


@checks.of("trainer.reset_train_metrics()")
def _(names, value):
    assert [metric.compute() for metric in names["trainer"].train_metrics] == [None] * 3


@checks.of("[metric.name for metric in trainer.train_metrics]")
def _(names, value):
    assert value == ["batch_loss", "ema_loss", "ema_loss_fn"]


@checks.of("trainer.on_exec_creation(lambda executor, mode: None)")
def _(names, value):
    made, trainer = [], Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD)
    trainer.on_exec_creation(lambda executor, mode: made.append(mode))
    batch = torch.ones(2, 1), torch.ones(2, 1)
    for _ in range(2):
        trainer.train_step(batch)
        trainer.eval_step(batch)
    assert made == ["train", "eval"]


@checks.of('trainer.add_per_step_update(lambda model: None, "constraint")')
def _(names, value):
    trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD)
    trainer.add_per_step_update(lambda model: model.weight.clamp_(max=-3.0), "constraint")
    before = (trainer.model(torch.ones(2, 1)) - 1).square().mean().item()
    assert trainer.train_step((torch.ones(2, 1), torch.ones(2, 1))).batch_loss == pytest.approx(
        before
    )
    assert trainer.model.weight.item() == -3.0


@checks.of("Trainer(model, nn.MSELoss(), max_kinds=20)")
def _(names, value):
    batch = (names["x"],), (names["x"][:, :1],)
    for kind in range(20):
        value.eval_step(Minibatch(*batch, kind))
    with pytest.raises(RuntimeError, match="max_kinds=20"):
        value.eval_step(Minibatch(*batch, 20))


@checks.of('trainer.to("cpu")')
def _(names, value):
    assert {p.device.type for p in value.model.parameters()} == {"cpu"}


@checks.of("with collected_losses(): add_loss(p.square())", "with collected_losses(): get_losses()")
def _(names, value):
    p = torch.tensor([1.0, 3.0])
    with collected_losses():
        assert get_losses() is None
        add_loss(p.square())  # not reduced: its mean
        add_loss(torch.tensor(2.0))
        assert get_losses().item() == 7.0


@checks.of("Trainer(model, nn.MSELoss(), torch.optim.Adam, accumulate=2)")
def _(names, value):
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    halves, whole = nn.Linear(3, 1), nn.Linear(3, 1)
    whole.load_state_dict(halves.state_dict())
    trainer = Trainer(halves, nn.MSELoss(), torch.optim.SGD, accumulate=2)
    for part in slice(4), slice(4, 8):
        trainer.train_step((x[part], y[part]))
    Trainer(whole, nn.MSELoss(), torch.optim.SGD).train_step((x, y))
    torch.testing.assert_close(halves.weight, whole.weight)


# -- loop and hooks ------------------------------------------------------------------------------------


@checks.of("loop = Loop(trainer)")
def _(names, value):
    assert names["loop"].model is names["trainer"].model


@checks.of("metrics = Loop(trainer).run_steps(ds, 3)", "metrics = Loop(trainer).run_epochs(ds, 2)")
def _(names, value):
    assert names["metrics"] == {
        metric.name: metric.compute() for metric in names["trainer"].train_metrics
    }
    assert list(names["metrics"]) == ["batch_loss", "ema_loss", "ema_loss_fn"]


@checks.of("Loop(trainer).run_steps(ds, 0)")
def _(names, value):
    assert value == {}
    assert steps_of(lambda loop, fn: loop.on_end("end", fn), n=0) == []


@checks.of("Loop(trainer).run_to_step(endless, 5)")
def _(names, value):
    loop = Loop(numbers)
    loop.run_steps(iter(range(9)), 2)
    loop.run_to_step(iter(range(9)), 5)
    assert (loop.step, loop.start_step) == (5, 2)


@checks.of('Loop(trainer).on_start("name", fn, 0)')
def _(names, value):
    called, loop = [], Loop(numbers)
    for priority in 5, -1, 3:
        loop.on_start(
            f"hook {priority}", lambda loop, p=priority: called.append((p, loop.batches)), priority
        )
    data = [1, 2]
    loop.run_epochs(data, 3)
    assert called == [(-1, data), (3, data), (5, data)]


@checks.of('Loop(trainer).on_step("name", fn, 0)')
def _(names, value):
    assert steps_of(lambda loop, fn: loop.on_step("name", fn, 0), n=4) == [0, 1, 2, 3]


@checks.of('Loop(trainer).on_end("name", fn, 0)')
def _(names, value):
    assert steps_of(lambda loop, fn: loop.on_end("name", fn, 0), n=4) == [4]


@checks.of("loop.loop_step, loop.start_step, loop.end_step, loop.epoch - loop.start_epoch")
def _(names, value):
    assert value == (14, 0, 14, 2)  # 7 batches in each of 2 epochs
    loop = Loop(numbers)
    loop.run_epochs([1, 2, 3], 2)
    loop.run_epochs([1, 2], 2)
    assert (loop.loop_step, loop.start_step, loop.end_step, loop.epoch - loop.start_epoch) == (
        10,
        6,
        10,
        2,
    )


@checks.of('loop.shared_data["key"] = 1')
def _(names, value):
    assert names["loop"].shared_data["key"] == 1


@checks.of("loop.median_train_step_duration()")
def _(names, value):
    assert value == pytest.approx(float(np.median(names["loop"].train_step_durations)))
    assert Loop(numbers).median_train_step_duration() == 0.001


@checks.of('EveryNSteps(loop, 100, "name", 0, fn)')
def _(names, value):
    def add(loop, fn):
        names["EveryNSteps"](loop, 100, "name", 0, fn)

    assert steps_of(add, 350) == [99, 199, 299]
    assert steps_of(add, 250, first=150) == [249, 349]  # gomlx 0.9 counts from the attachment


@checks.of('loop.on_step("name", fn, trigger=EveryNSteps(100))')
def _(names, value):
    def add(loop, fn):
        loop.on_step("name", fn, trigger=names["EveryNSteps"](100))

    # later gomlx begins to count at LoopStep
    assert steps_of(add, 250, first=150) == [
        199,
        299,
        399,
    ]


@checks.of('NTimesDuringLoop(loop, 10, "name", 0, fn)')
def _(names, value):
    found = steps_of(lambda loop, fn: names["NTimesDuringLoop"](loop, 10, "name", 0, fn))
    assert found == list(range(9, 100, 10))  # gomlx: 0, 9, 19, ..., 99


@checks.of('PeriodicCallback(loop, 60.0, True, "name", 0, fn)')
def _(names, value):
    clock = iter(range(0, 100_000, 25))

    def add(loop, fn):
        names["PeriodicCallback"](loop, 60.0, True, "name", 0, fn, clock=lambda: next(clock))

    # 25 s between two looks; the time counts from the end of a call
    assert steps_of(add, 9) == [
        3,
        6,
        9,
    ]


@checks.of('ExponentialCallback(loop, 100, 1.2, True, "name", 0, fn)')
def _(names, value):
    def add(loop, fn):
        names["ExponentialCallback"](loop, 100, 1.2, True, "name", 0, fn)

    assert steps_of(add, 1000) == [100, 220, 364, 537, 745, 995, 1000]


# -- data ----------------------------------------------------------------------------------------------


@checks.of("as_dataset([(x, x)])")
def _(names, value):
    for _ in range(2):  # a second epoch sees all data again
        (batch,) = value
        assert isinstance(batch.inputs, tuple)
        value.reset()


@checks.of("InMemory(x, x[:, :1], batchsize=8, shuffle=True)")
def _(names, value):
    first, second = rows(value), rows(value)
    assert same_rows(first, names["x"])
    assert not torch.equal(first, second)
    assert [len(batch.inputs[0]) for batch in value] == [8] * 6 + [2]


@checks.of(
    "InMemory.from_dataset(ds, batchsize=8)",
    "InMemory.from_dataset(examples, batched=False, batchsize=8)",
)
def _(names, value):
    assert value.n == 50
    assert torch.equal(rows(value), names["x"])


@checks.of("Batch(examples, 8)")
def _(names, value):
    assert torch.equal(rows(value), names["x"])
    assert [tuple(batch.inputs[0].shape) for batch in value] == [(8, 3)] * 6 + [(2, 3)]


@checks.of("InMemory(x, x[:, :1], batchsize=8, shuffle=True, replacement=True)")
def _(names, value):
    found = rows(value)
    assert len(found) == 50
    assert {tuple(row) for row in found.tolist()} < {tuple(row) for row in names["x"].tolist()}


@checks.of("Take(ds, 3)")
def _(names, value):
    assert torch.equal(rows(value), names["x"][:24])


@checks.of("Map(ds, lambda batch: batch)")
def _(names, value):
    assert torch.equal(rows(value), names["x"])


@checks.of("Map(range(7), lambda batch: load(batch.x), workers=2, ordered=False)")
def _(names, value):
    assert same_rows(rows(value), names["x"][:49])
    meet = threading.Barrier(2, timeout=300)  # two loads take place at the same time

    def together(batch):
        meet.wait()
        return names["load"](batch.x)

    mapped = names["Map"](range(6), together, workers=2, ordered=False)
    assert same_rows(rows(mapped), names["x"][:42])


@checks.of("ReadAhead(ds, 2)", 'ReadAhead(ds, 2, device="cpu")')
def _(names, value):
    assert torch.equal(rows(value), names["x"])


# -- metrics, losses, optimizers -----------------------------------------------------------------------


@checks.of('MeanMetric(nn.MSELoss(), "mse", "#mse", metric_type="loss")')
def _(names, value):
    assert (value.name, value.short_name, value.metric_type) == ("mse", "#mse", "loss")
    for n, error in ((100, 1.0), (100, 2.0), (3, 9.0)):  # not the mean of the three, 4
        value.update(torch.full((n, 1), error**0.5), torch.zeros(n, 1), weight=n)
    assert value.compute() == pytest.approx((100 + 200 + 27) / 203)


@checks.of('EMAMetric(nn.MSELoss(), "mse", "~mse", new_example_weight=0.01)')
def _(names, value):
    expected = 0.0
    for k in range(1, 151):
        value.update(torch.tensor([float(k % 7)]), torch.zeros(1))
        weight = max(0.01, 1 / k)
        expected = (1 - weight) * expected + weight * (k % 7) ** 2
    assert value.compute() == pytest.approx(expected)


@checks.of("trainer.train_metrics[0].pretty_print(0.5)")
def _(names, value):
    assert value == "0.5"


@checks.of("binary_accuracy(p, y)")
def _(names, value):
    assert value.item() == float((names["p"] > 0.5).double().mean())
    # the test of gomlx: ties are misses
    probabilities = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.8, 0.9])
    labels = torch.tensor([1, 0, 1, 0, 0, 1])
    assert names["binary_accuracy"](probabilities, labels).item() == pytest.approx(2 / 6)


@checks.of("binary_logits_accuracy(p, y)")
def _(names, value):
    assert value.item() == float((names["p"] > 0).double().mean())
    logits, labels = torch.tensor([-0.1, 0.0, 0.2]), torch.tensor([1, 0, 1])
    assert names["binary_logits_accuracy"](logits, labels).item() == pytest.approx(1 / 3)


@checks.of("sparse_categorical_accuracy(torch.rand(4, 3), torch.zeros(4, 1, dtype=torch.int64))")
def _(names, value):
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 2.0, 1.0], [0.0, 0.0, 3.0]])
    labels = torch.tensor([[1], [0], [2]])  # the second ties
    assert names["sparse_categorical_accuracy"](scores, labels).item() == pytest.approx(2 / 3)


@checks.of('WeightedLoss(nn.MSELoss(reduction="none"))(p, (y, torch.ones(4, 1)))')
def _(names, value):
    torch.testing.assert_close(value, (names["p"] - names["y"]).square())
    mask = torch.tensor([[True], [False], [True], [False]])
    loss = names["WeightedLoss"](nn.MSELoss())(torch.ones(4, 1), (torch.zeros(4, 1), mask))
    assert loss.mean().item() == 0.5  # divided by all elements


@checks.of(
    "Trainer(model, WeightedLoss(nn.MSELoss())).eval_step(Minibatch((x[:4],), (y, p > 0.5), weight=p > 0.5))"
)
def _(names, value):
    mask = (names["p"] > 0.5).numpy()
    squares = ((names["model"](names["x"][:4]) - names["y"]) ** 2).detach().numpy()
    expected = np.where(mask, squares, 0).sum() / max(mask.sum(), 1)  # MaskedReduceAllMean
    assert value["loss"] == pytest.approx(expected, rel=1e-5)


@checks.of("Trainer(model, nn.MSELoss(), torch.optim.Adam, clip_nan=True)")
def _(names, value):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.good + self.bad[:1] + (0 * self.bad[1:]).sqrt()

    model = Bad()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam, clip_nan=True)
    trainer.train_step((torch.ones(1), torch.zeros(1)))
    assert model.good.item() == pytest.approx(1 - 1e-3)
    assert model.bad.tolist() == [1, 1]


@checks.of("loop.trainer")
def _(names, value):
    assert value is names["trainer"]


@checks.of(
    "-(torch.eye(2) * torch.tensor([[0.5, 0.5], [0, 1]]).clamp(1e-7, 1 - 1e-7).log()).sum(-1).mean()"
)
def _(names, value):
    assert value.item() == pytest.approx(math.log(2) / 2)


@checks.of("nn.CrossEntropyLoss()(torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([1]))")
def _(names, value):
    assert float(value) == pytest.approx(math.log(sum(math.exp(v - 2.0) for v in (1.0, 2.0, 0.5))))


@checks.of('by_name("adamw", lr=1e-3)')
def _(names, value):
    made = value([torch.zeros(2, requires_grad=True)])
    assert type(made) is torch.optim.AdamW
    assert [made.defaults[name] for name in ("lr", "eps", "weight_decay")] == [1e-3, 1e-8, 0.01]


def rates(trainer, n=100):
    """The rates of the steps of a run."""
    found = []
    trainer.add_per_step_update(
        lambda model: found.append(trainer.optimizer.param_groups[0]["lr"]), "note"
    )
    Loop(trainer).run_steps(InMemory(torch.zeros(n, 3), torch.zeros(n, 1), batchsize=1), n)
    return found


@checks.of("Trainer(model, nn.MSELoss(), torch.optim.Adam, scheduler=cosine(100))")
def _(names, value):
    found = rates(value)
    assert [found[k] for k in (0, 50)] == pytest.approx([1e-3, 5e-4])
    assert found == pytest.approx(
        [1e-3 * (1 + math.cos(math.pi * k / 100)) / 2 for k in range(100)]
    )


@checks.of("Trainer(model, nn.MSELoss(), torch.optim.Adam, scheduler=cosine(cycles=1, warm_up=10))")
def _(names, value):
    found = rates(value)
    assert found[:10] == pytest.approx([1e-4 * k for k in range(10)])
    assert found[10:] == pytest.approx(
        [1e-3 * (1 + math.cos(math.pi * k / 90)) / 2 for k in range(90)]
    )


@checks.of('Trainer(model, nn.MSELoss(), by_name("sgd", lr=0.1), scheduler=inverse_sqrt)')
def _(names, value):
    found = rates(value)
    assert [found[k - 1] for k in (1, 4, 100)] == pytest.approx([0.1, 0.05, 0.01])


# -- reports and checkpoints ---------------------------------------------------------------------------


@checks.of("loop.hooks.attach(ProgressBar())")
def _(names, value):
    loop = Loop(numbers)
    loop.hooks.attach(names["ProgressBar"]())
    loop.run_steps(range(3), 3)
    assert loop.step == 3


@checks.of("report_eval(trainer, ds)")
def _(names, value):
    tables = []
    names["report_eval"](names["trainer"], names["ds"], printer=tables.append)
    assert "in memory" in tables[0]
    assert f"{mse(names):.4g}" in tables[0]


@checks.of(
    'saves = Checkpointer("saves", keep=3).track(model=model, optimizer=adam); saves.restore()',
    'Checkpointer("saves").track(model=model, optimizer=adam).save(loop)',
    'saves = Checkpointer("saves").track(model=model, optimizer=adam); saves.save(loop); saves.load()',
)
def _(names, value):
    model, loop = nn.Linear(1, 1), Loop(numbers)
    saves = Checkpointer("kept", keep=3).track(model=model)
    for weight in 1.0, 2.0, 3.0, 4.0:
        nn.init.constant_(model.weight, weight)
        assert saves.save(loop).exists()
    assert len(saves.paths()) == 3
    nn.init.zeros_(model.weight)
    Checkpointer("kept", keep=3).track(model=model).load()
    assert model.weight.item() == 4.0
    with pytest.raises(FileNotFoundError):
        Checkpointer("none").track(model=model).load()


@checks.of('Checkpointer("means", keep=-1, take_mean=-1)')
def _(names, value):
    model = nn.Linear(1, 1)
    for path in value.paths():
        path.unlink()
    value.track(model=model)
    for weight in 1.0, 2.0, 6.0:
        nn.init.constant_(model.weight, weight)
        value.save(Loop(numbers))
    value.restore()
    assert model.weight.item() == 3.0


@checks.of(
    'PeriodicCallback(loop, 60.0, True, "save", 100, Checkpointer("saves").track(model=model, optimizer=adam).save)'
)
def _(names, value):
    loop, saves = Loop(numbers), Checkpointer("periodic").track(model=nn.Linear(1, 1))
    names["PeriodicCallback"](loop, 60.0, True, "save", 100, saves.save, clock=lambda: 0.0)
    before = len(saves.paths())
    loop.run_steps(range(3), 3)
    assert saves.latest_step() == 3
    assert len(saves.paths()) == max(before, 1)


@checks.of("first_nonfinite(model, lambda: model(x))")
def _(names, value):
    assert value == ""
    model = nn.Sequential(nn.Linear(3, 1), nn.LogSigmoid())
    nn.init.constant_(model[0].weight, -3e38)
    found = names["first_nonfinite"](model, lambda: model(torch.full((2, 3), 9.0)))
    assert found == ", first given by module '0' (Linear)"
