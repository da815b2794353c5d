"""Rectangles that cover an array."""

import numpy as np
import pytest

from fluxutils_py.data import blocks
from fluxutils_py.data.blocks import block_slices

N, T = 5, 7


@pytest.mark.parametrize("block", [1, 3, 7, 8, 14, 35, 1000])
@pytest.mark.parametrize("n_features", [1, 4])
def test_blocks_cover_every_step_once(monkeypatch, block, n_features):
    monkeypatch.setattr(blocks, "BLOCK", block)
    seen = np.zeros((N, T), int)
    for series, steps in block_slices(N, T, n_features):
        seen[series, steps] += 1
        assert seen[series, steps].size * n_features <= max(block, n_features)
    assert (seen == 1).all()


def test_blocks_are_long_along_both_axes(monkeypatch):
    """A file in either order is read in stretches of some length, not again and again for a value
    in each page.
    """
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    for n_series, n_steps, size in (
        (70, 900, (32, 31)),
        (900, 70, (32, 31)),
        (7, 900, (7, 142)),
        (900, 7, (142, 7)),
    ):
        series, steps = block_slices(n_series, n_steps)[0]
        assert (series.stop, steps.stop) == size
