"""Intervals whose widths follow the inputs: what they hold, and that every way of asking agrees."""

import copy
import pickle

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_pinball_loss
from sklearn.pipeline import make_pipeline

from fluxutils_py import SequenceRegressor, SequenceScaler, check_export, samples, timesteps
from fluxutils_py.auto.intervals import pinball_of_ends
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.streams.conformal import conformal_quantile
from tests.plain_networks import LagRegressor

N, T = 12, 160
SPREAD = 8.0  # of the noise where the second input is positive, relative to the other steps


def data(n_series=N, n_steps=T, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, n_series, n_steps))
    noise = rng.normal(size=(2, n_series, n_steps)) * np.where(x[1] > 0, SPREAD, 1) / 4
    return x, np.stack([x.sum(0), 100 - 10 * x[0]]) + noise * np.array([1, 10])[:, None, None]


@pytest.fixture(scope="module")
def est():
    return LagRegressor(n_lags=1, level=[95, 80], random_state=0).fit(*data())


@pytest.mark.parametrize("n_series", [3, N])
def test_widths_follow_the_inputs(n_series):
    x, y = data(n_series, T * N // n_series)
    est = LagRegressor(n_lags=1, level=80, random_state=0).fit(x, y)
    x, y = data(30, seed=1)
    predicted, low, high = est.predict_interval(x)
    np.testing.assert_allclose(predicted, est.predict(x), rtol=1e-6)
    inside, width = (low <= y) & (y <= high), high - low
    is_wide = x[1] > 0
    for g in range(2):
        assert abs(inside[g].mean() - 0.8) < 0.04
        assert abs(inside[g][is_wide].mean() - inside[g][~is_wide].mean()) < 0.25
        assert 3 < width[g][is_wide].mean() / width[g][~is_wide].mean() < 1.5 * SPREAD
    # of intervals that are equally wide, as many hold all quiet steps, and few of the others
    constant = LagRegressor(n_lags=1, level=80, scale_target=False, random_state=0).fit(*data())
    _, below, above = constant.predict_interval(x)
    equal = (below <= y) & (y <= above)
    assert (equal[:, ~is_wide].mean() - equal[:, is_wide].mean()) > 0.3
    assert width.mean() < (above - below).mean()


def test_errors_relative_to_the_ends_have_the_level_as_their_quantile(est):
    errors = est.fitted_parts_.calibration.errors  # of two outputs, then of the levels 80 and 95
    for level, relative in zip((0.8, 0.8, 0.95, 0.95), errors[2:], strict=True):
        found = conformal_quantile(np.abs(relative), level)
        # a higher level holds the lower ones, and may have to be wider
        assert found == pytest.approx(1) if level == 0.8 else found <= 1 + 1e-9
    assert np.array_equal(np.sign(errors[:2]), np.sign(errors[2:4]))


def test_higher_levels_hold_the_lower_ones(est):
    x, y = data(seed=2)
    ends = {level: est.predict_interval(x, level=level) for level in (80, 95)}
    assert (ends[95][1] <= ends[80][1]).all()
    assert (ends[80][2] <= ends[95][2]).all()
    for level, (_, low, high) in ends.items():
        assert abs(((low <= y) & (y <= high)).mean() - level / 100) < 0.04


def test_the_loss_is_the_pinball_loss_of_both_ends():
    rng = np.random.default_rng(0)
    out, y = rng.normal(size=(5, 4, 10)), rng.normal(size=(5, 4, 2))
    shares = (0.1, 0.9, 0.02, 0.98)
    found = pinball_of_ends(torch.from_numpy(out), torch.from_numpy(y), shares=shares)
    assert found.shape == y.shape
    expected = [
        mean_pinball_loss(y[:, :, g].ravel(), out[:, :, 2 + 2 * k + g].ravel(), alpha=share)
        for k, share in enumerate(shares)
        for g in range(2)
    ]
    assert found.mean().item() == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("form", ["samples", "timesteps", "list", "lengths"])
def test_each_form_of_inputs_has_the_same_ends(est, form):
    x, _ = data(5, 30, seed=3)
    whole = est.predict_interval(x, level=80)
    if form == "list":
        found = est.predict_interval([x[:, n, : 20 + n] for n in range(5)], level=80)
        for ends, expected in zip(found, whole, strict=True):
            for n, of_series in enumerate(ends):
                np.testing.assert_allclose(of_series, expected[:, n, : 20 + n])
        return
    if form == "lengths":
        found = est.predict_interval(x, level=80, lengths=[30, 7, 30, 30, 30])
        assert np.isnan(found[2][:, 1, 7:]).all()
        np.testing.assert_allclose(found[2][:, 0], whole[2][:, 0])
        return
    view = samples(x) if form == "samples" else timesteps(x)
    for ends, expected in zip(est.predict_interval(view, level=80), whole, strict=True):
        assert ends.shape == est.predict(view).shape
        np.testing.assert_allclose(np.asarray(view.from_rows(ends, 2)), expected)


def test_a_vector_of_targets_has_vectors_of_ends():
    x, y = data(1, 400)
    rows, target = x[:, 0].T, y[0, 0]
    est = LagRegressor(n_lags=1, level=80, random_state=0).fit(rows, target)
    assert [a.shape for a in est.predict_interval(rows)] == [(400,)] * 3


def test_pipelines_transform_first():
    x, y = data()
    pipe = make_pipeline(SequenceScaler(), LagRegressor(n_lags=1, level=80, random_state=0))
    pipe.fit(samples(x), samples(y))
    predicted, low, high = pipe[-1].predict_interval(pipe[:-1].transform(samples(x)))
    np.testing.assert_allclose(predicted, pipe.predict(samples(x)))
    inside = (low <= samples(y)) & (samples(y) <= high)
    assert abs(np.asarray(inside).mean() - 0.8) < 0.05


def test_files_copies_and_pickles_have_the_same_ends(est, tmp_path):
    x, _ = data(4, 20)
    expected = est.predict_interval(x, level=95)
    est.save(tmp_path / "est")
    twins = (
        LagRegressor.load(tmp_path / "est"),
        copy.deepcopy(est),
        pickle.loads(pickle.dumps(est)),
    )
    for twin in twins:
        for a, b in zip(twin.predict_interval(x, level=95), expected, strict=True):
            assert np.array_equal(a, b)
        assert twin.interval_estimator_.model_.center is twin.model_
    with pytest.raises(TypeError, match="save that estimator"):
        est.interval_estimator_.save(tmp_path / "ends")
    again = LagRegressor.load(tmp_path / "est").fit(*data(seed=4))
    assert again.predict_interval(x, level=80)[0].shape == expected[0].shape


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "c", "torch"])
def test_the_estimator_of_intervals_is_exported(tmp_path, format):
    x, y = data(6, 100)
    est = SequenceRegressor(cell="linear+lstm", max_updates=3, level=80, random_state=0)
    est.fit(x.astype("float32"), y.astype("float32"))
    ends = est.interval_estimator_
    together = np.concatenate(est.predict_interval(x.astype("float32")))
    np.testing.assert_allclose(ends.predict(x.astype("float32")), together)
    path = tmp_path / ("model.h" if format == "c" else "model")
    ends.export(path, format=format)
    check_export(path, ends, x[:, :, :20].astype("float32"), tolerance=2e-5)


def test_a_stream_widens_and_narrows_the_ends_of_the_fit(est):
    x, _ = data(4, 60, seed=5)
    _, low, high = est.predict_interval(x, level=80)
    live = est.stream(4, interval=0.8)
    found = [live.step(x[:, :, t]) for t in range(30)]
    for t, (prediction, below, _) in enumerate(found):
        np.testing.assert_allclose(prediction, est.predict(x)[:, :, t], rtol=1e-6)
        # no target has come: by the same factor at all steps
        factor = (prediction - below) / (prediction - low[:, :, t])
        np.testing.assert_allclose(
            factor, (found[0][0] - found[0][1]) / (found[0][0] - low[:, :, 0])
        )
        assert (factor > 0.5).all()
        assert (factor < 2).all()
    before = (prediction - below) / (prediction - low[:, :, 29])
    for t in range(30):  # far above
        live.observe(found[t][0] + 3 * (high - low)[:, :, t])
    state = live.state
    prediction, below, above = live.step(x[:, :, 30])
    assert ((above - prediction) > 2 * (high - prediction[..., None])[:, :, 30]).all()
    assert np.isfinite(before).all()
    again = est.stream(4, state, interval=0.8).step(x[:, :, 30])
    for a, b in zip(again, (prediction, below, above), strict=True):
        assert np.array_equal(a, b)


def test_a_stream_holds_its_share_where_the_noise_doubles():
    x, y = data(2, 1500)
    est = LagRegressor(n_lags=1, level=80, random_state=0).fit(x[:, :, :1000], y[:, :, :1000])
    y = y + 2 * (y - est.predict(x)) * (np.arange(1500) >= 1000)
    live = est.stream(2, interval=0.8)
    inside = []
    for t in range(1500):
        _, low, high = live.step(x[:, :, t])
        inside.append((low <= y[:, :, t]) & (y[:, :, t] <= high))
        live.observe(y[:, :, t])
    assert abs(np.mean(inside[1050:]) - 0.8) < 0.04


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_that_are_constant_have_narrow_intervals(dtype):
    x, y = (a.astype(dtype) for a in data(3, 120))
    y[1] = 5
    est = LagRegressor(n_lags=1, level=80, random_state=0).fit(x, y)
    _, low, high = est.predict_interval(x)
    np.testing.assert_allclose(low[1], 5, rtol=1e-5)
    np.testing.assert_allclose(high[1], 5, rtol=1e-5)
    assert 0.6 < ((low <= y) & (y <= high))[0].mean() < 0.95
    live = est.stream(3, interval=0.8)
    for t in range(120):
        _, low, high = live.step(x[:, :, t])
        live.observe(y[:, :, t])
    assert np.isfinite([low, high]).all()
    np.testing.assert_allclose([low[1], high[1]], 5, rtol=1e-3)


@pytest.mark.parametrize("settings", [{"scale_target": False}, {"level": 99.5}])
def test_where_all_widths_are_equal_there_is_no_estimator_of_intervals(settings):
    x, y = data(3, 40)
    arguments = {"level": 80, "random_state": 0, **settings}
    if settings == {"level": 99.5}:
        with pytest.warns(UserWarning, match="24 held-out .* too few"):
            est = LagRegressor(n_lags=1, **arguments).fit(x, y)
        with pytest.warns(UserWarning, match="24 held-out .* too few"):
            assert np.isinf(est.predict_interval(x)[1]).all()
    else:
        est = LagRegressor(n_lags=1, **arguments).fit(x, y)
    assert est.interval_estimator_ is None
    predicted, low, high = est.predict_interval(x, level=70)
    np.testing.assert_allclose(high - predicted, predicted - low)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (0.8, "per cent: give 80 for 0.8"),
        (100, "in per cent, such as 80"),
        ("80", "in per cent, such as 80"),
        ([80, -1], "in per cent, such as 80"),
        (True, "in per cent, such as 80"),
        ([], r"in per cent, such as 80 .* got \[\]"),
    ],
)
def test_what_is_no_level(level, message):
    with pytest.raises(SpecError, match=message):
        LagRegressor(n_lags=1, level=level).fit(*data(3, 40))


def test_other_levels_than_those_of_the_fit(est):
    x, _ = data(2, 10)
    with pytest.raises(SpecError, match=r"one of \[95, 80\]: give one"):
        est.predict_interval(x)
    with pytest.raises(SpecError, match=r"level=90: .* \(80\.0, 95\.0\)"):
        est.predict_interval(x, level=90)
    with pytest.raises(SpecError, match=r"one of \[80, 95\]"):
        est.predict_interval(x, level=[80, 95])
    with pytest.raises(TypeError, match=r"level=90 for interval=0\.9"):
        SequenceRegressor(interval=0.9)
