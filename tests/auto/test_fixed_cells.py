"""Ready-made estimators of fixed features: cell='kernels' and cell='linear'."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import cross_val_score

from fluxutils_py import (
    SequenceClassifier,
    SequenceRegressor,
    check_export,
    h5mmap,
    h5save,
    samples,
)
from fluxutils_py.errors import DataError, SpecError
from tests.plain_networks import KernelClassifier, LagRegressor

F, N, T = 2, 30, 41
CLASSES = np.array(["down", "level", "up"])


def waves(n=N, seed=0, dtype="float32"):
    """Series of three frequencies, and their labels; lengths differ."""
    rng = np.random.default_rng(seed)
    codes = np.arange(n) % 3
    t = np.arange(T)
    phases = rng.uniform(0, 6, (F, n, 1))
    x = np.sin((0.3 + 0.4 * codes[:, None]) * t + phases) + 0.3 * rng.normal(size=(F, n, T))
    lengths = rng.integers(25, T + 1, n)
    return (50 + 3 * x).astype(dtype), CLASSES[codes], lengths


@pytest.fixture(scope="module")
def fitted():
    x, y, lengths = waves()
    return SequenceClassifier(cell="kernels", random_state=0).fit(x, y, lengths=lengths)


@pytest.mark.slow
def test_kernels_tell_frequencies_apart_on_new_series(fitted):
    x, y, lengths = waves(60, seed=1)
    assert fitted.score(x, y, lengths=lengths) > 0.95
    p = fitted.predict_proba(x, lengths=lengths)
    assert p.shape == (60, 3)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert (fitted.classes_[p.argmax(1)] == fitted.predict(x, lengths=lengths)).all()
    assert fitted.n_iter_ == 1
    assert 0 <= fitted.loss_ < 0.5


@pytest.mark.slow
def test_a_list_of_series_is_as_good_as_lengths(fitted):
    x, y, lengths = waves()
    series = [x[:, i, :n] for i, n in enumerate(lengths)]
    est = SequenceClassifier(cell="kernels", random_state=0).fit(series, y)
    np.testing.assert_allclose(
        est.decision_function(series), fitted.decision_function(x, lengths=lengths), atol=1e-4
    )


@pytest.mark.slow
def test_a_stream_gives_at_each_step_what_shorter_series_give(fitted):
    x, _, _ = waves(6, seed=2)
    live = fitted.stream(n_series=6, method="decision_function")
    for t in range(T):
        y = live.step(x[:, :, t])
        if t in (0, 7, T - 1):
            np.testing.assert_allclose(
                y.T, fitted.decision_function(x[:, :, : t + 1]), rtol=0, atol=1e-4
            )


def test_predict_goes_on_from_a_state(fitted):
    x, _, _ = waves(5, seed=3)
    whole = fitted.predict_proba(x)
    _, state = fitted.predict_proba(x[:, :, :17], return_state=True)
    np.testing.assert_allclose(
        fitted.predict_proba(x[:, :, 17:], state=state), whole, rtol=0, atol=1e-6
    )


def test_files_copies_and_pickles_predict_the_same(fitted, tmp_path):
    x, _, _ = waves(7, seed=4)
    fitted.save(tmp_path / "model")
    loaded = SequenceClassifier.load(tmp_path / "model")
    expected = fitted.decision_function(x)
    for other in (loaded, pickle.loads(pickle.dumps(fitted))):
        assert (other.decision_function(x) == expected).all()
    assert clone(fitted).cell == "kernels"


@pytest.mark.slow
def test_data_in_a_file_and_views_give_the_same_model(tmp_path):
    x, y, _ = waves()
    h5save(tmp_path / "x.h5", {"x": x})
    expected = SequenceClassifier(cell="kernels", random_state=0).fit(x, y).decision_function(x)
    for form in (h5mmap(tmp_path / "x.h5", "x"), samples(x)):
        est = SequenceClassifier(cell="kernels", random_state=0).fit(form, y)
        np.testing.assert_allclose(est.decision_function(form), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_batchsize_and_seqsize_do_not_matter():
    x, y, lengths = waves()
    expected = None
    for settings in ({}, {"batchsize": 7, "seqsize": 9}):
        est = SequenceClassifier(cell="kernels", random_state=0, **settings)
        got = est.fit(x, y, lengths=lengths).decision_function(x)
        expected = got if expected is None else expected
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_weights_of_zero_leave_series_out():
    x, y, _ = waves()
    w = np.ones(N)
    w[[1, 5]] = 0
    est = SequenceClassifier(cell="kernels", random_state=0).fit(x, y, w)
    wrong = y.copy()
    wrong[[1, 5]] = "down"
    other = SequenceClassifier(cell="kernels", random_state=0).fit(x, wrong, w)
    np.testing.assert_allclose(
        est.decision_function(x), other.decision_function(x), rtol=0, atol=1e-4
    )


@pytest.mark.slow
def test_it_works_in_cross_validation():
    x, y, _ = waves()
    scores = cross_val_score(
        SequenceClassifier(cell="kernels", random_state=0), samples(x), y, cv=3
    )
    assert scores.min() > 0.7


@pytest.mark.slow
def test_numbers_of_series_are_regressed():
    x, _, _ = waves()
    y = x.std(2).sum(0)
    est = SequenceRegressor(cell="kernels", random_state=0).fit(x, y)
    assert est.score(x, y) > 0.95
    assert est.predict(x).shape == (N,)


@pytest.mark.slow
def test_validation_data_give_a_loss():
    x, y, _ = waves()
    more = waves(12, seed=6)[:2]
    est = SequenceClassifier(cell="kernels", random_state=0).fit(x, y, validation_data=more)
    assert len(est.validation_loss_curve_) == 1
    assert est.evaluate(*more) == pytest.approx(est.validation_loss_curve_[0], rel=1e-4)


@pytest.mark.slow
def test_warm_start_fits_again_and_partial_fit_is_refused(fitted):
    x, y, _ = waves()
    with pytest.raises(SpecError, match=r"partial_fit.*'kernels'.*closed form"):
        SequenceClassifier(cell="kernels").partial_fit(x, y, classes=CLASSES)
    est = SequenceClassifier(cell="kernels", random_state=0, warm_start=True)
    first = est.fit(x, y).decision_function(x)
    np.testing.assert_allclose(est.fit(x, y).decision_function(x), first, rtol=0, atol=1e-4)


def test_kernels_are_for_one_target_per_series():
    x, _, _ = waves()
    with pytest.raises(SpecError, match=r"'kernels' .* 'linear'"):
        SequenceRegressor(cell="kernels").fit(x, x[:1])


@pytest.mark.slow
def test_an_export_gives_what_the_stream_gives(tmp_path):
    """In ONNX, the layer takes long: see exporting/test_running.py."""
    x, y, lengths = waves()
    est = KernelClassifier(cell="kernels", random_state=0).fit(x, y, lengths=lengths)
    est.export(tmp_path / "model.pt2", "torch")
    assert check_export(tmp_path / "model.pt2", est, waves(3, seed=5)[0]) < 1e-4


# -- the linear model of lags ---------------------------------------------------------------------------


@pytest.mark.slow
def test_linear_is_the_ridge_on_lags():
    x, _, _ = waves(dtype="float64")
    rng = np.random.default_rng(1)
    y = x[:1] * 0.5 + np.roll(x[1:], 3, 2) + 0.1 * rng.normal(size=(1, N, T))
    est = LagRegressor(n_lags=24, scale_target=False).fit(x, y)
    z = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
    past = np.concatenate([np.zeros((F, N, 23)), z], 2)
    rows = (
        np.concatenate([past[:, :, 23 - k : 23 - k + T] for k in range(24)]).reshape(24 * F, -1).T
    )
    deviation = np.sqrt(rows.var(0) + 1e-6)
    rows = (rows - rows.mean(0)) / deviation / np.sqrt(24 * F)
    rows = rows * np.repeat(1 / np.sqrt(np.arange(1, 25)), F)  # trust in steps that are long ago
    unit = (rows**2).sum(1).mean()
    errors = []
    for alpha in np.logspace(-4, 2, 13) * unit:
        predicted = Ridge(alpha).fit(rows, y.ravel()).predict(rows).reshape(1, N, T)
        errors.append(np.abs(predicted - est.predict(x)).max())
    assert min(errors) < 1e-7


@pytest.mark.slow
def test_linear_classifies_steps():
    x, _, _ = waves()
    y = np.where(x[0] + np.roll(x[1], 2, 1) > 100, "high", "low")
    est = SequenceClassifier(cell="linear").fit(x, y)
    assert est.score(x, y) > 0.9
    assert est.predict(x).shape == (1, N, T)


@pytest.mark.slow
def test_missing_targets_are_left_out():
    x, _, _ = waves()
    y = x[:1] * 2.0
    gaps = y.copy()
    gaps[:, ::3, 5:9] = np.nan
    est = SequenceRegressor(cell="linear").fit(x, gaps)
    np.testing.assert_allclose(est.predict(x), y, atol=0.5)
    assert torch.isfinite(est.model_.head.weight).all()


def linear(x, y):
    return SequenceRegressor(cell="linear", random_state=0).fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [1, 100])
def test_sensors_that_are_read_in_turn_are_learnt_as_well_as_both(turn):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 2, 600))
    y = np.stack([x[0] - 0.5 * np.roll(x[1], 1, 1), 3 + np.roll(x[0], 2, 1)])
    is_first = np.arange(600) // turn % 2 == 0
    gaps = np.where(np.stack([is_first, ~is_first])[:, None], y, np.nan)
    assert linear(x, gaps).score(x, y) > 0.99  # of steps before the first, nothing is known
    few = y.copy()
    few[1, 0, 12:] = few[1, 1:] = np.nan
    np.testing.assert_allclose(linear(x, few).predict(x)[0], linear(x, y[:1]).predict(x)[0])


def test_a_target_that_is_never_there_is_refused():
    x, _, _ = waves()
    y = np.stack([x[0], np.full_like(x[0], np.nan)])
    with pytest.raises(DataError, match=r"output \[1\] has no target at a step that counts"):
        linear(x, y)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1e6])
@pytest.mark.parametrize("cell", ["auto", "linear", "kernels"])
def test_inputs_that_never_change_give_the_mean(cell, value):
    x, _, _ = waves()
    rng = np.random.default_rng(0)
    y = rng.normal(size=(1, N, T))
    mean = np.broadcast_to(y.mean(), y.shape)
    if cell == "kernels":
        y, mean = y[0, :, -1], np.full(N, y[0, :, -1].mean())
    found = SequenceRegressor(cell=cell, random_state=0).fit(np.full_like(x, value), y)
    np.testing.assert_allclose(found.predict(np.full_like(x, value)), mean, atol=0.05)
