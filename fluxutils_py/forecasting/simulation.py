"""Draw paths of the next steps: quantiles say how each step is distributed, past errors how steps
depend on each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.forecaster_settings import sorted_quantiles
from fluxutils_py.forecasting.history import History, forecasts_along
from fluxutils_py.forecasting.outputs import (
    forecast_values,
    future_covariates,
    key_columns,
    require_panel,
)
from fluxutils_py.forecasting.panel_windows import PanelWindows
from fluxutils_py.frames.frames import make_frame

N_SERIES = 64  # past errors come from at most so many series,
N_ORIGINS = 128  # and from so many last origins in each


def simulate_frame(
    fitted: FittedForecaster,
    history: History,
    shape: tuple[int, int] | None,
    futr_df: object,
    n: int,
    rng: np.random.Generator,
) -> Any:
    """Implement ``Forecaster.simulate`` for a history; ``shape`` as from :func:`array_shape`."""
    ahead = future_covariates(fitted, history, futr_df, fitted.h)
    paths = simulate_paths(fitted, history, ahead, n, rng)
    if shape is not None:
        return np.moveaxis(paths, 1, 0).reshape(n, *shape, fitted.h)
    panel = require_panel(history)
    keys = key_columns(fitted, panel, fitted.h)
    # the rows of a series: its steps in the first path, then those in the second
    of_series = np.arange(panel.n_series * fitted.h).reshape(panel.n_series, 1, fitted.h)
    rows = np.broadcast_to(of_series, paths.shape).ravel()
    columns = {name: values[rows] for name, values in keys.items()}
    columns["sample"] = np.broadcast_to(np.arange(n)[None, :, None], paths.shape).ravel()
    columns[fitted.names[0]] = paths.ravel()
    return make_frame(columns, panel.types, panel.backend)


def simulate_paths(
    fitted: FittedForecaster,
    history: History,
    ahead: np.ndarray,
    n: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return ``n`` paths of each series, (N, n, h); ``ahead`` holds the covariates known ahead.

    Raises
    ------
    SpecError
        If there are fewer than two quantiles.
    DataError
        If no series has ``h`` known steps in a row to learn from.
    """
    levels = sorted_quantiles(fitted.settings)
    if len(levels) < 2:
        raise SpecError(
            f"simulate draws from quantiles, of which the forecaster has {len(levels)}: fit with "
            "at least two, such as quantiles=(0.1, 0.5, 0.9)"
        )
    scores = _normal_scores(levels)
    templates = past_scores(fitted, history)
    values = forecast_values(fitted, history, ahead)[:, 1:]
    with np.errstate(invalid="ignore"):
        z = fitted.features.forward(values)
    paths = np.empty((history.n_series, n, fitted.h))
    for path, nodes in zip(paths, z, strict=True):
        # as many different ones as there are
        rows = rng.permutation(np.resize(rng.permutation(len(templates)), n))
        ranks = _ranks(templates[rows], rng)
        shares = (ranks + rng.random(ranks.shape)) / n
        path[:] = _at_scores(_normal_scores(shares), scores, nodes)
    paths = fitted.features.inverse(paths)
    # no value below 0 from the tails of what was never below
    never = ~(history.tail[0] < 0).any(1)
    floor = never[:, None] & (values[:, 0] >= 0)
    return np.where(floor[:, None] & (paths < 0), 0.0, paths)


def past_scores(fitted: FittedForecaster, history: History) -> np.ndarray:
    """Return where the truth was in past forecasts of h steps, (windows, h), as normal scores of
    its quantile.
    """
    h = fitted.h
    windows, lengths = _recent_windows(fitted, history)
    last = lengths - 1 - h
    longest = int(last.max())
    if longest < 0:
        raise DataError(
            f"no series is long enough to see how the {h} steps of a forecast depend on each "
            f"other: it takes {h + 1} steps, and the longest has {longest + 1 + h}"
        )
    # of each series the last half: the networks have read the first
    origins = last[:, None] - np.arange(min(N_ORIGINS, longest - longest // 2 + 1))
    origins[origins < np.maximum(last // 2, 0)[:, None]] = -1
    scores = _normal_scores(sorted_quantiles(fitted.settings))
    series = np.arange(len(lengths))
    found = []
    forecasts = forecasts_along(fitted.models, windows, origins, fitted.quantiles)
    for at, values in zip(origins.T, forecasts, strict=True):
        truth = windows.source.cut(series, at + 1, h)[0]
        use = (at >= 0) & ~np.isnan(truth).any(1) & ~np.isnan(values).any((1, 2))
        z = fitted.features.forward(truth[use])
        nodes = fitted.features.forward(values[use, 1:])
        found += [_scores_of(*pair, scores) for pair in zip(z, nodes, strict=True)]
    if not found:
        raise DataError(
            f"no series has {h} known steps in a row to see how the steps of a forecast depend on "
            "each other"
        )
    return np.stack(found)


def _recent_windows(fitted: FittedForecaster, history: History) -> tuple[PanelWindows, np.ndarray]:
    """Return windows of what is kept of the longest series, and how many steps that is."""
    n_kept = history.n_kept
    kept = np.minimum(history.lengths, n_kept)
    longest = np.argsort(-kept, kind="stable")[: 8 * N_SERIES]
    series = longest[:: -(-len(longest) // N_SERIES)]
    lengths = kept[series]
    inside = np.arange(n_kept) >= n_kept - lengths[:, None]
    values = history.tail[:, series][:, inside]
    return fitted.packed_windows(values, lengths, history.static[series]), lengths


def _normal_scores(shares: Any) -> np.ndarray:
    """Return the quantiles of the standard normal distribution."""
    return torch.special.ndtri(torch.as_tensor(shares, dtype=torch.float64)).numpy()


def _ranks(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the rank of each value in its column, from 0; equal ones in random order."""
    order = np.lexsort((rng.random(values.shape), values), axis=0)
    ranks = np.empty(values.shape, int)
    np.put_along_axis(ranks, order, np.arange(len(values))[:, None], axis=0)
    return ranks


def _at_scores(at: np.ndarray, scores: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return values (n, h) at normal scores (n, h), linear between nodes (Q, h) and beyond."""
    j = np.clip(np.searchsorted(scores, at) - 1, 0, len(scores) - 2)
    low = np.take_along_axis(nodes, j, 0)
    high = np.take_along_axis(nodes, j + 1, 0)
    return low + (high - low) * (at - scores[j]) / (scores[j + 1] - scores[j])


def _scores_of(values: np.ndarray, nodes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the normal scores (h,) of values (h,): the inverse of :func:`_at_scores`."""
    j = np.clip((nodes < values).sum(0) - 1, 0, len(scores) - 2)
    steps = np.arange(len(values))
    low = nodes[j, steps]
    width = nodes[j + 1, steps] - low
    # of two equal quantiles the values between are one
    share = (values - low) / np.where(width > 0, width, 1.0)
    return scores[j] + share * (scores[j + 1] - scores[j])
