import numpy as np
import pytest

from fluxutils_py.data.filling import forward_fill, last_positions, last_values


def fill_in_loop(block, state, start):
    """What forward_fill computes, one value after another."""
    filled = np.empty_like(block)
    last = state.copy()
    for s in range(block.shape[2]):
        last = np.where(np.isnan(block[:, :, s]), last, block[:, :, s])
        filled[:, :, s] = np.where(np.isnan(last), start[:, None], last)
    return filled, last


def make_block(rng, share_missing):
    block = rng.normal(size=(2, 5, 7))
    block[rng.random(block.shape) < share_missing] = np.nan
    return block


def test_last_positions():
    present = np.array([[False, True, False, True], [True, False, False, False], [False] * 4])
    expected = [[-1, 1, 1, 3], [0, 0, 0, 0], [-1] * 4]
    np.testing.assert_array_equal(last_positions(present), expected)


@pytest.mark.parametrize("share_missing", [0, 0.3, 0.8, 1])
def test_forward_fill_is_the_loop(share_missing):
    rng = np.random.default_rng(0)
    block = make_block(rng, share_missing)
    state = rng.normal(size=(2, 5))
    state[:, ::2] = np.nan
    start = np.array([10.0, 20.0])
    expected, last = fill_in_loop(block, state, start)
    returned = forward_fill(block, state, start)
    np.testing.assert_array_equal(block, expected)
    np.testing.assert_array_equal(returned, last)  # NaN where there is none: not the start


def test_forward_fill_of_parts_is_that_of_the_whole():
    rng = np.random.default_rng(1)
    whole = make_block(rng, 0.5)
    parts = whole.copy()
    nothing, start = np.full((2, 5), np.nan), np.zeros(2)
    state = forward_fill(parts[:, :, :3], nothing, start)
    state = forward_fill(parts[:, :, 3:], state, start)
    expected = forward_fill(whole, nothing, start)
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(state, expected)


@pytest.mark.parametrize("share_missing", [0, 0.5, 1])
def test_last_values(share_missing):
    block = make_block(np.random.default_rng(2), share_missing)
    expected = np.full((2, 5), np.nan)
    for s in range(block.shape[2]):
        expected = np.where(np.isnan(block[:, :, s]), expected, block[:, :, s])
    np.testing.assert_array_equal(last_values(block), expected)
