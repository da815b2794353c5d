"""Checkpoints: which there are, what is in them, and runs that are killed."""

import contextlib
import errno
import json
import os
import random
import resource
import signal
import time
from collections import Counter, OrderedDict
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import LoadError
from fluxutils_py.gomlx import Trainer
from fluxutils_py.training import Checkpointer, EveryNSteps, InMemory, Loop, StepInfo, TrainState
from fluxutils_py.training.early_stopping import Schedule
from fluxutils_py.training.generator_state import RandomGenerators
from fluxutils_py.training.triggers import AtSteps


def names(folder):
    return sorted(os.listdir(folder))


# -- files ---------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_counted_on(tmp_path):
    checkpoints = Checkpointer(tmp_path / "run", keep=3)
    assert checkpoints.paths() == []
    assert checkpoints.latest() is checkpoints.read() is None
    for i in range(10):
        path = checkpoints.write({"i": i}, step=100 - i)
        assert checkpoints.latest() == path
        assert checkpoints.read() == {"i": i}
    expected = [f"checkpoint-n{n:07d}-step-{101 - n:08d}" for n in (8, 9, 10)]
    assert [
        path.stem for path in checkpoints.paths()
    ] == expected  # by their number, not by the step
    assert names(tmp_path / "run") == sorted(
        f"{name}.{kind}" for name in expected for kind in ("json", "pt")
    )
    again = Checkpointer(tmp_path / "run", keep=1)
    assert again.write({"i": 99}, step=5).name == "checkpoint-n0000011-step-00000005.pt"
    assert len(again.paths()) == 1


def test_numbers_of_more_digits_are_newer(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=-1)
    checkpoints.write({"i": 0}, 1).rename(tmp_path / "checkpoint-n9999999-step-00000001.pt")
    checkpoints = Checkpointer(tmp_path, keep=-1)
    assert checkpoints.write({"i": 1}, 2).name == "checkpoint-n10000000-step-00000002.pt"
    assert checkpoints.write({"i": 2}, 123456789).name == "checkpoint-n10000001-step-123456789.pt"
    assert [checkpoints.read(path)["i"] for path in checkpoints.paths()] == [0, 1, 2]
    assert checkpoints.read()["i"] == 2


def test_all_are_kept_if_one_says_so(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=-1)
    for i in range(5):
        checkpoints.write({}, i)
    assert len(checkpoints.paths()) == 5


def test_other_files_are_left_alone(tmp_path):
    others = [
        "notes.txt",
        "checkpoint.pt",
        "checkpoint-n1-step-2.pt",
        ".hidden.part",
        "old.json",
        "model.pt",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    checkpoints = Checkpointer(tmp_path)
    for i in range(3):
        checkpoints.write({}, i)
    assert len(checkpoints.paths()) == 1
    assert set(others) < set(names(tmp_path))


def test_a_text_tells_what_it_is_of(tmp_path):
    path = Checkpointer(tmp_path).write({}, 7, metrics={"loss": 0.5})
    about = json.loads(path.with_suffix(".json").read_text())
    assert (about["step"], about["metrics"], about["versions"]["torch"]) == (
        7,
        {"loss": 0.5},
        version("torch"),
    )


def test_plain_data_and_tensors_come_back_as_they_were(tmp_path):
    state = {
        "numbers": [1, 2.5, True, None, 2**100, 1j, "text", b"bytes", (1, (2,)), {3, 4}],
        "numpy": [np.float64(0.1), np.int64(3), np.bool_(True)],
        "tensors": OrderedDict(
            a=torch.randn(3, 2, requires_grad=True), b=nn.Parameter(torch.ones(2))
        ),
        "counter": Counter({1: 2}),
        5: {6: torch.tensor(True)},
    }
    checkpoints = Checkpointer(tmp_path)
    checkpoints.write(state, 1)
    found = checkpoints.read()
    assert found["numbers"] == state["numbers"]
    assert [type(v) for v in found["numpy"]] == [float, int, bool]
    assert torch.equal(found["tensors"]["a"], state["tensors"]["a"])
    assert not found["tensors"]["b"].requires_grad
    assert found["counter"][7] == 0
    assert found[5][6].item() is True


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path):
    path = Checkpointer(tmp_path).write({"a": torch.zeros(1_000_000)[:3]}, 1)
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.zeros(3), "a['b'][1] is a ndarray"),
        (print, "a['b'][1] is a builtin_function_or_method"),
        (nn.Linear(1, 1), "a['b'][1] is a Linear"),
    ],
)
def test_other_things_are_refused_before_anything_is_written(tmp_path, value, where):
    with pytest.raises(TypeError) as caught:
        Checkpointer(tmp_path / "new").write({"a": {"b": [0, value]}}, 1)
    assert f"{where}: " in str(caught.value)
    assert not (tmp_path / "new").exists()


TRIGGER = "trigger must be a Trigger, such as EveryNSteps(100), got 100"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trigger": 100}, TypeError, TRIGGER),
        ({"keep": "2"}, TypeError, "keep must be an integer, got '2'"),
        ({"keep": 2.0}, TypeError, "keep must be an integer, got 2.0"),
        ({"keep": True}, TypeError, "keep must be an integer, got True"),
        ({"keep": 0}, ValueError, "keep must be a positive integer, got 0"),
        ({"take_mean": None}, TypeError, "take_mean must be an integer, got None"),
        (
            {"take_mean": 3, "keep": 2},
            ValueError,
            "take_mean=3 needs as many checkpoints, but keep=2; raise keep",
        ),
        ({"take_mean": -2}, ValueError, "take_mean must be a positive integer, got -2"),
        (
            {"dir": __file__},
            NotADirectoryError,
            f"dir={__file__!r} is a file; give the path of a folder",
        ),
    ],
)
def test_what_an_argument_cannot_be_is_said_at_once(tmp_path, arguments, error, message):
    with pytest.raises(error) as caught:
        Checkpointer(**{"dir": tmp_path, **arguments})
    assert str(caught.value) == message


def test_numbers_of_numpy_will_do(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=np.int64(2), take_mean=np.int32(2))
    for i in range(3):
        checkpoints.write({}, i)
    assert len(checkpoints.paths()) == 2


# -- killed while saving -------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("killed_in", ["save", "fsync", "replace", "unlink"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_save_that_is_killed_anywhere_leaves_a_checkpoint(tmp_path, killed_in, call):
    """As a kill would: at the moment of a call, and nothing is cleaned up."""
    Checkpointer(tmp_path).write({"i": 1}, 1)
    child = os.fork()
    if child == 0:
        where = {"save": torch, "unlink": __import__("pathlib").Path}.get(killed_in, os)
        real, calls = getattr(where, killed_in), []

        def kill(*args, **kwargs):
            calls.append(args)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(where, killed_in, kill)
        with contextlib.suppress(BaseException):
            Checkpointer(tmp_path).write({"i": 2}, 2)
        os._exit(0)
    os.waitpid(child, 0)
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.read() in ({"i": 1}, {"i": 2})
    checkpoints.write({"i": 3}, 3)
    assert checkpoints.read() == {"i": 3}
    assert len(names(tmp_path)) == 2


def test_a_damaged_file_is_an_error_that_names_the_remedy(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=2)
    checkpoints.write({"i": 1}, 1)
    path = checkpoints.write({"i": 2}, 2)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(LoadError) as caught:
        checkpoints.read()
    assert str(caught.value).startswith(f"{path} is damaged or no fluxutils_py checkpoint file")
    assert str(caught.value).endswith(
        ". Delete it to continue from the previous checkpoint, if there is one"
    )
    path.unlink()
    assert checkpoints.read() == {"i": 1}


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.write({}, 1)
    torch.save({**torch.load(path, weights_only=True), "format": 2}, path)
    with pytest.raises(LoadError, match=r"\.pt .*format 2, .*reads 1: .*Delete"):
        checkpoints.read()


# -- means of parameters -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters and buffers of every sort."""

    def __init__(self, value):
        super().__init__()
        self.trained = nn.Parameter(torch.full((3,), float(value)))
        self.tied = self.trained
        self.small = nn.Parameter(torch.full((2,), float(value), dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((3,), float(value)), requires_grad=False)
        self.register_buffer("mean", torch.full((3,), float(value)))
        self.register_buffer("count", torch.tensor(int(value)))


def save_each(folder, values, **kwargs):
    for step, value in enumerate(values, 10):
        model = Mixed(value)
        checkpoints = Checkpointer(folder, **kwargs).track(model=model, loop=Loop(StepInfo))
        checkpoints.tracked["loop"].step = step
        checkpoints.save(checkpoints.tracked["loop"])


@pytest.mark.parametrize(
    ("values", "take_mean", "expected"), [([9, 1, 3], 2, 2), ([1, 3], 5, 2), ([7, 1, 3], 1, 3)]
)
def test_means_are_of_trainable_floating_parameters_only(tmp_path, values, take_mean, expected):
    save_each(tmp_path, values, keep=5)
    model, loop = Mixed(0), Loop(StepInfo)
    assert (
        Checkpointer(tmp_path, keep=5, take_mean=take_mean).track(model=model, loop=loop).restore()
    )
    assert torch.equal(model.trained, torch.full((3,), float(expected)))
    assert model.tied is model.trained
    assert torch.equal(model.small, torch.full((2,), float(expected), dtype=torch.bfloat16))
    assert torch.equal(model.frozen, torch.full((3,), float(values[-1])))
    assert torch.equal(model.mean, torch.full((3,), float(values[-1])))
    assert model.count == values[-1]
    assert loop.step == 10 + len(values) - 1


def test_means_need_parameters_of_one_shape(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=2, take_mean=2)
    for n in (2, 3):
        checkpoints.write({"m": {"w": torch.zeros(n)}}, n, trainable={"m": ["w"]})
    with pytest.raises(LoadError) as caught:
        checkpoints.read()
    assert all(part in str(caught.value) for part in ("m.w differs", "[3]", "[2]", "take_mean=1"))
    assert checkpoints.read(checkpoints.latest())["m"]["w"].shape == (3,)


# -- of what there is ----------------------------------------------------------------------------------


def test_a_checkpoint_of_other_things_is_refused(tmp_path):
    save_each(tmp_path, [1])
    with pytest.raises(LoadError) as caught:
        Checkpointer(tmp_path).track(model=Mixed(0), optimizer=Loop(StepInfo)).restore()
    assert all(
        part in str(caught.value)
        for part in (f"{tmp_path} holds ['loop', 'model']", "['model', 'optimizer']")
    )


def test_what_does_not_fit_changes_nothing(tmp_path):
    save_each(tmp_path, [1])
    model, other = Mixed(5), Loop(StepInfo)
    other.step = 77
    model.register_buffer("more", torch.zeros(1))
    checkpoints = Checkpointer(tmp_path).track(loop=other, model=model)
    with pytest.raises(
        LoadError,
        match=r"step-00000010\.pt .*its model: ",
    ):
        checkpoints.restore()
    assert other.step == 77
    assert torch.equal(model.trained, torch.full((3,), 5.0))


def test_a_copy_that_tracks_more_leaves_its_original_alone(tmp_path):
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    original = Checkpointer(tmp_path).track(model=model)
    copies = [original.with_tracked(other=other), original.with_tracked(more=other)]
    assert original.tracked == {"model": model}
    assert [c.tracked for c in copies] == [
        {"model": model, "other": other},
        {"model": model, "more": other},
    ]


def test_what_cannot_be_tracked_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^data .*tuple .*state_dict"):
        Checkpointer(tmp_path).track(data=(1, 2))


# -- as a hook -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "steps"), [(None, [3, 6, 6]), (EveryNSteps(2), [2, 4, 6, 6]), (AtSteps(5), [5, 6])]
)
def test_saves_after_epochs_or_when_its_trigger_fires_and_at_the_end(tmp_path, trigger, steps):
    loop = Loop(lambda batch: StepInfo(float(batch), metrics={"m": 2.0, "text": "t"}))
    checkpoints = Checkpointer(tmp_path, keep=-1, trigger=trigger).track(loop=loop)
    loop.hooks.attach(checkpoints)
    loop.run_epochs([1, 2, 3], 2)
    assert [int(path.stem[-8:]) for path in checkpoints.paths()] == steps
    assert json.loads(checkpoints.latest().with_suffix(".json").read_text())["metrics"] == {
        "batch_loss": 3.0,
        "m": 2.0,
    }


def test_save_is_an_action_for_any_hook(tmp_path):
    loop = Loop(lambda batch: StepInfo(1.0))
    checkpoints = Checkpointer(tmp_path, keep=-1).track(loop=loop)
    loop.on_step("save", checkpoints.save, priority=100, trigger=AtSteps(2))
    loop.run_epochs([1, 2, 3], 1)
    assert [checkpoints.read(path)["loop"]["step"] for path in checkpoints.paths()] == [2]


# -- runs that are killed ------------------------------------------------------------------------------


class Fit:
    """Everything that a run is made of."""

    def __init__(self, folder):
        torch.manual_seed(1)
        x = torch.randn(42, 3, dtype=torch.float64)
        self.data = InMemory(
            x, x.sum(1, keepdim=True).sin(), batchsize=4, shuffle=True, random_state=0
        )
        self.model = nn.Sequential(
            nn.Linear(3, 9), nn.Dropout(0.2), nn.BatchNorm1d(9), nn.Linear(9, 1)
        ).double()
        self.trainer = Trainer(self.model, nn.MSELoss(), torch.optim.Adam)
        self.loop = Loop(self.trainer)
        self.loop.hooks.attach(
            Schedule(torch.optim.lr_scheduler.MultiStepLR(self.trainer.optimizer, [20, 40]), "step")
        )
        self.checkpoints = Checkpointer(folder, trigger=EveryNSteps(1)).track(
            model=self.model,
            optimizer=self.trainer.optimizer,
            loop=self.loop,
            data=self.data,
            random=RandomGenerators(),
        )
        self.checkpoints.restore()
        self.loop.hooks.attach(self.checkpoints)

    def run(self):
        self.loop.run_epochs(self.data, 5)
        history = [
            {k: v for k, v in record.items() if k != "seconds"} for record in self.loop.history
        ]
        state = self.model.state_dict()
        return {
            "model": state,
            "history": history,
            "optimizer": self.trainer.optimizer.state_dict(),
        }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


@pytest.mark.slow
def test_a_run_that_is_killed_over_and_over_ends_as_if_it_had_not_been(tmp_path):
    whole = Fit(tmp_path / "whole").run()
    outcome, folder, moments = (
        tmp_path / "outcome.pt",
        Checkpointer(tmp_path / "killed"),
        random.Random(4),
    )
    kills, saved, files, deadline = 0, 0, 0, time.monotonic() + 60
    while not outcome.exists():
        assert time.monotonic() < deadline
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                torch.save(Fit(folder.dir).run(), tmp_path / "aside.pt")
                os.replace(tmp_path / "aside.pt", outcome)
            os._exit(0)
        saved += moments.randrange(1, 6)  # saves from now on, and a moment more
        while newest(folder) < saved and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.004))
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        saved = newest(folder)
        before, files = files, len(folder.paths())
        # one more each time at most: killed after a save, before the older ones are removed
        assert files <= max(before, 1) + 1
        assert folder.read() is not None  # never unreadable
    assert kills >= 10
    assert len(folder.paths()) == 1
    assert same(torch.load(outcome), whole)


def newest(folder):
    path = folder.latest()
    return 0 if path is None else int(path.name[12:19])


# -- means of all ---------------------------------------------------------------------------------------


def test_the_mean_of_all_checkpoints(tmp_path):
    model, loop = nn.Linear(2, 1), Loop(StepInfo)
    checkpoints = Checkpointer(tmp_path, keep=-1, take_mean=-1).track(model=model)
    for loop.step in range(5):
        model.weight.data.fill_(loop.step**2)
        checkpoints.save(loop)
    assert checkpoints.restore()
    assert model.weight.tolist() == [[6.0, 6.0]]  # of 0, 1, 4, 9, 16


def test_without_ranks_the_first_saves_whoever_calls(tmp_path, monkeypatch):
    state = TrainState(3, nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters()))
    monkeypatch.setattr("fluxutils_py.training.checkpointer.is_main_process", lambda: False)
    checkpoints = Checkpointer(tmp_path).track(model=state.model)
    assert checkpoints.save(state) is None
    assert checkpoints.paths() == []


@pytest.mark.slow
def test_dropout_goes_on_exactly_from_what_the_docstring_tracks(tmp_path):
    x = torch.randn(20, 3)

    def train(steps, folder):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        data = InMemory(x, x.sum(1, keepdim=True), batchsize=4, shuffle=True, random_state=0)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam)
        loop = Loop(trainer)
        checkpoints = Checkpointer(folder, trigger=EveryNSteps(1))
        checkpoints.track(model=model, optimizer=trainer.optimizer, loop=loop, data=data).restore()
        loop.hooks.attach(checkpoints)
        loop.run_to_step(data, steps)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = train(4, tmp_path / "whole")
    train(2, tmp_path / "cut")
    assert torch.equal(train(4, tmp_path / "cut"), whole)


def test_a_full_disk_is_the_error_of_the_disk_and_the_old_checkpoint_stays(tmp_path):
    model = nn.Linear(100, 200)
    checkpoints = Checkpointer(tmp_path).track(model=model)
    old = checkpoints.save(Loop(StepInfo))
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (7680, before[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint-n.*\.pt") as raised:
            checkpoints.save(Loop(StepInfo))
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.paths() == [old]
    assert checkpoints.restore()


def test_load_restores_or_raises_where_there_is_none(tmp_path):
    model = nn.Linear(2, 1)
    saves = Checkpointer(tmp_path / "saves").track(model=model)
    with pytest.raises(FileNotFoundError, match="saves"):
        saves.load()
    saved = model.weight.detach().clone()
    saves.save(SimpleNamespace(step=3), {"loss": 1.0})  # as a hook of gomlx is called
    nn.init.zeros_(model.weight)
    saves.load()
    assert torch.equal(model.weight, saved)
