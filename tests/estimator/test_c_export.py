"""Headers of C: compiled strictly, they give what streams give; wrong use; text."""

import re

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceImputer,
    SequenceRegressor,
    SequenceScaler,
    WinsorScaler,
    export,
    samples,
    stream,
)
from fluxutils_py.errors import ExportError
from fluxutils_py.nn import GRU, LSTM, RNN, HFGRU, LRU, MinLSTM, SequenceStack
from tests.exporting.c_programs import build, run_steps

N, T = 5, 40
SPEC = {"epochs": 1, "batchsize": 4, "seqsize": 10}
CELLS = ["lstm", "gru", "rnn", "flstm", "sgru", "mgu", "smgu", "hfgru", "mingru", "minlstm", "lru"]


@pytest.fixture
def x(rng):
    """(F, N, T)"""
    return rng.normal(size=(3, N, T)).astype("float32")


def streamed(model, steps, method="predict"):
    """The outputs (T, G) for steps (T, F) of one series."""
    live = stream(model, method=method)
    return np.stack([live.step(step[:, None])[:, 0] for step in steps])


def error(found, wanted):
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    largest = max(1, np.nanmax(np.abs(wanted)))
    return np.nanmax(np.abs(found - wanted)) / largest


@pytest.mark.parametrize("target", ["c", "c++", "arm"])
@pytest.mark.parametrize("cell", CELLS)
def test_ten_thousand_steps_of_each_cell(cell, target, x, rng, tmp_path):
    est = SequenceRegressor(7, cell=cell, num_layers=2, epochs=2, random_state=0)
    est.fit(x, 100 + x[:2].cumsum(2))
    est.export(tmp_path / "model.h", format="c")
    steps = rng.normal(size=(10_000 if target == "c" else 1000, 3)).astype("float32")
    assert error(run_steps(target, tmp_path / "model.h", steps), streamed(est, steps)) < 1e-5


MODELS = {
    "stack": lambda: nn.Sequential(LSTM(3, 5), GRU(5, 4), RNN(4, 6), nn.Linear(6, 2)),
    "initial": lambda: nn.Sequential(
        GRU(3, 5, trainable_init=True), LRU(5, 4, trainable_init=True), nn.Linear(4, 2)
    ),
    "cells": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), HFGRU(4, 6, alpha=0.3), MinLSTM(6, 4), nn.Linear(4, 2)
    ),
    "blocks": lambda: nn.Sequential(SequenceStack(LRU, 3, 6, 2), nn.Linear(6, 2)),
    "no_state": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_of_several_layers(name, dtype, x, rng, tmp_path):
    torch.manual_seed(0)
    x = x.astype(dtype)
    est = Estimator(MODELS[name](), spec=SPEC, random_state=0).fit(x, x[:2])
    with torch.no_grad():
        for p in est.model_.parameters():
            p.add_(0.2 * torch.randn_like(p))
    est.export(tmp_path / "model.h", format="c")
    steps = rng.normal(size=(500, 3)).astype(dtype)
    bound = 1e-5 if dtype == "float32" else 1e-12
    assert error(run_steps("c", tmp_path / "model.h", steps), streamed(est, steps)) < bound


@pytest.mark.parametrize(
    "made",
    [
        [SequenceScaler()],
        [WinsorScaler()],
        [SequenceImputer(), SequenceScaler()],
        [SequenceImputer("ffill"), FunctionTransformer(np.sinh), SequenceScaler()],
    ],
    ids=repr,
)
@pytest.mark.parametrize("target", ["c", "c++", "arm"])
def test_pipelines_and_missing_values(made, target, rng, tmp_path):
    # as many series as features, which scikit-learn mistakes for them
    x = rng.normal([[[9.0]], [[-0.3]], [[1.0]]], [[[2.0]], [[0.7]], [[1.0]]], (3, 3, T))
    x = x.astype("float32")
    holes = x.copy()
    holes[rng.random(x.shape) < 0.2] = np.nan
    pipe = make_pipeline(*made, SequenceRegressor(4, cell="gru", epochs=2, random_state=0))
    fits = (x, x[:2]) if len(made) == 3 else (samples(x), samples(x[:2]))
    pipe.fit(*fits)
    export(pipe, tmp_path / "model.h", format="c")
    steps = (x if isinstance(made[0], SequenceScaler) else holes)[:, 1].T.copy()
    steps[:4] = steps[20] = np.nan
    found = run_steps(target, tmp_path / "model.h", steps)
    assert error(found, streamed(pipe, steps)) < 1e-5
    assert np.isnan(found).any() == isinstance(made[0], SequenceScaler)
