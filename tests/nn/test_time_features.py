"""Lags and statistics of the past, against pandas."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fluxutils_py import loadstates, reset, states
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import ExponentialMeans, Lags, RollingStatistics, RunningStatistics

F, N, T = 3, 4, 37


@pytest.fixture
def x():
    torch.manual_seed(0)
    x = torch.randn(T, N, F, dtype=torch.float64) * 3 + 100
    x[:, 1, 2] = 5.5  # a constant
    return x


def shifted(frame, lag):
    return frame.shift(lag, fill_value=0.0)


def slope(values):
    return np.polyfit(np.arange(len(values)), values, 1)[0] if len(values) > 1 else 0.0


def rolling(frame, span):
    window = frame.rolling(span, min_periods=1)
    return [window.mean(), window.std(ddof=0), window.apply(slope, raw=True)]


def running(frame):
    window = frame.expanding()
    change = frame.diff().abs().expanding().mean().fillna(0.0)
    last = pd.DataFrame({"t": np.log(np.arange(1, T + 1))})
    first = frame * 0 + frame.iloc[0]
    return [
        window.mean(),
        window.std(ddof=0),
        window.max(),
        window.min(),
        frame,
        first,
        change,
        last,
    ]


LAYERS = {
    "lags": (partial(Lags, lags=[0, 3, 11]), lambda f: [shifted(f, lag) for lag in (0, 3, 11)]),
    "one lag": (partial(Lags, lags=[1]), lambda f: [shifted(f, 1)]),
    "the step itself": (partial(Lags, lags=[0]), lambda f: [f]),
    "exponential": (
        partial(ExponentialMeans, spans=[1, 5, 20]),
        lambda f: [f.ewm(span=s, adjust=True).mean() for s in (1, 5, 20)],
    ),
    "rolling": (
        partial(RollingStatistics, spans=[1, 5, 60]),
        lambda f: [part for span in (1, 5, 60) for part in rolling(f, span)],
    ),
    "running": (RunningStatistics, running),
}
every = pytest.mark.parametrize("name", LAYERS)


@every
def test_outputs_are_those_of_pandas(name, x):
    make, oracle = LAYERS[name]
    layer = make(F).double()
    y = layer(x)
    assert y.shape == (T, N, layer.n_out)
    for b in range(N):
        expected = np.concatenate(oracle(pd.DataFrame(x[:, b].numpy())), axis=1)
        np.testing.assert_allclose(y[:, b], expected, rtol=0, atol=2e-7)


@every
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_windows_steps_states_and_batches_give_the_same(name, dtype, bound, x):
    layer = LAYERS[name][0](F).to(dtype)
    x = (x - 100).to(dtype)
    # one constant is -94.5, whose rounding is larger than the bound
    same = partial(torch.testing.assert_close, rtol=bound / 10, atol=bound)
    whole = layer(x)
    assert whole.dtype == dtype
    reset(layer)
    assert [s.shape[1] for s in states(layer)] == [0] * len(states(layer))
    parts = [layer(x[:5]), layer(x[5:6]), *(layer(step)[None] for step in x[6:20])]
    kept = [s.clone() for s in states(layer)]
    assert all(s.dtype == dtype for s in kept)
    parts.append(layer(x[20:]))
    same(torch.cat(parts), whole)
    reset(layer)
    same(layer(x[:, 2:3]), whole[:, 2:3])
    reset(layer)
    loadstates(layer, kept)
    same(layer(x[20:]), whole[20:])


@every
def test_a_series_that_is_reset_starts_anew(name, x):
    layer = LAYERS[name][0](F).double()
    fresh = layer(x)
    layer.reset_series(torch.tensor([0, 3]))
    again = layer(x)
    torch.testing.assert_close(again[:, [0, 3]], fresh[:, [0, 3]], rtol=0, atol=1e-12)


@pytest.mark.slow
@every
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(1)
    layer = LAYERS[name][0](2).double()
    x = torch.randn(6, 2, 2, dtype=torch.float64, requires_grad=True)

    def outputs(x):
        reset(layer)
        return layer(x)

    assert torch.autograd.gradcheck(outputs, x)


@every
def test_constant_inputs_have_finite_gradients(name):
    layer = LAYERS[name][0](F)
    x = torch.ones(9, 2, F, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


@every
def test_there_is_nothing_to_train_or_to_store(name):
    layer = LAYERS[name][0](F)
    assert not list(layer.parameters())
    assert not layer.state_dict()


def test_spans_and_sizes_are_checked():
    with pytest.raises(ValueError, match=r"Lags: lags .* got -1"):
        Lags(2, [0, -1])
    with pytest.raises(ValueError, match=r"ExponentialMeans: spans .* got 0"):
        ExponentialMeans(2, [0])
    with pytest.raises(ValueError, match=r"RollingStatistics: spans .* got none"):
        RollingStatistics(2, [])
    with pytest.raises(TypeError, match=r"RollingStatistics: spans .* 1.5"):
        RollingStatistics(2, [1.5])
    with pytest.raises(ValueError, match=r"RunningStatistics: n_in .* got 0"):
        RunningStatistics(0)
    with pytest.raises(ShapeError, match=r"RunningStatistics takes 3 .*\(5, 2, 4\)"):
        RunningStatistics(3)(torch.zeros(5, 2, 4))


def test_models_of_them_learn(x):
    model = nn.Sequential(RollingStatistics(F), nn.LazyLinear(1)).double()
    model(x).square().mean().backward()
    assert model[1].weight.grad.isfinite().all()


def test_means_of_numbers_whose_squares_are_infinite():
    x = 1e30 * torch.randn(T, N, F)
    y = RollingStatistics(F, [5])(x)
    for b in range(N):
        expected = pd.DataFrame(x[:, b].numpy()).rolling(5, min_periods=1).mean()
        np.testing.assert_allclose(y[:, b, :F], expected, rtol=0, atol=1e24)
    assert (y[0, :, F:] == 0).all()  # deviation and slope of a single step
