"""Means and scales in blocks, against NumPy on the whole."""

import numpy as np
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.inputs.moments import Affine, Moments, moments

F, N, T = 3, 7, 11
RNG = np.random.default_rng(5)


def test_blocks_add_up_to_the_whole_with_weights_and_gaps():
    x, w = RNG.normal(1e6, 2, size=(F, N, T)), RNG.uniform(0, 2, size=(N, T))
    x[1, 2:4, 5] = np.nan
    blocks = [
        (x[:, n, t], w[n, t])
        for n in (slice(0, 3), slice(3, N))
        for t in (slice(0, 4), slice(4, T))
    ]
    each = [(a, np.broadcast_to(v, a.shape)) for a, v in blocks]  # a weight for each feature
    for found in (moments(blocks, F), moments(each, F)):
        for f, (weight, mean, squares) in enumerate(zip(*found, strict=True)):
            live = ~np.isnan(x[f])
            expected = np.average(x[f][live], weights=w[live])
            assert np.isclose(weight, w[live].sum(), rtol=1e-12)
            assert np.isclose(mean, expected, rtol=1e-12)
            assert np.isclose(squares, (w[live] * (x[f][live] - expected) ** 2).sum(), rtol=1e-8)


def test_two_parts_are_merged():
    a, b = RNG.normal(size=13), RNG.normal(3, 2, size=5)
    first = Moments(13, a.mean(), 13 * a.var())
    n, mean, squares = first.merge(Moments(5, b.mean(), 5 * b.var()))
    both = np.concatenate([a, b])
    assert n == 18
    assert np.allclose([mean, squares / n], [both.mean(), both.var()], rtol=1e-12)


def test_the_scale_of_a_constant_is_one_and_scaling_is_undone():
    mean, variance = np.array([5.0, 1e9]), np.array([4.0, 1e-12])
    scale = Moments(np.full(2, 7), mean, 7 * variance).scale("x")
    assert scale.tolist() == [2.0, 1.0]
    x = RNG.normal(size=(2, N, T))
    scaled = Affine(mean, scale).transform_block(x)
    assert np.allclose(scaled[0], (x[0] - 5) / 2, rtol=0, atol=1e-12)
    assert np.allclose(
        Affine(mean, scale, inverse=True).transform_block(scaled), x, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("value", [1e160, 1e300, 1.7e308])
def test_values_that_cannot_be_squared_have_no_scale(value):
    x = RNG.normal(size=(F, N, T))
    x[1] = np.where(x[1] > 0, value, -value)
    with pytest.raises(DataError, match=r"feature 1 of y .* 1e154"):
        moments([(x, None)], F).scale("y")


def test_sums_do_not_depend_on_the_order_in_memory():
    x = RNG.normal(1e3, 2, size=(F, 1, 500)) ** 3
    c, f = (moments([(a, None)], F) for a in (x, np.asfortranarray(x)))
    assert [a.tolist() for a in c] == [a.tolist() for a in f]
