"""Intervals and sets of arrays: what a fit holds out, and that predictions do not change."""

import math

import numpy as np
import pytest

from fluxutils_py import samples, timesteps
from fluxutils_py.errors import SpecError
from tests.plain_networks import LagClassifier, LagRegressor, plain_classifier, plain_regressor

F, T = 2, 100


def data(n_series, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(F, n_series, T))
    noise = rng.normal(size=(2, n_series, T)) * np.array([0.5, 2])[:, None, None]
    return x, np.stack([x.sum(0), x[0] - x[1]]) + noise


def linear(**arguments):
    # whose intervals are all equally wide
    return LagRegressor(n_lags=1, scale_target=False, **arguments)


def width_of(est, share=0.8):
    return est.fitted_parts_.calibration.quantile(share)


def quantile(errors, level):
    known = np.sort(np.abs(errors), axis=None)
    return known[math.ceil(level * (known.size + 1) - 1e-9) - 1]


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, 80])
def test_predictions_do_not_change(level):
    x, y = data(3)
    expected = plain_regressor(4, 2, epochs=3, random_state=0, dropout=0.1).fit(x, y)
    est = plain_regressor(4, 2, epochs=3, random_state=0, dropout=0.1, level=level).fit(x, y)
    assert np.array_equal(est.predict(x), expected.predict(x))
    assert est.loss_curve_ == expected.loss_curve_


def test_a_generator_of_the_user_goes_on_as_without():
    x, y = data(3)
    generators = [np.random.default_rng(5), np.random.default_rng(5)]
    for rng, level in zip(generators, (None, 80), strict=True):
        plain_regressor(4, epochs=1, random_state=rng, level=level).fit(x, y)
    assert generators[0].random() == generators[1].random()


@pytest.mark.slow
def test_width_is_the_quantile_of_the_errors_on_the_last_fifth_of_few_series():
    x, y = data(3)
    part = linear().fit(x[:, :, :80], y[:, :, :80])
    errors = (y - part.predict(x))[:, :, 80:]
    est = linear(level=80).fit(x, y)
    width = [quantile(e, 0.8) for e in errors]
    np.testing.assert_allclose(width_of(est), width)
    predicted, low, high = est.predict_interval(x)
    assert np.array_equal(predicted, est.predict(x))
    np.testing.assert_allclose(predicted - low, np.reshape(width, (2, 1, 1)) + np.zeros_like(y))
    np.testing.assert_allclose(high - predicted, predicted - low)


@pytest.mark.slow
def test_whole_series_of_many_are_held_out():
    x, y = data(20)
    est = linear(level=80, random_state=0).fit(x, y)
    errors = est.fitted_parts_.calibration.errors
    assert errors.shape == (2, 4, T)
    # of a model that has not seen them: each fits worse than in the model of all
    inside = [
        np.isclose(errors[0, i], (y - est.predict(x))[0, n], atol=0.2).all()
        for i in range(4)
        for n in range(20)
    ]
    assert sum(inside) == 4


@pytest.mark.slow
def test_coverage_of_new_series():
    x, y = data(20)
    est = linear(level=90, random_state=0).fit(x, y)
    x, y = data(200, seed=1)
    _, low, high = est.predict_interval(x)
    np.testing.assert_allclose(((low <= y) & (y <= high)).mean((1, 2)), 0.9, atol=0.03)


@pytest.mark.slow
def test_series_of_unequal_length_and_missing_targets():
    x, y = data(3)
    y[:, 1, 90:95] = np.nan
    lengths = np.array([100, 100, 60])
    est = linear(level=80).fit(x, y, lengths=lengths)
    errors = est.fitted_parts_.calibration.errors
    # the cut is at the same step for all, 80; the third series ends before
    known = ~np.isnan(errors[0])
    assert known.sum(1).tolist() == [20, 15]
    x_parts = [x[:, n, :k] for n, k in enumerate(lengths)]
    y_parts = [y[:, n, :k] for n, k in enumerate(lengths)]
    of_lists = linear(level=80).fit(x_parts, y_parts)
    np.testing.assert_allclose(width_of(of_lists), width_of(est))
    predicted, low, high = of_lists.predict_interval(x_parts)
    assert [p.shape for p in low] == [(2, 100), (2, 100), (2, 60)]
    np.testing.assert_allclose(high[2] - predicted[2], width_of(est)[:, None] + np.zeros(60))


@pytest.mark.slow
def test_steps_without_weight_do_not_count():
    x, y = data(3)
    weight = np.ones((3, T))
    weight[:, 85:] = 0
    y[:, :, 85:] = 1e6
    est = linear(level=80).fit(x, y, weight)
    # held out is a fifth of the 85 steps that count
    assert (~np.isnan(est.fitted_parts_.calibration.errors)).sum() == 2 * 3 * 17
    cut = linear(level=80).fit(x[:, :, :85], y[:, :, :85])
    np.testing.assert_allclose(width_of(est), width_of(cut))


@pytest.mark.slow
@pytest.mark.parametrize("view", [samples, timesteps])
def test_views_come_back_in_their_form(view):
    x, y = data(3)
    est = linear(level=80).fit(view(x), view(y))
    predicted, low, high = est.predict_interval(view(x))
    assert predicted.shape == low.shape == high.shape == est.predict(view(x)).shape
    arrays = est.predict_interval(x)
    for matrix, array in zip((predicted, low, high), arrays, strict=True):
        np.testing.assert_allclose(np.asarray(matrix), _rows(view, array))


def _rows(view, array):
    """(G, N, T) as rows of samples, or of timesteps."""
    g, n, t = array.shape
    if view is samples:
        return array.transpose(1, 0, 2).reshape(n, g * t)
    return array.transpose(2, 0, 1).reshape(t, g * n)


def test_held_out_data_of_the_user_calibrate_the_model_itself():
    x, y = data(3)
    validation = data(4, seed=2)
    est = plain_regressor(4, epochs=2, random_state=0, level=80)
    est.fit(x, y, validation_data=validation)
    errors = validation[1] - est.predict(validation[0])
    width = [quantile(e, 0.8) for e in errors]
    # behind them, the errors relative to the distances to the ends
    np.testing.assert_allclose(width_of(est), [*width, 1, 1], rtol=1e-5)
    stopped = plain_regressor(4, epochs=2, random_state=0, level=80, early_stopping=True)
    stopped.fit(x, y)
    assert stopped.fitted_parts_.calibration.errors.shape[1:] == (1, T)


@pytest.mark.slow
def test_one_target_per_series_holds_out_series():
    x, _ = data(20)
    y = x.mean((0, 2)) + 0.1 * np.random.default_rng(0).normal(size=20)
    est = linear(level=70, random_state=0).fit(x, y)
    assert est.fitted_parts_.calibration.errors.shape == (1, 4, 1)
    predicted, low, high = est.predict_interval(x)
    assert predicted.shape == low.shape == (20,)
    np.testing.assert_allclose(high - low, 2 * width_of(est)[0])


@pytest.mark.slow
def test_sets_hold_the_label_as_often_as_promised_and_the_likeliest_always():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 60, 40))
    # three classes that overlap
    labels = np.digitize(x + rng.normal(size=x.shape), [-0.7, 0.7])
    names = np.array(["low", "middle", "high"])[labels]
    est = LagClassifier(n_lags=1, level=90, random_state=0)
    est.fit(x[:, :40], names[:, :40])
    sets = est.predict_set(x[:, 40:])
    likely = est.predict_proba(x[:, 40:])
    assert sets.shape == likely.shape
    assert sets.dtype == bool
    (threshold,) = est.fitted_parts_.calibration.quantile(0.9)
    expected = (likely >= 1 - threshold - 1e-6) | (likely == likely.max(0))
    assert np.array_equal(sets, expected)
    position = np.searchsorted(est.classes_, names[:, 40:])
    assert abs(np.take_along_axis(sets, position, 0).mean() - 0.9) < 0.04
    assert 1 < sets.sum(0).mean() < 3


@pytest.mark.slow
def test_sets_of_lists_are_those_of_arrays():
    x, _ = data(12)
    labels = (x[:1] > 0).astype(int)
    est = LagClassifier(n_lags=1, level=90, random_state=0).fit(x, labels)
    lists = est.predict_set([x[:, n, : 50 + n] for n in range(12)])
    whole = est.predict_set(x)
    assert all(np.array_equal(s, whole[:, n, : 50 + n]) for n, s in enumerate(lists))


@pytest.mark.slow
def test_sets_of_series_are_rows():
    x, _ = data(30)
    labels = np.where(x.mean((0, 2)) > 0, 1, 0)
    est = plain_classifier(4, epochs=2, level=60, random_state=0).fit(x, labels)
    assert est.predict_set(x).shape == (30, 2)
    assert est.predict_set(x).any(1).all()


@pytest.mark.slow
def test_a_file_keeps_the_calibration(tmp_path):
    x, y = data(3)
    est = linear(level=80).fit(x, y)
    est.save(tmp_path / "est")
    loaded = LagRegressor.load(tmp_path / "est")
    for a, b in zip(loaded.predict_interval(x), est.predict_interval(x), strict=True):
        assert np.array_equal(a, b)
    first, second = (e.stream(3, interval=0.8).step(x[:, :, 0]) for e in (loaded, est))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_errors():
    x, y = data(3)
    est = linear().fit(x, y)
    with pytest.raises(SpecError, match=r"has no interval: set level=90"):
        est.predict_interval(x)
    with pytest.raises(SpecError, match=r"per cent: give 90 for 0\.9"):
        linear(level=0.9).fit(x, y)
    with pytest.raises(SpecError, match="a fit that continues"):
        plain_regressor(4, epochs=1, level=90).partial_fit(x, y)
    warm = plain_regressor(4, epochs=1, level=90, warm_start=True).fit(x, y)
    with pytest.raises(SpecError, match="a fit that continues"):
        warm.fit(x, y)
    with pytest.warns(UserWarning, match="too few for level 99.9, .* infinite"):
        assert np.isinf(linear(level=99.9).fit(x, y).predict_interval(x)[2]).all()


@pytest.mark.slow
def test_sets_from_too_few_held_out_series_hold_all_classes_and_say_so_at_the_line_that_asks():
    x, _ = data(30)
    labels = np.where(x.mean((0, 2)) > 0, 1, 0)
    est = plain_classifier(4, epochs=2, level=60, random_state=0).fit(x, labels)
    with pytest.warns(
        UserWarning, match=r"6 held-out .* level 90, .* 9: .*all classes.* 45 targets"
    ) as found:
        assert est.predict_set(x, level=90).all()
    assert [w.filename for w in found] == [__file__]
