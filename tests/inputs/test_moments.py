"""Means and scales in blocks, against NumPy on the whole."""

import numpy as np
import pytest

from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.errors import DataError
from fluxutils_py.inputs import moments as module
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


def expected(x, w):
    """Count, mean and sum of squared deviations of each feature (F, n), by NumPy."""
    live = ~np.isnan(x) & (w > 0)
    mean = [np.average(a[i], weights=v[i]) for a, v, i in zip(x, w, live, strict=True)]
    deviation = np.where(live, x - np.reshape(mean, (-1, 1)), 0)
    return (w * live).sum(1), np.array(mean), (w * deviation**2).sum(1)


@pytest.mark.parametrize("width", [1, 5, 64, 10_000])
@pytest.mark.parametrize("kind", ["whole", "gaps", "weights", "weights of each", "all"])
def test_parts_of_any_size_are_joined_and_cut(monkeypatch, width, kind):
    for owner in (module, blocks_module):
        monkeypatch.setattr(owner, "BLOCK", module.PARTS * F * width)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(F, 9, 40)) * np.reshape([1e-9, 1.0, 1e6], (F, 1, 1))
    x += np.reshape([0.0, 1e5, -1e7], (F, 1, 1))
    w = np.ones((F, 9, 40))
    if kind in ("gaps", "all"):
        x[:, :2, :3] = np.nan  # no origin in the first part
        x[rng.random(x.shape) < 0.3] = np.nan
    if kind != "whole" and kind != "gaps":
        w[:] = rng.integers(0, 3, (F if "each" in kind else 1, 9, 40))
        x[1, w[1] == 0] = 1e200  # wild where it does not count
    sizes = [(slice(0, 1), slice(0, 40)), (slice(1, 4), slice(0, 7)), (slice(1, 4), slice(7, 40))]
    sizes += [(slice(4, 9), slice(t, t + 1)) for t in range(40)]
    given = {"whole": None, "gaps": None, "weights of each": w}.get(kind, w[0])
    blocks = [(x[:, n, t], None if given is None else given[..., n, t]) for n, t in sizes]
    found = moments(blocks, F)
    for a, b in zip(found, expected(x.reshape(F, -1), w.reshape(F, -1)), strict=True):
        assert a == pytest.approx(b, rel=1e-11)
    turned = [(np.asfortranarray(a), v) for a, v in blocks]
    assert all((a == b).all() for a, b in zip(found, moments(turned, F), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", ">f4", "bool"])
def test_constants_and_large_means_keep_their_digits_over_many_parts(monkeypatch, dtype):
    for owner in (module, blocks_module):
        monkeypatch.setattr(owner, "BLOCK", 1 << 10)
    x = np.random.default_rng(0).integers(0, 2, (2, 31, 77)).astype(dtype)
    if np.dtype(dtype).itemsize > 2:
        x += np.asarray(1e7, dtype)
    x[0] = 1 if dtype in ("int16", "bool") else 0.1
    count, mean, squares = moments([(x[:, :10], None), (x[:, 10:], None)], 2)
    assert count.tolist() == [31 * 77] * 2
    assert (mean[0], squares[0]) == (x[0, 0, 0], 0)
    shifted = x[1].astype(float) - x[1].min()
    assert squares[1] == pytest.approx(shifted.var() * shifted.size, rel=1e-12)


def test_without_values_there_is_nothing():
    for blocks in ([], [(np.zeros((2, 0, 5)), None)], [(np.full((2, 3, 5), np.nan), None)]):
        assert [a.tolist() for a in moments(blocks, 2)] == [[0, 0]] * 3


def test_steps_without_values_are_as_if_they_were_not_there():
    x = np.random.default_rng(1).normal(3, 2, size=(F, 13, 11)) ** 3
    padded = np.full((F, 13, 17), np.nan)
    padded[:, :, 2:13] = x
    w = np.random.default_rng(2).uniform(size=(13, 17))
    for weight in (None, w):
        found = moments([(padded, weight)], F)
        wanted = moments([(x, None if weight is None else weight[:, 2:13])], F)
        assert [a.tolist() for a in found] == [a.tolist() for a in wanted]
