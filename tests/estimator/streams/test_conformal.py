"""Quantiles of split conformal prediction, and intervals that follow residuals, beside plain loops."""

import math

import numpy as np
import pytest

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.estimator.streams import conformal
from fluxutils_py.estimator.streams.conformal import (
    AdaptiveInterval,
    Calibration,
    check_level,
    conformal_quantile,
)


@pytest.mark.parametrize("n", [9, 10, 19, 37, 99, 100])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_quantile_is_the_smallest_with_enough_scores_below(n, level):
    scores = np.random.default_rng(n).permutation(n).astype(float)
    scores = np.insert(scores, 3, np.nan)  # does not count
    # by counting: at least level * (n + 1) of the n scores are at most this one
    enough = [s for s in range(n) if s + 1 >= level * (n + 1) - 1e-9]
    assert conformal_quantile(scores.reshape(1, -1), level) == enough[0]


def test_too_few_scores_give_an_infinite_quantile_and_a_warning():
    told = r"^8 held-out .* level 90, .* needs 9: .* sets hold all classes.* fit on 45 targets"
    with pytest.warns(UserWarning, match=told) as found:
        assert conformal_quantile(np.arange(8.0), 0.9) == math.inf
    assert found[0].filename == __file__
    assert conformal_quantile(np.arange(9.0), 0.9) == 8


def test_a_further_score_is_below_as_often_as_promised():
    rng = np.random.default_rng(0)
    inside = [
        rng.exponential() <= conformal_quantile(rng.exponential(size=19), 0.9) for _ in range(4000)
    ]
    assert abs(np.mean(inside) - 0.9) < 0.015  # exactly 18 / 20


@pytest.mark.parametrize("bad", [0, 1, 1.5, -0.1, "0.9", True, float("nan")])
def test_a_level_must_be_a_share(bad):
    with pytest.raises(SpecError, match="interval must be a share between 0 and 1"):
        check_level("interval", bad)


def plain_loop(residuals, level, delay, start):
    """The formulas, for one number at a time: distances to both ends before each step."""
    offset, scale, log_width, least = start
    smoothing = 1 - 0.5 ** (1 / conformal.BIAS_STEPS)
    ends, given = [], []
    for t in range(len(residuals)):
        width = scale * math.exp(log_width)
        ends.append((width - offset, width + offset))
        given.append(residuals[t])
        if t < delay:
            continue
        r, (below, above) = given[t - delay], ends[t - delay]
        if math.isnan(r):
            continue
        limit = conformal.LARGEST * scale
        deviation = r - offset
        offset += smoothing * max(-limit, min(limit, deviation))
        scale = max(least, scale + smoothing * (min(abs(deviation), limit) - scale))
        step = conformal.RATE / (1 + delay / conformal.DELAY)
        log_width += step * ((0 if -below <= r <= above else 1) - (1 - level))
    return np.array(ends)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
@pytest.mark.parametrize("delay", [0, 5])
def test_intervals_are_those_of_a_plain_loop(shape, delay):
    rng = np.random.default_rng(1)
    calibration = rng.normal(size=(*shape, 50))
    residuals = rng.standard_t(2, size=(*shape, 300)) + np.linspace(0, 4, 300)
    residuals[..., 20:23] = np.nan
    watched = AdaptiveInterval(0.8, shape)
    # of another number of series: pooled, and not run through
    watched.calibrate(Calibration.of(calibration, of_every_series=False))
    start = watched.values.copy()
    pending, found = [], []
    for t in range(300):
        found.append((watched.below, watched.above))
        pending.append((residuals[..., t], watched.below, watched.above))
        if t >= delay:
            watched.observe(*pending.pop(0), delay=delay)
    for g in range(shape[0]):
        errors = np.sort(np.abs(calibration[g] - np.median(calibration[g])), axis=None)
        width = errors[math.ceil((errors.size + 1) * 0.8 - 1e-9) - 1]
        for n in range(shape[1]):
            expected = plain_loop(residuals[g, n].tolist(), 0.8, delay, start[:, g, n])
            ends = np.array([(b[g, n], a[g, n]) for b, a in found])
            np.testing.assert_allclose(ends, expected, rtol=1e-10)
            np.testing.assert_allclose(ends[0].mean(), width)  # begins as split conformal


def test_the_same_series_are_run_through_each_for_itself():
    rng = np.random.default_rng(2)
    errors = rng.normal(size=(1, 2, 200)) * np.array([1, 10])[:, None]
    watched = AdaptiveInterval(0.9, (1, 2))
    watched.calibrate(Calibration.of(errors, of_every_series=True))
    assert 6 < watched.below[0, 1] / watched.below[0, 0] < 16


@pytest.mark.slow
def test_coverage_holds_where_the_spread_and_the_mean_drift():
    rng = np.random.default_rng(3)
    n_steps = 4000
    growth = np.exp(np.linspace(0, 2, n_steps)) * (1 + 0.5 * np.sin(np.arange(n_steps) / 300))
    residuals = rng.normal(size=(3, n_steps)) * growth + np.linspace(0, 5, n_steps)
    calibration = Calibration.of(rng.normal(size=(1, 3, 300)), of_every_series=True)
    watched = AdaptiveInterval(0.9, (1, 3))
    watched.calibrate(calibration)
    inside = np.zeros((3, n_steps))
    for t in range(n_steps):
        r = residuals[None, :, t]
        inside[:, t] = ((r >= -watched.below) & (r <= watched.above))[0]
        watched.observe(r, watched.below, watched.above)
    assert np.abs(inside.mean(1) - 0.9).max() < 0.01
    assert np.abs(inside[:, -1000:].mean(1) - 0.9).max() < 0.03
    (fixed,) = calibration.quantile(0.9)
    assert (np.abs(residuals) <= fixed).mean() < 0.6


def test_a_reset_series_starts_from_its_calibration_and_others_go_on():
    watched = AdaptiveInterval(0.9, (1, 3))
    watched.calibrate(Calibration.of(np.random.default_rng(0).normal(size=(1, 3, 40)), True))
    before = watched.below.copy()
    for _ in range(10):
        watched.observe(np.full((1, 3), 30.0), watched.below, watched.above)
    moved = watched.below.copy()
    watched.reset(np.array([1]))
    assert watched.below[0, 1] == before[0, 1]
    assert (watched.below[0, [0, 2]] == moved[0, [0, 2]]).all()


def test_errors_that_are_all_missing_are_refused_and_many_are_thinned():
    with pytest.raises(DataError, match="no step that is held out for intervals has a target"):
        Calibration.of(np.full((1, 2, 3), np.nan), True)
    many = Calibration.of(np.zeros((1, 1000, 500)), True)
    assert many.errors.size <= conformal.MOST_SCORES
    assert not many.of_every_series
