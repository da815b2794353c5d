"""Inputs, level, scale and seasonal naive forecast: against a loop over single values."""

import numpy as np
import pytest

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.features import Features

SIZES = [(3, 7, 7, 5), (5, 7, 21, 12), (9, 4, 8, 3), (2, 1, 1, 4), (16, 5, 10, 7)]


def values(rng, n, missing):
    z = rng.normal(size=n).cumsum() + 9
    z[rng.random(n) < missing] = np.nan
    return z


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize(("h", "season", "lag", "size"), SIZES)
def test_features_equal_a_naive_loop(rng, oracle, h, season, lag, size, missing, log):
    f = Features(h, season, lag, size, log, 0.7, 0.002)
    n = 45
    z = values(rng, n, missing)
    z[:3] = np.nan  # a series has no value yet
    past = f.past(np.concatenate([np.full(f.lookback, np.nan), z])[None], n)
    out = np.empty((1, n, f.n_inputs), np.float32)
    f.inputs(past, out)
    assert past.known[0].tolist() == [not np.isnan(z[: t + 1]).all() for t in range(n)]
    for t in np.flatnonzero(past.known[0]):
        level, scale, ahead, _ = oracle.state(z, t, f)
        np.testing.assert_allclose(past.level[0, t], level, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(past.scale[0, t], scale, rtol=1e-9)
        np.testing.assert_allclose(past.naive[0, t], ahead)
        np.testing.assert_allclose(out[0, t], oracle.inputs(z, t, f), atol=2e-5)


def test_what_is_computed_does_not_depend_on_how_the_steps_are_cut(rng):
    f = Features(5, 7, 14, 9, False, 2.0, 1e-6)
    z = np.concatenate([np.full((4, f.lookback), np.nan), rng.normal(size=(4, 2 * f.lookback))], 1)
    z[:, f.lookback :][rng.random((4, 2 * f.lookback)) < 0.2] = np.nan
    n = 2 * f.lookback
    whole = np.empty((4, n, f.n_inputs), np.float32)
    f.inputs(f.past(z, n), whole)
    for start in (0, 1, 57, f.lookback, n - 1):
        stop = min(start + 33, n)
        part = np.empty((4, stop - start, f.n_inputs), np.float32)
        f.inputs(f.past(z[:, start : f.lookback + stop], stop - start), part)
        np.testing.assert_allclose(part, whole[:, start:stop], atol=1e-4)


def test_values_older_than_the_memory_are_forgotten():
    f = Features(2, 1, 1, 3, False, 1.0, 1e-6)
    z = np.full(f.lookback + f.memory + 9, np.nan)
    z[f.lookback] = 5.0
    known = f.past(z[None], f.memory + 9).known[0]
    last = f.memory + 2  # of the two seasons that it is filled into
    assert known[: last + 1].all()
    assert not known[last + 1 :].any()


def test_an_output_of_zero_is_the_seasonal_naive_forecast_in_the_units_of_the_values():
    f = Features(2, 2, 2, 3, True, 1.0, 1e-6)
    y = np.r_[np.full(f.lookback - 1, np.nan), 1e-3, 1e9][None]
    past = f.past(f.forward(y), 1)
    out = np.zeros((1, 1, 2))
    np.testing.assert_allclose(f.denormalised(out, past, (), None), [[[1e-3, 1e9]]])
    missing = f.past(np.full((1, f.lookback + 1), np.nan), 1)
    assert np.isnan(f.denormalised(out, missing, (), None)).all()
    with pytest.raises(DataError, match=r"there is -1; .*transform='none'"):
        f.forward(np.array([1.0, -1.0, np.nan]))
