"""What is learnt from a held-out end holds on new forecasts, and is never much worse than the best source."""

import numpy as np
import pytest

from fluxutils_py.forecasting.calibration import (
    HeldOutEnd,
    groups_of_steps,
    independent_errors,
    learn_correction,
)
from fluxutils_py.forecasting.features import SOURCES

H = 12
QUANTILES = (0.1, 0.25, 0.75, 0.9)


def held_out(rng, errors, width, n_series=60, n_origins=20):
    """A held-out end whose sources err by so much, and whose network says bands of this width."""
    shape = (n_series, n_origins, H)
    targets = rng.normal(size=shape)
    sources = [targets + size * rng.normal(size=shape) for size in errors]
    # the seasonal naive forecast is 0 in these units
    base = sources.pop(1)
    targets, network, *baselines = (x - base for x in (targets, *sources))
    z = np.array([-1.28, -0.67, 0.67, 1.28])
    levels = network[:, :, None] + width * z[:, None]
    outputs = np.concatenate([network[:, :, None], levels], 2)
    origins = np.tile(np.arange(n_origins) * H, (n_series, 1))
    return HeldOutEnd(outputs, np.stack(baselines, 2), targets, origins)


def point_only(end):
    return end._replace(outputs=end.outputs[:, :, :1])


def corrected(end, correction):
    return correction.apply(end.outputs, end.baselines, np)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.3, 1.0, 3.0], ids=["too narrow", "right", "too wide"])
def test_bands_hold_what_they_say_at_every_step(rng, width):
    errors = [1.0] + [9.0] * (len(SOURCES) - 1)
    end = held_out(rng, errors, width, n_series=200)
    correction = learn_correction(end, QUANTILES, squared=False)
    new = held_out(rng, errors, width, n_origins=60)
    out = corrected(new, correction)
    for low, high, share in ((1, 4, 0.8), (2, 3, 0.5)):
        inside = (new.targets >= out[:, :, low]) & (new.targets <= out[:, :, high])
        np.testing.assert_allclose(inside.mean((0, 1)), share, atol=0.04)
        right = 2 * {0.8: 1.28, 0.5: 0.67}[share]
        assert (out[:, :, high] - out[:, :, low]).mean() < 1.1 * right
    assert (np.diff(out[:, :, 1:], axis=2) >= 0).all()


@pytest.mark.parametrize("best", range(len(SOURCES)))
@pytest.mark.parametrize("squared", [False, True])
def test_a_forecast_is_hardly_worse_than_the_best_source(rng, best, squared):
    errors = [3.0] * len(SOURCES)
    errors[best] = 0.5
    correction = learn_correction(point_only(held_out(rng, errors, 1.0)), (), squared)
    np.testing.assert_allclose(correction.weights.sum(0), 1)
    assert correction.weights.min() >= 0
    assert correction.weights[best].min() > 0.75
    new = point_only(held_out(rng, errors, 1.0))
    error = np.abs(new.targets - corrected(new, correction)[:, :, 0]).mean()
    by_source = [np.abs(new.targets).mean(), np.abs(new.errors).mean()]
    by_source += [np.abs(new.targets - new.baselines[:, :, i]).mean() for i in range(6)]
    assert error < 1.03 * min(by_source)


def test_weights_change_over_the_horizon(rng):
    """The network is good near, and the mean of the memory far."""
    end = held_out(rng, [1.0] * len(SOURCES), 1.0)
    near = np.arange(H) < 6
    noise = rng.normal(size=end.targets.shape)
    end.outputs[:, :, 0] = end.targets + np.where(near, 0.1, 4.0) * noise
    end.baselines[:, :, 3] = end.targets + np.where(near, 4.0, 0.1) * noise
    weights = learn_correction(end, (), squared=False).weights
    assert weights[0, 0] > 0.8 > 0.3 > weights[0, -1]
    assert weights[5, -1] > 0.7 > 0.3 > weights[5, 0]


@pytest.mark.slow
def test_missing_truths_do_not_count(rng):
    end = held_out(rng, [1.0] * len(SOURCES), 1.0)
    end.targets[::2, :, ::3] = np.nan
    other = end._replace(outputs=np.where(np.isnan(end.targets)[:, :, None], 1e6, end.outputs))
    one, two = (learn_correction(e, QUANTILES, squared=False) for e in (end, other))
    np.testing.assert_allclose(one.weights, two.weights, atol=0.02)
    assert np.isfinite(one.offsets).all()


@pytest.mark.parametrize("h", [1, 2, 3, 7, 48, 720])
def test_groups_cover_the_horizon(h):
    groups = groups_of_steps(h)
    assert groups[0][0] == 0
    assert groups[-1][2] == h
    assert [middle for _, middle, _ in groups][-1] == h - 1
    assert all(first <= middle < stop for first, middle, stop in groups)
    assert len(groups) <= 20


@pytest.mark.slow
def test_few_independent_errors_move_little(rng):
    """Series that all err alike are one, and forecasts that overlap are few."""
    errors = [1.0] + [9.0] * (len(SOURCES) - 1)
    alike = held_out(rng, errors, 0.3, n_series=1, n_origins=40)
    alike = HeldOutEnd(*(np.repeat(part, 8, 0) for part in alike))
    close = alike._replace(origins=np.tile(np.arange(40) // 4, (8, 1)))
    apart = held_out(rng, errors, 0.3, n_series=8, n_origins=40)
    for end, last, n in ((alike, 0, 40), (alike, H - 1, 40), (close, H - 1, 1 + 2 * 9 / H)):
        assert independent_errors(end, last) == pytest.approx(n)
    assert independent_errors(apart, H - 1) == pytest.approx(8 * 40, rel=0.1)
    widths = []
    for end in (close, alike, apart):
        out = corrected(end, learn_correction(end, QUANTILES, squared=False))
        widths.append((out[:, :, 4] - out[:, :, 1]).mean() / 2.56)
    # from the networks' .3 towards the 1 that is right
    assert 0.3 < widths[0] < 0.6 < widths[1] < 0.8 < widths[2] < 1.1
