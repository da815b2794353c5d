"""Tasks that only a learner with a memory across windows can do."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, seqloss
from fluxutils_py.nn import GRU, LRU, LSTM, RNN, CausalConv1d


def mse(est, x, y):
    return float(((est.predict(x) - y) ** 2).mean())


@pytest.mark.slow
def test_fluxutils_own_test():
    """test/sklearn.jl of FluxUtils.jl: the mean over ten features, two epochs."""
    x = np.random.default_rng(0).normal(size=(10, 1000, 1000)).astype("float32")
    y = x.mean(0, keepdims=True)
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(10, 10), nn.Linear(10, 1))
    est = Estimator(
        model,
        seqloss(nn.functional.mse_loss),
        None,
        {"epochs": 2, "batchsize": 100, "seqsize": 100},
    )
    est.fit(x, y)
    assert mse(est, x, y) < 0.01


def flip_flop(n_series, n_steps, random_seed):
    """Hold the last of random pulses of +1 and -1, which come with probability .05 a step."""
    rng = np.random.default_rng(random_seed)
    pulses = rng.choice(
        [-1.0, 0.0, 1.0], p=[0.025, 0.95, 0.025], size=(1, n_series, n_steps)
    ).astype("float32")
    pulses[:, :, 0] = rng.choice([-1, 1], size=(1, n_series))
    at = np.maximum.accumulate(np.where(pulses != 0, np.arange(n_steps), 0), axis=2)
    return pulses, np.take_along_axis(pulses, at, 2)


@pytest.mark.slow
def test_flip_flop_is_held_across_windows():
    x, y = flip_flop(64, 1000, 0)
    xt, yt = flip_flop(20, 1000, 1)
    torch.manual_seed(0)
    model = nn.Sequential(GRU(1, 8), nn.Linear(8, 1))
    spec = Spec(epochs=8, batchsize=32, seqsize=10)
    est = Estimator(model, None, partial(torch.optim.Adam, lr=1e-2), spec, random_state=0).fit(x, y)
    assert mse(est, xt, yt) < 0.02
    # what any learner that forgets at each window is left with: until the first pulse of a window
    # it can only guess 0
    unknown = np.maximum.accumulate(np.abs(xt).reshape(1, 20, 100, 10), axis=3) == 0
    assert float((unknown.reshape(yt.shape) * yt**2).mean()) > 0.75


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "learned"), [(20, True), (0, False)])
def test_recall_beyond_the_window_needs_overlap(overlap, learned):
    lag, seqsize = 15, 10
    rng = np.random.default_rng(0)
    x = rng.choice([-1.0, 1.0], size=(1, 64, 200)).astype("float32")
    y = np.zeros_like(x)
    y[:, :, lag:] = x[:, :, :-lag]
    torch.manual_seed(0)
    rnn = RNN(1, 32)
    # remembers from the start, so that only credit has to be assigned
    nn.init.orthogonal_(rnn.module.weight_hh_l0)
    spec = Spec(epochs=20, batchsize=32, seqsize=seqsize, overlap=overlap, burn_in=lag, clip=1.0)
    est = Estimator(
        nn.Sequential(rnn, nn.Linear(32, 1)), None, partial(torch.optim.Adam, lr=3e-3), spec
    ).fit(x, y)
    error = float(((est.predict(x) - y)[:, :, lag:] ** 2).mean())
    assert error < 0.1 if learned else error > 0.9


def random_signs(lag, n_series, random_seed):
    x = (
        np.random.default_rng(random_seed)
        .choice([-1.0, 1.0], size=(1, n_series, 500))
        .astype("float32")
    )
    y = np.zeros_like(x)
    y[:, :, lag:] = x[:, :, :-lag]
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "lr", "n_series", "epochs"),
    [
        (partial(CausalConv1d, 1, 16, 201), 3e-3, 32, 8),
        (partial(LRU, 1, 16, n_states=512, r_min=0.995, r_max=0.9995), 7e-4, 64, 5),
    ],
    ids=["convolution", "LRU"],
)
def test_recall_over_200_steps_in_windows_of_50(layer, lr, n_series, epochs):
    """A window alone knows nothing of its targets, and is left with an error of 1."""
    lag = 200
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(16, 1))
    spec = Spec(epochs=epochs, batchsize=8, seqsize=50, overlap=lag, burn_in=lag, clip=1.0)
    opt = partial(torch.optim.Adam, lr=lr)
    est = Estimator(model, None, opt, spec, random_state=0).fit(*random_signs(lag, n_series, 0))
    x, y = random_signs(lag, 16, 1)
    assert float(((est.predict(x) - y)[:, :, lag:] ** 2).mean()) < 0.1
    window = x[:, :, 250:300]  # without the state that was carried to it
    assert float(((est.predict(window) - y[:, :, 250:300]) ** 2).mean()) > 0.9
