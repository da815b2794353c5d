"""Choose the kind of a forecaster's networks on the end of the training part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.estimator import Estimator
from fluxutils_py.forecasting.covariates import Covariates
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.forecaster_settings import (
    RECURRENT,
    SEGMENTS,
    ForecasterSettings,
    recurrent_settings,
)
from fluxutils_py.forecasting.held_out_end import HeldOutEnd, walk_held_out_end
from fluxutils_py.forecasting.panel_windows import ArrayFNT, ArraySource, PackedSeries, PanelWindows
from fluxutils_py.forecasting.segment_model import LEAST_SEGMENTS, SegmentSizes
from fluxutils_py.inputs.panel import Panel

# a recurrent network has all its outputs at each step: with more, its training takes minutes
MOST_OUTPUTS = 1_000
LEAST_STEPS = 4_000  # of all series, without which segments have too little to learn from


def segment_features(features: Features, lengths: np.ndarray) -> Features:
    """Return the features of a network of segments, whose inputs are last values alone."""
    sizes = _segment_sizes(features, lengths)
    return replace(features, lag=features.season, input_size=sizes.input_size)


def _segment_sizes(features: Features, lengths: np.ndarray) -> SegmentSizes:
    return SegmentSizes.of(features.season, int(np.median(lengths)), features.h)


def candidate_networks(
    settings: ForecasterSettings,
    source: PackedSeries | ArraySource,
    features: Features,
    covariates: Covariates,
) -> list[str]:
    """Return the kinds of networks that can be used, the first of which needs no choice.

    Raises
    ------
    DataError
        If ``network`` is "segments" and there are covariates.
    """
    has_covariates = bool(covariates.hist or covariates.futr or covariates.stat)
    if settings.network == SEGMENTS and has_covariates:
        raise DataError(
            "network='segments' reads the last values alone, and there are covariates; leave out "
            "hist_exog_list, futr_exog_list and stat_exog_list, or set network='recurrent'"
        )
    if settings.network != "auto":
        return [settings.network]
    sizes = _segment_sizes(features, source.lengths)
    if (
        has_covariates
        or recurrent_settings(settings)
        or sizes.n_past < LEAST_SEGMENTS
        or source.lengths.sum() < LEAST_STEPS
    ):
        return [RECURRENT]
    if features.h * (1 + len(settings.quantiles)) > MOST_OUTPUTS:
        return [SEGMENTS]
    return [RECURRENT, SEGMENTS]


def choose_network(
    candidates: Mapping[str, FittedForecaster],
    series: Panel | ArrayFNT,
    loss: object,
    fit: Callable[[FittedForecaster, PanelWindows], Estimator],
) -> tuple[str, dict[str, float]]:
    """Train each kind of network without the end of the training part, and compare their errors
    there.

    Returns
    -------
    str
        The kind with the smallest error; the first where there is too little history to tell.
    dict of str to float
        The errors, relative to those of the seasonal naive forecast.
    """
    errors: dict[str, float] = {}
    for kind, candidate in candidates.items():

        def fit_candidate(windows: PanelWindows) -> list:
            return list(fit(candidate, windows).model_.members)

        windows = candidate.windows(series)
        end = walk_held_out_end(windows, candidate.n_quantiles, fit_candidate)
        if end is None:
            break
        errors[kind] = relative_error(end, loss)
    if not errors:
        return next(iter(candidates)), errors
    return min(errors, key=lambda kind: errors[kind]), errors


def relative_error(end: HeldOutEnd, loss: object) -> float:
    """Return the mean error of the point forecasts relative to that of the seasonal naive ones."""
    power = 2 if loss == "mse" else 1
    # of the same steps: in units of the scale, the naive forecast's error is the target
    known = ~np.isnan(end.errors)
    own = np.abs(end.errors[known]) ** power
    naive = np.abs(end.targets[known]) ** power
    return float(own.mean() / max(naive.mean(), 1e-30))
