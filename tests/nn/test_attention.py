"""Sliding window attention against softmax attention written out, with rotary positions counted
from the start.
"""

import pytest
import torch

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn import SlidingWindowAttention
from fluxutils_py.nn.states import reset, states

from .stepwise import B, F, assert_follows


def rotated(x, t):
    """(B, heads, D) at the absolute position ``t``, as complex numbers."""
    n = x.shape[-1] // 2
    angle = t * 10_000.0 ** -(torch.arange(n, dtype=torch.float64) / n)
    turned = torch.complex(x[..., :n], x[..., n : 2 * n]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag, x[..., 2 * n :]], -1)


def attention(layer):
    """What is kept is every step so far."""
    heads, H = layer.n_heads, layer.n_out
    qkv, out = layer.module.qkv, layer.module.out

    def step(x, past):
        q, k, v = (
            (x @ w.T + b).view(B, heads, -1)
            for w, b in zip(qkv.weight.split(H), qkv.bias.split(H), strict=True)
        )
        t = len(past)
        past = [*past, (rotated(k, t), v)]
        seen = past[-layer.window :]
        scores = torch.stack([(rotated(q, t) * k).sum(-1) for k, _ in seen]) / (H / heads) ** 0.5
        share = scores.softmax(0)
        y = sum(p[..., None] * v for p, (_, v) in zip(share, seen, strict=True))
        return y.reshape(B, H) @ out.weight.T + out.bias, past

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_out", "n_heads", "window"), [(8, 2, 5), (6, 1, 43), (6, 2, 64), (8, 4, 2), (10, 2, 7)]
)
def test_attention_is_its_formula(n_out, n_heads, window):
    layer = SlidingWindowAttention(F, n_out, n_heads, window).double()
    assert_follows(layer, attention(layer), [])


def test_a_window_of_one_sees_the_step_alone():
    layer = SlidingWindowAttention(F, 8, 2, window=1)
    x = torch.randn(6, 2, F)
    m = layer.module
    values = x @ m.qkv.weight[16:].T + m.qkv.bias[16:]
    torch.testing.assert_close(layer(x), values @ m.out.weight.T + m.out.bias)


def test_series_that_have_seen_different_numbers_of_steps_are_right_together():
    layer, x = (
        SlidingWindowAttention(F, 8, 2, window=6).double(),
        torch.randn(20, 3, F, dtype=torch.float64),
    )
    layer(x[:10])
    layer.reset_series(torch.tensor([1]))  # this one begins anew
    found = layer(x[10:])
    assert (found[:, 1] - reset(layer)(x[10:])[:, 1]).abs().max() < 1e-12
    assert (found[:, ::2] - reset(layer)(x)[10:, ::2]).abs().max() < 1e-12


def test_long_series_keep_their_digits():
    """Positions are relative: float32 is as exact at step 5000 as at the start."""
    layer, x = SlidingWindowAttention(F, 8, 2, window=16), torch.randn(5000, 1, F)
    whole = layer(x)
    torch.testing.assert_close(whole[-10:], reset(layer)(x[-40:])[-10:], rtol=0, atol=2e-6)


def test_the_state_is_keys_and_values_of_the_last_steps():
    layer, x = SlidingWindowAttention(F, 8, 2, window=5), torch.randn(7, 2, F)
    assert [tuple(s.shape) for s in states(layer)] == [(4, 0, 8), (4, 0, 8), (4, 0)]
    layer(x[:3])
    assert states(layer)[2].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    layer(x[3:])
    k, v, exists = states(layer)
    m = layer.module
    torch.testing.assert_close(k, x[-4:] @ m.qkv.weight[8:16].T + m.qkv.bias[8:16])
    torch.testing.assert_close(v, x[-4:] @ m.qkv.weight[16:].T + m.qkv.bias[16:])
    assert exists.eq(1).all()


def test_a_table_made_in_inference_mode_serves_training():
    layer, x = SlidingWindowAttention(F, 12, 2, window=9), torch.randn(7, 2, F)
    with torch.inference_mode():
        layer(x)
    reset(layer)(x).sum().backward()
    assert layer.module.qkv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8), ValueError, r"n_in .*positive integer, got 0"),
        ((3, 8, 0), ValueError, r"n_heads .*positive integer, got 0"),
        ((3, 8, 2, 0), ValueError, r"window .*positive integer, got 0"),
        ((3, 8, 2, 1.5), TypeError, r"window .*positive integer, got 1\.5"),
        (
            (3, 10),
            ValueError,
            r"n_heads=4 .*n_out=10; .*n_out / n_heads .*",
        ),
    ],
)
def test_bad_sizes_are_named(arguments, error, message):
    with pytest.raises(error, match=f"^SlidingWindowAttention: {message}$"):
        SlidingWindowAttention(*arguments)


def test_another_number_of_features_is_named():
    message = r"SlidingWindowAttention .*3 .*\(6, 2, 4\)"
    with pytest.raises(ShapeError, match=f"^{message}$"):
        SlidingWindowAttention(3, 8)(torch.zeros(6, 2, 4))
