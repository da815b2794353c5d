"""Cross-validate forecasts by walking forward in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.fitted_state import FittedState, forecasts_along
from fluxutils_py.forecasting.forecaster_settings import ForecasterSettings
from fluxutils_py.forecasting.model_fitting import fit_panel
from fluxutils_py.forecasting.outputs import key_columns
from fluxutils_py.frames.frames import make_frame
from fluxutils_py.frames.panel import Columns, Panel
from fluxutils_py.parallel import RankGroup


def cross_validate(
    settings: ForecasterSettings,
    fitted: FittedState | None,
    columns: Columns,
    ranks: RankGroup,
    panel: Panel,
    n_windows: int,
    step_size: int,
    refit: bool,
    outputs: Mapping[str, int],
) -> Any:
    """Implement ``Forecaster.cross_validation``; ``fitted`` are networks that are not trained here,
    and ``outputs`` the columns of forecasts with the number of each among the networks' outputs.
    """
    h = int(settings.h)
    behind = h + step_size * np.arange(n_windows - 1, -1, -1)
    cutoffs = np.maximum(panel.lengths[:, None] - behind, 0)  # (N, W); 0: the series has not begun
    _require_long_series(panel, cutoffs[:, 0], int(behind[0]))
    first_step = np.zeros(panel.n_series, int)
    parts: list[dict[str, np.ndarray]] = []
    # one pass over the series serves all cutoffs of the same networks
    for group in np.split(cutoffs, n_windows, axis=1) if refit else [cutoffs]:
        made = fitted
        if made is None:
            # cut before anything is chosen: no value after the cutoff can be seen
            past = panel.cut(first_step, group[:, 0])
            made, _ = fit_panel(clone(settings), columns, ranks, past)
        windows = made.windows(panel)
        forecasts = forecasts_along(made, windows, group - 1)
        for cutoff, values in zip(group.T, forecasts, strict=True):
            parts.append(_window_columns(made, panel, cutoff, values, outputs))
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    types = panel.types | {"cutoff": panel.types[columns.time]}
    return make_frame(found, types, panel.backend)


def _require_long_series(panel: Panel, cutoff: np.ndarray, behind: int) -> None:
    """Raise DataError if no series begins before the first cutoff; warn of those that do not."""
    short = np.flatnonzero(cutoff == 0)
    if len(short) == panel.n_series:
        raise DataError(
            f"no series is long enough: the windows take {behind} steps from the end of each, and "
            f"the longest series has {panel.lengths.max()}; use fewer windows, or a smaller "
            "step_size"
        )
    if len(short):
        warn(
            f"{len(short)} of {panel.n_series} series are too short for the first window, which "
            f"takes {behind} steps from the end of each (series {panel.ids[short[0]]!r} has "
            f"{panel.lengths[short[0]]})"
        )


def _window_columns(
    fitted: FittedState,
    panel: Panel,
    cutoff: np.ndarray,
    forecasts: np.ndarray,
    outputs: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Return keys, targets and forecasts (N, 1 + quantiles, h) after the ``cutoff[n]`` first steps
    of each series, for those that have begun.
    """
    h = fitted.h
    target = fitted.columns.target
    series = np.flatnonzero(cutoff)
    future = panel.cut(cutoff, np.where(cutoff > 0, cutoff + h, 0))
    # the keys are those of the h steps after the end of a panel
    empty = replace(future, lengths=np.zeros_like(future.lengths))
    columns = key_columns(fitted, empty, h)
    # the cutoff tells the windows apart, as in frames of NeuralForecast
    columns["cutoff"] = np.repeat(panel.times(series, cutoff[series] - 1), h)
    columns[target] = future.values[target]
    return columns | {name: forecasts[series, i].ravel() for name, i in outputs.items()}
