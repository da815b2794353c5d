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
