"""Export forecasters, and compare the files with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting import ExportedModel, Graph, write_graph
from fluxutils_py.exporting.export_files import Path
from fluxutils_py.forecasting.covariates import Covariate, Covariates
from fluxutils_py.forecasting.fitted_state import FittedState
from fluxutils_py.forecasting.forecast_step import ForecastStep
from fluxutils_py.forecasting.history import forecasts_along
from fluxutils_py.forecasting.panel_windows import PanelWindows
from fluxutils_py.frames.panel import Panel
from fluxutils_py.parallel import get_communicator
from fluxutils_py.versions import installed_version

N_COMPARED = 24  # steps at which forecasts are compared


def export_forecaster(
    fitted: FittedState,
    path: Path,
    format: str,
    class_name: str,
    comm: object,
) -> None:
    """Implement ``Forecaster.export``; ``class_name`` is that of the forecaster."""
    step = ForecastStep(fitted)
    # of one series: only their sizes and types matter
    inputs = [torch.ones(n, dtype=torch.float64) for n in step.inputs.values()]
    covariates = {
        "past": fitted.covariates.hist,
        "static": fitted.covariates.stat,
        "known": fitted.covariates.futr,
    }
    metadata = {
        "h": fitted.h,
        "season": fitted.features.season,
        "covariates": {k: [_describe_covariate(c) for c in v] for k, v in covariates.items()},
        "estimator": class_name,
        "fluxutils_py": installed_version("fluxutils_py"),
        "torch": torch.__version__,
    }
    # the step is built on every rank: what cannot be exported is an error on all of them
    if get_communicator(comm).rank == 0:
        graph = Graph(inputs, steps=[step])
        write_graph(path, graph, format, list(step.inputs), fitted.names, metadata)


def _describe_covariate(covariate: Covariate) -> dict[str, Any]:
    categories = covariate.categories
    return {
        "name": covariate.name,
        "categories": None if categories is None else [str(c) for c in categories],
    }


def check_forecaster_export(
    fitted: FittedState,
    path: Path,
    panel: Panel,
    tolerance: float,
) -> float:
    """Compare an exported file with its forecaster on some series; see ``check_export``.

    All steps go through the file, in windows of different lengths; the forecasts are compared at up
    to N_COMPARED steps of each series, its last one among them. Covariates known ahead count as
    missing after the end of a series.
    """
    windows = fitted.windows(panel)
    lengths = windows.source.lengths
    last = lengths[:, None] - 1
    origins = np.linspace(0, 1, N_COMPARED) * last
    # short series have fewer steps than are compared
    origins = np.unique(origins.astype(int), axis=1)
    outputs = _run_file(path, windows, fitted.covariates)
    expected = forecasts_along(fitted.models, windows, origins, fitted.quantiles)
    largest = 0.0
    for at, want in zip(origins.T, expected, strict=True):
        got = outputs[at, np.arange(len(at))]
        got = got.reshape(want.shape)
        away = _relative_differences(got, want)
        worst = float(away.max())
        if worst > tolerance:
            n, i, k = np.unravel_index(away.argmax(), away.shape)
            raise ExportError(
                f"{path}: {fitted.names[i]} of series {panel.ids[n]!r} is "
                f"{got[n, i, k]:.7g} {k + 1} steps after step {at[n]}, that of the forecaster is "
                f"{want[n, i, k]:.7g}: a relative difference of {worst:.1e}, above {tolerance:.1e}"
            )
        largest = max(largest, worst)
    return largest


def _relative_differences(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the differences of forecasts (N, outputs, h), relative to the largest of each series.

    0 where both are NaN, infinite where one is.
    """
    largest = np.nanmax(np.abs(want), axis=(1, 2), initial=0.0)
    # of the whole series: a value near 0 has few exact digits
    scale = np.maximum(1.0, largest)[:, None, None]
    both_missing = np.isnan(got) & np.isnan(want)
    away = np.abs(got - want) / scale
    away = np.where(both_missing, 0.0, away)
    return np.nan_to_num(away, nan=np.inf)


def _run_file(
    path: Path,
    windows: PanelWindows,
    covariates: Covariates,
) -> np.ndarray:
    """Return the outputs of a file for all steps of all series from their first ones: (T, N,
    outputs * h).
    """
    n_steps = int(windows.source.lengths.max())
    inputs = _file_inputs(windows, covariates, n_steps)
    file = ExportedModel(path, windows.n_series)
    parts = []
    begin = 0
    length = 1
    # pieces of 1, 3, 7, ... steps: the state must be handed on at any place
    while begin < n_steps:
        stop = begin + length
        outputs = file.run(*(x[begin:stop] for x in inputs))
        parts.append(np.concatenate(outputs, axis=-1))
        begin = stop
        length = 2 * length + 1
    return np.concatenate(parts)


def _file_inputs(
    windows: PanelWindows,
    covariates: Covariates,
    n_steps: int,
) -> list[np.ndarray]:
    """Return the inputs of an exported file in its units: (T, N, features) each."""
    n = windows.n_series
    h = windows.features.h
    series = np.arange(n)
    first = np.zeros(n, int)
    y, *past = windows.source.cut(series, first, n_steps)
    inputs = [y.T[:, :, None]]
    if past:
        values = _undo_scaling(covariates.hist, np.stack(past))
        inputs.append(values.transpose(2, 1, 0))
    if covariates.stat:
        assert windows.static is not None
        # static covariates are inputs of every step of the file
        static = windows.static.T[:, :, None]
        static = _undo_scaling(covariates.stat, static).transpose(2, 1, 0)
        inputs.append(np.repeat(static, n_steps, 0))
    if windows.ahead is not None:
        known = windows.ahead.cut(series, first, n_steps + h)
        known = _undo_scaling(covariates.futr, known)
        steps = sliding_window_view(known, 1 + h, axis=2)  # (C, N, T, 1 + h)
        steps = steps.transpose(2, 1, 0, 3)
        inputs.append(steps.reshape(n_steps, n, -1))
    return inputs


def _undo_scaling(covariates: tuple[Covariate, ...], channels: np.ndarray) -> np.ndarray:
    """Return channels (C, N, T) as they were before the covariates scaled them."""
    scale = np.array([c.scale for c in covariates])
    mean = np.array([c.mean for c in covariates])
    return channels * scale[:, None, None] + mean[:, None, None]
