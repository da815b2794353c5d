"""Learning natively beside torch: equal results, taking turns, copies, what is left to torch."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, SequenceRegressor, Spec
from fluxutils_py.nn import LRU, MinGRU, MinLSTM, SequenceStack, kernels, native_kernels
from fluxutils_py.steps.native_learning import NativeLearning, Target

F, N, T = 2, 3, 30
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)

pytestmark = [
    pytest.mark.skipif(kernels.library() is None, reason="there are no kernels here"),
    pytest.mark.filterwarnings("ignore:this fit makes", "ignore:fewer than 50 updates"),
]


def run(live, x, y, delay=0, start=0, stop=T):
    """Predictions, with each truth given ``delay`` steps late."""
    found = []
    for t in range(start, stop):
        found.append(live.step(x[:, :, t]))
        if t - delay >= start:
            live.observe(y[:, :, t - delay])
    return np.stack(found, -1)


def deep(n_in, n_out):
    """All operations whose gradients the kernels know, but those of ready-made networks."""
    return nn.Sequential(
        MinGRU(n_in, 5),
        nn.Linear(5, 7, bias=False),
        nn.Tanh(),
        MinLSTM(7, 70),
        nn.Linear(70, 4),
        nn.ReLU(),
        LRU(4, 5),
        nn.LayerNorm(5),
        nn.SiLU(),
        nn.Linear(5, 3),
        nn.LeakyReLU(),
        nn.Linear(3, 2),
        nn.Sigmoid(),
        nn.Linear(2, n_out),
    )


def stack(n_in, n_out):
    return nn.Sequential(SequenceStack(LRU, n_in, 4), nn.Linear(4, n_out))


def series_of_two_targets(dtype):
    x = np.random.default_rng(6).normal(size=(F, N, T))
    y = np.stack([x[0].cumsum(-1) / 3, x[0] * x[1]])
    missing = y.copy()
    missing[0, 1, 5:9] = np.nan
    missing[:, :, 12] = np.nan
    gaps = x.copy()
    gaps[:, 2, 17] = np.nan
    return [a.astype(dtype) for a in (x, y, gaps, missing)]


def fit_of(model, opt, dtype, clip=None):
    x, y, gaps, missing = series_of_two_targets(dtype)
    if isinstance(model, str):
        small = {"num_layers": 2, "max_updates": 3, "batchsize": N, "seqsize": 10}
        est = SequenceRegressor(4, cell=model, random_state=0, verbose=False, **small)
    else:
        torch.manual_seed(0)
        spec = Spec(epochs=1, batchsize=N, seqsize=7, clip=clip)
        est = Estimator(model(F, 2), None, opt, spec, random_state=0, verbose=False)
    return est.fit(x, y), gaps, missing


@pytest.fixture
def torch_is_off(monkeypatch):
    def refuse(*_):
        raise AssertionError("torch was to learn")

    def switch():
        monkeypatch.setattr("fluxutils_py.training.window_step.WindowStep.__call__", refuse)

    return switch


LEARNT = {
    "deep": (deep, ADAM, {}),
    "clipped, decoupled": (deep, partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True), {}),
    "momentum": (deep, partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1), {}),
    "plain descent, late truths": (deep, partial(torch.optim.SGD, lr=0.01), {"delay": 3}),
    "first frozen": (deep, ADAM, {"freeze": ["0", "1"]}),
    "parts frozen": (
        deep,
        ADAM,
        {"freeze": ["3.module.linear.bias", "6.module.nu_log", "7", "8", "9.weight"]},
    ),
    "stack": (stack, ADAM, {"learn": 0.003}),
    "ready-made": ("linear+minlstm", None, {"learn": 0.002}),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", LEARNT)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernels_learn_what_torch_learns(net, dtype, torch_is_off):
    model, opt, options = LEARNT[net]
    est, x, y = fit_of(model, opt, dtype, clip=0.2 if "clip" in net else None)
    options = {"learn": 0.02, **options}
    delay = options.get("delay", 0)
    with native_kernels(False):
        expected = run(est.stream(N, **options), x, y, delay)
    torch_is_off()
    found = run(est.stream(N, **options), x, y, delay)
    is_double = dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 if is_double else 3e-6)
    assert np.nanmax(np.abs(found - est.predict(x))) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("n_classes", [2, 3])
def test_kernels_learn_labels_as_torch_does(n_classes, torch_is_off):
    x, *_ = series_of_two_targets(np.float64)
    labels = np.digitize(x[:1], [-0.5, 0.7][: n_classes - 1]).astype(float)
    model = nn.Sequential(MinGRU(F, 5), nn.Linear(5, n_classes))
    spec = Spec(epochs=1, batchsize=N, seqsize=7)
    est = EstimatorClassifier(model, None, ADAM, spec, random_state=0, verbose=False)
    est.fit(x, labels)
    labels[0, 1, 5:9] = np.nan
    labels[:, :, 12] = np.nan
    options = {"learn": 0.05, "method": "decision_function"}
    with native_kernels(False):
        expected = run(est.stream(N, **options), x, labels)
    torch_is_off()
    found = run(est.stream(N, **options), x, labels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(found[:, :, -1] - found[:, :, 0]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_torch_and_kernels_take_turns(fused):
    """Each goes on with what the other has learnt, also in a stream made from the state."""
    opt = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=fused)
    est, x, y = fit_of(deep, opt, np.float64)
    with native_kernels(False):
        expected = run(est.stream(N, learn=0.02), x, y)
    live = est.stream(N, learn=0.02)
    found = []
    for t in range(x.shape[2]):
        with native_kernels(t % 5 < 3):
            if t % 7 == 0:
                live = est.stream(N, live.state, learn=0.02)
            found.append(live.step(x[:, :, t]))
        with native_kernels(t % 4 < 2):
            live.observe(y[:, :, t])
    np.testing.assert_allclose(np.stack(found, -1), expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_copies_of_a_stream_learn_apart(torch_is_off):
    est, x, y = fit_of(deep, ADAM, np.float64)
    torch_is_off()
    live = est.stream(N, learn=0.02)
    run(live, x, y, stop=20)
    twin = copy.deepcopy(live)
    other = pickle.loads(pickle.dumps(live))
    found = run(live, x, y, start=20)
    assert np.array_equal(run(twin, x, y, start=20), found, equal_nan=True)
    assert np.array_equal(run(other, x, y, start=20), found, equal_nan=True)


def learning(model, opt=ADAM, freeze=()):
    model = model.double().eval()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in freeze)
    optimizer = opt(model.parameters())
    return NativeLearning(model, (F, N), optimizer, None, Target(np.zeros(1), np.ones(1)))


def twice():
    """A layer in two places."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(MinGRU(F, 4), layer, layer, nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("model", "opt"),
    [
        (nn.Sequential(MinGRU(F, 4), nn.GELU(), nn.Linear(4, 1)), ADAM),
        (nn.Sequential(MinGRU(F, 4, trainable_init=True), nn.Linear(4, 1)), ADAM),
        (nn.Sequential(MinGRU(F, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), ADAM),
        (twice(), ADAM),
        (nn.Sequential(MinGRU(F, 4), nn.Linear(4, 1)), partial(ADAM, amsgrad=True)),
        (nn.Sequential(MinGRU(F, 4), nn.Linear(4, 1)), torch.optim.RMSprop),
        (nn.Sequential(MinGRU(F, 4), nn.Linear(4, 2)), ADAM),  # of other outputs than the truth
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_torch(model, opt):
    x, truth = np.zeros((F, N)), np.zeros((1, N))
    before = copy.deepcopy(model.state_dict())
    unknown = learning(model, opt)
    assert unknown.program() is None
    assert not unknown.run(x, truth)
    assert all(torch.equal(p, before[name].double()) for name, p in model.state_dict().items())
    assert learning(nn.Sequential(MinGRU(F, 4), nn.Linear(4, 1))).run(x, truth)


def test_a_loss_that_is_not_finite_is_told_and_changes_no_parameter():
    model = nn.Sequential(MinGRU(F, 4), nn.Linear(4, 1))
    native = learning(model)
    before = [p.clone() for p in model.parameters()]
    assert native.run(np.ones((F, N)), np.full((1, N), 1e300))
    assert native.problem == ("loss", np.inf)
    assert all(map(torch.equal, before, model.parameters()))
    assert native.run(np.ones((F, N)), np.ones((1, N)))
    assert native.problem is None
    assert not any(map(torch.equal, before, model.parameters()))
