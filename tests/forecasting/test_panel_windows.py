"""Windows of inputs and targets: against plain slicing, and masks of each horizon."""

import numpy as np
import pytest

from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.channels import Channels, Covariate
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.panel_windows import PackedSeries, PanelWindows, WindowArray

H, M = 4, 3


@pytest.fixture
def windows(rng):
    lengths = np.array([11, 1, 26, 7])
    # target, past number and category; number and category known ahead
    values = rng.normal(size=(5, lengths.sum()))
    values[[2, 4]] = rng.integers(0, 4, (2, lengths.sum()))
    features = Features(H, M, 2 * M, 5, False, 1.0, 1e-6)
    number, kind = Covariate("number"), Covariate("kind", categories=("a", "b", "c"))
    groups = ((number, kind), (number, number, kind), (number, kind))
    channels = Channels(H, features.n_inputs, *groups)
    ahead = PackedSeries(values[3:], lengths)
    static = np.concatenate([rng.normal(size=(4, 2)), rng.integers(0, 4, (4, 1))], 1)
    return PanelWindows(PackedSeries(values[:3], lengths), features, channels, static, ahead)


def test_targets_are_the_next_values_less_the_seasonal_naive_by_the_scale(windows, oracle):
    n, length = windows.n_series, 26
    targets = windows.targets(
        Segments(np.arange(n), np.zeros(n, int), np.full(n, length)), 0, length
    )
    for i, (offset, count) in enumerate(
        zip(windows.source.offsets, windows.source.lengths, strict=True)
    ):
        y = windows.source.values[0, offset : offset + count]
        for t in range(count):
            _, scale, ahead, _ = oracle.state(y, t, windows.features)
            later = np.full(H, np.nan)
            later[: count - t - 1] = y[t + 1 : t + 1 + H]
            np.testing.assert_allclose(targets[i, t], (later - ahead) / scale, rtol=1e-5, atol=1e-5)
        assert np.isnan(targets[i, count - 1 :]).all()


def test_channels_stand_where_they_are_said_to(windows, oracle):
    c, f, series, t = windows.channels, windows.features, 2, 20
    at = windows.source.offsets[series]
    x = windows.inputs(Segments(np.array([series]), np.array([t]), np.array([3])), 0, 3)[0, 0]
    y, hist, hist_code = windows.source.values[:, at : at + 26]
    futr, futr_code = windows.ahead.values[:, at : at + 26]
    *numbers, code = windows.static[series]
    _, scale, _, _ = oracle.state(y, t, f)
    assert x.shape == (c.total,)
    np.testing.assert_allclose(x[: c.history], oracle.inputs(y, t, f), atol=2e-5)
    later = [
        v
        for known in (futr, futr_code)
        for v in (*known[t + 1 : t + 1 + H], *known[t + np.array([-2, -1, 0, -2])])
    ]
    now = [hist[t], *numbers, futr[t], hist_code[t], code, futr_code[t]]
    rest = [*now, *later, scale]
    np.testing.assert_allclose(x[c.history :], rest, rtol=1e-5)


def test_series_in_any_order_and_from_any_step_are_those_alone(windows):
    segments = Segments(np.array([2, 0, 3, 2]), np.array([9, 0, 2, 0]), np.array([5, 5, 5, 5]))
    together = WindowArray(windows, "inputs").read_segments(segments, 1, 4)
    assert together.shape == (3, 4, windows.channels.total)
    for i in range(4):
        alone = WindowArray(windows, "inputs").read_segments(segments[np.array([i])], 1, 4)
        np.testing.assert_array_equal(together[:, i], alone[:, 0])


def test_arrays_take_slices_as_others_do(windows):
    warmup = np.array([2, 0, 6, 1])
    for array in (WindowArray(windows, "inputs"), WindowArray(windows, "targets", warmup)):
        whole = np.asarray(array)
        assert whole.shape == array.shape == (len(whole), 4, 26)
        np.testing.assert_allclose(array[:, 1:3, 4:9], whole[:, 1:3, 4:9], atol=1e-5)
        np.testing.assert_allclose(array[2, [3, 0], 5], whole[2, [3, 0], 5], atol=1e-5)
    assert np.isnan(whole[:, 2, :6]).all()
    assert not np.isnan(whole[:, 2, 6]).any()


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
