"""What surrounds a call does not change its numbers: each equals, bit for bit, the same call by
itself. A call that needs gradients is refused where they are off, before anything changes.
"""

import contextlib
import functools
import tempfile
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.pipeline import make_pipeline
from torch import nn

import fluxutils_py.nn as fnn
from fluxutils_py import (
    Estimator,
    SequenceScaler,
    WinsorScaler,
    explain,
    samples,
    stream,
)
from fluxutils_py.forecasting import Forecaster
from tests.plain_networks import LagRegressor

X = np.random.default_rng(0).normal(size=(2, 5, 24)).astype("float32")
Y = (0.1 * X.cumsum(2)).sum(0, keepdims=True) + X[:1]
SETTINGS = {"random_state": 0, "verbose": False, "comm": None}
DAYS = pd.date_range("2020", periods=40)
FRAME = pd.DataFrame({"unique_id": "a", "ds": DAYS, "y": np.sin(np.arange(40.0)) + X[0, 0].sum()})


def model(n_in, n_out):
    """Build a model whose initial weights are drawn in the call."""
    return nn.Sequential(
        fnn.SequenceStack(fnn.MinGRU, n_in, 6), fnn.LSTM(6, 5), nn.Linear(5, n_out)
    )


def estimator():
    return Estimator(model, spec={"epochs": 2, "batchsize": 3, "seqsize": 13}, **SETTINGS)


def linear():
    return LagRegressor(n_lags=2, level=80, **SETTINGS)


def forecaster():
    return Forecaster(h=3, max_steps=2, hidden_size=4, n_models=1, **SETTINGS)


@functools.cache
def fitted(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make().fit(FRAME) if make is forecaster else make().fit(X, Y)


def parameters(est):
    return [p.detach().numpy() for p in est.model_.parameters()]


def steps(live):
    return [live.step(X[:, :, t]) for t in range(3)]


def watch(make, **settings):
    live = fitted(make).stream(5, **settings)
    found = [live.step(X[:, :, 0])]
    live.observe(Y[:, :, 0])
    return [*found, live.step(X[:, :, 1])]


def run_pipeline():
    pipe = make_pipeline(SequenceScaler(), WinsorScaler(), estimator())
    pipe.fit(samples(X), samples(Y))
    return [pipe.predict(samples(X)), *steps(stream(pipe, 5))]


def save_and_load():
    with tempfile.TemporaryDirectory() as folder:
        fitted(estimator).save(f"{folder}/model")
        est = Estimator.load(f"{folder}/model", model=model)
    return [*parameters(est), est.predict(X)]


def export():
    with tempfile.TemporaryDirectory() as folder:
        fitted(linear).export(f"{folder}/model.h", format="c")
        return [np.fromfile(f"{folder}/model.h", np.uint8)]


CALLS = {
    "fit": lambda: parameters(estimator().fit(X, Y)),
    "fit in closed form": lambda: parameters(linear().fit(X, Y)),
    "partial_fit": lambda: parameters(estimator().partial_fit(X, Y)),
    "evaluate with gradient": lambda: fitted(estimator).evaluate(X, Y, gradient=True),
    "learn": lambda: watch(estimator, learn=True),
    "pipeline": lambda: run_pipeline(),
    "fit of a forecaster": lambda: [forecaster().fit(FRAME).predict()],
    "evaluate": lambda: [fitted(estimator).evaluate(X, Y)],
    "predict": lambda: [fitted(make).predict(X) for make in (estimator, linear)],
    "score": lambda: [fitted(make).score(X, Y) for make in (estimator, linear)],
    "stream": lambda: [y for make in (estimator, linear) for y in steps(fitted(make).stream(5))],
    "interval": lambda: watch(linear, interval=0.8, alarm=True),
    "explain": lambda: [explain(fitted(estimator), X, series=1, step=17).attributions],
    "save": save_and_load,
    "export": export,
    "scalers": lambda: [s().fit_transform(X) for s in (SequenceScaler, WinsorScaler)],
    "forecast": lambda: [fitted(forecaster).predict(), fitted(forecaster).predict(FRAME)],
}
NEED_GRADIENTS = list(CALLS)[:7]


@contextlib.contextmanager
def changed(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


# all that may stand around a call; one of each kind stands there at once
MODES = [
    lambda: torch.autocast("cpu", torch.bfloat16),
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.float16),
    lambda: changed(torch.set_grad_enabled, False, True),
]
DEVICES = [
    lambda: torch.device("meta"),
    contextlib.nullcontext,
    lambda: changed(torch.set_default_device, "meta", None),
    lambda: changed(torch.set_default_device, "cpu", None),
]
NUMBERS = [
    lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    lambda: changed(torch.use_deterministic_algorithms, True, False),
]
LIBRARIES = [
    lambda: np.errstate(all="raise"),
    lambda: sklearn.config_context(array_api_dispatch=True, enable_metadata_routing=True),
    lambda: np.printoptions(precision=2, threshold=3, legacy="1.13"),
    lambda: sklearn.config_context(assume_finite=True, transform_output="pandas"),
]


@contextlib.contextmanager
def surroundings(k, shift):
    """Enter one of each kind: over 0 <= k < 4 all of each, and over shifts other combinations."""
    with contextlib.ExitStack() as stack:
        for i, kind in enumerate((LIBRARIES, NUMBERS, DEVICES, MODES)):
            stack.enter_context(kind[(k + i * shift) % 4]())
        yield


def arrays(found):
    flat = []
    for each in found:
        if isinstance(each, tuple):
            flat += arrays(each)
        elif isinstance(each, pd.DataFrame):
            flat.append(each.select_dtypes("number").to_numpy())
        else:
            flat.append(np.asarray(each))
    return flat


@functools.cache
def alone(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return arrays(CALLS[name]())


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:this fit makes", "ignore:after [0-9]+ updates the loss")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("name", CALLS)
def test_numbers_do_not_depend_on_what_surrounds_the_call(name, k):
    expected = alone(name)
    shift = list(CALLS).index(name) % 4
    with surroundings(k, shift):
        if name in NEED_GRADIENTS and not torch.is_grad_enabled():
            with pytest.raises(RuntimeError, match=r"gradients.*no_grad.*inference_mode"):
                CALLS[name]()
            return
        found = CALLS[name]()
    found = arrays(found)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
