"""The model of residuals behind alarms, beside a plain loop over numbers."""

import math

import numpy as np
import pytest

from fluxutils_py.estimator.streams import residual_model
from fluxutils_py.estimator.streams.residual_model import ResidualModel


def plain_loop(residuals, memory, *, is_distance=False):
    """The formulas, for one series without a calibration; the alarm after each step. Of distances,
    only larger ones count.
    """
    size_of = (lambda r: r) if is_distance else abs

    def below(value, limit, excess):
        if is_distance:
            return math.exp((value - limit) / excess / math.log(10))
        return -math.log10(1 - 0.9 * value / limit)

    lives = [max(1.0, memory / part) for part in residual_model.PARTS]
    gains = [1 - 0.5 ** (1 / life) for life in lives]
    slow = 1 - 0.5 ** (1 / memory)
    mean_abs = math.sqrt(2 / math.pi)
    scale, centre, count = 0.0, 0.0, 0
    spread = [math.sqrt(a / (2 - a)) for a in gains]
    means, mean_spreads = [0.0] * len(gains), list(spread)
    sizes, size_centres = [0.0] * len(gains), [0.0 if is_distance else mean_abs] * len(gains)
    size_spreads = [s * math.sqrt(1 - 2 / math.pi) for s in spread]
    (limits, excesses), alarms, alarm = residual_model.TAILS.copy(), [], 0.0
    for r in residuals:
        if not math.isnan(r):
            scale = scale if scale > 0 else abs(r)
            in_scales = size_of(r / (scale or 1.0))
            u = max(-5.0, min(5.0, r / (scale or 1.0)))
            gain = max(slow, 1 / (count + 10))
            count += 1
            for i, a in enumerate(gains):
                means[i] += a * (u - means[i])
                sizes[i] += a * (size_of(u) - sizes[i])
            scale += gain * (min(abs(r), 3 * scale) / mean_abs / 0.94 - scale)
            centre += gain * (max(-2.0, min(2.0, u)) - centre)
            for i in range(len(gains)):
                d = min(abs(means[i] - centre), 3 * mean_spreads[i])
                mean_spreads[i] += gain * (d / 0.75 - mean_spreads[i])
                d = max(-3 * size_spreads[i], min(3 * size_spreads[i], sizes[i] - size_centres[i]))
                size_centres[i] += gain * d
                size_spreads[i] += gain * (abs(d) / 0.75 - size_spreads[i])
            total = sum(
                size_of(means[i] - centre) / (mean_spreads[i] + 1e-9)
                + max(0.0, sizes[i] - size_centres[i]) / (size_spreads[i] + 1e-9)
                for i in range(len(gains))
            )
            rate = min(0.3, max(slow / residual_model.TAIL_MEMORY, 1 / (count + 10)) / 0.1)
            decades = []
            for i, value in enumerate([total, math.log(max(in_scales, 1e-9))]):
                above = value - limits[i]
                if above > 0:
                    decades.append(1 + above / excesses[i] / math.log(10))
                else:
                    decades.append(below(value, limits[0], excesses[0]) if i == 0 else 0.0)
                if decades[i] < 3:
                    limits[i] += rate * excesses[i] * (0.9 if above > 0 else -0.1)
                    if above > 0:
                        excesses[i] += rate * (above / residual_model.KEPT - excesses[i])
                limits[i] = max(limits[i], residual_model.LEAST_TAILS[i][0])
                excesses[i] = max(excesses[i], residual_model.LEAST_TAILS[i][1])
            single = decades[1] - math.log10(2)
            alarm = max(decades[0], single) if single > 2 else decades[0]
            alarm = min(alarm, count / 10)  # few tell nothing of what is rare
        alarms.append(alarm)
    return alarms


def test_the_first_residuals_raise_no_alarm():
    rng = np.random.default_rng(0)
    model = ResidualModel((1, 200), memory=1000)
    alarms = []
    for _ in range(40):
        model.observe(rng.standard_t(3, size=(1, 200)))
        alarms.append(model.alarm().max())
    assert max(alarms[:20]) <= 2
    assert all(a <= (t + 1) / 10 for t, a in enumerate(alarms))


def test_alarms_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    residuals = rng.standard_t(3, size=(1, 6, 150))
    residuals[:, 1, 40:60] = np.nan
    residuals[0, 2, 90:110] += 6
    model = ResidualModel((1, 6), memory=80)
    found = []
    for t in range(150):
        model.observe(residuals[:, :, t])
        found.append(model.alarm())
    each = [plain_loop(residuals[0, n].tolist(), 80) for n in range(6)]
    np.testing.assert_allclose(np.array(found).T, each, rtol=1e-9, atol=1e-9)


def test_what_is_kept_of_a_tail_is_that_of_an_exponential_variable():
    excess = np.random.default_rng(1).exponential(size=400_000)
    kept = excess[1 + excess / math.log(10) < residual_model.KNOWN]
    assert abs(kept.mean() - residual_model.KEPT) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "n_steps"), [(200, 2000), (2000, 6000)])
def test_two_decades_are_about_one_step_in_a_hundred(memory, n_steps):
    """Whatever the memory: on normal residuals, on a heavy tail and on correlated ones."""
    rng = np.random.default_rng(memory)
    slow = rng.normal(size=(40, n_steps))
    for t in range(1, n_steps):
        slow[:, t] += 0.9 * slow[:, t - 1]
    kinds = [rng.normal(size=(40, n_steps)), rng.standard_t(3, size=(40, n_steps)), slow]
    model = ResidualModel((1, 120), memory)
    above = np.zeros((2, 3))
    for residuals in np.concatenate(kinds).T:
        model.observe(residuals[None])
        if model.values[2, 0, 0] > n_steps / 3:
            alarm = model.alarm().reshape(3, 40)
            above += [(alarm > 1).mean(1), (alarm > 2).mean(1)]
    shares = above / (n_steps - n_steps // 3)
    assert (shares[0] > 0.08).all()
    assert (shares[0] < 0.17).all()
    assert (shares[1] > 0.008).all()
    assert (shares[1] < 0.022).all()


@pytest.mark.slow
def test_a_single_residual_counts_as_what_it_is():
    """The farther out, the more decades, whatever the memory; it is over at the next step."""
    for memory in (200, 2000):
        sizes = np.array([0.0, 5, 8, 12, 50])
        residuals = np.random.default_rng(6).normal(size=(1, 1, 1500)).repeat(len(sizes), 1)
        model = ResidualModel((1, len(sizes)), memory)
        for t in range(1500):
            model.observe(residuals[:, :, t])
        model.observe(sizes[None])
        alarm = model.alarm()
        assert alarm[0] < 1.5
        assert alarm[1] > 2
        assert alarm[2] > 3
        assert alarm[-1] > 6
        assert (np.diff(alarm) > 0.5).all()
        for _ in range(2):
            model.observe(residuals[:, :, 0])
        assert (model.alarm()[3:] < alarm[3:] - 0.5).all()


@pytest.mark.slow
def test_a_shift_alarms_for_half_of_the_memory_and_then_is_the_rule():
    residuals = np.random.default_rng(7).normal(size=(1, 20, 2000))
    residuals[..., 1000:] += 6
    model, alarms = ResidualModel((1, 20), 400), []
    for t in range(2000):
        model.observe(residuals[:, :, t])
        alarms.append(model.alarm())
    alarms = np.array(alarms)
    assert (alarms[1010:1200] > 2).mean() > 0.99
    assert np.median(alarms[1500:]) < 1
    assert (alarms[1600:] > 2).mean() < 0.05


@pytest.mark.slow
def test_a_new_scale_of_residuals_becomes_the_rule():
    residuals = np.random.default_rng(8).normal(size=(1, 20, 3000))
    residuals[..., 800:] *= 50
    model, alarms = ResidualModel((1, 20), 200), []
    for t in range(3000):
        model.observe(residuals[:, :, t])
        alarms.append(model.alarm())
    assert (np.array(alarms[2000:]) > 2).mean() < 0.03


@pytest.mark.slow
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


@pytest.mark.slow
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
