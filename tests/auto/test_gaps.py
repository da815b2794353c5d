"""Inputs that lack single values: the last one stands for them, and further inputs mark them."""

import numpy as np
import pytest
import torch
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceImputer,
    SequenceRegressor,
    check_export,
    export,
    load,
    samples,
    timesteps,
)
from fluxutils_py.errors import DataError, ExportError
from fluxutils_py.nn import Recur
from fluxutils_py.nn.time_features import LastValues

NAN = np.nan
T = 240


def data(seed=0, n_series=4):
    """Two slow inputs, of which a third of the steps is missing in runs, noise, and their sum."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, n_series, T)).cumsum(2) / 4 + np.array([50, 0])[:, None, None]
    y = (x.sum(0) + 0.1 * rng.normal(size=x.shape[1:]))[None]
    for f, n in np.ndindex(2, n_series):
        for start in rng.integers(0, T, 10):
            x[f, n, start : start + 8] = NAN
    x[0, :, 0] = NAN
    return np.concatenate([x, rng.normal(size=y.shape)]), y


def test_the_last_value_stands_for_a_gap_whatever_the_windows():
    x = np.random.default_rng(0).normal(size=(11, 3, 2))
    x[np.random.default_rng(1).random(x.shape) < 0.5] = NAN
    expected, last = [], np.zeros((3, 2))
    for step in x:
        last = np.where(np.isnan(step), last, step)
        expected.append(np.concatenate([last, np.isnan(step)], 1))
    layer = Recur(LastValues(2))
    for cuts in ([], [1], [4, 5, 9], range(1, 11)):
        layer.reset()
        parts = [layer(torch.from_numpy(part)) for part in np.split(x, cuts)]
        np.testing.assert_array_equal(torch.cat(parts).numpy(), expected)


@pytest.mark.parametrize("cell", ["linear", "linear+lstm", "lstm", "auto"])
def test_ready_made_models_take_gaps(cell, tmp_path):
    x, y = data()
    est = SequenceRegressor(cell=cell, random_state=0).fit(x, y)
    assert est.choice_.has_gaps
    x, y = data(1)
    predicted = est.predict(x)
    assert np.isfinite(predicted).all()
    piped = make_pipeline(SequenceImputer("ffill"), SequenceRegressor(cell=cell, random_state=0))
    piped.fit(samples(data()[0]), samples(data()[1]))
    error = np.abs(y - predicted).mean()
    assert error < 1.2 * np.abs(y - piped.predict(x)).mean()
    live = est.stream(4)
    steps = np.stack([live.step(x[:, :, t]) for t in range(T)], 2)
    np.testing.assert_allclose(steps, predicted, rtol=1e-5, atol=1e-5)
    est.save(tmp_path / "est")
    assert np.array_equal(load(tmp_path / "est").predict(x), predicted)
    rows = timesteps(x)
    np.testing.assert_allclose(rows.from_rows(est.predict(rows), 1), predicted, rtol=1e-6)


def test_rare_outages_do_not_harm_what_follows_them():
    """Marks of earlier steps would be features of some weight that hardly ever differ from 0."""
    rng = np.random.default_rng(0)
    level = rng.normal(size=(1, 1, 3000)).cumsum(2) / 8
    x = level + 0.3 * rng.normal(size=(3, 1, 3000))
    for start, lift in ((400, 2.0), (1300, -2.0), (2400, 2.0), (2700, 0.0)):
        x[:, :, start : start + 25] = NAN
        level[:, :, start + 5 : start + 60] += lift
    known = np.isfinite(x[:1])
    later = slice(2200, None)
    errors = []
    for inputs in (x, SequenceImputer("ffill").fit_transform(x)):
        est = SequenceRegressor(cell="linear").fit(inputs[..., :2200], level[..., :2200])
        error = np.abs(est.predict(inputs) - level)
        errors.append(error[..., later][known[..., later]].mean())
    assert errors[0] < 1.02 * errors[1]


def test_a_gap_is_marked():
    """Where values are missing because they are large, their absence tells."""
    rng = np.random.default_rng(0)
    value = rng.normal(size=(1, 6, T))
    x = np.concatenate([np.where(value > 1, NAN, value), rng.normal(size=value.shape)])
    est = SequenceRegressor(cell="linear").fit(x[:, :4], value[:, :4])
    imputed = make_pipeline(SequenceImputer("ffill"), SequenceRegressor(cell="linear"))
    imputed.fit(samples(x[:, :4]), samples(value[:, :4]))
    errors = [np.square(m.predict(x[:, 4:]) - value[:, 4:]).mean() for m in (est, imputed)]
    assert errors[0] < 0.3 * errors[1]


def test_classifiers_intervals_and_further_fits():
    x, y = data()
    labels = np.where(y > 50, "high", "low")
    clf = SequenceClassifier(cell="linear+lstm", max_updates=20, random_state=0).fit(x, labels)
    assert clf.score(x, labels) > 0.8
    est = SequenceRegressor(cell="linear", level=80, random_state=0).fit(x, y)
    x, y = data(1, 20)
    _, low, high = est.predict_interval(x)
    assert 0.6 < ((low <= y) & (y <= high)).mean() < 0.9
    x, y = data()
    more = SequenceRegressor(cell="lstm", max_updates=60, random_state=0).fit(x, y)
    before = more.n_iter_
    assert more.partial_fit(x, y).n_iter_ > before
    assert np.isfinite(more.evaluate(x, y))


@pytest.mark.slow
def test_an_exported_model_takes_gaps(tmp_path):
    x, y = (a.astype("float32") for a in data())
    est = SequenceRegressor(cell="linear+lstm", max_updates=20, random_state=0).fit(x, y)
    export(est, tmp_path / "model.onnx")
    check_export(tmp_path / "model.onnx", est, x, tolerance=1e-4)
    with pytest.raises(ExportError, match="fills gaps"):
        export(est, tmp_path / "model.h", format="c")


def test_steps_without_any_input_are_gaps_as_before():
    x, y = data()
    x[:, 1, 50:60] = NAN
    known = np.where(np.isnan(x).all(0), NAN, np.nan_to_num(x))
    assert SequenceRegressor(cell="linear").fit(known, y).choice_.has_gaps
    with pytest.raises(
        DataError, match=r"x is nan in all features at series 1, step 50; .* NaN in the target"
    ):
        Estimator().fit(known, y)
    y[:, 1, 50:60] = NAN
    est = SequenceRegressor(cell="linear").fit(x, y)
    predicted = est.predict(x)
    assert np.isnan(predicted[0, 1, 50:60]).all()
    assert np.isfinite(predicted[0, 0]).all()


def test_what_still_is_an_error():
    x, y = data()
    clean = np.nan_to_num(x)
    est = SequenceRegressor(cell="linear").fit(clean, y)
    assert not est.choice_.has_gaps
    with pytest.raises(DataError, match="x is nan at feature 0, series 0, step 0"):
        est.predict(x)
    infinite = np.where(np.isnan(x), np.inf, x)
    with pytest.raises(DataError, match="x is inf at feature 0, series 0, step 0"):
        SequenceRegressor(cell="linear").fit(infinite, y)
    with pytest.raises(DataError, match="x is nan"):  # kernels describe whole series
        SequenceRegressor().fit(x, y[0, :, -1])
    assert not hasattr(SequenceRegressor(), "model_")


def test_verbose_tells(capsys):
    x, y = data()
    SequenceRegressor(cell="linear", verbose=True).fit(x, y)
    told = capsys.readouterr().err
    assert "filling gaps in the inputs" in told
    assert "gaps filled with the last value and marked" in told
