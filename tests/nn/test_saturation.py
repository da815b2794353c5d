"""Gradients of saturated gates: of ``csrc/exp2.h``, where slopes have to be 0 and not merely small."""

import copy

import pytest
import torch
from torch import nn

from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    SMGU,
    MinGRU,
    MinLSTM,
    Recur,
    native_kernels,
)
from fluxutils_py.nn.kernels import library as kernels

pytestmark = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())

F, H = 3, 19  # units that fill no vector
SCALES = [1e3, 1e6, 1.6e9, 1e15]


LAYERS = {
    "LSTM": lambda: LSTM(F, H),
    "GRU": lambda: GRU(F, H),
    "RNN": lambda: RNN(F, H),
    "LSTMCell": lambda: Recur(nn.LSTMCell(F, H)),
    **{
        kind.__name__: (lambda kind=kind: kind(F, H))
        for kind in (FLSTM, SGRU, MGU, SMGU, HFGRU, MinGRU, MinLSTM)
    },
}


def gradients(layer, x):
    """The outputs, and the gradients of their sum by inputs and parameters."""
    layer.reset()
    own = x.clone().requires_grad_()
    y = layer(own)
    return y.detach(), *torch.autograd.grad(y.sum(), [own, *layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_inputs_of_any_size_give_the_gradients_of_the_formulas(make, scale, dtype):
    layer = make().to(dtype)
    # values away from 0, so that every gate is saturated however its inputs are rounded
    x = (torch.rand(7, 9, F, dtype=dtype) + 0.5) * scale
    with native_kernels(True):
        ours = gradients(layer, x)
    with native_kernels(False):
        by_torch = gradients(layer, x)
        exact = gradients(copy.deepcopy(layer).double(), x.double())
    for value, reference, truth in zip(ours, by_torch, exact, strict=True):
        # torch's own, which grows with the input too
        rounding = (reference.double() - truth).abs().max()
        bound = 2 * rounding + 1e-5 * (1 + truth.abs().max())
        assert (value.double() - truth).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("make", [LAYERS["LSTM"], LAYERS["GRU"], LAYERS["RNN"], LAYERS["MinGRU"]])
def test_a_layer_that_is_saturated_at_every_step_has_no_gradient(make, sign, dtype):
    layer = make().to(dtype)
    bound = 1e3
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(sign * (1 + p.abs()) * bound)  # all sums far beyond the limit, on one side
    x = torch.rand(5, 9, F, dtype=dtype) + 0.5
    with native_kernels(False):
        expected = gradients(layer, x)
    for ours, theirs in zip(gradients(layer, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("fill", [1e15, 1e20])
def test_a_fill_value_in_one_step_moves_parameters_as_far_as_torch_does(fill):
    x, y = torch.randn(30, 4, F), torch.randn(30, 4, 1)
    x[11, 2, 1] = fill
    model = nn.Sequential(LSTM(F, H), nn.Linear(H, 1))
    ends = []
    for enabled in (True, False):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with native_kernels(enabled):
            for _ in range(5):
                trained[0].reset()
                optimizer.zero_grad()
                nn.functional.mse_loss(trained(x), y).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in trained.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gap", [-300.0, -20.0, 0.0, 20.0, 300.0])
def test_of_two_closed_gates_of_minlstm_the_difference_counts(gap):
    layer = MinLSTM(1, H)
    with torch.no_grad():
        layer.module.linear.weight.zero_()
        layer.module.linear.bias.copy_(
            torch.cat([torch.full((H,), -500.0 + gap), torch.full((H,), -500.0), torch.ones(H)])
        )
    y = layer(torch.zeros(1, 9, 1))
    keep = torch.sigmoid(torch.tensor(gap, dtype=torch.float64))
    torch.testing.assert_close(y.double(), (1 - keep).expand_as(y).contiguous(), rtol=0, atol=1e-6)
