"""Fit a ready-made estimator: choose its model and calibrate its intervals by fits on a part of the
data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.estimator.calibrating import HeldOut
from fluxutils_py.estimator.conformal import Calibration
from fluxutils_py.estimator.estimator_settings import MinibatchSize, Settings
from fluxutils_py.estimator.fit_choice import FitChoice
from fluxutils_py.estimator.fit_data import FitData, FitRequest, Training
from fluxutils_py.estimator.fitted_parts import SeriesEstimator
from fluxutils_py.estimator.fitting import After, BegunFit, assemble, nothing_more, run, run_fit
from fluxutils_py.estimator.same_fit import require_same_fit
from fluxutils_py.nn.ready_made import LinearPlusNetwork
from fluxutils_py.reporting.progress import say_stage
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.window_step import evaluate_windows

TRIAL_FRACTION = 0.2
FEW_SERIES = 9  # of which a trial holds out the ends, not whole ones
CLEARLY = 0.97  # of the loss of the linear model, below which a network is worth it
GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)


def run_auto_fit(est: SeriesEstimator, request: FitRequest) -> None:
    """Fit a ready-made estimator; see :func:`run_fit`."""
    _require_whole_fit(est, request)
    run_fit(est, request, _choose_and_calibrate)


def _choose_and_calibrate(settings: Settings, fit: BegunFit) -> tuple[Settings, After]:
    if not fit.continues:  # else the first fit has chosen
        settings = choose(fit)
    if settings.interval is None:
        return settings, nothing_more
    return settings, calibrated(settings, fit)


def _require_whole_fit(est: Any, request: FitRequest) -> None:
    """Raise SpecError if an interval is asked for that no held-out data can calibrate."""
    if est.interval is None:
        return
    continues = request.resume and hasattr(est, "model_")
    if continues or not request.is_fit:
        raise SpecError(
            "interval is calibrated on data that a whole fit holds out: a fit that continues has "
            "seen all; set interval=None, and give calibration=(x, y) to stream"
        )
    if request.sharded:
        raise SpecError(
            "interval and sharded=True: set interval=None, or give each rank all series"
        )


def choose(fit: BegunFit) -> Settings:
    """Return the settings of the model that is chosen for the data, after a trial if need be."""
    est: Any = fit.est
    choice = est.choose(fit.data.size, fit.data.request.is_fit)
    settings: Settings = est.settings_of(choice)
    if choice.needs_trial:
        line = "trying the network on a part of the data that is held out"
        say_stage(settings.verbose, fit.ranks, line)
        settings = est.settings_of(_choice_after_trial(settings, fit, choice))
    return settings


def _choice_after_trial(settings: Settings, fit: BegunFit, choice: FitChoice) -> FitChoice:
    """Return the choice with the gain of the network that does best on data that are held out.

    They are the last fifth of few series, or a fifth of many. Where the network adds nothing, the
    choice is the linear model alone.
    """
    held_out, training = fit_of_part(fit, settings, FEW_SERIES)
    assert held_out.validation is not None
    model = training.step.model
    held_out.validation.gap_value = math.nan
    batches = training.batches
    ranks = fit.ranks
    validation = TensorBatches(
        held_out.validation, batches.dtype, batches.device, rank=ranks.rank, size=ranks.size
    )
    losses = {}
    sums = [module for module in model.modules() if isinstance(module, LinearPlusNetwork)]
    for gain in GAINS:
        for module in sums:
            module.gain = gain
        losses[gain] = evaluate_windows(
            model, held_out.loss, validation, ranks, held_out.spec.precision
        )
    best = min(losses, key=lambda gain: math.inf if math.isnan(losses[gain]) else losses[gain])
    if not losses[best] < CLEARLY * losses[0.0]:
        best = 0.0
    cell = choice.cell if best > 0 else "linear"
    return replace(choice, cell=cell, gain=best, needs_trial=False)


def calibrated(settings: Settings, fit: BegunFit) -> After:
    """Return what gives the estimator the errors of its model on held-out data, after the fit.

    They are those of the model of the fit, on data that the user holds out anyway; else those of a
    model that learns from a part of the data alone, before the fit, which learns from all.
    """
    data = fit.data
    is_given = data.request.validation_data is not None
    calibration: Calibration | None = None
    if not (is_given or settings.early_stopping):
        line = "fitting on a part, to calibrate the interval on the rest"
        say_stage(settings.verbose, fit.ranks, line)
        calibration = _calibration_by_trial(settings, fit)

    def keep(training: Training) -> None:
        found = calibration
        windows = training.data.validation
        if windows is not None:
            whole = windows.segments if is_given else training.data.inputs.segments()
            held_out = HeldOut(windows, whole, training.data.codec, training.data.spec)
            found = held_out.calibration(training.step.model)
        fit.est.fitted_parts_ = replace(fit.est.fitted_parts_, calibration=found)

    return keep


def _calibration_by_trial(settings: Settings, fit: BegunFit) -> Calibration:
    """Return the errors, on a part of the data, of a model that was fitted on the rest."""
    few = FEW_SERIES
    if fit.data.targets.per_series:
        few = 0  # the end of a series has its target: whole series are held out
        if fit.data.inputs.N < 2:
            raise DataError(
                "interval: one series with one target cannot be held out; give more series, or "
                "validation_data"
            )
    held_out, training = fit_of_part(fit, settings, few)
    assert held_out.validation is not None
    whole = held_out.inputs.segments()
    part = HeldOut(held_out.validation, whole, held_out.codec, held_out.spec)
    return part.calibration(training.step.model)


def fit_of_part(fit: BegunFit, settings: Settings, few: int) -> tuple[FitData, Training]:
    """Fit a model on all but the last fifth of few series, or a fifth of many.

    Return the data, whose ``validation`` is the rest, and the training, done. The estimator and
    its generator stay as they are.
    """
    trial = replace(settings, early_stopping=True, callbacks=None, verbose=False)
    # a generator of the user advances once, by the fit itself
    trial = replace(trial, random_state=None)
    size = MinibatchSize.of(trial, fit.ranks.size, fit.saved)
    held_out = fit.data.cut(trial, size.whole, fit.data.split(TRIAL_FRACTION, fit.seed, few))
    spec = replace(held_out.spec, patience=None)
    fitted = replace(held_out, spec=spec, validation=None)
    rng = np.random.default_rng(fit.seed)
    training = assemble(fitted, fit.ranks, rng, size, request=fit.data.request)
    require_same_fit(training)
    run(cast(SeriesEstimator, SimpleNamespace()), training)
    return held_out, training
