"""Stretches of series: against plain indexing."""

import numpy as np
import pytest

from fluxutils_py.forecasting.panel_windows import ArraySource, PackedSeries


def test_packed_series_are_cut_with_nan_beyond_their_ends(rng):
    lengths = np.array([3, 1, 6])
    values = rng.normal(size=(2, 10))
    source = PackedSeries(values, lengths)
    padded = np.full((2, 3, 30), np.nan)
    for i, (offset, n) in enumerate(zip((0, 3, 4), lengths, strict=True)):
        padded[:, i, 10 : 10 + n] = values[:, offset : offset + n]
    series, start = np.array([2, 0, 2, 1]), np.array([-3, 1, 4, -9])
    found = source.cut(series, start, 5)
    expected = np.stack(
        [padded[:, s, 10 + t : 15 + t] for s, t in zip(series, start, strict=True)], 1
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("order", ["C", "F"])
def test_each_feature_of_an_array_is_a_series(rng, order):
    x = np.asarray(rng.normal(size=(2, 5, 9)), order=order)
    source = ArraySource(x)
    assert (source.n_series, source.lengths.tolist()) == (10, [9] * 10)
    series, start = np.array([3, 4, 5, 6, 9, 1]), np.array([-2, -2, -2, 0, 6, 40])
    found = source.cut(series, start, 4)
    padded = np.full((10, 60), np.nan)
    padded[:, 10:19] = x.reshape(10, 9)
    expected = np.stack([padded[s, 10 + t : 14 + t] for s, t in zip(series, start, strict=True)])
    np.testing.assert_array_equal(found[0], expected)
