"""RNNStack, GaussianNoise, DenseReLU and ffnn, against torch's own layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py.nn import GRU, LSTM, MGU, GaussianNoise, RNNStack
from fluxutils_py.nn.activations import psigmoid
from fluxutils_py.nn.layers import DenseReLU, ffnn
from fluxutils_py.nn.model_windows import takes_windows


def kinds(model):
    return [type(m).__name__ for m in model]


@pytest.mark.parametrize(("layer", "theirs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_a_stack_is_torchs_layer_of_several(layer, theirs):
    stack, whole = RNNStack(3, 5, 3, layer=layer).double(), theirs(3, 5, 3).double()
    assert kinds(stack) == [layer.__name__] * 3
    parameters = (p.detach() for m in stack for p in m.parameters())
    whole.load_state_dict(dict(zip(whole.state_dict(), parameters, strict=True)))
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(stack(x), whole(x)[0], rtol=0, atol=1e-14)
    steps = copy.deepcopy(stack)
    for m in steps:
        m.reset()
    torch.testing.assert_close(
        torch.stack([steps(step) for step in x]), whole(x)[0], rtol=0, atol=1e-14
    )


def test_a_stack_has_dropout_between_layers_only_and_none_in_evaluation():
    stack = RNNStack(3, 5, 3, 0.4, MGU)
    assert kinds(stack) == ["MGU", "Dropout", "MGU", "Dropout", "MGU"]
    assert stack[1].p == 0.4
    x = torch.randn(7, 4, 3)
    assert torch.equal(stack.eval()(x), without_dropout(stack, x))
    assert kinds(RNNStack(3, 5, 1, 0.4)) == ["LSTM"]
    with pytest.raises(ValueError, match=r"nlayers must be .*, got 0"):
        RNNStack(3, 5, 0)


def without_dropout(stack, x):
    for m in copy.deepcopy(stack)[::2]:
        m.reset()
        x = m(x)
    return x


def test_noise_is_normal_drawn_from_torchs_generator_in_training_only():
    x = torch.full((1000, 1000), 3.0)
    layer = GaussianNoise(0.5)
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, x + 0.5 * torch.randn(1000, 1000))
    assert float((y - x).std()) == pytest.approx(0.5, rel=0.01)
    assert float((y - x).mean()) == pytest.approx(0, abs=0.005)
    before = torch.get_rng_state()
    assert layer.eval()(x) is x
    assert GaussianNoise(0)(x) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(layer) == "GaussianNoise(0.5)"
    with pytest.raises(ValueError, match="stddev must be 0 or more, got -1"):
        GaussianNoise(-1)


def test_noise_lets_gradients_through():
    x = torch.randn(4, 3, requires_grad=True)
    GaussianNoise(0.5)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3))


def test_dense_relu():
    layer, x = DenseReLU(3, 5), torch.randn(7, 4, 3)
    assert torch.equal(layer(x), F.linear(x, layer[0].weight, layer[0].bias).relu())
    assert kinds(layer) == ["Linear", "ReLU"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["Linear", "Tanh", "Linear", "Tanh"]),
        ({"last_linear": True}, ["Linear", "Tanh", "Linear"]),
        ({"dropout": 0.1}, ["Linear", "Tanh", "Dropout", "Linear", "Tanh", "Dropout"]),
        ({"bnfun": nn.Identity}, ["Linear", "Tanh", "BatchNorm", "Identity"] * 2),
        (
            {"bnfun": nn.ReLU, "dropout": 0.1, "last_linear": True},
            ["Linear", "Tanh", "BatchNorm", "ReLU", "Dropout", "Linear"],
        ),
    ],
)
def test_list_of_layers_of_a_feed_forward_network(settings, expected):
    model = ffnn(3, 5, 2, nn.Tanh, **settings)
    assert kinds(model) == expected
    widths = [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]
    assert widths == [(3, 5), (5, 5)]
    assert isinstance(model, nn.Sequential)


def test_a_single_linear_layer_is_not_wrapped():
    assert type(ffnn(3, 5, 1, nn.Tanh, last_linear=True)) is nn.Linear
    assert kinds(ffnn(3, 5, 1, nn.Tanh)) == ["Linear", "Tanh"]


def test_functions_of_the_network_may_be_functions():
    model, x = ffnn(3, 5, 2, psigmoid), torch.randn(4, 3)
    expected = psigmoid(model[2](psigmoid(model[0](x))))
    assert torch.equal(model(x), expected)
    assert repr(model[1]) == "Elementwise(psigmoid)"
    with pytest.raises(
        TypeError,
        match="give the class Tanh, not an instance",
    ):
        ffnn(3, 5, 2, nn.Tanh())
    with pytest.raises(ValueError, match=r"nlayers must be .*, got 0"):
        ffnn(3, 5, 0, nn.Tanh)


def test_batch_normalisation_of_a_window_is_over_steps_and_series():
    model, x = (
        ffnn(3, 5, 1, nn.Tanh, nn.Identity).double(),
        3 + torch.randn(7, 4, 3, dtype=torch.float64),
    )
    y = model(x)
    h = torch.tanh(model[0](x)).flatten(0, 1)
    torch.testing.assert_close(
        y.flatten(0, 1), (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
    )
    assert takes_windows(model, [x])
