"""Ready-made estimators, streams, explanations and forecasters on a GPU, against the same on the
CPU. Skipped where there is no GPU.

In float64, or without the products of ten bits that cuDNN makes in float32 by default.
"""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceRegressor,
    Spec,
    bmm,
    check_export,
    explain,
    export,
    grad2net,
    load,
    net2grad,
    net2vec,
    vec2net,
)
from fluxutils_py.forecasting import Forecaster, model_fitting
from fluxutils_py.nn import LRU, MinGRU, MinLSTM, SequenceStack
from tests.nn.every_layer import MODELS, F, with_head
from tests.plain_networks import QuietClassifier, QuietRegressor

GPU = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:fewer than 50 updates"),
]
N, T = 13, 43
NO_NOISE = {"dropout": 0.0, "random_state": 0, "verbose": False}
X = np.random.default_rng(0).normal(size=(F, N, T))
Y = np.cumsum(X[:2], 2) / 5 + 40
LABELS = np.where(X[:1] > 0, "up", "down")


def both(make, *data, **arguments):
    """Fitted on the GPU and on the CPU."""
    return [make(device).fit(*data, **arguments) for device in (GPU, "cpu")]


def regressors(**settings):
    return both(
        lambda device: QuietRegressor(**{"max_updates": 60, **NO_NOISE, **settings}, device=device),
        X,
        Y,
    )


def near(a, b, tolerance=1e-8):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_the_outputs_gradients_and_states_of_the_cpu(name):
    torch.manual_seed(0)
    here = with_head(name, dtype=torch.float64)
    for module in here.modules():  # else cuDNN does not differentiate them
        module.training = isinstance(module, nn.RNNBase)
    there = pickle.loads(pickle.dumps(here)).to(GPU)
    x = torch.from_numpy(X.transpose(2, 1, 0).copy())
    found = []
    for model in (there, here):
        inputs = x.to(next(model.parameters()).device)
        out = [model(inputs[:20]), model(inputs[20:21]), model(inputs[21:])]
        torch.cat(out).square().sum().backward()
        found.append((torch.cat(out).detach().cpu(), net2grad(model).cpu()))
    for ours, expected in zip(*found, strict=True):
        near(ours, expected)


@pytest.mark.parametrize(
    "cell",
    ["auto", "linear", "linear+lstm", "lstm", "rnn", "mgu", "mingru", "lru", "tcn", "attention"],
)
def test_regressors_of_steps(cell):
    there, here = regressors(cell=cell)
    assert all(p.device.type == GPU for p in there.model_.parameters())
    near(there.predict(X), here.predict(X), 1e-6)
    assert there.score(X, Y) == pytest.approx(here.score(X, Y), abs=1e-6)
    live = there.stream(N)
    near(np.stack([live.step(X[:, :, t]) for t in range(T)], 2), there.predict(X))


@pytest.mark.parametrize("target", ["steps", "series"])
@pytest.mark.parametrize("cell", ["auto", "kernels", "linear", "gru"])
def test_classifiers(cell, target):
    if (cell, target) == ("kernels", "steps"):
        pytest.skip("kernels are for targets per series")
    y = LABELS if target == "steps" else LABELS[0, :, -1]
    lengths = np.random.default_rng(1).integers(20, T + 1, N) if target == "series" else None
    there, here = both(
        lambda device: QuietClassifier(cell=cell, **NO_NOISE, max_updates=60, device=device),
        X,
        y,
        lengths=lengths,
    )
    near(there.predict_proba(X, lengths=lengths), here.predict_proba(X, lengths=lengths), 1e-5)
    assert (there.predict(X) == here.predict(X)).mean() > 0.99


@pytest.mark.parametrize(
    "settings",
    [
        {"n_models": 2},
        {"early_stopping": True},
        {"spec": {"gradient": "exact"}, "cell": "mingru", "seqsize": 7},
        {"spec": {"overlap": 3, "burn_in": 2}, "seqsize": 7},
        {"level": 80},
    ],
)
def test_settings_of_a_network(settings):
    there, here = regressors(**{"cell": "lstm", **settings})
    near(there.predict(X), here.predict(X), 1e-6)
    if "level" in settings:
        near(there.predict_interval(X), here.predict_interval(X), 1e-6)


@pytest.mark.parametrize("layer", [MinGRU, MinLSTM, LRU])
def test_exact_gradients_are_those_of_the_cpu(layer):
    def make(device):
        torch.manual_seed(0)
        model = nn.Sequential(SequenceStack(layer, F, 5), nn.Linear(5, 2))
        spec = Spec(epochs=2, batchsize=5, seqsize=7, overlap=0, gradient="exact")
        return Estimator(model, None, None, spec, device=device, random_state=0)

    there, here = both(make, X, Y)
    near(net2vec(there).cpu(), net2vec(here))


@pytest.mark.parametrize("cell", ["mingru", "lstm", "linear+minlstm"])
@pytest.mark.parametrize("delay", [0, 3])
def test_streams_learn_what_they_learn_on_the_cpu(cell, delay):
    found = []
    for est in regressors(cell=cell):
        live = est.stream(N, learn=True, delay=delay)
        for t in range(T):
            live.step(X[:, :, t])
            if t >= delay:
                live.observe(Y[:, :, t - delay])
        found.append(live.step(X[:, :, 0]))
    near(*found, 1e-6)


def test_streams_with_intervals_and_alarms():
    results = []
    for est in regressors(cell="lstm"):
        live, found = est.stream(N, interval=0.8, alarm=True, calibration=(X, Y)), []
        for t in range(T):
            found.append(np.stack(live.step(X[:, :, t])[:3]))
            live.observe(Y[:, :, t])
        results.append(np.array(found))
    near(*results, 1e-6)


def test_files_pickles_and_exports_go_where_there_is_no_gpu(tmp_path):
    there, here = regressors(cell="lstm")
    there.save(tmp_path / "est.pt")
    for again in (
        QuietRegressor.load(tmp_path / "est.pt", device="cpu"),
        QuietRegressor.load(tmp_path / "est.pt"),
        load(tmp_path / "est.pt"),
        pickle.loads(pickle.dumps(there)),
    ):
        near(again.predict(X), here.predict(X), 1e-6)
    for name, form in (("est.h", "c"), ("est.onnx", "onnx"), ("est.pt2", "torch")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export(there, tmp_path / name, form)
            if name != "est.h":
                assert check_export(tmp_path / name, there, X) < 1e-6
    assert all(p.device.type == GPU for p in there.model_.parameters())


def test_fits_go_on():
    found = []
    for device in (GPU, "cpu"):
        est = SequenceRegressor(
            cell="lstm", device=device, warm_start=True, max_updates=60, **NO_NOISE
        )
        est.fit(X, Y).fit(X, Y)
        est.partial_fit(X, Y)
        _, state = est.predict(X[:, :, :20], return_state=True)
        found.append(est.predict(X[:, :, 20:], state=state))
    near(*found, 1e-6)


def test_missing_targets_and_weights():
    y, weight = Y.copy(), np.random.default_rng(1).random((N, T))
    y[:, ::3, 5:9] = np.nan
    there, here = both(
        lambda device: SequenceRegressor(cell="lstm", max_updates=60, **NO_NOISE, device=device),
        X,
        y,
        weight,
    )
    near(there.predict(X), here.predict(X), 1e-6)


def test_weights_of_series():
    weight = np.random.default_rng(2).random(N)
    there, here = both(
        lambda device: SequenceRegressor(max_updates=60, **NO_NOISE, device=device),
        X,
        X[0].mean(1),
        weight,
    )
    near(there.predict(X), here.predict(X), 1e-6)


def test_explanations():
    there, here = regressors(cell="lstm")
    found = [explain(est, X, series=1, step=20, output=1).attributions for est in (there, here)]
    near(*found, 1e-6)


@pytest.mark.parametrize("network", ["recurrent", "segments"])
def test_forecasters(network, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(model_fitting, "DROPOUT", 0.0)
    t = np.arange(90)
    levels = np.arange(1, 6)[:, None]
    y = levels * (10 + 3 * np.sin(2 * np.pi * t / 7)) + np.random.default_rng(0).normal(
        size=(5, 90)
    )
    results = []
    for device in (GPU, "cpu"):
        fc = Forecaster(
            6, 7, quantiles=(0.1, 0.9), network=network, max_steps=30, n_models=2,
            random_state=0, device=device, verbose=False,
        ).fit(y[None, :, :80])  # fmt: skip
        first = fc.predict()
        fc.update(y[None, :, 80:84])
        later = fc.predict()
        fc.save(tmp_path / "fc.pt")
        again = Forecaster.load(tmp_path / "fc.pt").predict()
        results.append([np.stack(list(found.values())) for found in (first, later, again)])
    for ours, expected in zip(*results, strict=True):
        near(ours, expected, 1e-3)  # networks are of float32


def test_vectors_and_products():
    model = with_head("LSTM", dtype=torch.float64).to(GPU)
    vector = net2vec(model)
    assert vector.device.type == GPU
    vec2net(model, vector.cpu() + 1)  # from either side
    assert torch.equal(net2vec(model), vector + 1)
    grad2net(model, vector)
    assert torch.equal(net2grad(model), vector)
    a, b = torch.rand(3, 4, 2, dtype=torch.float64), torch.rand(4, 5, 2, dtype=torch.float64)
    near(bmm(a.to(GPU), b.to(GPU)).cpu(), bmm(a, b))
