"""Alarms of several outputs: one distance of all errors, beside NumPy; what is frozen; states."""

import numpy as np
import pytest

from fluxutils_py import SequenceRegressor
from fluxutils_py.estimator.streams.conformal import Calibration
from fluxutils_py.estimator.streams.residual_model import ResidualModel
from tests.estimator.streams.test_residual_model import plain_loop
from tests.plain_networks import LagRegressor


def errors(n_outputs, n_series, n_steps, seed=0, kind="white"):
    """Of outputs that go together: white, correlated in time or with heavy tails."""
    rng = np.random.default_rng(seed)
    size = (n_outputs, n_series, n_steps)
    found = rng.standard_t(3, size=size) if kind == "heavy" else rng.normal(size=size)
    if kind == "slow":
        for t in range(1, n_steps):
            found[:, :, t] += 0.5 * found[:, :, t - 1]
    mixing = np.random.default_rng(100).normal(size=(n_outputs, n_outputs))
    return np.einsum("gh,hnt->gnt", mixing, found)


def calibrated(given, *, memory=1000, n_series=None, frozen=False):
    model = ResidualModel((len(given), n_series or given.shape[1]), memory, frozen=frozen)
    model.calibrate(Calibration(given, True))
    return model


def run(model, given):
    found = []
    for t in range(given.shape[2]):
        model.observe(given[:, :, t])
        found.append(model.alarm())
    return np.array(found)


def moments_of(of_series):
    """Second moments (G, G) of errors (G, S), by a loop: bounded, with smaller correlations."""
    n_outputs = len(of_series)
    count, found = np.zeros(n_outputs), np.zeros((n_outputs, n_outputs))
    for step in of_series.T:
        known = ~np.isnan(step)
        count += known
        scale = np.sqrt(np.diag(found))
        cut = [min(max(e, -5 * s), 5 * s) if s > 0 else e for e, s in zip(step, scale, strict=True)]
        for g in np.flatnonzero(known):
            for h in np.flatnonzero(known):
                n = min(count[g], count[h])
                share = 1 if g == h else 1 / (1 + 1e-3 + n_outputs / n)
                found[g, h] += (share * cut[g] * cut[h] - found[g, h]) / n
    return found


def as_normal(squares, n):
    return ((squares / n) ** (1 / 3) - 1 + 2 / (9 * n)) / np.sqrt(2 / (9 * n))


def squared_distance(moments, error):
    """By the inverse of the part that is known."""
    known = np.flatnonzero(~np.isnan(error))
    part = moments[np.ix_(known, known)]
    return error[known] @ np.linalg.inv(part) @ error[known], len(known)


@pytest.mark.parametrize(("n_outputs", "n_series"), [(2, 1), (3, 2), (8, 1)])
def test_the_residual_is_the_distance_by_the_covariance_of_all_errors(n_outputs, n_series):
    given = errors(n_outputs, n_series, 60)
    given[0, 0, 10:20] = np.nan
    model = calibrated(given)
    new = errors(n_outputs, n_series, 5, seed=1)
    new[1, 0, 3] = np.nan  # that output is left out
    new[:, -1, 4] = np.nan
    for t in range(5):
        found = model._residual(new[:, :, t])
        for n in range(n_series):
            squares, n_known = squared_distance(moments_of(given[:, n]), new[:, n, t])
            expected = as_normal(squares, n_known) if n_known else np.nan
            np.testing.assert_allclose(found[n], expected, rtol=1e-7, atol=1e-9)


def test_a_calibration_is_judged_by_the_covariance_of_its_other_parts():
    given = errors(3, 1, 50)
    found = ResidualModel((3, 1), 1000)._judged(given)
    for k in range(10):
        part = slice(5 * k, 5 * k + 5)
        moments = moments_of(np.delete(given[:, 0], part, axis=1))
        expected = [as_normal(*squared_distance(moments, e)) for e in given[:, 0, part].T]
        np.testing.assert_allclose(found[0, part], expected, rtol=1e-7)


def test_alarms_are_those_of_a_plain_loop_over_distances():
    """Without a calibration the covariance is that of the steps so far."""
    given = errors(2, 2, 150)
    given[0, 1, 30:40] = np.nan
    given[:, 1, 60:80] = np.nan
    given[:, 0, 100:120] += 6
    found = run(ResidualModel((2, 2), 200), given)
    for n in range(2):
        distances = []
        for t in range(150):
            squares, k = squared_distance(moments_of(given[:, n, : t + 1]), given[:, n, t])
            distances.append(as_normal(squares, k) if k else np.nan)
        expected = plain_loop(distances, 200, is_distance=True)
        np.testing.assert_allclose(found[:, n], expected, rtol=1e-6, atol=1e-9)


def test_shares_are_those_of_the_errors_that_whitening_makes_independent():
    given = errors(4, 2, 300)
    model = calibrated(given)
    new = errors(4, 2, 200, seed=1)
    new[2] += 9 * given[2].std()
    run(model, new)
    running = np.zeros(4)
    moments = moments_of(given[:, 0])
    scale = np.sqrt(np.diag(moments))
    values, vectors = np.linalg.eigh(moments / np.outer(scale, scale))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    for t in range(200):
        running += (1 - 0.5 ** (160 / 1000)) * ((root @ (new[:, 0, t] / scale)) ** 2 - running)
    shares = model.shares()
    np.testing.assert_allclose(shares[:, 0], running / running.sum(), rtol=1e-6)
    np.testing.assert_allclose(shares.sum(0), 1)
    assert (shares.argmax(0) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_what_is_frozen_keeps_sounding_and_the_memory_forgets(n_outputs):
    quiet = errors(n_outputs, 2, 400)
    fault = errors(n_outputs, 2, 3000, seed=1) + 4 * quiet.std()
    frozen, learning = calibrated(quiet, frozen=True), calibrated(quiet, memory=200)
    moving = [3, 8, 9, 10, 14, 15, 16, 24]  # the alarm, running means, and parts of the distance
    fixed = np.setdiff1d(np.arange(len(frozen.values)), moving)
    before = frozen.values[fixed].copy()
    assert (run(frozen, fault)[100:] > 3).mean() > 0.99
    np.testing.assert_array_equal(frozen.values[fixed], before)
    assert np.median(run(learning, fault)[-200:]) < 1


def test_a_calibration_counts_as_a_full_memory():
    """A fault soon after a short calibration is not learnt within 300 steps."""
    quiet = errors(4, 10, 80)
    fault = errors(4, 10, 300, seed=1) + 3 * quiet.std()
    assert (run(calibrated(quiet), fault)[50:] > 2).mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["white", "slow", "heavy"])
@pytest.mark.parametrize("frozen", [False, True])
def test_two_decades_are_about_one_step_in_a_hundred_of_quiet_data(kind, frozen):
    given = errors(8, 30, 1000, seed=3, kind=kind)
    alarms = run(calibrated(given[:, :, :500], frozen=frozen), given[:, :, 500:])
    assert 0.003 < (alarms > 2).mean() < 0.04
    assert 0.04 < (alarms > 1).mean() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_short_calibration_does_not_raise_false_alarms(frozen):
    """Eighty steps tell little of eight outputs, and less of how slow means vary."""
    given = errors(8, 60, 380, seed=4)
    assert (run(calibrated(given[:, :, :80], frozen=frozen), given[:, :, 80:]) > 2).mean() < 0.01


def test_a_smaller_distance_is_none():
    quiet = errors(3, 20, 400)
    alarms = run(calibrated(quiet), 0.1 * errors(3, 20, 300, seed=1))
    assert (alarms[50:] < 0.5).all()


def test_one_series_goes_as_several_do():
    quiet, new = errors(3, 2, 100), errors(3, 2, 80, seed=1)
    new[1, 0, 20:30] = np.nan
    new[:, 0, 40:44] = np.nan
    both = run(calibrated(quiet), new)
    alone = run(calibrated(quiet[:, :1]), new[:, :1])
    # the scale at the start is that of all series of the calibration
    assert np.abs(both[:, 0] - alone[:, 0]).max() < 0.5
    model, single = calibrated(quiet), calibrated(quiet[:, :1])
    single.load(model.state[:, :, :1])
    np.testing.assert_allclose(run(single, new[:, :1])[:, 0], both[:, 0], rtol=1e-9)


def test_series_without_a_calibration_of_their_own_start_as_the_others():
    quiet, new = errors(3, 6, 300), errors(3, 4, 300, seed=1)
    quiet[:, 2] = np.nan
    own = calibrated(quiet)
    expected = np.delete(own.initial, 2, 2).mean(2)
    expected[3] = 0.0  # no alarm yet
    np.testing.assert_allclose(own.initial[:, :, 2], expected)
    for frozen in (False, True):
        others = calibrated(quiet, n_series=4, frozen=frozen)
        assert (others.alarm() == 0).all()
        assert (run(others, new) > 2).mean() < 0.05


def test_an_output_that_never_erred_is_heard_and_one_never_seen_is_left_out():
    quiet, new = errors(3, 1, 200), errors(3, 1, 200, seed=1)
    quiet[1] = 0.0
    quiet[2] = np.nan
    new[1, :, :100] = 0.0
    with np.errstate(all="raise", under="ignore"):
        alarms = run(calibrated(quiet, frozen=True), new)
    assert np.isfinite(alarms).all()
    assert (alarms[:100] > 3).mean() < 0.05
    assert (alarms[100:] > 3).all()


# -- streams -----------------------------------------------------------------------------------


def machine(n_steps, seed=0):
    """Six sensors (6, 1, T) of a slow state, where one breaks in the last third."""
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(2, n_steps))
    for t in range(1, n_steps):
        state[:, t] += 0.9 * state[:, t - 1]
    x = rng.normal(size=(6, 2)) @ state + 0.3 * rng.normal(size=(6, n_steps))
    x[4, -n_steps // 3 :] += 3
    return x[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("alarm", [True, "frozen"])
def test_the_lines_of_the_page_hear_a_fault_and_name_the_sensor(alarm):
    x = machine(900)
    est = SequenceRegressor(cell="linear", level=90, scale_target=False, verbose=False)
    est.fit(x[:, :, :399], x[:, :, 1:400])
    _, state = est.predict(x[:, :, :399], return_state=True)
    live = est.stream(1, state, alarm=alarm)
    alarms = []
    for t in range(400, 900):
        live.step(x[:, :, t - 1])
        live.observe(x[:, :, t])
        alarms.append(live.alarm[0])
    assert live.alarm_shares.shape == (6, 1)
    assert live.alarm_shares.argmax() == 4
    quiet, broken = np.split(np.array(alarms), [200])
    assert (quiet > 2).mean() < 0.05
    assert (broken[20:] > np.quantile(quiet, 0.99)).mean() > 0.9


@pytest.fixture(scope="module")
def est():
    x = machine(240)
    return LagRegressor(n_lags=1, level=80, scale_target=False).fit(x[:, :, :-1], x[:, :, 1:])


def test_the_memory_is_a_thousand_steps_or_what_the_user_says(est):
    memory = [est.stream(1, alarm=alarm).state[-4][1].item() for alarm in (True, 300, "frozen")]
    assert memory == [1000, 300, 2 * 48]
    long = SequenceRegressor(cell="linear", level=90, scale_target=False, verbose=False)
    x = machine(4001)
    long.fit(x[:, :, :-1], x[:, :, 1:])
    assert long.stream(1, alarm=True).state[-4][1].item() == 1600


@pytest.mark.parametrize("options", [{"delay": 3}, {"interval": 0.8}])
def test_reset_of_a_stream_forgets_what_was_seen(est, options):
    x = machine(60, seed=2)
    live, fresh = (est.stream(1, alarm=True, **options) for _ in range(2))
    for t in range(30):
        live.step(x[:, :, t])
        live.observe(x[:, :, t + 1] + 50)
    live.reset()
    for t in range(30):
        live.step(x[:, :, t])
        fresh.step(x[:, :, t])
        live.observe(x[:, :, t + 1])
        fresh.observe(x[:, :, t + 1])
        np.testing.assert_array_equal(live.alarm, fresh.alarm)
        np.testing.assert_array_equal(live.alarm_shares, fresh.alarm_shares)


def test_a_state_of_one_output_from_0_2_0_goes_on():
    """It has a memory that was shorter, and no more rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 2, 200))
    one = LagRegressor(n_lags=1, level=80, scale_target=False).fit(x[:, :, :-1], x[:, :, 1:])
    live = one.stream(2, alarm=160)
    assert live.state[-2].shape == (46, 1, 2)
    again = one.stream(2, live.state, alarm=True)
    assert again.state[-4][1].item() == 160
    np.testing.assert_array_equal(again.alarm_shares, np.ones((1, 2)))
