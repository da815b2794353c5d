"""Forecast from origins inside of the series that a forecaster was trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.cross_validation import Walk, cut_horizon
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.history import forecasts_along
from fluxutils_py.forecasting.outputs import key_columns
from fluxutils_py.inputs.frames import make_frame
from fluxutils_py.inputs.panel import Panel


def in_sample_frame(fitted: FittedForecaster, panel: Panel, step_size: int) -> Any:
    """Implement ``Forecaster.predict_insample``.

    One pass of the networks serves all origins, which are counted from the end of each series, as
    in cross-validation.

    Raises
    ------
    DataError
        If no series is longer than the horizon.
    """
    h = fitted.h
    longest = int(panel.lengths.max())
    if longest <= h:
        raise DataError(
            f"no series is longer than the horizon of {h} steps (the longest has {longest}): no "
            "forecast of known values can begin in it"
        )
    walk = Walk(1 + (longest - h - 1) // step_size, step_size, None)
    behind = walk.steps_behind(h)
    cutoffs = np.maximum(panel.lengths[:, None] - behind, 0)  # 0: the series has not begun
    windows = fitted.windows(panel)
    of_cutoffs = forecasts_along(fitted.models, windows, cutoffs - 1, fitted.n_quantiles)
    parts = [
        _columns_at(fitted, panel, cutoff, forecasts)
        for cutoff, forecasts in zip(cutoffs.T, of_cutoffs, strict=True)
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    types = panel.types | {"cutoff": panel.types[fitted.columns.time]}
    return make_frame(columns, types, panel.backend)


def _columns_at(
    fitted: FittedForecaster,
    panel: Panel,
    cutoff: np.ndarray,
    forecasts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return keys, truth and forecasts (N, 1 + quantiles, h) of the series that have begun."""
    h = fitted.h
    target = fitted.columns.target
    series = np.flatnonzero(cutoff)
    future = cut_horizon(panel, series, cutoff[series], h)
    # the keys are those of the h steps after the end of a panel
    empty = replace(future, lengths=np.zeros_like(future.lengths))
    columns = key_columns(fitted, empty, h)
    last_known = panel.times(series, cutoff[series] - 1)
    columns["cutoff"] = np.repeat(last_known, h)
    columns[target] = future.values[target]
    columns |= {name: forecasts[series, i].ravel() for i, name in enumerate(fitted.names)}
    return columns
