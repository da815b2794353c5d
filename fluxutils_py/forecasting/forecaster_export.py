"""Export forecasters, and compare the files with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting import ExportedModel, Graph, write_graph
from fluxutils_py.exporting.export_files import check_format
from fluxutils_py.forecasting.covariates import Covariate
from fluxutils_py.forecasting.forecast_step import ForecastStep
from fluxutils_py.forecasting.history import forecasts_along
from fluxutils_py.forecasting.outputs import column_names
from fluxutils_py.forecasting.panel import series_name
from fluxutils_py.forecasting.panel_windows import PanelWindows
from fluxutils_py.parallel import get_communicator
from fluxutils_py.versions import installed_version

N_COMPARED = 24  # steps at which forecasts are compared


def export_forecaster(fc: Any, path: Any, format: str) -> None:
    """Implement ``Forecaster.export``."""
    check_format(format)
    check_is_fitted(fc, "models_")
    step = ForecastStep(fc.models_, fc.features_, fc.channels_, fc.covariates_, len(fc.quantiles))
    inputs = [torch.ones(n, dtype=torch.float64) for n in step.inputs.values()]
    covariates = {
        "past": fc.covariates_.hist,
        "static": fc.covariates_.stat,
        "known": fc.covariates_.futr,
    }
    metadata = {
        "h": fc.features_.h,
        "season": fc.features_.season,
        "covariates": {
            name: [_describe_covariate(c) for c in group] for name, group in covariates.items()
        },
        "estimator": type(fc).__name__,
        "fluxutils_py": installed_version("fluxutils_py"),
        "torch": torch.__version__,
    }
    if get_communicator(fc.comm).rank == 0:
        write_graph(
            path, Graph(inputs, steps=[step]), format, list(step.inputs), column_names(fc), metadata
        )


def _describe_covariate(covariate: Covariate) -> dict[str, Any]:
    categories = covariate.categories
    return {
        "name": covariate.name,
        "categories": None if categories is None else [str(c) for c in categories],
    }


def check_forecaster_export(fc: Any, path: Any, df: Any, tolerance: float) -> float:
    """Compare an exported file with its forecaster on some series; see ``check_export``.

    All steps go through the file, in windows of different lengths; the forecasts are compared at up
    to N_COMPARED steps of each series, its last one among them. Covariates known ahead count as
    missing after the end of a series.
    """
    check_is_fitted(fc, "models_")
    panel, array = fc._read(df, None, fitted=True)
    windows = fc._windows(panel, array)
    lengths = np.asarray(windows.source.lengths)
    ends = np.linspace(0, 1, N_COMPARED) * (lengths[:, None] - 1)
    origins = np.unique(ends.astype(int), axis=1)
    found = np.concatenate(_run_file(path, windows, fc), axis=-1)  # (T, N, outputs)
    expected = forecasts_along(fc.models_, windows, origins, len(fc.quantiles))
    largest = 0.0
    for at, want in zip(origins.T, expected, strict=True):
        got = found[at, np.arange(len(at))].reshape(want.shape)
        scale = np.maximum(1.0, np.nanmax(np.abs(want), axis=(1, 2), initial=0.0))[:, None, None]
        away = np.where(np.isnan(got) & np.isnan(want), 0.0, np.abs(got - want) / scale)
        worst = float(np.nan_to_num(away, nan=np.inf).max())
        if worst > tolerance:
            n, i, k = np.unravel_index(np.nan_to_num(away, nan=np.inf).argmax(), away.shape)
            raise ExportError(
                f"{path}: {column_names(fc)[i]} of series {series_name(panel, int(n))} is "
                f"{got[n, i, k]:.7g} {k + 1} steps after step {at[n]}, that of the forecaster is "
                f"{want[n, i, k]:.7g}: a relative difference of {worst:.1e}, above {tolerance:.1e}"
            )
        largest = max(largest, worst)
    return largest


def _run_file(path: Any, windows: PanelWindows, fc: Any) -> list[np.ndarray]:
    """Return the outputs of a file for all steps of all series from their first ones, each (T, N,
    h).
    """
    n, n_steps, h = windows.n_series, int(windows.source.lengths.max()), fc.features_.h
    series, first = np.arange(n), np.zeros(n, int)
    y, *past = windows.source.cut(series, first, n_steps)
    inputs = [y.T[:, :, None]]
    if past:
        inputs.append(_undo_scaling(fc.covariates_.hist, np.stack(past)).transpose(2, 1, 0))
    if fc.covariates_.stat:
        assert windows.static is not None
        static = _undo_scaling(fc.covariates_.stat, windows.static.T[:, :, None])
        inputs.append(np.repeat(static.transpose(2, 1, 0), n_steps, 0))
    if windows.ahead is not None:
        known = _undo_scaling(fc.covariates_.futr, windows.ahead.cut(series, first, n_steps + h))
        steps = np.lib.stride_tricks.sliding_window_view(known, 1 + h, axis=2)  # (C, N, T, 1 + h)
        inputs.append(steps.transpose(2, 1, 0, 3).reshape(n_steps, n, -1))
    file, parts, at, length = ExportedModel(path, n), [], 0, 1
    while at < n_steps:
        parts.append(file.run(*(x[at : at + length] for x in inputs)))
        at, length = at + length, 2 * length + 1
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _undo_scaling(covariates: tuple[Covariate, ...], channels: np.ndarray) -> np.ndarray:
    """Return channels (C, N, T) as they were before the covariates scaled them."""
    scale, mean = ([getattr(c, name) for c in covariates] for name in ("scale", "mean"))
    return channels * np.array(scale)[:, None, None] + np.array(mean)[:, None, None]
