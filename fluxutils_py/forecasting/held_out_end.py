"""Walk forward through the held-out end of the training part, for what a forecaster can promise.

:func:`walk_held_out_end` trains on all but the last steps of each series, forecasts from origins
in these, and returns forecasts, truths and baselines by series, origin and step of the horizon, all
in the units of the networks: differences from the seasonal naive forecast, divided by each series'
scale. What is chosen by them (widths of bands, weights, which network) depends on the training part
alone. ``fit`` is whatever trains on windows, so that kinds of networks can be compared on the same
origins::

    end = walk_held_out_end(windows, n_quantiles, fit)
    if end is not None:  # None: there is too little history to hold some out
        np.nanmean(np.abs(end.errors), axis=(0, 1))  # mean error by step of the horizon
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from fluxutils_py.data.segments import Segments
from fluxutils_py.forecasting.history import outputs_along
from fluxutils_py.forecasting.panel_windows import PanelWindows

SHARE = 0.2  # of the steps of a typical series that is held out, at most
MOST_HELD = 2048  # steps of a series, or two horizons: files may hold very long series
ENOUGH = 40  # times the horizon is held out of few seasons, of all series together
MANY_SEASONS = 10  # in a series that can do without a fifth of its steps
MOST_ORIGINS = 256  # evenly spaced, that series are forecast from
LEAST_ERRORS = 20  # of each step of the horizon, without which nothing is learnt from them
MOST_SERIES = 256  # evenly spaced, that are forecast
MOST_VALUES = 1 << 22  # numbers in all forecasts that are kept
CONTEXT = 1024  # steps before the held-out end that networks read at most, from a state of zeros


class HeldOutEnd(NamedTuple):
    """Forecasts of M series from W origins each, and what came.

    All values are differences from the seasonal naive forecast in units of the series' scale at the
    origin (see :class:`Features`). NaN where a value is missing.

    Attributes
    ----------
    outputs : ndarray of shape (M, W, 1 + Q, h)
        The point forecast and the quantiles, averaged over the networks.
    baselines : ndarray of shape (M, W, B, h)
        Forecasts that need no network, see ``Features.baselines``.
    targets : ndarray of shape (M, W, h)
    series : ndarray of int, shape (M,)
    origins : ndarray of int, shape (M, W)
        The last step that each forecast knows.
    """

    outputs: np.ndarray
    baselines: np.ndarray
    targets: np.ndarray
    series: np.ndarray
    origins: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """Truth minus point forecast: (M, W, h)."""
        return self.targets - self.outputs[:, :, 0]


def walk_held_out_end(
    windows: PanelWindows,
    n_quantiles: int,
    fit: Callable[[PanelWindows], Sequence[nn.Module]],
) -> HeldOutEnd | None:
    """Fit on all but the end of each series, and forecast the end from many origins.

    Parameters
    ----------
    windows : PanelWindows
        Of the whole training part.
    n_quantiles : int
    fit : callable
        Trains on windows, which end before the held-out steps, and returns the networks.

    Returns
    -------
    HeldOutEnd or None
        None where the history is too short, or too few of its values are known.
    """
    lengths = windows.source.lengths
    h = windows.features.h
    n_held = held_out_steps(lengths, h, windows.features.season)
    # others keep all their steps in training, and are not forecast
    series = np.flatnonzero(lengths >= 2 * n_held)
    n_origins = n_held - h + 1
    if n_held == 0 or len(series) * n_origins < LEAST_ERRORS:
        return None
    if len(series) > MOST_SERIES:
        series = series[np.linspace(0, len(series) - 1, MOST_SERIES).astype(int)]
    shortened = lengths - np.where(lengths >= 2 * n_held, n_held, 0)
    shorter = windows.until(shortened)
    if not _has_targets(shorter, series):
        return None
    models = fit(shorter)
    per_origin = len(series) * (2 + n_quantiles) * h
    n_origins = min(n_origins, MOST_ORIGINS, max(1, MOST_VALUES // per_origin))
    ahead = np.linspace(0, n_held - h, n_origins).round().astype(int)
    origins = (shortened[series] - 1)[:, None] + ahead
    end = forecast_origins(models, windows, n_quantiles, series, origins)
    # missing values make no errors, and may be all of the end
    n_errors = (~np.isnan(end.errors)).sum((0, 1))
    return end if n_errors.min() >= min(LEAST_ERRORS, origins.size) else None


def _has_targets(windows: PanelWindows, series: np.ndarray) -> bool:
    """Return whether one of these series has two known values so near each other that the later
    one can be a target.
    """
    stop = windows.source.lengths[series]
    # training has no targets in the first steps of a series, a quarter of it at most
    start = np.maximum(stop // 4, stop - CONTEXT)
    known = ~np.isnan(windows.source.cut(series, start, int((stop - start).max()))[0])
    row, step = np.nonzero(known)
    near = np.diff(step) <= windows.features.memory + windows.features.h
    return bool((near & (np.diff(row) == 0)).any())


def held_out_steps(lengths: np.ndarray, h: int, season: int) -> int:
    """Return how many last steps of each series are held out; 0 if too few would be left."""
    typical = int(np.median(lengths))
    n_held = min(round(SHARE * typical), max(MOST_HELD, 2 * h))
    if typical < MANY_SEASONS * season:
        # a network that has seen fewer seasons would look worse than the one that is kept
        n_held = min(n_held, h * (1 + -(-ENOUGH // len(lengths))))
    n_held = max(h, n_held)
    # as much again, and a horizon after the first season
    return n_held if typical - n_held >= max(n_held, season + h) else 0


def forecast_origins(
    models: Sequence[nn.Module],
    windows: PanelWindows,
    n_quantiles: int,
    series: np.ndarray,
    origins: np.ndarray,
) -> HeldOutEnd:
    """Forecast some series from the steps ``origins[m, w]``, and look up what came."""
    start = np.maximum(origins.min(1) - CONTEXT, 0)
    by_model = [outputs_along(model, windows, origins, series, start) for model in models]
    features = windows.features
    outputs = np.mean(by_model, 0)
    outputs = outputs.reshape(*origins.shape, 1 + n_quantiles, features.h)
    baselines = []
    targets = []
    for at in origins.T:
        steps = Segments(series, at, np.ones(len(at), int))
        past = windows.past(steps, 0, 1)
        baselines.append(features.baselines(past)[:, 0])
        targets.append(windows.targets(steps, 0, 1)[:, 0].astype(np.float64))
    return HeldOutEnd(outputs, np.stack(baselines, 1), np.stack(targets, 1), series, origins)
