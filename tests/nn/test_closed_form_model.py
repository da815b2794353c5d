"""Models of fixed features and a linear head."""

import pytest
import torch

from fluxutils_py import reset
from fluxutils_py.nn import CausalKernels
from fluxutils_py.nn.closed_form_model import InputScale, kernel_model, lag_model, series_features

F, N, T = 3, 5, 29


@pytest.fixture
def xs():
    torch.manual_seed(0)
    return torch.randn(T, N, F, dtype=torch.float64) * 2 + 7


MODELS = {
    "kernels": lambda: kernel_model(F, 2, 340),
    "lags": lambda: lag_model(F, 2, 4),
}
every = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def built(make):
    torch.manual_seed(1)
    model = make().double()
    for layer in model.layers:
        if isinstance(layer, CausalKernels):
            layer.fit_biases(torch.randn(F, 4, T, dtype=torch.float64))
    model.scale.mean += 7
    model.scale.scale *= 2
    return model


@every
def test_windows_steps_and_blocks_of_time_give_the_same(make, xs, monkeypatch):
    model = built(make)
    whole = model(xs)
    assert whole.shape == (T, N, 2)
    reset(model)
    torch.testing.assert_close(torch.stack([model(x) for x in xs]), whole, rtol=0, atol=1e-12)
    reset(model)
    monkeypatch.setattr("fluxutils_py.nn.closed_form_model.MOST_VALUES", 4 * N * model.n_features)
    torch.testing.assert_close(model(xs), whole, rtol=0, atol=1e-12)


@every
def test_advancing_leads_to_the_same_state(make, xs):
    model = built(make)
    expected = model(xs)[-1]
    reset(model)
    model.advance(xs[:-1])
    torch.testing.assert_close(model(xs[-1]), expected, rtol=0, atol=1e-12)


@every
def test_features_at_single_steps_are_those_of_whole_windows(make, xs):
    model = built(make)
    whole = model.features(xs)
    reset(model)
    ends = torch.tensor([[4, 2], [28, 0], [4, 0], [17, 4]])
    features = series_features(model, xs, ends)
    torch.testing.assert_close(features, whole[ends[:, 0], ends[:, 1]], rtol=0, atol=1e-12)
    reset(model)
    series_features(model, xs[:9], torch.empty(0, 2, dtype=torch.int64))
    torch.testing.assert_close(model.features(xs[9:]), whole[9:], rtol=0, atol=1e-12)


@every
def test_the_factors_are_one_for_each_feature(make):
    model = make()
    assert all(factors.shape == (model.n_features,) for factors in model.relative)
    assert model.head.in_features == model.n_features


def test_statistics_have_their_share_of_the_variance():
    model = kernel_model(F, 2, 5000)
    n_kernels = model.layers[0].n_out
    squares = model.relative[0].square()
    assert (squares[:n_kernels] == 1).all()
    assert float(squares[n_kernels:].sum()) == pytest.approx(0.3 * n_kernels, rel=1e-6)


def test_inputs_are_standardised_and_missing_ones_are_the_mean():
    scale = InputScale(2)
    scale.mean += torch.tensor([1e9, -3.0])
    scale.scale *= torch.tensor([2.0, 0.5])
    x = torch.tensor([[1e9 + 128, -3], [torch.nan, -2.5]], dtype=torch.float32)
    assert scale(x).tolist() == [[64, 0], [0, 1]]
    assert scale(x).dtype == torch.float32


def test_features_of_integers_are_those_of_floats_bit_for_bit():
    model = kernel_model(2, 1, 340)
    model.layers[0].fit_biases(torch.randn(2, 5, 30))
    model.scale.mean[:] = torch.tensor([3.0, -1.0])
    xs = torch.randint(-9, 9, (30, 5, 2))
    ends = torch.tensor([[3, 1], [29, 0], [12, 4]])
    got = [series_features(reset(model), x, ends) for x in (xs, xs.float())]
    torch.testing.assert_close(*got, rtol=0, atol=0)
