"""Windows as CUDA graphs. Where there is no GPU, a stand-in for the graph repeats the same operations
on the same memory, and forgets what Python did.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import net2vec, seqloss
from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.nn import GRU, LRU, LSTM
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.training import window_graph
from fluxutils_py.training.minibatch import TensorBatches
from fluxutils_py.training.window_step import GRAPHS, WindowStep

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


MSE = seqloss(nn.MSELoss())


def squared_error(model, xs, ys):
    return (model(xs) - ys).square().mean()


@pytest.fixture
def replays(monkeypatch):
    """The number of windows that were replayed."""
    found = []
    plain = window_graph.capture

    def capture(run):
        if torch.cuda.is_available():
            replay, results = plain(run)
        else:
            with torch.random.fork_rng():
                run()
            results = run()

        def repeat():
            found.append(1)
            if torch.cuda.is_available():
                return replay()
            for value, again in zip(results, run(), strict=True):
                value.copy_(again)
            forget(run)

        return repeat, results

    def forget(run):
        names = run.__code__.co_freevars
        held = dict(zip(names, (cell.cell_contents for cell in run.__closure__), strict=True))
        for p in held["self"]._params:
            p.grad = None
        for layer in recurrent_layers(held["model"]):
            layer.state = torch.full((1,), torch.nan)

    monkeypatch.setattr(window_graph, "capture", capture)
    monkeypatch.setenv(GRAPHS, "1")
    return found


def batches(device, n_series=5, n_steps=33, batchsize=3, seqsize=5, dtype=torch.float64):
    x = np.random.default_rng(0).normal(size=(2, n_series, n_steps))
    y = np.tanh(x.sum(0, keepdims=True).cumsum(2) / 3)
    arrays = [SeriesArray(x, "x")], [SeriesArray(y, "y")]
    windows = SequenceWindows(*arrays, batchsize=batchsize, seqsize=seqsize)
    return list(TensorBatches(windows, dtype, torch.device(device)))


def train(model, loss, device, *, by_graph, after=None, epochs=3, **settings):
    """Train a copy of a model; return it, the losses and the mean gradients."""
    model = copy.deepcopy(model).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    step = WindowStep(model, loss, opt, comm=None, defer=True, **settings)
    assert step._is_graphed == by_graph
    losses, gradients = [], []
    for epoch in range(epochs):
        step.start_epoch()
        read_late = [step(batch).loss for batch in batches(device)]
        losses += map(float, read_late)
        step.finish_epoch()
        gradients.append(step.mean_gradient().clone())
        if after is not None:
            after(model, opt, epoch)
    return model, losses, gradients


def assert_same(model, loss, device, monkeypatch, **settings):
    graphed = train(model, loss, device, by_graph=True, **settings)
    monkeypatch.delenv(GRAPHS)
    expected = train(model, loss, device, by_graph=False, **settings)
    torch.testing.assert_close(net2vec(graphed[0]), net2vec(expected[0]), rtol=1e-9, atol=1e-9)
    assert graphed[1] == pytest.approx(expected[1], rel=1e-9)
    torch.testing.assert_close(graphed[2], expected[2], rtol=1e-8, atol=1e-10)
    for one, other in zip(*map(recurrent_layers, (graphed[0], expected[0])), strict=True):
        torch.testing.assert_close(one.state, other.state)


MODELS = {
    "lstm": lambda: nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)),
    "gru, lru": lambda: nn.Sequential(GRU(2, 3), LRU(3, 5), nn.Linear(5, 1)),
    "normalized": lambda: nn.Sequential(LSTM(2, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [{}, {"clip": 0.05}, {"accumulate": 3, "clip": 0.05}])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_learns_what_its_operations_learn(name, settings, device, replays, monkeypatch):
    torch.manual_seed(0)
    assert_same(MODELS[name]().double(), MSE, device, monkeypatch, **settings)
    # of two groups of seven windows in three epochs: no first one, no last one, which is shorter,
    # and of the second group, of two series, none
    assert len(replays) == 3 * 5


@pytest.mark.parametrize("device", DEVICES)
def test_rates_buffers_and_frozen_parameters(device, replays, monkeypatch):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen += x.shape[1]
            return x

    def after(model, opt, epoch):
        opt.param_groups[0]["lr"] *= 0.5
        model[2].bias.requires_grad_(epoch == 1)  # frozen after the first epoch, not the second

    torch.manual_seed(0)
    model = nn.Sequential(LSTM(2, 4), Counting(), nn.Linear(4, 1)).double()
    assert_same(model, squared_error, device, monkeypatch, after=after)
    assert len(replays) == 2 * 5
    monkeypatch.setenv(GRAPHS, "1")
    trained, *_ = train(model, MSE, device, by_graph=True, epochs=1)
    assert trained[1].seen == 7 * (3 + 2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_not_finite_changes_nothing(device, replays):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(2, 4), nn.Linear(4, 1)).double().to(device)
    step = WindowStep(
        model, MSE, torch.optim.AdamW(model.parameters(), fused=True), comm=None, defer=True
    )
    first, second, third, *_ = batches(device)
    step(first), step(second)
    before = net2vec(model).clone()
    third.labels[0][0, 0] = torch.inf
    info = step(third)
    with pytest.raises(FloatingPointError, match="loss is inf"):
        float(info.loss)
    assert torch.equal(net2vec(model), before)
    assert len(replays) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_exact_gradients_are_not_captured(device, replays):
    model = nn.Sequential(LRU(2, 4), nn.Linear(4, 1)).double()
    train(model, MSE, device, by_graph=False, gradient="exact")
    assert not replays
