"""A fit's curves, as TensorBoard reads them: the fit's own, once each, forwards, and of no other
fit.
"""

import os
import pickle
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec, samples
from fluxutils_py.bobbin import SummaryWriter
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.reporting import TensorBoard, tensorboard
from fluxutils_py.training import Checkpointer, EveryNSteps, InMemory, Loop, StepInfo, StopTraining

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 11)).astype("f4")
Y = X.mean(0, keepdims=True)
XV, YV = X[:, :3, :5], Y[:, :3, :5]
STEPS = 9  # of an epoch: 3 groups of at most 3 series, 3 windows of at most 4 steps


def make(*callbacks, epochs=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    spec = Spec(
        epochs,
        3,
        4,
        shuffle=True,
        lr_schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    return Estimator(
        model, spec=spec, callbacks=list(callbacks), random_state=0, verbose=False, **options
    )


class Losses:
    """Remembers the loss of every step."""

    def __init__(self):
        self.found = []

    def on_step(self, loop):
        self.found.append((loop.step, np.float32(loop.batch_loss)))


def curve(values, n=STEPS):
    return [(n * (k + 1), np.float32(value)) for k, value in enumerate(values)]


def without_times(found):
    return {
        tag: events for tag, events in found.items() if "second" not in tag and "sec" not in tag
    }


@pytest.mark.few
@pytest.mark.parametrize("trigger", [4, EveryNSteps(4)])
def test_the_curves_are_those_of_the_fit(tmp_path, scalars, trigger):
    losses = Losses()
    est = make(TensorBoard(tmp_path / "new" / "a", trigger=trigger), losses).fit(
        X, Y, validation_data=(XV, YV)
    )
    found = scalars(tmp_path / "new" / "a")
    assert found["train/loss"] == curve(est.loss_curve_)
    assert found["validation/loss"] == curve(est.validation_loss_curve_)
    for name in ("lr", "mean_batch_loss", "seconds"):
        assert found[f"train/{name}"] == curve([record[name] for record in est.history_])
    assert found["train/batch_loss"] == losses.found[3::4]
    assert [step for step, _ in found["trainer/steps_per_sec"]] == [8, 12, 16, 20, 24]
    assert set(found) == {
        "train/loss", "validation/loss", "train/lr", "train/mean_batch_loss", "train/seconds", "train/folds",
        "train/batch_loss", "trainer/steps_per_sec",
    }  # fmt: skip


@pytest.mark.slow
def test_looking_changes_nothing(tmp_path, no_thread_stays):
    looked_at, alone = make(TensorBoard(tmp_path, trigger=1)).fit(X, Y), make().fit(X, Y)
    assert torch.equal(net2vec(looked_at), net2vec(alone))
    assert looked_at.loss_curve_ == alone.loss_curve_


def test_the_curves_can_be_looked_at_while_training_goes_on(tmp_path, scalars, monkeypatch):
    monkeypatch.setattr(tensorboard, "FLUSH_S", 0.05)
    seen = []

    def look(loop):
        if loop.step == 2 * STEPS + 1:
            end = time.monotonic() + 60
            while len(scalars(tmp_path).get("train/loss", [])) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            seen.extend(scalars(tmp_path)["train/loss"])

    est = make(TensorBoard(tmp_path), look).fit(X, Y)
    assert seen == curve(est.loss_curve_)[:2]


def test_a_trainers_metrics_are_there_too(tmp_path, scalars):
    x = torch.randn(20, 3)
    trainer = Trainer(nn.Linear(3, 1), nn.MSELoss(), torch.optim.SGD)
    loop, metrics = Loop(trainer), []
    loop.on_step("metrics", lambda loop: metrics.append(loop.metrics))
    loop.hooks.attach(TensorBoard(tmp_path, trigger=1))
    loop.run_epochs(InMemory(x, x.sum(1, keepdim=True), batchsize=8), 2)
    found = scalars(tmp_path)
    for name in ("batch_loss", "ema_loss", "ema_loss_fn"):
        assert found[f"train/{name}"] == curve([m[name] for m in metrics], 1)


def test_runs_of_steps_go_on_with_the_curve(tmp_path, scalars):
    loop = Loop(lambda loss: StepInfo(loss))
    loop.hooks.attach(TensorBoard(tmp_path, trigger=1))
    batches = [8.0, 7.0, 6.0, 5.0, 4.0]
    for n in (2, 1, 1):
        loop.run_steps(batches, n)
    loop.run_epochs(batches, 1)
    assert scalars(tmp_path)["train/batch_loss"] == curve(batches, 1)


# -- fits that go on -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A fit that is not killed, and its directory."""
    folder = tmp_path_factory.mktemp("whole")
    return make(TensorBoard(folder, trigger=1)).fit(X, Y, validation_data=(XV, YV)), folder


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("killed_at", [1, 4, 9, 10, 14, 27])
def test_a_fit_that_is_killed_and_resumed_has_each_point_once(
    tmp_path, scalars, uninterrupted, killed_at, every
):
    whole, folder = uninterrupted

    def kill(loop):
        if loop.step == killed_at and killing:
            raise Killed

    class Late:  # what the end of an epoch writes is there, but was not saved
        name, priority = "late", 1000

        def on_epoch(self, loop):
            kill(loop)

    for killing in (True, False):
        saves = Checkpointer(tmp_path / "saves", trigger=EveryNSteps(every))
        est = make(
            TensorBoard(tmp_path / "cut", trigger=1),
            Late() if killed_at % STEPS == 0 else kill,
            saves,
        )
        if killing:
            with pytest.raises(Killed):
                est.fit(X, Y, validation_data=(XV, YV))
        else:
            est.fit(X, Y, validation_data=(XV, YV))
    assert est.loss_curve_ == whole.loss_curve_
    found, expected = (without_times(scalars(path)) for path in (tmp_path / "cut", folder))
    saved = killed_at - (killed_at % STEPS != 0)
    # between the last step of an epoch and its end: one point makes way
    if every == 1 and saved and saved % STEPS == 0:
        expected["train/batch_loss"].pop(saved - 1)
    assert found == expected


@pytest.mark.slow
def test_more_epochs_after_a_checkpoint_go_on_with_the_curves(tmp_path, scalars):
    for epochs in (1, 3):
        est = make(
            TensorBoard(tmp_path / "a", trigger=2), Checkpointer(tmp_path / "saves"), epochs=epochs
        ).fit(X, Y)
    assert scalars(tmp_path / "a")["train/loss"] == curve(est.loss_curve_)
    assert [step for step, _ in scalars(tmp_path / "a")["train/batch_loss"]] == list(
        range(2, 27, 2)
    )


@pytest.mark.slow
def test_partial_fit_and_warm_start_go_on_with_the_curves(tmp_path, scalars):
    est = make(TensorBoard(tmp_path / "partial", trigger=3))
    for _ in range(12):  # files of one process, within a second or two
        est.partial_fit(X, Y)
    assert scalars(tmp_path / "partial")["train/loss"] == curve(est.loss_curve_)
    assert [step for step, _ in scalars(tmp_path / "partial")["train/batch_loss"]] == list(
        range(3, 109, 3)
    )
    est = make(TensorBoard(tmp_path / "warm"), epochs=1, warm_start=True).fit(X, Y).fit(X, Y)
    assert scalars(tmp_path / "warm")["train/loss"] == curve(est.loss_curve_)


# -- several fits ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fit_that_begins_anew_sets_the_earlier_one_aside_and_nothing_else(tmp_path, scalars):
    make(TensorBoard(tmp_path, trigger=1)).fit(X, Y, validation_data=(XV, YV))
    with SummaryWriter(tmp_path) as writer:
        writer.scalar("mine", 0.5, 7)
    (earlier,) = tmp_path.glob("*.fit")
    content = earlier.read_bytes()
    est = make(TensorBoard(tmp_path, trigger=5), epochs=2).fit(X, Y)
    found = scalars(tmp_path)
    assert found["mine"] == [(7, 0.5)]
    assert found["train/loss"] == curve(est.loss_curve_)
    assert [step for step, _ in found["train/batch_loss"]] == [5, 10, 15]
    assert "validation/loss" not in found
    assert (tmp_path / earlier.name.replace("tfevents", "earlier")).read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("n_jobs", [None, 2])
def test_each_fit_of_a_search_has_a_directory(
    tmp_path, scalars, accumulated, forked_workers, n_jobs
):
    est = make(TensorBoard(tmp_path, each_fit=True), epochs=1)
    x, y = samples(X), samples(Y)
    search = GridSearchCV(
        est, {"spec__seqsize": [4, 6]}, cv=2, n_jobs=n_jobs, error_score="raise"
    ).fit(x, y)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == [f"fit-{n:04}" for n in range(1, 6)]  # the last is that of the best
    assert [len(list((tmp_path / name).iterdir())) for name in folders] == [1] * 5
    last = scalars(tmp_path / "fit-0005")["train/loss"]
    assert [value for _, value in last] == [
        np.float32(v) for v in search.best_estimator_.loss_curve_
    ]
    texts = [accumulated(tmp_path / name).Tensors("estimator/text_summary")[0] for name in folders]
    sizes = ["seqsize=4" in text.tensor_proto.string_val[0].decode() for text in texts]
    assert sorted(sizes[:4]) == [False, False, True, True]


class Clock:
    """In place of the module ``time``: it stands still but for sleep."""

    def __init__(self):
        self.now, self.slept = 1000.25, 0

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.slept += 1
        self.now += 0.75


def test_a_name_that_would_sort_before_the_others_is_not_used(tmp_path, monkeypatch):
    clock, numbers = Clock(), iter([9, 10, 11])
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid.get", lambda: next(numbers)
    )
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time.time", clock.time)
    monkeypatch.setattr(tensorboard, "time", clock)
    for _ in range(2):
        tensorboard.open_torch_writer(tmp_path).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".")[3] + " " + name.split(".")[-1] for name in names] == [
        "0000001000 9",
        "0000001001 11",
    ]
    assert clock.slept == 1


@pytest.mark.slow
def test_it_is_cloned_and_pickled_as_its_directory_also_while_in_use(tmp_path, scalars):
    copies = []

    def copy_it(loop):
        if loop.step == 5:
            copies.append(pickle.loads(pickle.dumps(loop.shared_data["estimator"].callbacks[0])))
            copies.append(clone(loop.shared_data["estimator"]).callbacks[0])

    first = make(TensorBoard(tmp_path, trigger=2), copy_it).fit(X, Y)
    second = make(copies[0]).fit(X, Y)
    third = make(copies[1]).fit(X, Y)
    assert first.loss_curve_ == second.loss_curve_ == third.loss_curve_
    assert scalars(tmp_path)["train/loss"] == curve(third.loss_curve_)
    assert [step for step, _ in scalars(tmp_path)["train/batch_loss"]] == list(range(2, 27, 2))
    assert len(list(tmp_path.iterdir())) == 3


# -- when things fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopTraining])
def test_a_fit_that_fails_or_is_stopped_leaves_what_it_wrote(
    tmp_path, scalars, error, no_thread_stays
):
    def fail(loop):
        if loop.step == STEPS + 5:
            raise error

    est = make(TensorBoard(tmp_path, trigger=1), fail)
    if error is StopTraining:
        est.fit(X, Y)
    else:
        with pytest.raises(error):
            est.fit(X, Y)
    assert [step for step, _ in scalars(tmp_path)["train/batch_loss"]][: STEPS + 4] == list(
        range(1, STEPS + 5)
    )
    assert scalars(tmp_path)["train/loss"][0][0] == STEPS


def test_without_tensorboard_nothing_is_trained_or_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    est = make(TensorBoard(tmp_path / "a"))
    with pytest.raises(ImportError) as caught:
        est.fit(X, Y)
    assert str(caught.value) == (
        "writing for TensorBoard needs the package tensorboard: pip install tensorboard"
    )
    assert not hasattr(est, "model_")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("trigger", [0, -3, True])
def test_a_trigger_is_at_least_one(tmp_path, trigger):
    with pytest.raises(ValueError, match=f"^trigger .*1, or a Trigger, got {trigger}$"):
        TensorBoard(tmp_path, trigger=trigger)
