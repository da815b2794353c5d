"""Forecast from origins inside of the series that a forecaster was trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.cross_validation import (
    Walk,
    frame_of_windows,
    window_columns,
)
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.history import forecasts_along
from fluxutils_py.frames.panel import Panel


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
    of_cutoffs = forecasts_along(fitted.models, windows, cutoffs - 1, fitted.quantiles)
    parts = [
        window_columns(fitted, panel, cutoff, forecasts)
        for cutoff, forecasts in zip(cutoffs.T, of_cutoffs, strict=True)
    ]
    return frame_of_windows(panel, fitted.columns.time, parts)
