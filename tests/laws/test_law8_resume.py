"""Law 8: a run killed at any moment and resumed equals the uninterrupted one bit for bit.

The uninterrupted run has no checkpoints at all, so that saving them cannot hide that it changes something.
"""

import copy
import os
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from fluxutils_py import Estimator, Spec, net2vec, seqloss
from fluxutils_py.errors import LoadError
from fluxutils_py.evaluation import Checkpointer
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.training import EverySeconds, ForEachNSteps, StopTraining

N, T = 7, 11  # with batchsize 4 and seqsize 4: groups of 4 and 3 series, 3 windows each, the last of 3 steps
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


def net(layer=LSTM, **kwargs):
    torch.manual_seed(1)
    return nn.Sequential(layer(2, 4, **kwargs), nn.Linear(4, 1)).double()


def make(folder=None, *others, model=net, trigger=None, epochs=2, loss=None, opt=Adam, n_jobs=None, **spec):
    saves = [] if folder is None else [Checkpointer(folder, trigger=trigger)]
    spec = Spec(epochs=epochs, batchsize=4, seqsize=4, rebatch=False, **spec)
    settings = {"callbacks": [*others, *saves], "n_jobs": n_jobs, "random_state": 0, "verbose": False}
    return Estimator(model(), loss, opt, spec, **settings)


def outcome(est):
    """All that a fit leaves behind."""
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in est.history_]
    curves = (est.loss_curve_, est.validation_loss_curve_, est.loss_, est.n_iter_, est._n_steps)
    tensors = (net2vec(est.model_), est.grad_, dict(est.model_.named_buffers()), est.optimizer_.state_dict())
    scheduler = None if est._scheduler is None else est._scheduler.state_dict()
    return history, curves, tensors, scheduler, est._rng.bit_generator.state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and for those only


# -- stopped after every step --------------------------------------------------------------------------

PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, patience=0)
MISSING = np.where(RNG.random(Y.shape) < 0.2, np.nan, Y)
WITHOUT_LIFE = np.where(np.arange(N)[None, :, None] >= 4, np.nan, Y)  # a whole group that teaches nothing
CASES = {
    "plain": ({}, {}),
    "shuffled": ({"shuffle": True}, {}),
    "overlapping": ({"overlap": 2}, {}),
    "overlapping and shuffled": ({"overlap": 1, "shuffle": True, "model": partial(net, GRU)}, {}),
    "accumulating": ({"accumulate": 4}, {}),
    "accumulating over epochs that it does not divide, scheduled by step": (
        {"accumulate": 4, "scheduler": partial(lr_scheduler.StepLR, step_size=1), "schedule_every": "step"},
        {},
    ),
    "burning in": ({"burn_in": 5}, {}),
    "dropout": ({"model": partial(net, num_layers=2, dropout=0.4)}, {}),
    "dropout and shuffled": ({"model": partial(net, num_layers=2, dropout=0.4), "shuffle": True}, {}),
    "buffers": ({"model": lambda: nn.Sequential(Noisy(), net())}, {}),
    "scheduled by step": ({"scheduler": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12)}, {}),
    "scheduled by epoch": ({"scheduler": partial(lr_scheduler.StepLR, step_size=1)}, {}),
    "scheduled by validation": ({"scheduler": PLATEAU}, {"validation_data": (XV, YV)}),
    "clipped": ({"clip": 0.01, "opt": partial(SGD, lr=1.0, momentum=0.9)}, {}),
    "lengths and missing targets": ({"shuffle": True}, {"y": MISSING, "lengths": [11, 2, 7, 11, 4, 9, 10]}),
    "a group that teaches nothing": ({"accumulate": 2}, {"y": WITHOUT_LIFE}),
    "weighted": ({"shuffle": True}, {"sample_weight": np.arange(1.0, N + 1)}),
    "averaged sum": ({"loss": seqloss(nn.MSELoss(reduction="sum")), "opt": partial(AdamW, lr=1e-4)}, {}),
    "two threads": ({"n_jobs": 2, "shuffle": True}, {}),
    "two threads and dropout": ({"n_jobs": 2, "model": partial(net, num_layers=2, dropout=0.4)}, {}),
    "patient": ({"patience": 1, "epochs": 4, "opt": partial(Adam, lr=0.5)}, {"validation_data": (XV, YV)}),
}
CASES["scheduled by step"][0]["schedule_every"] = "step"


@pytest.mark.parametrize("case", CASES)
def test_a_fit_stopped_at_any_step_and_called_again_equals_the_uninterrupted_one(tmp_path, case):
    settings, arguments = CASES[case]
    arguments = {"y": Y, **arguments}
    whole = outcome(make(**settings).fit(X, **arguments))
    steps = whole[1][-1]
    assert steps >= STEPS
    for k in range(1, steps + 1):
        folder, trigger = tmp_path / str(k), ForEachNSteps(1 + k % 3)
        with pytest.raises(Boom):
            make(folder, Breaks(k), trigger=trigger, **settings).fit(X, **arguments)
        again = make(folder, trigger=trigger, **settings)
        assert same(outcome(again.fit(X, **arguments)), whole), k
        assert again.fit(X, **arguments) is again
        assert same(outcome(again), whole), k  # a finished one makes no more steps
