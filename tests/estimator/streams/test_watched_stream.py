"""Streams that take in the target: what they return, late targets, states, resets, errors."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import make_pipeline
from torch import nn

from fluxutils_py import (
    Estimator,
    SequenceRegressor,
    SequenceScaler,
    samples,
    stream,
)
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator import WatchedStream
from fluxutils_py.estimator.streams.conformal import AdaptiveInterval, Calibration
from fluxutils_py.estimator.streams.residual_model import ResidualModel
from fluxutils_py.nn import LSTM, native_kernels
from tests.plain_networks import LagClassifier, LagRegressor

F, N, T, G = 2, 3, 240, 2


def data(seed=0, n_series=N, dtype="float64"):
    rng = np.random.default_rng(seed)
    x = rng.normal(50, 3, size=(F, n_series, T)).astype(dtype)
    noise = rng.normal(size=(G, n_series, T)) * np.array([1, 5])[:, None, None]
    return x, (np.stack([x.mean(0), x[0] - x[1]]) + noise).astype(dtype)


@pytest.fixture(scope="module")
def est():
    return LagRegressor(n_lags=2, level=80, scale_target=False).fit(*data())


@pytest.fixture(scope="module")
def with_ends():
    """Its stream of an interval also runs the network of the ends."""
    return SequenceRegressor(cell="linear", level=80, random_state=0).fit(*data())


def run(live, x, y, delay=0, start=0, stop=T):
    """The results of steps, with each target given ``delay`` steps late."""
    found = []
    for t in range(start, stop):
        found.append(live.step(x[:, :, t]))
        if t - delay >= start:
            live.observe(y[:, :, t - delay])
    return found


def equal(first, second):
    return all(
        np.array_equal(a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_give_the_prediction_and_what_the_models_of_residuals_say(kernels, delay, dtype):
    x, y = data(dtype=dtype)
    est = LagRegressor(n_lags=2, level=80, scale_target=False).fit(x, y)
    x, y = data(1, dtype=dtype)
    predicted = est.predict(x)
    calibration = est.fitted_parts_.calibration
    interval, residuals = AdaptiveInterval(0.8, (G, N)), ResidualModel((G, N), 1000)
    interval.calibrate(calibration)
    residuals.calibrate(calibration)
    with native_kernels(kernels):
        found = run(est.stream(N, interval=0.8, alarm=True), x, y, delay)
    ends = []
    for t, (y_hat, low, high, alarm) in enumerate(found):
        assert y_hat.dtype == low.dtype == high.dtype == dtype
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-9}
        np.testing.assert_allclose(y_hat, predicted[:, :, t], **close)
        np.testing.assert_allclose(low, predicted[:, :, t] - interval.below, **close)
        np.testing.assert_allclose(high, predicted[:, :, t] + interval.above, **close)
        if dtype == "float64":  # the spreads behind alarms are small numbers
            np.testing.assert_allclose(alarm, residuals.alarm(), rtol=1e-6, atol=1e-6)
        ends.append((interval.below, interval.above))
        if t >= delay:
            r = y[:, :, t - delay].astype(float) - predicted[:, :, t - delay]
            interval.observe(r, *ends[t - delay], delay=delay)
            residuals.observe(r)


@pytest.mark.slow
def test_calibration_of_a_fit_is_of_the_end_of_each_series(est):
    # held out: the last fifth, from a model of the first four fifths
    x, y = data()
    part = LagRegressor(n_lags=2).fit(x[:, :, :192], y[:, :, :192])
    np.testing.assert_allclose(
        est.fitted_parts_.calibration.errors, (y - part.predict(x))[:, :, 192:], atol=1e-9
    )


@pytest.mark.slow
def test_calibration_data_may_be_given(est):
    x, y = data(7)
    given = est.stream(N, interval=0.8, calibration=(x, y))
    expected = AdaptiveInterval(0.8, (G, N))
    expected.calibrate(Calibration.of(y - est.predict(x), True))
    y_hat, low, _ = given.step(x[:, :, 0])
    np.testing.assert_allclose(low, y_hat - expected.below)


@pytest.mark.slow
def test_one_series_goes_as_two_do(est):
    x, y = data(2)
    calibration = data(3)
    one = (calibration[0][:, :1], calibration[1][:, :1])
    both = est.stream(2, interval=0.9, calibration=(calibration[0][:, :2], calibration[1][:, :2]))
    alone = est.stream(1, interval=0.9, calibration=one)
    pairs = zip(run(both, x[:, :2], y[:, :2], 1), run(alone, x[:, :1], y[:, :1], 1), strict=True)
    for two, single in pairs:
        for a, b in zip(two, single, strict=True):
            np.testing.assert_allclose(a[:, :1], b, rtol=1e-9)


@pytest.mark.slow
def test_a_stream_of_one_number_takes_the_short_way_and_gives_the_same():
    x, y = data(n_series=2)
    est = LagRegressor(n_lags=2, level=90, scale_target=False).fit(x, y[:1])
    x, y = data(4, n_series=2)
    y[0, 0, 20:24] = np.nan
    c = data(5, n_series=2)
    both = run(est.stream(2, interval=0.9, calibration=(c[0], c[1][:1])), x, y[:1], 2)
    one = est.stream(1, interval=0.9, calibration=(c[0][:, :1], c[1][:1, :1]))
    for two, single in zip(both, run(one, x[:, :1], y[:1, :1], 2), strict=True):
        for a, b in zip(two, single, strict=True):
            np.testing.assert_allclose(a[:, :1], b, rtol=1e-9)


@pytest.mark.few
@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize(
    "watch",
    [{"interval": 0.8}, {"alarm": 50}, {"interval": 0.8, "alarm": True}, {"alarm": "frozen"}],
)
def test_a_state_goes_on_with_the_same_bits(est, watch, delay, tmp_path):
    x, y = data(6)
    whole = run(est.stream(N, **watch), x, y, delay)
    live = est.stream(N, **watch)
    run(live, x, y, delay, stop=100)
    torch.save(live.state, tmp_path / "state.pt")
    again = est.stream(N, torch.load(tmp_path / "state.pt"), **watch)
    assert again.n_pending == delay
    rest = []
    for t in range(100, T):
        rest.append(again.step(x[:, :, t]))
        again.observe(y[:, :, t - delay])
    assert equal(rest, whole[100:])
    copied = pickle.loads(pickle.dumps(again))
    assert equal([copied.step(x[:, :, 0])], [again.step(x[:, :, 0])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("had", "has"),
    [
        ({"alarm": True}, {}),
        ({"interval": 0.8}, {"alarm": True}),
        ({"alarm": True}, {"interval": 0.8}),
    ],
)
def test_a_state_of_a_stream_with_other_options_is_refused_by_name(with_ends, had, has):
    x, y = data()
    live = with_ends.stream(N, **had)
    live.step(x[:, :, 0])
    live.observe(y[:, :, 0])
    with pytest.raises(SpecError, match=r"stream with other options.* the same interval=, alarm="):
        with_ends.stream(N, live.state, **has)
    with_ends.stream(N, live.state, **had).step(x[:, :, 1])


def test_a_state_of_the_model_alone_starts_from_the_calibration(est):
    x, _ = data(1)
    _, state = est.predict(x[:, :, :50], return_state=True)
    y_hat, low, _ = est.stream(N, state, interval=0.8).step(x[:, :, 50])
    np.testing.assert_allclose(y_hat, est.predict(x)[:, :, 50])
    assert np.allclose(
        y_hat - low,
        est.stream(N, interval=0.8).step(x[:, :, 50])[0]
        - est.stream(N, interval=0.8).step(x[:, :, 50])[1],
    )


@pytest.mark.slow
def test_pipelines_have_them_in_the_units_of_the_target(est):
    x, y = data()
    pipe = make_pipeline(SequenceScaler(), LagRegressor(n_lags=2, level=80, scale_target=False))
    pipe.fit(samples(x), samples(y))
    x, y = data(1)
    plain = run(est.stream(N, interval=0.8, alarm=True), x, y)
    piped = run(stream(pipe, N, interval=0.8, alarm=True), x, y)
    for a, b in zip(plain, piped, strict=True):
        for one, two in zip(a, b, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    scaled = TransformedTargetRegressor(
        LagRegressor(n_lags=2, level=80, scale_target=False),
        func=np.log1p,
        inverse_func=np.expm1,
        check_inverse=False,
    ).fit(samples(x), samples(np.abs(y)))
    with pytest.raises(SpecError, match="calibration=\\(x, y\\)"):
        stream(scaled, N, interval=0.8)
    live = stream(scaled, N, interval=0.8, calibration=(x, np.abs(y)))
    assert len(live.step(x[:, :, 0])) == 3


def test_a_truth_that_never_comes_changes_nothing(est):
    x, y = data(1)
    live = est.stream(N, interval=0.8, alarm=True)
    run(live, x, y, stop=50)
    _, interval, residuals, pending = live.state[-4:]
    live.step(x[:, :, 50])
    assert live.n_pending == 1
    live.observe(np.full((G, N), np.nan))
    assert len(pending) == live.n_pending == 0
    assert torch.equal(live.state[-3], interval)
    assert torch.equal(live.state[-2], residuals)


def test_outputs_belong_to_the_caller(est):
    x, y = data(1)
    mine, other = est.stream(N, interval=0.8), est.stream(N, interval=0.8)
    for t in range(5):
        spoilt = mine.step(x[:, :, t])
        kept = other.step(x[:, :, t])
        assert equal([spoilt], [kept])
        for array in spoilt:
            array[...] = 1e6
        mine.observe(y[:, :, t])
        other.observe(y[:, :, t])


def test_reset_of_some_series_forgets_their_residuals_and_late_truths(est):
    x, y = data(1)
    live = est.stream(N, interval=0.8, alarm=True)
    for t in range(60):
        live.step(x[:, :, t])
        if t >= 2:
            live.observe(y[:, :, t - 2] + 10.0)
    live.reset([1])
    fresh = est.stream(N, interval=0.8, alarm=True)
    assert live.n_pending == 2
    for t in (58, 59):  # of steps before the reset
        live.observe(y[:, :, t] + 10.0)
    one, two = live.step(x[:, :, 60]), fresh.step(x[:, :, 60])
    assert np.allclose(one[1][:, 1], two[1][:, 1])
    assert not np.allclose(one[1][:, 0], two[1][:, 0])
    assert one[3][1] == two[3][1]
    live.reset()
    assert live.n_pending == 0
    assert equal(
        [live.step(x[:, :, 60])], [est.stream(N, interval=0.8, alarm=True).step(x[:, :, 60])]
    )


def test_alarms_alone_need_no_calibration():
    x, y = data()
    model = nn.Sequential(LSTM(F, 4), nn.Linear(4, G)).double()
    est = Estimator(model, spec={"epochs": 1, "batchsize": 3, "seqsize": 40}, random_state=0)
    live = est.fit(x, y).stream(N, alarm=True)
    assert isinstance(live, WatchedStream)
    y_hat, alarm = live.step(x[:, :, 0])
    assert y_hat.shape == (G, N)
    np.testing.assert_array_equal(alarm, np.zeros(N))
    assert live.step(x[:, :, 1], alarm=False).shape == (G, N)
    with pytest.raises(SpecError, match="calibration"):
        est.stream(N, interval=0.9)


def test_errors_name_what_came_and_what_is_expected(est):
    x, y = data(1)
    live = est.stream(N, interval=0.8)
    with pytest.raises(DataError, match="no step waits"):
        live.observe(y[:, :, 0])
    before = live.state
    with pytest.raises(ShapeError):
        live.step(x[:, :2, 0])
    assert len(live.state[-1]) == len(before[-1]) == 0
    live.step(x[:, :, 0])
    with pytest.raises(ShapeError, match=r"\(2, 3\), got \(3,\)"):
        live.observe(y[0, :, 0])
    with pytest.raises(DataError, match="infinite"):
        live.observe(np.full((G, N), np.inf))
    with pytest.raises(SpecError, match="make it with alarm=True"):
        live.step(x[:, :, 0], alarm=True)
    with pytest.raises(SpecError, match=r"interval=0\.8, this one has interval=0\.9"):
        est.stream(N, live.state, interval=0.9)
    with pytest.raises(SpecError, match="no alarm"):
        est.stream(N, live.state, interval=0.8, alarm=True)
    with pytest.raises(ShapeError):
        est.stream(N + 1, live.state, interval=0.8)
    with pytest.raises(SpecError, match="interval must be a share"):
        est.stream(N, interval=90)
    with pytest.raises(SpecError, match=r"got 3.*memory in steps"):
        est.stream(N, alarm=3)
    with pytest.raises(SpecError, match=r"'froze'.*memory in steps"):
        est.stream(N, alarm="froze")
    frozen = est.stream(N, alarm="frozen").state
    with pytest.raises(SpecError, match="alarm=frozen, this one has alarm=True"):
        est.stream(N, frozen, alarm=True)
    with pytest.raises(SpecError, match="alarm=1000, this one has alarm=frozen"):
        est.stream(N, est.stream(N, alarm=True).state, alarm="frozen")
    with pytest.raises(SpecError, match="a frozen alarm, starts from errors"):
        LagRegressor(n_lags=2).fit(x, y).stream(N, alarm="frozen")
    with pytest.raises(SpecError, match="make it with alarm=True"):
        _ = live.alarm_shares
    with pytest.raises(SpecError, match="calibration is for"):
        est.stream(N, calibration=(x, y))
    with pytest.raises(ShapeError, match=r"y has shape \(1, 3, 240\), .* \(2, 3, 240\)"):
        est.stream(N, interval=0.8, calibration=(x, y[:1]))
    with pytest.raises(SpecError, match="does not learn"):
        live.learn(x[:, :, 0], y[:, :, 0])
    live = est.stream(N, interval=0.8, delay=1)
    live.step(x[:, :, 0])
    live.step(x[:, :, 1])
    with pytest.raises(DataError, match="2 steps wait for their target"):
        live.step(x[:, :, 2])
    assert live.n_pending == 2


@pytest.mark.slow
def test_labels_and_targets_of_series_are_refused():
    x, y = data()
    labels = LagClassifier(n_lags=2).fit(x, (y[:1] > y[:1].mean()).astype(int))
    with pytest.raises(SpecError, match="predicts labels"):
        labels.stream(N, interval=0.9)
    ends = LagRegressor(n_lags=2).fit(x, y[0, :, -1])
    with pytest.raises(SpecError, match="one target per series"):
        ends.stream(N, alarm=True)


@pytest.mark.slow
def test_coverage_on_a_drifting_series_where_a_fixed_interval_is_far_off():
    """The slope of the target changes and its noise grows after the fit."""
    rng = np.random.default_rng(0)
    n, trained = 4000, 1000
    x = rng.normal(size=(1, 2, n))
    drift = np.clip((np.arange(n) - trained) / 2000, 0, None)
    y = x * (1 + drift) + 2 * drift + rng.normal(size=x.shape) * 0.3 * (1 + 2 * drift)
    est = LagRegressor(n_lags=1, level=90, scale_target=False)
    est.fit(x[:, :, :trained], y[:, :, :trained])
    live = est.stream(2, interval=0.9)
    inside = []
    for t in range(trained, n):
        _, low, high = live.step(x[:, :, t])
        live.observe(y[:, :, t])
        inside.append((low <= y[:, :, t]) & (y[:, :, t] <= high))
    assert np.abs(np.mean(inside, axis=0) - 0.9).max() < 0.01
    _, low, high = est.predict_interval(x[:, :, trained:])
    assert ((low <= y[:, :, trained:]) & (y[:, :, trained:] <= high)).mean() < 0.6
