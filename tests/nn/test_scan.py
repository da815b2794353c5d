"""Windows with gradients by hand, against the formula step by step with torch's autograd."""

import pytest
import torch

from fluxutils_py.nn.activations import psigmoid, ptanh
from fluxutils_py.nn.scan import scan_gru, scan_lstm

S, B, F, H = 5, 3, 2, 4


def tensors(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_equal_with_gradients(ours, formula, inputs):
    weights = [torch.randn_like(out) for out in ours]
    for got, want in zip(ours, formula, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    got, want = (
        torch.autograd.grad(sum((o * w).sum() for o, w in zip(outs, weights, strict=True)), inputs)
        for outs in (ours, formula)
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11)


def test_lstm_of_approximate_activations():
    inputs = x, h, c, w_x, w_h, b = tensors(
        (S, B, F), (B, H), (B, H), (4 * H, F), (4 * H, H), (4 * H,)
    )
    y, state, memory = [], h, c
    for t in range(S):
        i, f, g, o = (x[t] @ w_x.T + state @ w_h.T + b).chunk(4, 1)
        memory = psigmoid(f) * memory + psigmoid(i) * ptanh(g)
        state = psigmoid(o) * ptanh(memory)
        y.append(state)
    assert_equal_with_gradients(
        scan_lstm(x, h, c, w_x, w_h, b), (torch.stack(y), state, memory), inputs
    )


@pytest.mark.parametrize("exact", [False, True])
def test_gru_with_three_gates(exact):
    sigmoid, tanh = (torch.sigmoid, torch.tanh) if exact else (psigmoid, ptanh)
    inputs = x, h, w_x, w_h, b = tensors((S, B, F), (B, H), (3 * H, F), (3 * H, H), (3 * H,))
    y, state = [], h
    for t in range(S):
        r_x, z_x, n_x = (x[t] @ w_x.T + b).chunk(3, 1)
        r_h, z_h, n_h = (state @ w_h.T).chunk(3, 1)
        z, n = sigmoid(z_x + z_h), tanh(n_x + sigmoid(r_x + r_h) * n_h)
        state = (1 - z) * n + z * state
        y.append(state)
    assert_equal_with_gradients(
        scan_gru(x, h, w_x, w_h, b, exact=exact), (torch.stack(y), state), inputs
    )
