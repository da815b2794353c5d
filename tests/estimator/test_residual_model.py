"""The model of residuals behind alarms, beside a plain loop over numbers."""

import math

import numpy as np
import pytest

from fluxutils_py.estimator import residual_model
from fluxutils_py.estimator.residual_model import ResidualModel, tail_decades


def plain_loop(residuals, memory):
    """The formulas, for one series without a calibration; the alarm after each step."""
    lives = [max(1.0, memory / part) for part in residual_model.PARTS]
    gains = [1 - 0.5 ** (1 / life) for life in lives]
    slow = 1 - 0.5 ** (1 / memory)
    mean_abs = math.sqrt(2 / math.pi)
    scale, centre, count = 0.0, 0.0, 0
    spread = [math.sqrt(a / (2 - a)) for a in gains]
    means, mean_spreads = [0.0] * len(gains), list(spread)
    sizes, size_centres = [0.0] * len(gains), [mean_abs] * len(gains)
    size_spreads = [s * math.sqrt(1 - 2 / math.pi) for s in spread]
    alarms = []
    for r in residuals:
        if not math.isnan(r):
            scale = scale if scale > 0 else abs(r)
            u = max(-5.0, min(5.0, r / (scale or 1.0)))
            gain = max(slow, 1 / (count + 10))
            count += 1
            for i, a in enumerate(gains):
                means[i] += a * (u - means[i])
                sizes[i] += a * (abs(u) - sizes[i])
            scale += gain * (min(abs(r), 3 * scale) / mean_abs / 0.94 - scale)
            centre += gain * (max(-2.0, min(2.0, u)) - centre)
            for i in range(len(gains)):
                d = min(abs(means[i] - centre), 3 * mean_spreads[i])
                mean_spreads[i] += gain * (d / 0.75 - mean_spreads[i])
                d = max(-3 * size_spreads[i], min(3 * size_spreads[i], sizes[i] - size_centres[i]))
                size_centres[i] += gain * d
                size_spreads[i] += gain * (abs(d) / 0.75 - size_spreads[i])
        total = sum(
            abs(means[i] - centre) / (mean_spreads[i] + 1e-9)
            + max(0.0, sizes[i] - size_centres[i]) / (size_spreads[i] + 1e-9)
            for i in range(len(gains))
        )
        x = total / residual_model.TAIL_SCALE
        tail = math.exp(-x) * sum(x**k / math.factorial(k) for k in range(residual_model.SHAPE))
        alarms.append(-math.log10(tail))
    return alarms


def test_alarms_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    residuals = rng.standard_t(3, size=(2, 3, 150))
    residuals[:, 1, 40:60] = np.nan
    residuals[1, 2, 90:110] += 6
    model = ResidualModel((2, 3), memory=80)
    found = []
    for t in range(150):
        model.observe(residuals[:, :, t])
        found.append(model.alarm())
    each = [[plain_loop(residuals[g, n].tolist(), 80) for n in range(3)] for g in range(2)]
    # the largest of the outputs
    np.testing.assert_allclose(np.array(found).T, np.max(each, axis=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("total", [0.0, 1.0, 10.0, 80.0, 4000.0])
def test_the_tail_is_that_of_a_gamma_distribution(total):
    from scipy.stats import gamma

    expected = -gamma(residual_model.SHAPE, scale=residual_model.TAIL_SCALE).logsf(total)
    if np.isfinite(expected):
        np.testing.assert_allclose(
            tail_decades(np.array([total])), expected / math.log(10), atol=1e-9
        )
    assert np.isfinite(tail_decades(np.array([total])))


@pytest.mark.parametrize("memory", [200, 1000])
def test_two_decades_are_about_one_step_in_a_hundred(memory):
    """Within a factor of four, on residuals of a heavy tail and on correlated ones."""
    rng = np.random.default_rng(memory)
    heavy = rng.standard_t(4, size=(1, 50, 2000))
    slow = rng.normal(size=(1, 50, 2000))
    for t in range(1, 2000):
        slow[..., t] += 0.7 * slow[..., t - 1]
    for residuals in (heavy, slow):
        model = ResidualModel((1, 50), memory)
        above = []
        for t in range(2000):
            model.observe(residuals[:, :, t])
            if t > 800:
                above.append(model.alarm() > 2)
        assert 0.01 / 4 < np.mean(above) < 0.04


@pytest.mark.parametrize("kind", ["shift", "burst", "spike"])
def test_an_anomaly_stands_out_and_does_not_become_the_rule(kind):
    rng = np.random.default_rng(4)
    residuals = rng.normal(size=(1, 1, 1500))
    where = slice(1000, 1003) if kind == "spike" else slice(1000, 1040)
    residuals[..., where] *= 4 if kind == "burst" else 1
    residuals[..., where] += {"shift": 2.5, "burst": 0, "spike": 12}[kind]
    model = ResidualModel((1, 1), 400)
    alarms = []
    for t in range(1500):
        model.observe(residuals[:, :, t])
        alarms.append(float(model.alarm()[0]))
    assert max(alarms[where]) > 3
    assert max(alarms[where]) > 1.5 * max(alarms[200:1000])
    assert np.median(alarms[1300:]) < 1


def test_a_scale_of_residuals_changes_no_alarm():
    residuals = np.random.default_rng(5).normal(size=(1, 1, 300))
    alarms = []
    for factor in (1.0, 1e-8, 1e8):
        model = ResidualModel((1, 1), 100)
        for t in range(300):
            model.observe(factor * residuals[:, :, t])
        alarms.append(float(model.alarm()[0]))
    np.testing.assert_allclose(alarms, alarms[0], rtol=1e-6)


def test_zeros_alone_raise_no_alarm():
    model = ResidualModel((1, 2), 100)
    for _ in range(300):
        model.observe(np.zeros((1, 2)))
    assert (model.alarm() < 1).all()
