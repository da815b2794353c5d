"""Trials on data that are held out: their errors, the choice by them, and what it leaves."""

import dataclasses
import re
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from fluxutils_py import SequenceClassifier, SequenceRegressor, load, save
from fluxutils_py.auto import trial_fits, trials
from fluxutils_py.auto.trials import BLOCKS, GAINS, choice_after_trials
from fluxutils_py.data import SeriesArray
from fluxutils_py.estimator.fitted_parts import FitChoice
from fluxutils_py.nn.ready_made import LinearPlusNetwork

BEFORE = FitChoice("linear+lstm", needs_trial=True, max_updates=70)


def product(n_series, n_steps, seed=0):
    """Return inputs, and a target that a linear model cannot learn."""
    x = np.random.default_rng(seed).normal(size=(2, n_series, n_steps))
    return x, x[:1] * x[1:] + 0.3 * x[:1]


# -- the choice ------------------------------------------------------------------------------------


def errors_of(*at_full_gain):
    """Return errors of blocks that go straight from 1 to those given."""
    return 1 + np.array(at_full_gain)[:, None] * GAINS - GAINS


@pytest.mark.parametrize(
    ("full", "in_time", "gain"),
    [
        ([0.85, 0.9, 0.85, 0.9], True, 0.6),
        ([0.5, 0.6, 0.5, 0.6], True, 1.0),  # so much better that all is kept
        ([0.5, 0.6, 0.5, 0.6], False, 1.0),
        ([0.5, 0.5, 0.5, 1.1], False, 0.5),  # no block more than 5 per cent worse
        ([1.2, 0.2, 0.2, 0.8], True, 0.12),
        ([1.1, 1.0, 1.2, 1.1], False, 0.0),
        ([0.9, 1.1, 0.88, 1.09], True, 0.0),  # within the standard error
        ([0.9, 1.04, 0.88, 1.04], False, 1.0),
        ([np.nan, 0.5, 0.5, 0.5], False, 1.0),
    ],
)
def test_the_gain_is_the_best_that_is_safe(full, in_time, gain):
    choice = choice_after_trials(BEFORE, errors_of(*full), in_time)
    assert choice.gain == pytest.approx(gain)
    assert choice.cell == ("linear+lstm" if gain else "linear")
    assert not choice.needs_trial
    assert choice.max_updates == 70


def test_errors_of_quiet_blocks_count_little():
    errors = np.array([[2.0], [2.0], [2.0], [0.01]]) * errors_of(0.5, 0.5, 0.5, 3.0)
    assert choice_after_trials(BEFORE, errors, False).gain == 1.0


def test_nothing_that_is_known_is_the_linear_model():
    errors = np.full((BLOCKS, len(GAINS)), np.nan)
    assert choice_after_trials(BEFORE, errors, True).cell == "linear"


# -- the errors ------------------------------------------------------------------------------------


@pytest.fixture
def found(monkeypatch):
    """The trials of a fit: held-out data, model, axis and errors of each."""
    seen = []
    plain = trials.errors_by_block

    def call(held, model, axis, ranks):
        errors = plain(held, model, axis, ranks)
        seen.append((held, model, axis, errors))
        return errors

    monkeypatch.setattr(trial_fits, "errors_by_block", call)
    return seen


def as_tried(est, held, model, gain):
    """Return the estimator with the model and the codec of a trial."""
    for module in model.modules():
        if isinstance(module, LinearPlusNetwork):
            module.gain = gain
    est.model_ = model
    est.fitted_parts_ = dataclasses.replace(est.fitted_parts_, codec=held.codec)
    return est


def test_errors_of_trials_in_time_are_those_of_predictions(found):
    x, y = product(2, 500)
    y[0, 1, 390:420] = np.nan
    est = SequenceRegressor(random_state=0).fit(x, y)
    assert [axis for _, _, axis, _ in found] == [1, 1]
    for (held, model, _, errors), (begin, end) in zip(found, [(300, 400), (400, 500)], strict=True):
        for gain in (0.0, 0.5, 1.0):
            predicted = as_tried(est, held, model, gain).predict(x)
            wrong = ((predicted - y) / held.codec.scale.scale)[0, :, begin:end] ** 2
            expected = [np.sqrt(np.nanmean(b)) for b in np.array_split(wrong, BLOCKS, axis=1)]
            np.testing.assert_allclose(errors[:, list(GAINS).index(gain)], expected, rtol=1e-4)


def test_errors_of_labels_are_without_weights_of_classes(found):
    x, y = product(40, 60)
    labels = np.where(y > 1, "high", "low")
    weight = np.random.default_rng(1).random(labels.shape[1:]) + 0.5
    est = SequenceClassifier(random_state=0, class_weight="balanced").fit(x, labels, weight)
    ((held, model, axis, errors),) = found
    assert axis == 0
    series = np.unique(held.windows.segments.series)
    assert len(series) == 8
    for gain in (0.0, 1.0):
        likely = as_tried(est, held, model, gain).predict_proba(x)[1]
        expected = [
            log_loss(
                labels[0, block].ravel() == "low",
                likely[block].ravel(),
                sample_weight=weight[block].ravel(),
            )
            for block in np.array_split(series, BLOCKS)
        ]
        np.testing.assert_allclose(errors[:, list(GAINS).index(gain)], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("known", "spec", "n_blocks"),
    [
        (slice(280, 400), None, 4),  # the first trial has nothing to learn from
        (slice(330, 400), None, 0),
        (slice(0, 300), None, 8),  # what is behind the last target is no part of the data
        (slice(0, 400), {"burn_in": 270}, 0),  # longer than what is held out
    ],
)
def test_a_trial_without_targets_is_left_out(known, spec, n_blocks):
    x, y = product(1, 400)
    target = np.full_like(y, np.nan)
    target[:, :, known] = y[:, :, known]
    est = SequenceRegressor(spec=spec, random_state=0).fit(x, target)
    assert {len(row) - 1 for row in est.choice_.tried} == {n_blocks}
    if n_blocks == 0:
        assert est.cell_ == "linear"
    assert np.isfinite(est.predict(x)).all()


# -- what is left ----------------------------------------------------------------------------------


def test_what_was_tried_is_kept_and_prints_a_table(tmp_path):
    x, y = product(1, 300)
    est = SequenceRegressor(random_state=0)
    with pytest.raises(AttributeError, match="choice_"):
        _ = est.choice_
    est.fit(x, y)
    lines = str(est.choice_).splitlines()
    assert lines[0].startswith(f"cell={est.cell_!r}")
    assert len(lines) == 2 + len(GAINS)
    assert len(est.choice_.tried[0]) == 1 + 2 * BLOCKS
    save(est, tmp_path / "est")
    assert load(tmp_path / "est").choice_ == est.choice_


@pytest.mark.parametrize("kind", [SequenceRegressor, SequenceClassifier])
def test_what_does_not_learn_is_computed_once_with_the_same_result(kind, monkeypatch):
    """Series of different lengths, missing targets, several models."""
    x, y = product(3, 90)
    x[:, 1, 50:] = np.nan
    y[:, 1, 50:] = np.nan
    y[0, 0, 5:9] = np.nan
    if kind is SequenceClassifier:
        y = np.where(np.isnan(y), np.nan, y > 0)
    settings = {"cell": "linear+gru", "max_updates": 4, "n_models": 2, "random_state": 0}
    settings |= {"dropout": 0.0, "seqsize": 30, "batchsize": 2}
    x64 = x.astype(np.float64)
    once = kind(**settings).fit(x64, y, lengths=[90, 50, 90])
    monkeypatch.setattr(trial_fits, "MOST_KEPT", 0)
    each_time = kind(**settings).fit(x64, y, lengths=[90, 50, 90])
    np.testing.assert_allclose(once.loss_curve_, each_time.loss_curve_, rtol=1e-6)
    for mine, theirs in zip(once.model_.parameters(), each_time.model_.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=0, atol=1e-6)


def test_networks_learn_with_dropout_and_noise_and_all_that_is_left(monkeypatch):
    """In training mode, also where what does not learn was computed before."""
    modes = []
    plain = LinearPlusNetwork.forward

    def forward(network, x):
        if torch.is_grad_enabled():
            modes.append({network.training, network.dropout.training, network.noise.training})
        return plain(network, x)

    monkeypatch.setattr(LinearPlusNetwork, "forward", forward)
    x, y = product(1, 300)
    est = SequenceRegressor(random_state=0).fit(x, y)
    assert len(modes) > est.choice_.max_updates
    assert modes == [{True}] * len(modes)
    without = SequenceRegressor(cell="linear+gru", dropout=0.0, max_updates=9, random_state=0)
    half = SequenceRegressor(cell="linear+gru", dropout=0.5, max_updates=9, random_state=0)
    assert without.fit(x, y).loss_curve_ != half.fit(x, y).loss_curve_


def test_the_fit_goes_on_from_its_trials(monkeypatch):
    """The linear model is that of a fit alone, and the network has learnt before."""
    x, y = product(12, 100)
    est = SequenceRegressor(random_state=0).fit(x, y)
    assert est.cell_ == "linear+lstm"
    alone = SequenceRegressor(cell="linear").fit(x, y)
    np.testing.assert_array_equal(
        est.model_.linear.head.weight.detach(), alone.model_.head.weight.detach()
    )
    # 200 updates are divided between a trial and the fit
    assert est.choice_.max_updates == 100
    assert est.loss_curve_[0] < 0.8 * alone.loss_curve_[0]


def test_a_trial_that_keeps_the_linear_model_is_the_fit_of_one(monkeypatch):
    worse = errors_of(1.1, 1.2, 1.1, 1.2)
    monkeypatch.setattr(trial_fits, "errors_by_block", lambda *given: worse)
    x = np.random.default_rng(0).normal(size=(2, 2, 150))
    y = x[:1] - x[1:] + np.random.default_rng(1).normal(size=(1, 2, 150))
    est = SequenceRegressor(random_state=0).fit(x, y)
    alone = SequenceRegressor(cell="linear", random_state=0).fit(x, y)
    assert est.cell_ == "linear"
    np.testing.assert_array_equal(est.predict(x), alone.predict(x))
    assert est.loss_curve_ == alone.loss_curve_
    assert dataclasses.replace(est.choice_, tried=()).gain == 0.0


@pytest.mark.parametrize("level", [None, 80])
def test_each_stage_has_a_bar_on_a_terminal(level, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    x, y = product(2, 250)
    est = SequenceRegressor(level=level, random_state=0).fit(x, y)
    told = capsys.readouterr().err
    shown = dict.fromkeys(re.findall(r"\r([a-z0-9 ]+): +\d+%", told))
    of_level = [] if level is None else ["calibration", "intervals"]
    assert list(shown) == ["linear model", "trial 1 of 2", "trial 2 of 2", *of_level]
    n_updates = est.choice_.max_updates
    assert f"{n_updates}/{n_updates}" in told  # of the fit itself, which has no name


def test_of_very_many_steps_one_trial_holds_out_some(monkeypatch, capsys):
    monkeypatch.setattr(trial_fits, "MOST_HELD_OUT", 80)
    held = []
    plain = trial_fits.errors_by_block

    def errors(part, *arguments):
        held.append(part.windows.segments.length.sum())
        return plain(part, *arguments)

    monkeypatch.setattr(trial_fits, "errors_by_block", errors)
    x, y = product(2, 400)
    est = SequenceRegressor(random_state=0, verbose=True).fit(x, y)
    assert held == [80]
    assert len(est.choice_.tried[0]) == 1 + BLOCKS
    told = capsys.readouterr().err
    assert "1 of 3: fitting the linear model" in told
    assert "2 of 3: trying the network" in told


@pytest.mark.slow
def test_a_default_fit_reads_each_input_at_most_six_times(monkeypatch):
    n_read = 0
    plain = SeriesArray.read

    def read(array, *where):
        nonlocal n_read
        values = plain(array, *where)
        n_read += values.size * (array.name == "x")
        return values

    monkeypatch.setattr(SeriesArray, "read", read)
    x, y = product(20, 1000)
    assert SequenceRegressor(random_state=0).fit(x, y).cell_ == "linear+lstm"
    assert n_read < 6 * x.size


@pytest.mark.slow
def test_an_interval_is_calibrated_by_the_model_of_the_last_trial_that_learnt_on():
    rng = np.random.default_rng(0)
    x, y = product(40, 200)
    y = y + 0.3 * rng.normal(size=y.shape)
    est = SequenceRegressor(level=80, scale_target=False, random_state=0).fit(x[:, :30], y[:, :30])
    assert est.cell_ == "linear+lstm"
    predicted, low, high = est.predict_interval(x[:, 30:])
    new = y[:, 30:]
    assert 0.75 < ((low <= new) & (new <= high)).mean() < 0.87
    # as wide as the errors of the model itself, not of one that has learnt less
    assert est.fitted_parts_.calibration.quantile(0.8) < 1.15 * np.quantile(
        abs(new - predicted), 0.8
    )
