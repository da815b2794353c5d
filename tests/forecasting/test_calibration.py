"""The held-out end of the training part: what was held out, and what was forecast from where."""

import numpy as np
import pytest

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.calibration import held_out_steps, walk_held_out_end
from fluxutils_py.forecasting.features import BASELINE_NAMES
from fluxutils_py.forecasting.forecaster_settings import quantile_column
from fluxutils_py.forecasting.panel_windows import WindowArray

QUANTILES = (0.2, 0.5, 0.9)


@pytest.fixture(scope="module")
def fitted(make_panel, small):
    """A forecaster of quantiles whose windows are walked: of two features, some values missing."""
    rng = np.random.default_rng(3)
    y = 20 + rng.normal(size=(2, 3, 61)).cumsum(2)
    y[0, 1, 7:9] = np.nan
    fc = Forecaster(3, (4,), quantiles=QUANTILES, transform="none", calibrate=False, **small)
    fc.fit(y)
    return fc, y


def walked(fc, y):
    windows = fc._fitted.windows(fc._read_known(y, None))
    seen = []

    def fit(windows):
        seen.append(windows)
        return fc.models_

    return walk_held_out_end(windows, len(QUANTILES), fit), seen


@pytest.mark.slow
def test_forecasts_truths_and_baselines_are_those_of_their_origins(fitted):
    fc, y = fitted
    end, (shortened,) = walked(fc, y)
    held = 12  # a fifth of 61 steps
    assert (shortened.source.lengths == 61 - held).all()
    assert end.origins.shape == (6, held - 3 + 1)
    f = fc.features_
    series = y.reshape(6, -1)
    for n, w in [(0, 0), (3, 4), (5, 9)]:
        t = end.origins[n, w]
        assert t == 61 - held - 1 + w
        forecast = fc.predict(y[:, :, : t + 1])
        names = ["Forecaster", *(quantile_column(q) for q in QUANTILES)]
        expected = np.stack([forecast[name].reshape(6, -1)[n] for name in names])
        past = series[n, : t + 1]
        naive = past[[t - 3, t - 2, t - 1]]
        scale = max(np.nanmean(np.abs(past[4:] - past[:-4])), f.smallest_scale)
        np.testing.assert_allclose(naive + scale * end.outputs[n, w], expected, rtol=1e-5)
        truth = series[n, t + 1 : t + 4]
        np.testing.assert_allclose(naive + scale * end.targets[n, w], truth, rtol=1e-5)
        slope = (past[-1] - past[0]) / t
        by_hand = {
            "last": past[[-1, -1, -1]],
            "drift": past[-1] + slope * np.array([1, 2, 3]),
            "level": np.full(3, past[-4:].mean()),
            "mean": np.full(3, past.mean()),  # 128 steps and more
            "long season": naive,
            "seasonal mean": past[t - 15 :].reshape(4, 4).mean(0)[:3],
        }
        for name, values in by_hand.items():
            found = naive + scale * end.baselines[n, w, BASELINE_NAMES.index(name)]
            np.testing.assert_allclose(found, values, rtol=1e-6)


def test_nothing_of_the_held_out_steps_is_seen_in_training(fitted):
    fc, y = fitted
    _, (shortened,) = walked(fc, y)
    changed = y.copy()
    changed[:, :, 49:] = 1e6
    _, (other,) = walked(fc, changed)
    for content in ("inputs", "targets"):
        a, b = (np.asarray(WindowArray(w, content)[:, :, :]) for w in (shortened, other))
        assert a.shape[2] == 49
        np.testing.assert_array_equal(a, b)


def test_too_little_history_is_not_held_out(fitted):
    fc, y = fitted
    assert walked(fc, y[:, :, :12])[0] is None
    assert held_out_steps(np.array([130] * 45), 8, 52) == 16
    assert held_out_steps(np.array([130, 130, 20]), 8, 52) == 26
    assert held_out_steps(np.array([700] * 400), 48, 24) == 140
    assert held_out_steps(np.array([655_360]), 48, 24) == 2048
    assert held_out_steps(np.array([60]), 30, 7) == 0
    assert held_out_steps(np.array([34, 34]), 14, 7) == 0
    assert held_out_steps(np.array([50, 50]), 14, 7) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("h", "missing"), [(1, slice(-30, None)), (3, slice(-30, None)), (3, slice(0, 125))]
)
def test_nothing_is_corrected_by_an_end_without_values_or_with_nothing_before_it(h, missing, small):
    y = np.full((1, 1, 150), 5.0)
    y[..., missing] = np.nan
    fc, plain = (
        Forecaster(h, season_length=1, quantiles=(0.1, 0.9), calibrate=calibrate, **small).fit(y)
        for calibrate in (True, False)
    )
    assert fc.correction_ is None
    found = fc.predict()
    for name, expected in plain.predict().items():
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found[name], expected)
