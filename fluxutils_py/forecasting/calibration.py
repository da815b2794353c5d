"""Calibrate forecasts by those of the held-out end of the training part: weights of networks and
simple forecasts at each step of the horizon, and how wide the bands have to be.

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
from fluxutils_py.forecasting.features import Correction
from fluxutils_py.forecasting.fitted_state import outputs_along
from fluxutils_py.forecasting.panel_windows import PanelWindows

SHARE = 0.2  # of the steps of a typical series that is held out, at most
MOST_HELD = 2048  # steps of a series, or two horizons
ENOUGH = 40  # times the horizon is held out of few seasons, of all series together
MANY_SEASONS = 10  # in a series that can do without a fifth of its steps
MOST_ORIGINS = 256  # evenly spaced, that series are forecast from
LEAST_ERRORS = 20  # of each step of the horizon, without which nothing is learnt from them
MOST_SERIES = 256  # evenly spaced, that are forecast
MOST_VALUES = 1 << 22  # numbers in all forecasts that are kept
CONTEXT = 1024  # steps before the held-out end that networks read at most, from a state of zeros


# of learning from them
NETWORK_FIRST = 0.5  # weight of the network before any error is seen; the others share the rest
N_ITERATIONS = 200
FOLDS = 5  # of series, or of origins, in which the weights of the others are tried
RATE = 4.0
SPREADS = (1.0, 0.75, 1.25, 0.5, 1.5, 0.25, 2.0, 0.0)  # that are tried, nearest to 1 first
GAIN = 0.99  # of the loss so far, below which another one is taken: networks know of new regimes
# errors that are needed to trust what they teach as much as the networks: a held-out end is one
# stretch of time, and what it favours may not last
PRIOR_ERRORS = 30
MOST_ROWS = 4096  # evenly spaced errors from which the weights of a group of steps are learnt
RATIO = 1.5  # between neighbouring groups of steps of the horizon


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
    origins : ndarray of int, shape (M, W)
        The last step that each forecast knows.
    """

    outputs: np.ndarray
    baselines: np.ndarray
    targets: np.ndarray
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
    end = forecast_origins(models, windows, series, origins)
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
    series: np.ndarray,
    origins: np.ndarray,
) -> HeldOutEnd:
    """Forecast some series from the steps ``origins[m, w]``, and look up what came."""
    start = np.maximum(origins.min(1) - CONTEXT, 0)
    by_model = [outputs_along(model, windows, origins, series, start) for model in models]
    features = windows.features
    outputs = np.mean(by_model, 0)
    outputs = outputs.reshape(*origins.shape, -1, features.h)
    baselines = []
    targets = []
    for at in origins.T:
        steps = Segments.single_steps(series, at)
        past = windows.past(steps, 0, 1)
        baselines.append(features.baselines(past)[:, 0])
        targets.append(windows.targets(steps, 0, 1)[:, 0].astype(np.float64))
    return HeldOutEnd(outputs, np.stack(baselines, 1), np.stack(targets, 1), origins)


# -- what the errors teach -------------------------------------------------------------------------


def learn_correction(
    end: HeldOutEnd,
    quantiles: tuple[float, ...],
    squared: bool,
) -> Correction:
    """Learn from forecasts of a held-out end, with the squared or absolute error as loss.

    Notes
    -----
    The offsets are those of split conformal prediction, one for each quantile (Romano, Patterson &
    Candes 2019, Conformalized quantile regression, NeurIPS, section 6), of groups of steps of the
    horizon. Errors of overlapping forecasts count as one: see :func:`independent_errors`. The fewer
    there are, the nearer the correction is to none.
    """
    h = end.targets.shape[-1]
    groups = groups_of_steps(h)
    forecasts = np.stack([end.outputs[:, :, 0], np.zeros_like(end.targets)], 2)
    forecasts = np.concatenate([forecasts, end.baselines], 2)  # (M, W, sources, h)
    n_errors = [independent_errors(end, middle) for _, middle, _ in groups]
    trust = _between(groups, [np.array([n / (n + PRIOR_ERRORS)]) for n in n_errors])[0]
    weights = trust * _all_weights(forecasts, end.targets, groups, squared)
    weights[0] += 1 - trust
    if not quantiles:
        return Correction(weights, np.ones(h), np.empty((0, h)), trust)
    error = _errors_of_others(forecasts, end.targets, groups, squared)
    distance = end.outputs[:, :, 1:] - end.outputs[:, :, :1]
    levels = [_safe_levels(np.array(quantiles), n) for n in n_errors]
    best = (np.inf, 1.0, np.empty(0))
    q = np.array(quantiles)[:, None]
    for spread in SPREADS:
        rest = error[:, :, None] - spread * distance  # (M, W, Q, h)
        offsets = _between(
            groups, [_offsets(rest, at, g) for at, g in zip(levels, groups, strict=True)]
        )
        rest = rest - offsets
        loss = float(np.nanmean(np.maximum(q * rest, (q - 1) * rest)))
        if loss < GAIN * best[0]:
            best = (loss, spread, offsets)
    _, spread, offsets = best
    return Correction(weights, 1 + trust * (spread - 1), trust * offsets, trust)


def independent_errors(end: HeldOutEnd, step: int) -> float:
    """Return how many of the errors at a step of the horizon, from 0, tell as much as independent
    ones: those that overlap by half at most, of as many series as err by themselves.
    """
    n_origins = end.origins.shape[1]
    span = end.origins[0, -1] - end.origins[0, 0]
    return _independent_series(end.errors) * min(n_origins, 1 + 2 * span / (step + 1))


def _independent_series(errors: np.ndarray) -> float:
    """Return how many independent series have a mean that varies as that of errors (M, W, h)."""
    errors = np.nan_to_num(errors)
    # in units of each series' own size, 1 where it has no errors
    size = np.sqrt((errors**2).mean((1, 2), keepdims=True))
    errors = errors / np.where(size > 0, size, 1.0)
    share = (errors.mean(0) ** 2).mean() / max((errors**2).mean(), 1e-30)
    return 1 / max(share, 1 / len(errors))


def _safe_levels(quantiles: np.ndarray, n: float) -> np.ndarray:
    """Return the shares of ``n`` errors below each quantile, so that a further one is below it with
    that probability: further out than the quantiles themselves.
    """
    # the (n + 1) q-th of n errors, counted from the nearer end
    upper = np.minimum((n + 1) / n * np.maximum(quantiles, 1 - quantiles), 1.0)
    return np.where(quantiles >= 0.5, upper, 1 - upper)


def groups_of_steps(h: int) -> list[tuple[int, int, int]]:
    """Return first, middle and end of overlapping groups of steps, longer the further ahead."""
    middles = np.unique(np.append(RATIO ** np.arange(int(np.log(h) / np.log(RATIO)) + 1), h))
    middles = np.unique(middles.astype(int)) - 1
    edges = [0, *middles, h - 1]
    return [(int(edges[i]), int(edges[i + 1]), int(edges[i + 2]) + 1) for i in range(len(middles))]


def _between(groups: list[tuple[int, int, int]], values: list[np.ndarray]) -> np.ndarray:
    """Interpolate values (n,) of groups to all steps: (n, h)."""
    middles = [middle for _, middle, _ in groups]
    steps = np.arange(groups[-1][2])
    return np.stack([np.interp(steps, middles, row) for row in np.transpose(values)])


def _errors_of_others(
    forecasts: np.ndarray,
    targets: np.ndarray,
    groups: list[tuple[int, int, int]],
    squared: bool,
) -> np.ndarray:
    """Return the errors (M, W, h) of point forecasts whose weights are learnt from other series, or
    of few series from other origins: their own would be too small.
    """
    n_series, n_origins = targets.shape[:2]
    by_series = n_series >= FOLDS
    n = n_series if by_series else n_origins
    errors = np.full_like(targets, np.nan)
    for part in np.array_split(np.arange(n), min(n, FOLDS)):
        inside = np.isin(np.arange(n), part)
        held = (inside, slice(None)) if by_series else (slice(None), inside)
        others = (~inside, slice(None)) if by_series else (slice(None), ~inside)
        weights = _all_weights(forecasts[others], targets[others], groups, squared)
        point = np.einsum("mwsh,sh->mwh", forecasts[held], weights)
        errors[held] = targets[held] - point
    return errors


def _all_weights(
    forecasts: np.ndarray,
    targets: np.ndarray,
    groups: list[tuple[int, int, int]],
    squared: bool,
) -> np.ndarray:
    """Return the weights at all steps: (sources, h)."""
    weights = _between(groups, [_weights(forecasts, targets, g, squared) for g in groups])
    return weights / weights.sum(0)


def _weights(
    forecasts: np.ndarray,
    targets: np.ndarray,
    group: tuple[int, int, int],
    squared: bool,
) -> np.ndarray:
    """Return the weights of forecasts (M, W, sources, h) with the least error on some steps.

    Exponentiated gradient (Kivinen & Warmuth 1997, Information and Computation 132(1), 1-63) from
    the prior: weights stay positive and add up to 1.
    """
    first, _, stop = group
    part = forecasts[..., first:stop].transpose(0, 1, 3, 2).reshape(-1, forecasts.shape[2])
    y_true = targets[..., first:stop].reshape(-1)
    known = np.flatnonzero(np.isfinite(y_true) & np.isfinite(part).all(1))
    weights = np.full(part.shape[1], (1 - NETWORK_FIRST) / (part.shape[1] - 1))
    weights[0] = NETWORK_FIRST
    if not len(known):
        return weights
    known = known[np.linspace(0, len(known) - 1, min(MOST_ROWS, len(known))).astype(int)]
    part, y_true = part[known], y_true[known]
    size = np.abs(y_true[:, None] - part).mean() or 1.0
    mean = np.zeros_like(weights)
    for i in range(N_ITERATIONS):
        error = part @ weights - y_true
        slope = error / size if squared else np.sign(error)
        gradient = slope @ part / (len(part) * size)
        weights = weights * np.exp(-RATE / np.sqrt(1 + i) * (gradient - gradient.min()))
        weights /= weights.sum()
        if 2 * i >= N_ITERATIONS:  # the mean of the second half, since steps have a size
            mean += weights
    return mean / mean.sum()


def _offsets(
    rest: np.ndarray,
    levels: np.ndarray,
    group: tuple[int, int, int],
) -> np.ndarray:
    """Return the quantiles (Q,) of what is left of errors (M, W, Q, h) on some steps."""
    first, _, stop = group
    return np.array(
        [np.nanquantile(rest[:, :, i, first:stop], level) for i, level in enumerate(levels)]
    )
