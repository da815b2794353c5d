"""Choose the kind of a forecaster's networks on the end of the training part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.calibration import HeldOutEnd
from fluxutils_py.forecasting.fitted_state import FittedState
from fluxutils_py.forecasting.forecaster_settings import (
    RECURRENT,
    SEGMENTS,
    ForecasterSettings,
    kind_of,
    seasons_of,
)
from fluxutils_py.forecasting.networks import segment_length, segments_of_past
from fluxutils_py.parallel import RankGroup

# a recurrent network has all its outputs at each step: with more, its training takes minutes
MOST_OUTPUTS = 1_000
LEAST_SEGMENTS = 4  # of the past, of a network of segments
LEAST_STEPS = 4_000  # of all series, without which segments have too little to learn from
NEAR = (
    1.02  # errors of segments, relative to the other kind's, that a held-out end cannot tell apart
)


def with_network(fitted: FittedState, kind: str, lengths: np.ndarray) -> FittedState:
    """Return what is fitted, with the features and channels of a kind of network."""
    if kind == fitted.network:
        return fitted
    of = fitted.features
    n_past = segments_of_past(of.season, int(np.median(lengths)), of.h)
    # other values are inputs, and the units of the outputs stay
    features = replace(of, lag=of.season, input_size=n_past * segment_length(of.season))
    channels = replace(fitted.channels, history=features.n_inputs)
    return replace(fitted, features=features, channels=channels, network=kind)


def candidate_networks(
    settings: ForecasterSettings,
    lengths: np.ndarray,
    fitted: FittedState,
    is_weighted: bool,
) -> list[str]:
    """Return the kinds of networks that can be used, the first of which needs no choice.

    ``is_weighted`` says whether targets have weights, or some of them only validate.

    Raises
    ------
    DataError
        If it is "segments" and there are covariates.
    """
    has_covariates = bool(fitted.channels.covariates)
    asked = kind_of(settings)
    if asked == SEGMENTS and has_covariates:
        raise DataError(
            "network='segments' reads the last values alone, and there are covariates; leave out "
            "hist_exog_list, futr_exog_list and stat_exog_list, or set network='recurrent'"
        )
    if asked != "auto":
        return [asked]
    features = fitted.features
    if (
        has_covariates
        or is_weighted
        or seasons_of(settings)[1] != "auto"
        or segments_of_past(features.season, int(np.median(lengths)), features.h) < LEAST_SEGMENTS
        or lengths.sum() < LEAST_STEPS
    ):
        return [RECURRENT]
    if features.h * (1 + len(settings.quantiles)) > MOST_OUTPUTS:
        return [SEGMENTS]
    return [RECURRENT, SEGMENTS]


def network_errors_of(
    ends: Mapping[str, HeldOutEnd | None],
    loss: object,
    ranks: RankGroup,
) -> dict[str, float]:
    """Return the error of each kind of network on the held-out end, relative to that of the
    seasonal naive forecast; empty where the history is too short for one.
    """
    known = {kind: end for kind, end in ends.items() if end is not None}
    errors = np.array([relative_error(end, loss) for end in known.values()])
    # hosts differ in their last digits, and must choose the same
    ranks.broadcast([torch.from_numpy(errors)])
    return dict(zip(known, errors.tolist(), strict=True))


def best_network(errors: Mapping[str, float]) -> str:
    """Return the kind of network with the smallest error; segments, which train and forecast in a
    fifth of the time, where their error is near it.
    """
    return min(errors, key=lambda kind: errors[kind] / (NEAR if kind == SEGMENTS else 1.0))


def relative_error(end: HeldOutEnd, loss: object) -> float:
    """Return the mean error of the point forecasts relative to that of the seasonal naive ones."""
    power = 2 if loss == "mse" else 1
    # of the same steps: in units of the scale, the naive forecast's error is the target
    known = ~np.isnan(end.errors)
    own = np.abs(end.errors[known]) ** power
    naive = np.abs(end.targets[known]) ** power
    return float(own.mean() / max(naive.mean(), 1e-30))
