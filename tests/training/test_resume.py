"""A run that is cut off after any step, and gone on with by other objects, ends as the one that was
not.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.errors import LoadError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.gomlx.running_metrics import EMAMetric
from fluxutils_py.praytools import cby
from fluxutils_py.training import (
    InMemory,
    Loop,
    Map,
    NTimes,
    ReadAhead,
    StepInfo,
    StopTraining,
    Take,
)
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.early_stopping import EarlyStopping, Schedule
from fluxutils_py.training.generator_state import RandomGenerators
from fluxutils_py.training.minibatch import TensorBatches
from fluxutils_py.training.triggers import EveryNSteps

X = torch.arange(22.0).reshape(11, 2)
EPOCHS = 3


class Counted(InMemory):
    """Counts how many batches are made."""

    made = 0

    def __iter__(self):
        return self.skip(0)

    def skip(self, n):
        for batch in super().skip(n):
            self.made += 1
            yield batch


class Shuffled(IterableDataset):
    """Draws from torch's default generator, and knows nothing of skipping."""

    def __iter__(self):
        yield from X[torch.randperm(5)]


class Stateful:
    """An iterable of one's own, that draws once a pass."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __iter__(self):
        yield from self.rng.permutation(6)


class Slow(SequenceWindows):
    waits = True  # and so read in the background


def windows(lazy):
    x = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("f4")
    source = SequenceWindows(
        [SeriesArray(x, "x")], [SeriesArray(x[:1], "y")], batchsize=2, seqsize=3
    )
    if lazy:
        source.__class__ = Slow
    return TensorBatches(
        source,
        torch.float32,
        torch.device("cpu"),
        np.random.default_rng(3),
    )


def shuffled(**kwargs):
    return InMemory(X, batchsize=3, shuffle=True, random_state=2, **kwargs)


DATA = {
    "a list": lambda: [1.0, 2.0, 4.0, 8.0],
    "in memory": lambda: InMemory(X, batchsize=3),
    "in memory, shuffled": shuffled,
    "adapted": lambda: as_dataset(shuffled()),
    "the first of an endless one": lambda: Take(shuffled(infinite=True), 6),
    "mapped": lambda: Map(shuffled(), lambda batch: batch.inputs[0] + 1),
    "mapped by threads": lambda: Map(shuffled(), lambda batch: batch.inputs[0] + 1, workers=2),
    "read ahead": lambda: ReadAhead(shuffled(), 3),
    "a loader": lambda: as_dataset(DataLoader(TensorDataset(X), batch_size=3, shuffle=True)),
    "a loader with a generator": lambda: as_dataset(
        DataLoader(
            TensorDataset(X), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(9)
        )
    ),
    "a stream": lambda: as_dataset(DataLoader(Shuffled(), batch_size=2)),
    "windows": lambda: windows(False),
    "windows read in the background": lambda: windows(True),
}


def numbers(batch):
    if isinstance(batch, int | float):
        return torch.tensor([float(batch)])
    return torch.as_tensor(batch.inputs[0])


class Run:
    """Something that depends on everything: order of the data, random numbers, hooks that count."""

    def __init__(self, data, stop_at=None):
        torch.manual_seed(0)
        self.value, self.fired, self.data = 1.0, [], data()
        self.average = EMAMetric(name="average")
        self.loop = Loop(self.step)
        self.loop.on_step(
            "often", lambda loop: self.fired.append(("often", loop.step)), trigger=EveryNSteps(3)
        )
        self.loop.on_step(
            "sometimes", lambda loop: self.fired.append(("sometimes", loop.step)), trigger=NTimes(4)
        )
        self.loop.on_epoch("epoch", lambda loop: self.fired.append(("epoch", loop.step)))
        self.loop.hooks.attach(cby(self.average.update))
        self.loop.hooks.attach(self)
        if stop_at is not None:
            self.loop.on_step("stop", lambda loop: loop.stop() if loop.step == stop_at else None)

    name = "the run"

    def step(self, batch):
        self.value = 0.9 * self.value + float(numbers(batch).sin().sum()) + float(torch.rand(()))
        return StepInfo(self.value, len(numbers(batch)))

    def on_step(self, loop):
        if hasattr(loop, "draws"):
            torch.rand(1)

    def state_dict(self):
        return {
            "value": self.value,
            "fired": list(self.fired),
            "average": self.average.state_dict(),
        }

    def load_state_dict(self, state):
        self.value, self.fired = state["value"], list(state["fired"])
        self.average.load_state_dict(state["average"])

    def things(self):
        known = {"random": RandomGenerators(), "loop": self.loop, "data": self.data}
        return {name: thing for name, thing in known.items() if hasattr(thing, "state_dict")}

    def save(self):
        return copy.deepcopy({name: thing.state_dict() for name, thing in self.things().items()})

    def outcome(self):
        history = [
            {k: v for k, v in record.items() if k != "seconds"} for record in self.loop.history
        ]
        loop = self.loop
        return (
            self.value,
            self.fired,
            self.average.compute(),
            history,
            loop.step,
            loop.epoch,
            loop.end_step,
        )


def cut_off(make, go, events=("step", "epoch", "end")):
    """The outcome of a whole run, and those of all that go on from some point of it."""
    whole, states = make(), []
    for event in events:
        whole.loop.hooks.add(
            event, lambda loop: states.append(whole.save()), name="save", priority=float("inf")
        )
    go(whole)
    for state in states:
        rest = make()
        torch.manual_seed(12345)  # another process
        for name, thing in rest.things().items():
            thing.load_state_dict(state[name])
        go(rest)
        yield whole.outcome(), rest.outcome()


@pytest.mark.few
@pytest.mark.parametrize("data", DATA)
def test_epochs_go_on_after_any_step(data, no_thread_stays):
    n = 0
    for whole, rest in cut_off(
        lambda: Run(DATA[data]), lambda run: run.loop.run_epochs(run.data, EPOCHS)
    ):
        assert rest == whole
        n += 1
    assert n > 3 * EPOCHS + EPOCHS


@pytest.mark.parametrize("data", ["in memory, shuffled", "read ahead", "a loader with a generator"])
def test_steps_go_on_after_any_step(data):
    for whole, rest in cut_off(
        lambda: Run(DATA[data]), lambda run: run.loop.run_to_step(run.data, 4)
    ):
        assert rest == whole


def test_steps_over_endless_data_go_on():
    def make():
        return Run(lambda: shuffled(infinite=True))

    for whole, rest in cut_off(make, lambda run: run.loop.run_to_step(run.data, 13)):
        assert rest == whole


@pytest.mark.parametrize("stop_at", [2, 6, 8])
def test_a_run_that_was_about_to_stop_stops(stop_at):
    def make():
        return Run(DATA["in memory, shuffled"], stop_at)

    for whole, rest in cut_off(make, lambda run: run.loop.run_epochs(run.data, EPOCHS)):
        assert rest == whole
        assert rest[4] == rest[-1] == stop_at


@pytest.mark.slow
def test_the_second_of_two_runs_goes_on():
    def go(run):
        run.loop.run_epochs(run.data, 2 - run.loop.epoch if run.loop.epoch < 2 else 2)
        if run.loop.epoch == 2 and run.loop.step == 8:
            run.loop.run_epochs(run.data, 2)

    outcomes = list(cut_off(lambda: Run(DATA["in memory, shuffled"]), go, events=["step"]))
    assert all(rest == whole for whole, rest in outcomes[8:])
    assert len(outcomes) == 16


def test_a_run_that_ended_is_not_run_again_but_lengthened():
    run, states = Run(DATA["in memory, shuffled"]), []
    run.loop.hooks.add(
        "end", lambda loop: states.append(run.save()), name="save", priority=float("inf")
    )
    run.loop.run_epochs(run.data, 2)
    after = run.save()
    whole = Run(DATA["in memory, shuffled"])
    whole.loop.run_epochs(whole.data, 5)
    for epochs, steps in ((1, 8), (2, 8), (5, 20)):
        rest = Run(DATA["in memory, shuffled"])
        for name, thing in rest.things().items():
            thing.load_state_dict(states[0][name])
        rest.loop.run_epochs(rest.data, epochs)
        assert rest.loop.step == steps
    assert rest.value == whole.value
    rest = Run(DATA["in memory, shuffled"])
    for name, thing in rest.things().items():
        thing.load_state_dict(after[name])
    rest.loop.run_epochs(rest.data, 3)  # that run was over: these are three more
    assert (rest.loop.step, rest.value) == (20, whole.value)


def test_batches_that_were_done_are_not_read_again():
    run, states = Run(lambda: Counted(X, batchsize=2, shuffle=True, random_state=0)), []
    run.loop.on_step("save", lambda loop: states.append(run.save()), priority=9)
    run.loop.run_epochs(run.data, 2)
    assert run.data.made == 12
    rest = Run(lambda: Counted(X, batchsize=2, shuffle=True, random_state=0))
    for name, thing in rest.things().items():
        thing.load_state_dict(states[9][name])
    rest.loop.run_epochs(rest.data, 2)
    assert rest.data.made == 2


def test_windows_that_were_done_are_not_read_again():
    first, second = windows(False), windows(False)
    source = iter(first)
    seen = [next(source) for _ in range(4)]
    state = first.state_dict()
    rest = list(source)
    second.load_state_dict(state)
    read, second.windows.read = (
        [],
        lambda place: (read.append(place), SequenceWindows.read(second.windows, place))[1],
    )
    again = list(second.skip(4))
    assert len(read) == len(again) == len(rest) > 0
    assert all(torch.equal(a.x, b.x) for a, b in zip(again, rest, strict=True))
    assert not torch.equal(seen[0].x, again[0].x)
    # the next pass
    assert [torch.equal(a.x, b.x) for a, b in zip(first, second, strict=True)] == [True] * len(
        first
    )


def test_shuffled_and_other_windows_are_told_apart():
    ordered = windows(False)
    ordered.rng = None
    with pytest.raises(
        LoadError,
        match=r"shuffled batches .*shuffle",
    ):
        ordered.load_state_dict(windows(False).state_dict())
    ordered.load_state_dict(ordered.state_dict())


# -- with a model, an optimizer, a schedule and early stopping ----------------------------------------


class Fit:
    def __init__(self, patience, recurrent=False):
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(2, 7), nn.Dropout(0.3), nn.BatchNorm1d(7), nn.Linear(7, 1)
        ).double()
        self.trainer = Trainer(self.model, nn.MSELoss(), torch.optim.Adam)
        self.loop = Loop(self.trainer)
        schedule = torch.optim.lr_scheduler.MultiStepLR(self.trainer.optimizer, [3, 7])
        self.loop.hooks.attach(Schedule(schedule, "step"))
        if patience:
            self.loop.on_epoch(
                "judge", lambda loop: loop.record.update(validation_loss=abs(loop.epoch - 1)), -30
            )
            self.loop.hooks.attach(EarlyStopping(self.model, patience))
        x = X.double() / 10
        self.data = InMemory(
            x, x.sum(1, keepdim=True).cos(), batchsize=4, shuffle=True, random_state=0
        )

    def things(self):
        found = {
            "model": self.model,
            "optimizer": self.trainer.optimizer,
            "loop": self.loop,
            "data": self.data,
        }
        return {**found, "random": RandomGenerators(rng=np.random.default_rng(0))}

    save = Run.save

    def outcome(self):
        history = [
            {k: v for k, v in record.items() if k != "seconds"} for record in self.loop.history
        ]
        weights = torch.cat([t.flatten() for t in self.model.state_dict().values()]).tolist()
        return weights, history, self.trainer.optimizer.param_groups[0]["lr"], self.loop.metrics


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 2])
def test_training_goes_on_after_any_step(patience):
    outcomes = list(
        cut_off(
            lambda: Fit(patience), lambda fit: fit.loop.run_epochs(fit.data, 6), ["step", "epoch"]
        )
    )
    for whole, rest in outcomes:
        assert rest[:3] == whole[:3]
        assert rest[3] == whole[3] or not rest[3]  # no step was left to make
    # of 3 in an epoch; the second epoch is the best, then two are not
    steps = 15 if patience else 18
    epochs = steps // 3 - (1 if patience else 0)
    assert len(outcomes) == (steps if not patience else 12) + (6 if not patience else epochs)


# -- what does not fit ---------------------------------------------------------------------------------


def test_a_state_with_hooks_that_are_not_there_is_refused_before_any_step():
    run, steps = Run(DATA["a list"]), []
    loop = Loop(lambda batch: (steps.append(batch), StepInfo(1.0))[1])
    run.loop.run_epochs(run.data, 1)
    loop.load_state_dict(run.loop.state_dict())
    loop.on_step("sometimes", print, trigger=NTimes(4))
    with pytest.raises(LoadError) as caught:
        loop.run_epochs(run.data, 1)
    assert all(part in str(caught.value) for part in ("'often', 'the run'", "it has 'sometimes'"))
    assert steps == []


def test_hooks_may_be_added_after_their_state_is_loaded():
    def make(fired, before):
        loop = Loop(lambda batch: StepInfo(1.0))
        if before is not None:
            loop.load_state_dict(before)
        loop.on_step("note", lambda loop: fired.append(loop.step), trigger=EveryNSteps(3))
        return loop

    first, fired = make([], None), []
    first.run_steps(range(9), 4)
    make(fired, first.state_dict()).run_steps(range(9), 5)
    assert fired == [6, 9]


def test_hooks_of_one_name_are_told_apart_by_their_order():
    def make():
        fired, loop = ([], []), Loop(lambda batch: StepInfo(1.0))
        for n, log in zip((2, 3), fired, strict=True):
            loop.on_step(
                "note", lambda loop, log=log: log.append(loop.step), trigger=EveryNSteps(n)
            )
        return fired, loop

    (_, loop), (fired, rest) = make(), make()
    loop.run_steps(range(5), 5)
    assert list(loop.state_dict()["hooks"]) == ["note", "note (2)"]
    rest.load_state_dict(loop.state_dict())
    rest.run_steps(range(12), 7)
    assert fired == ([6, 8, 10, 12], [6, 9, 12])


def test_stopping_within_a_hook_is_part_of_the_state():
    loop = Loop(lambda batch: StepInfo(1.0))

    def stop(loop):
        raise StopTraining

    states = []
    loop.on_step("stop", stop)
    loop.on_step("save", lambda loop: states.append(loop.state_dict()))
    loop.run_epochs([1, 2, 3], 2)
    assert [state["stop"] for state in states] == [True]
    assert not loop.state_dict()["stop"]  # the run is over: the next one is another
