"""Law 8: a run killed at any moment and resumed equals the uninterrupted one bit for bit.

The uninterrupted run has no checkpoints at all, so that saving them cannot hide that it changes
something.
"""

import copy
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, lr_scheduler

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.errors import LoadError
from fluxutils_py.nn import GRU, LRU, LSTM, MinGRU, MinLSTM
from fluxutils_py.training import Checkpointer, EveryNSteps, StopTraining
from fluxutils_py.training.triggers import EveryNSeconds

PROGRAM = Path(__file__).parent / "programs" / "resume.py"
# with batchsize 4 and seqsize 4: groups of 4 and 3 series, 3 windows each, the last of 3 steps
N, T = (
    7,
    11,
)
STEPS = 6  # per epoch
RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, N, T))
Y = np.cumsum(X.mean(0, keepdims=True), 2)
XV, YV = X[:, :3, :9] + 0.1, Y[:, :3, :9]


class Boom(Exception):
    pass


class Breaks:
    """Raises at a step, before anything of that step is saved."""

    def __init__(self, step):
        self.step = step

    def on_step(self, loop):
        if loop.step == self.step:
            raise Boom


class Noisy(nn.Module):
    """A buffer that moves, and one that no ``state_dict`` of torch holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
            self.count.add_(1)
        return x * (1 + 0.1 * self.mean) + 1e-3 * self.count


class Looked(nn.Module):
    """Its embedding has sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.rest = nn.Embedding(5, 2, sparse=True).double(), net()

    def forward(self, x):
        return self.rest(self.table(x[..., 0]))


def net(layer=LSTM, **kwargs):
    torch.manual_seed(1)
    return nn.Sequential(layer(2, 4, **kwargs), nn.Linear(4, 1)).double()


def diagonal():
    torch.manual_seed(1)
    layers = LRU(2, 4), MinLSTM(4, 4, trainable_init=True), MinGRU(4, 3)
    return nn.Sequential(*layers, nn.Linear(3, 1)).double()


def make(
    folder=None,
    *others,
    model=net,
    trigger=None,
    epochs=2,
    loss=None,
    opt=Adam,
    **spec,
):
    saves = [] if folder is None else [Checkpointer(folder, trigger=trigger)]
    spec = Spec(epochs=epochs, batchsize=4, seqsize=4, rebatch=False, **spec)
    settings = {
        "callbacks": [*others, *saves],
        "random_state": 0,
        "verbose": False,
    }
    return Estimator(model(), loss, opt, spec, **settings)


def outcome(est):
    """All that a fit leaves behind."""
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in est.history_]
    parts = est.fitted_parts_
    curves = (est.loss_curve_, est.validation_loss_curve_, est.loss_, est.n_iter_, parts.n_steps)
    tensors = (
        net2vec(est.model_),
        est.grad_,
        dict(est.model_.named_buffers()),
        est.optimizer_.state_dict(),
    )
    scheduler = None if parts.scheduler is None else parts.scheduler.state_dict()
    return history, curves, tensors, scheduler, parts.rng.bit_generator.state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


# -- stopped after a step ------------------------------------------------------------------------------

PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, patience=0)
MISSING = np.where(RNG.random(Y.shape) < 0.2, np.nan, Y)
LABELS = RNG.integers(5, size=(1, N, T))
# a whole group that teaches nothing
WITHOUT_LIFE = np.where(np.arange(N)[None, :, None] >= 4, np.nan, Y)
CASES = {
    "plain": ({}, {}),
    "shuffled": ({"shuffle": True}, {}),
    "overlapping": ({"overlap": 2}, {}),
    "overlapping and shuffled": ({"overlap": 1, "shuffle": True, "model": partial(net, GRU)}, {}),
    "accumulating": ({"accumulate": 4}, {}),
    "accumulating over epochs that it does not divide, scheduled by step": (
        {
            "accumulate": 4,
            "lr_schedule": ("step", partial(lr_scheduler.StepLR, step_size=1)),
        },
        {},
    ),
    "sparse gradients that wait": (
        {"accumulate": 4, "model": lambda: Looked(), "opt": SGD},
        {"x": LABELS},
    ),
    "burning in": ({"burn_in": 5}, {}),
    "exact gradients": (
        {"gradient": "exact", "model": lambda: diagonal(), "burn_in": 2, "shuffle": True},
        {"y": MISSING},
    ),
    "exact gradients that wait": (
        {"gradient": "exact", "model": lambda: diagonal(), "accumulate": 4},
        {},
    ),
    "NAdam": ({"opt": NAdam}, {}),  # torch would load its mu_product in float64
    "dropout": ({"model": partial(net, num_layers=2, dropout=0.4)}, {}),
    "dropout and shuffled": (
        {"model": partial(net, num_layers=2, dropout=0.4), "shuffle": True},
        {},
    ),
    "buffers": ({"model": lambda: nn.Sequential(Noisy(), net())}, {}),
    "scheduled by step": (
        {
            "lr_schedule": ("step", partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=13)),
        },
        {},
    ),
    "scheduled by epoch": ({"lr_schedule": partial(lr_scheduler.StepLR, step_size=1)}, {}),
    "scheduled by validation": ({"lr_schedule": PLATEAU}, {"validation_data": (XV, YV)}),
    "clipped": ({"clip": 0.01, "opt": partial(SGD, lr=1.0, momentum=0.9)}, {}),
    "lengths and missing targets": (
        {"shuffle": True},
        {"y": MISSING, "lengths": [11, 2, 7, 11, 4, 9, 10]},
    ),
    "a group that teaches nothing": ({"accumulate": 2}, {"y": WITHOUT_LIFE}),
    "weighted": ({"shuffle": True}, {"sample_weight": np.arange(1.0, N + 1)}),
    "averaged sum": (
        {"loss": seqloss(nn.MSELoss(reduction="sum")), "opt": partial(AdamW, lr=1e-4)},
        {},
    ),
    "patient": (
        {"patience": 1, "epochs": 4, "opt": partial(Adam, lr=0.5)},
        {"validation_data": (XV, YV)},
    ),
}


# stopped after each of their steps: all the places there are; the others in the middle of series, at
# the end of an epoch, and between groups of series, with gradients that wait and without
AT_EACH_STEP = {"plain", "overlapping and shuffled", "accumulating"}
PLACES = (2, STEPS, 9)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_fit_stopped_at_any_step_and_called_again_equals_the_uninterrupted_one(tmp_path, case):
    settings, arguments = CASES[case]
    arguments = {"x": X, "y": Y, **arguments}
    whole = outcome(make(**settings).fit(**arguments))
    steps = whole[1][-1]
    assert steps >= STEPS
    every = Checkpointer(tmp_path / "every", keep=-1, trigger=EveryNSteps(1))
    make(None, every, **settings).fit(**arguments)
    for k in range(steps) if case in AT_EACH_STEP else PLACES:
        folder = tmp_path / str(k)
        folder.mkdir()
        for path in every.dir.glob(f"*-step-{k:08d}.*"):  # as if it had been stopped then
            shutil.copy(path, folder)
        assert Checkpointer(folder).latest_step() == (k or -1)  # -1: none was saved yet
        again = make(folder, trigger=EveryNSteps(1 + k % 3), **settings)
        assert same(outcome(again.fit(**arguments)), whole), k
    assert again.fit(**arguments) is again
    assert same(outcome(again), whole)  # a finished one makes no more steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"shuffle": True, "patience": 5}, {"accumulate": 4}], ids=str
)
def test_a_finished_fit_goes_on_for_more_epochs_as_if_they_had_been_asked_for_at_once(
    tmp_path, settings
):
    # the best weights come early, the last ones are what goes on
    held = {"validation_data": (XV, -YV)}
    for trigger in (None, EveryNSteps(5)):
        folder = tmp_path / str(trigger is None)
        for epochs in (1, 2, 5):
            one = make(folder, trigger=trigger, epochs=epochs, **settings).fit(X, Y, **held)
            assert same(outcome(one), outcome(make(epochs=epochs, **settings).fit(X, Y, **held)))


@pytest.mark.slow
def test_only_the_steps_that_are_left_are_made(tmp_path):
    made = []
    with pytest.raises(Boom):
        make(tmp_path, Breaks(9), trigger=EveryNSteps(2)).fit(X, Y)
    make(tmp_path, lambda loop: made.append(loop.step), trigger=EveryNSteps(2)).fit(X, Y)
    assert made == [9, 10, 11, 12]


@pytest.mark.slow
def test_a_finished_fit_of_more_epochs_than_asked_for_is_given_with_a_warning(tmp_path):
    whole = make(tmp_path, epochs=3).fit(X, Y)
    with pytest.warns(
        UserWarning,
        match=r"checkpoint .*3 epochs.*epochs=2",
    ):
        again = make(tmp_path, epochs=2).fit(X, Y)
    assert same(outcome(again), outcome(whole))


@pytest.mark.slow
def test_what_is_shown_of_an_unfinished_fit_is_of_its_complete_epochs(tmp_path):
    with pytest.raises(Boom):
        make(tmp_path, Breaks(9), trigger=EveryNSteps(2)).fit(X, Y)
    est = make(tmp_path, Breaks(9), trigger=EveryNSteps(2))
    with pytest.raises(Boom):
        est.fit(X, Y)
    first = make(epochs=1).fit(X, Y)
    assert (est.n_iter_, est.fitted_parts_.n_steps, est.loss_curve_, est.loss_) == (
        1,
        6,
        first.loss_curve_,
        first.loss_,
    )
    assert torch.equal(est.grad_, first.grad_)


@pytest.mark.slow
def test_a_memory_map_is_gone_on_with_as_an_array_is(tmp_path):
    mapped = np.memmap(tmp_path / "x", X.dtype, "w+", shape=(T, N, 2)).transpose(2, 1, 0)
    mapped[:] = X
    whole = outcome(make(shuffle=True).fit(X, Y))
    for k in (3, 8):
        with pytest.raises(Boom):
            make(tmp_path / str(k), Breaks(k), trigger=EveryNSteps(1), shuffle=True).fit(mapped, Y)
        assert same(
            outcome(make(tmp_path / str(k), trigger=EveryNSteps(1), shuffle=True).fit(X, Y)), whole
        )


@pytest.mark.slow
def test_an_interrupt_leaves_the_last_checkpoint(tmp_path):
    def interrupt(loop):
        if loop.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, interrupt, trigger=EveryNSteps(1)).fit(X, Y)
    assert Checkpointer(tmp_path).latest_step() == 7
    assert same(
        outcome(make(tmp_path, trigger=EveryNSteps(1)).fit(X, Y)), outcome(make().fit(X, Y))
    )


# -- checkpointers as callbacks ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpointer_keeps_nothing_of_a_fit_and_is_copied_and_pickled_with_the_estimator(
    tmp_path,
):
    est = make(tmp_path, trigger=EveryNSteps(4) | EveryNSeconds(1000))
    checkpoints = est.callbacks[0]
    whole = outcome(est.fit(X, Y))
    assert est.callbacks[0] is checkpoints
    assert checkpoints.tracked == {}
    for other in (clone(est), copy.deepcopy(est), pickle.loads(pickle.dumps(est))):
        assert other.callbacks[0].dir == tmp_path
        assert same(outcome(other.fit(X, Y)), whole)


@pytest.mark.slow
def test_of_several_checkpointers_the_one_that_is_furthest_is_gone_on_from(tmp_path):
    made, folders = [], [tmp_path / name for name in "abc"]

    def several(*others):
        saves = [
            Checkpointer(f, trigger=EveryNSteps(n)) for f, n in zip(folders, (4, 3, 5), strict=True)
        ]
        return make(None, *others, *saves, shuffle=True)

    with pytest.raises(Boom):
        several(Breaks(10)).fit(X, Y)
    est = several(lambda loop: made.append(loop.step)).fit(X, Y)
    assert made == [10, 11, 12]
    assert same(outcome(est), outcome(make(shuffle=True).fit(X, Y)))


@pytest.mark.slow
def test_a_fitted_estimator_that_is_warm_goes_on_from_itself(tmp_path):
    def train(folder):
        est = make(folder, epochs=1).set_params(warm_start=True)
        return est.fit(X, Y).fit(X, Y).partial_fit(X, Y)

    assert same(outcome(train(tmp_path)), outcome(train(None)))
    assert Checkpointer(tmp_path).latest_step() == 3 * STEPS


@pytest.mark.slow
def test_a_warm_fit_that_was_killed_goes_on_in_another_process(tmp_path):
    with pytest.raises(Boom):
        make(tmp_path, Breaks(9), epochs=1, trigger=EveryNSteps(1)).set_params(warm_start=True).fit(
            X, Y
        ).fit(X, Y)
    est = make(tmp_path, epochs=1, trigger=EveryNSteps(1)).fit(X, Y)  # the fit that was killed
    warm = make(epochs=1).set_params(warm_start=True).fit(X, Y).fit(X, Y)
    assert same(outcome(est), outcome(warm))


SAME = "; call fit with the same data and settings to continue it, or give the Checkpointer another folder"
OTHERS = {
    "spec": ({"clip": 2.0}, {}, "spec.clip: None -> 2" + SAME),
    "learning rate": (
        {"opt": partial(Adam, lr=0.002), "shuffle": True},
        {},
        "spec.shuffle: False -> True, lr: 0.001 -> 0.002" + SAME,
    ),
    "shape": (
        {},
        {"x": X[..., :-1], "y": Y[..., :-1]},
        "the shape of x: (2, 7, 11) -> (2, 7, 10), the shape of y: (1, 7, 11) -> (1, 7, 10), the "
        "starts and lengths of "
        "series: {} -> {}" + SAME,
    ),
    "model": (
        {"model": lambda: net().append(nn.Identity())},
        {},
        "model.2: none -> Identity" + SAME,
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("case", OTHERS)
def test_the_checkpoints_of_another_fit_are_refused_and_nothing_is_changed(tmp_path, case):
    make(tmp_path).fit(X, Y)
    settings, arguments, message = OTHERS[case]
    est = make(tmp_path, **settings)
    before = dict(vars(est))
    with pytest.raises(LoadError) as caught:
        est.fit(**{"x": X, "y": Y, **arguments})
    found = re.sub(
        "[0-9a-f]{12}", "{}", str(caught.value).removeprefix(str(Checkpointer(tmp_path).latest()))
    )
    assert found == f" does not fit, its fit: {message}"
    assert vars(est) == before


class Counts:
    name = "counter"

    def __init__(self):
        self.n = 0

    def on_step(self, loop):
        self.n += 1

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.slow
def test_a_hook_that_remembers_something_goes_on_too_and_is_missed(tmp_path):
    counts = Counts()
    with pytest.raises(Boom):
        make(tmp_path, counts, Breaks(9)).fit(X, Y)
    assert counts.n == 9
    est = make(tmp_path)
    with pytest.raises(LoadError, match=r"hooks 'counter'.* missing.* add"):
        est.fit(X, Y)
    assert not hasattr(est, "model_")
    counts = Counts()
    make(tmp_path, counts).fit(X, Y)
    assert counts.n == 12


@pytest.mark.slow
def test_a_run_that_was_stopped_stays_stopped(tmp_path):
    def stop(loop):
        if loop.step == 4:
            raise StopTraining

    est = make(tmp_path, stop).fit(X, Y)
    assert same(outcome(make(tmp_path).fit(X, Y)), outcome(est))
    assert est.fitted_parts_.n_steps == 4


# -- killed --------------------------------------------------------------------------------------------


@pytest.fixture
def program(python, tmp_path):
    """``program(*arguments)``: what programs/resume.py prints."""

    def run(*arguments):
        command = [python, PROGRAM, tmp_path, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = {
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        with subprocess.Popen(command, start_new_session=True, **started) as process:
            try:
                out, err = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, err
        # before it, gloo of older torch says who is connected
        return json.loads(out.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_that_is_killed_at_20_moments_equals_the_uninterrupted_one(program, ranks):
    found = program("kills", ranks, 20)
    assert found["same"]
    assert found["steps"] == sorted(found["steps"])
    assert len(found["steps"]) == 20
    assert 20 < found["steps"][-1] < found["whole"]
    assert found["saving"] >= 1  # killed while it wrote
    assert found["read"] >= 20  # and every one that was listed could be read


@pytest.mark.slow
def test_a_fit_that_goes_on_with_another_number_of_ranks_after_each_kill_ends_as_one_process(
    program,
):
    found = program("elastic", 6)
    assert found["apart"] <= 1e-12
    assert len(set(found["sizes"])) >= 3
    assert all(a != b for a, b in itertools.pairwise(found["sizes"]))
    assert 0 < found["steps"][-1] < found["whole"]


BOOM, TOLD = "ZeroDivisionError: boom", "RemoteError: rank 1: ZeroDivisionError: boom"


@pytest.mark.slow
def test_of_two_ranks_that_save_together_one_may_fail(program, tmp_path):
    found = program("faults")
    exists = f"NotADirectoryError: [Errno 20] Not a directory: '{tmp_path / 'in the way/folder'}'"
    assert found["hook"] == [[TOLD, 0, []], [BOOM, 0, []]]  # at a step at which both were to save
    assert found["last hook"] == [[TOLD, 12, [6, 12, 18]], [BOOM, 12, [6, 12, 18]]]
    assert found["stop"] == [[None, 6, [6, 6]]] * 2
    assert found["stop between epochs"] == [[None, 12, [6, 12, 12]]] * 2
    assert found["writing"] == [[exists, None, []], [f"RemoteError: rank 0: {exists}", None, []]]
    assert found["fine"] == [[None, 24, [3, 6, 9, 12, 15, 18, 21, 24, 24]]] * 2
    rest = [None, found["fine"][0][2]]
    assert found["reading"] == [
        ["RemoteError: rank 1: LoadError: not here", *rest],
        ["LoadError: not here", *rest],
    ]
    # it goes on, and there is nothing left to do
    assert found["one process"] == [
        None,
        24,
        [*found["fine"][0][2], 24],
    ]
    assert found["after hook"] == found["after last hook"] == [True, 24, 2]
    assert found["after stop"] == [False, 6, 1]  # it stays stopped
    assert found["after stop between epochs"] == [False, 12, 1]
