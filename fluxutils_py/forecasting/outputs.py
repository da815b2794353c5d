"""Convert forecasts to frames and arrays, and new data to steps of a history."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.fitted_state import FittedState
from fluxutils_py.forecasting.history import History, forecasts
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frames import Frame, make_frame
from fluxutils_py.frames.panel import (
    Panel,
    read_static,
    read_steps,
    series_numbers,
)
from fluxutils_py.validation import check_integer


def forecast_values(
    fitted: FittedState,
    history: History,
    ahead: np.ndarray,
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h); ``ahead`` holds the covariates known ahead, (C, N,
    h).
    """
    features = fitted.features
    _warn_small_series(features, history)
    # the h steps after the end, at which only the covariates known ahead have values
    later = np.full((*history.tail.shape[:2], features.h), np.nan)
    if len(ahead):
        later[-len(ahead) :] = ahead
    # the last kept step is the one that is run again, with what is known ahead
    windows = fitted.tail_windows(np.concatenate([history.tail, later], axis=2), history.static)
    last = np.full(history.n_series, history.n_kept - 1)
    values = forecasts(fitted, windows, last, history.states)
    unknown = np.flatnonzero(np.isnan(values).any((1, 2)))
    if len(unknown):
        warn(
            f"{len(unknown)} series have no value in their last {features.memory} steps (the "
            f"first is {history.panel.ids[unknown[0]]!r}): their forecasts are missing"
        )
    return values


def _warn_small_series(features: Features, history: History) -> None:
    """Warn of series whose changes are far below the smallest scale, so that the network cannot see
    them.
    """
    last = history.tail[0, :, -features.memory :]
    z = np.log(last) if features.log else last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # series without a value
        # of all kept steps, since the scale is a mean over them
        spread = np.nanmax(z, axis=1) - np.nanmin(z, axis=1)
        rounding = 1e-12 * np.nanmax(np.abs(z), axis=1)
    # a constant series is not warned of: there is nothing to see
    small = np.flatnonzero((spread > rounding) & (spread < 0.1 * features.smallest_scale))
    if len(small):
        unit = " in logarithms" if features.log else ""
        warn(
            f"{len(small)} series change too little to be forecast together with the others: the "
            f"first is {history.panel.ids[small[0]]!r}, whose last {features.memory} steps "
            f"span {spread[small[0]]:.2g}{unit}, and the typical change in fit was "
            f"{features.unit:.2g}. Scale each series, or fit those of such different size "
            "separately"
        )


def forecast_far(
    fitted: FittedState,
    history: History,
    ahead: np.ndarray,
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h) of as many steps as ``ahead``, (C, N, h), has.

    After the steps that the networks forecast at once, their median takes the place of values, from
    which they forecast further.
    """
    h = ahead.shape[2]
    trained = fitted.h
    parts: list[np.ndarray] = []
    for start in range(0, h, trained):
        known = ahead[:, :, start : start + trained]
        # NaN: what the networks say of a step does not depend on covariates of later ones
        later = np.full((*known.shape[:2], trained - known.shape[2]), np.nan)
        known = np.concatenate([known, later], axis=2)
        if not parts:
            values = forecast_values(fitted, history, known)
        else:
            history = _continued(fitted, history, parts[-1], ahead[:, :, start - trained : start])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # said of the first steps
                values = forecast_values(fitted, history, known)
        parts.append(values)
    return np.concatenate(parts, axis=2)[:, :, :h]


def _continued(
    fitted: FittedState,
    history: History,
    forecasts: np.ndarray,
    ahead: np.ndarray,
) -> History:
    """Return a history whose next steps are the median of their forecasts (N, 1 + quantiles, h)."""
    n, _, h = forecasts.shape
    levels = fitted.quantiles
    # the point forecast comes first
    median = 1 + levels.index(0.5) if 0.5 in levels else 0
    values = np.full((len(history.tail), n, h), np.nan)
    values[0] = forecasts[:, median]
    values[len(values) - len(ahead) :] = ahead
    panel = replace(history.panel, lengths=history.panel.lengths + h)
    more = PackedSeries(values.reshape(len(values), -1), np.full(n, h))
    return history.extended(fitted, panel, np.arange(n), more, history.static)


def forecast_any(
    fitted: FittedState,
    history: History,
    futr_df: object,
    h: int | None,
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h) of any horizon; warns of one beyond that of
    training.
    """
    h = check_integer("h", h, 1, optional=True) or fitted.h
    if h > fitted.h:
        warn(
            f"h={h} is more than the {fitted.h} steps that the forecaster was trained on: later "
            "ones are forecast from the median of the steps before, whose error their quantiles do "
            f"not contain; for wider ones, fit with h={h}"
        )
    ahead = future_covariates(fitted, history, futr_df, h)
    return forecast_far(fitted, history, ahead)


def forecast_frame(
    fitted: FittedState,
    panel: Panel,
    values: np.ndarray,
    outputs: Mapping[str, int],
) -> Any:
    """Return forecasts (N, 1 + quantiles, h) after the ends of a panel as ``Forecaster.predict``
    does; ``outputs`` as from :func:`output_columns`.
    """
    # an array comes back in the form in which it was given
    if panel.shape is not None:
        arrays = {name: values[:, i].reshape(*panel.shape, -1) for name, i in outputs.items()}
        return arrays if len(arrays) > 1 else arrays[fitted.names[0]]
    columns = key_columns(fitted, panel, values.shape[2])
    columns |= {name: values[:, i].ravel() for name, i in outputs.items()}
    return make_frame(columns, panel.types, panel.backend)


def future_frame(fitted: FittedState, history: History, h: int | None = None) -> Any:
    """Implement ``Forecaster.make_future_dataframe``."""
    panel = require_frame(history)
    h = check_integer("h", h, 1, optional=True) or fitted.h
    return make_frame(key_columns(fitted, panel, h), panel.types, panel.backend)


def require_frame(history: History) -> Panel:
    """Return the ids and times of the stored series; DataError if they came as an array."""
    if history.panel.shape is not None:
        raise DataError("the forecaster was fitted on an array, whose series have no ids and times")
    return history.panel


def key_columns(
    fitted: FittedState,
    panel: Panel,
    h: int,
) -> dict[str, np.ndarray]:
    """Return the ids and times of the h steps after the end of each series."""
    series = np.repeat(np.arange(panel.n_series), h)
    steps = panel.lengths[series] + np.tile(np.arange(h), panel.n_series)
    columns = fitted.columns
    return {columns.id: panel.ids[series], columns.time: panel.times(series, steps)}


def rows_ahead(
    fitted: FittedState, frame: Frame, panel: Panel, h: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which rows of a frame are of the ``h`` steps after the ends of the series, the series
    of each of these, and its step after the end, from 0.
    """
    series, steps = read_steps(frame, fitted.columns, panel)
    # -1 is a series that the panel does not have; its step does not matter
    ahead = steps - panel.lengths[np.maximum(series, 0)]
    rows = np.flatnonzero((series >= 0) & (ahead >= 0) & (ahead < h))
    return rows, series[rows], ahead[rows]


def future_covariates(
    fitted: FittedState,
    history: History,
    futr_df: object,
    h: int,
) -> np.ndarray:
    """Return the channels of covariates known ahead, at the next h steps: (C, N, h).

    Raises
    ------
    DataError
        If a row or a value is missing. The message names it.
    """
    covariates = [c.name for c in fitted.channels.futr]
    channels = np.zeros((len(covariates), history.n_series, h))
    if not covariates:
        if futr_df is not None:
            raise DataError("futr_df is given, but futr_exog_list names no covariates")
        return channels
    if futr_df is None:
        raise DataError(
            f"futr_exog_list names {', '.join(covariates)}: give their values at "
            f"the {h} times that are forecast, predict(futr_df=...); make_future_dataframe() has "
            "the rows"
        )
    panel = require_frame(history)
    frame = Frame(futr_df, "futr_df")
    frame.require(fitted.columns.arguments(target=False, hist=False))
    rows, series, step = rows_ahead(fitted, frame, panel, h)
    # rows of other series and times are no error: a calendar covers more than is asked for
    _require_all_rows(fitted, panel, series, step, h)
    for channel, covariate in zip(channels, fitted.channels.futr, strict=True):
        channel[series, step] = covariate.channel(frame.values(covariate.name))[rows]
    return channels


def _require_all_rows(
    fitted: FittedState,
    panel: Panel,
    series: np.ndarray,
    step: np.ndarray,
    h: int,
) -> None:
    # rows rather than values: a missing value has been refused, with its row
    has_row = np.zeros((panel.n_series, h), bool)
    has_row[series, step] = True
    if not has_row.all():
        i, k = np.argwhere(~has_row)[0]
        at = panel.time_text(i, panel.lengths[i] + k)
        raise DataError(
            f"futr_df has no row of series {panel.ids[i]!r} at {at} (column "
            f"{fitted.columns.time!r}); it needs the {h} steps after the end of each series, see "
            "make_future_dataframe()"
        )


def score_forecasts(
    fitted: FittedState,
    history: History,
    df: object,
) -> float:
    """Implement ``Forecaster.score``."""
    panel = require_frame(history)
    frame = Frame(df, "df")
    frame.require(fitted.columns.arguments(hist=False))
    # a missing truth cannot be scored
    truth = frame.numbers(fitted.columns.target, missing=True)
    rows, series, step = rows_ahead(fitted, frame, panel, fitted.h)
    known = ~np.isnan(truth[rows])
    rows, series, step = rows[known], series[known], step[known]
    if not len(rows):
        raise DataError(
            f"df has no row of the {fitted.h} steps after the ends of the series that the "
            "forecaster was fitted on, to score"
        )
    # 0 where there is no row: these steps are not scored
    channels = np.zeros((len(fitted.channels.futr), history.n_series, fitted.h))
    for channel, covariate in zip(channels, fitted.channels.futr, strict=True):
        channel[series, step] = covariate.channel(frame.values(covariate.name))[rows]
    values = forecast_values(fitted, history, channels)[series, 0, step]
    scale = _typical_changes(history.tail[0], fitted.features.season)
    return -float(np.mean(np.abs(values - truth[rows]) / scale[series]))


def _typical_changes(values: np.ndarray, season: int) -> np.ndarray:
    """Return the mean absolute change of each series (N, K) from season to season, above 0."""
    # the tail may be shorter than a season
    season = min(season, values.shape[1] - 1)
    change = np.abs(values[:, season:] - values[:, :-season])
    known = ~np.isnan(change)
    scale = np.where(known, change, 0).sum(1) / np.maximum(known.sum(1), 1)
    return np.maximum(scale, 1e-6 * (scale.max() or 1.0))


# -- new data --------------------------------------------------------------------------------------


def require_same_static(
    fitted: FittedState,
    history: History,
    panel: Panel,
    static_df: object,
) -> None:
    """Raise DataError if a stored series comes with another static value: its state has followed
    from the old one.
    """
    if not fitted.channels.stat:
        return
    stored = require_frame(history).ids
    if static_df is not None:  # it may also have series of which df has no row
        has_row, static = read_static(static_df, fitted.columns, stored)
        panel = replace(panel, ids=stored[has_row], static=static)
    series = series_numbers(panel.ids, stored)
    with warnings.catch_warnings():
        # of new categories: an error follows, or they are of new series
        warnings.simplefilter("ignore")
        given = fitted.channels.static(panel)
    known = np.flatnonzero(series >= 0)
    changed = np.argwhere(given[known] != history.static[series[known]])
    if len(changed):
        i = known[changed[0, 0]]
        channel = changed[0, 1]
        column = fitted.channels.stat[channel]
        new = panel.static[column.name][i]
        shown = new if column.categories is None else repr(new)
        raise DataError(
            f"static covariate {column.name!r} of series {panel.ids[i]!r} is {shown}, and was "
            f"{column.describe(history.static[series[i], channel])} so far; update continues "
            "from a state that the old value led to: give that value, or whole series to "
            "predict(df)"
        )


def extended_history(
    fitted: FittedState, history: History, panel: Panel, df: object
) -> tuple[History, np.ndarray]:
    """Return a history with the steps of a panel, as read from ``df``, after the ends of its
    series, and the numbers of these series.
    """
    old = history.panel
    # new series follow the stored ones, in the order of their ids
    series = series_numbers(panel.ids, old.ids)
    new = series < 0
    series[new] = old.n_series + np.arange(int(new.sum()))
    gap = np.zeros(panel.n_series, int)
    gap[~new] = _gaps(fitted, old, panel, series, ~new)
    if old.shape is None:  # an array has no gaps
        _require_near(fitted, df, old)
    # the steps of a gap count, as missing values
    lengths = gap + panel.lengths
    ends = np.concatenate([old.lengths, np.zeros(int(new.sum()), int)])
    ends[series] += lengths
    longer = replace(
        old,
        ids=np.concatenate([old.ids, panel.ids[new]]),
        first=np.concatenate([old.first, panel.first[new]]),
        lengths=ends,
    )
    more = PackedSeries(_values_after_gaps(fitted, panel, lengths), lengths)
    static = fitted.channels.static(panel)
    return history.extended(fitted, longer, series, more, static), series


def _gaps(
    fitted: FittedState,
    old: Panel,
    panel: Panel,
    series: np.ndarray,
    known: np.ndarray,
) -> np.ndarray:
    """Return the steps without a row between the end of each known series and its first new row.

    Raises
    ------
    DataError
        If a row is not after the end of its series.
    """
    stored = series[known]
    begin, whole = panel.frequency.steps_between(old.first[stored], panel.first[known])
    gap = begin - old.lengths[stored]
    bad = np.flatnonzero((gap < 0) | ~whole)
    if len(bad):
        i = int(np.flatnonzero(known)[bad[0]])
        end = stored[bad[0]]
        raise DataError(
            f"series {panel.ids[i]!r} has a row at {panel.time_text(i, 0)} (column "
            f"{fitted.columns.time!r}), and is known until "
            f"{old.time_text(end, old.lengths[end] - 1)} already; give the rows that follow to "
            "update, or whole series to predict(df)"
        )
    return gap


def _require_near(
    fitted: FittedState,
    df: object,
    old: Panel,
) -> None:
    """Raise DataError if a row is so much later than the row before it that none of the known
    values counts any more.

    Most often, its time is wrong. Correct rows would then be refused, since they overlap the steps
    up to that row.
    """
    memory = fitted.features.memory
    series, steps = read_steps(Frame(df, "df"), fitted.columns, old)
    # by series and time: each row is compared with the row before it
    order = np.lexsort((steps, series))
    order = order[series[order] >= 0]
    series = series[order]
    steps = steps[order]
    # the step before each row: that of the row before it, or the last stored one
    before = old.lengths[series] - 1
    same = series[1:] == series[:-1]
    before[1:][same] = steps[:-1][same]
    far = np.flatnonzero(steps - before > memory)
    if len(far):
        i = series[far[0]]
        step = steps[far[0]]
        last = before[far[0]]
        raise DataError(
            f"series {old.ids[i]!r} has a row at {old.time_text(i, step)} (column "
            f"{fitted.columns.time!r}), {step - last} steps after the row before it at "
            f"{old.time_text(i, last)}: no value of the last {memory} steps, which the forecasts "
            "depend on, would be known. Correct the time; or give a row with a missing value for "
            "each step between; or give whole series to predict(df)"
        )


def _values_after_gaps(
    fitted: FittedState,
    panel: Panel,
    lengths: np.ndarray,
) -> np.ndarray:
    """Return the channels (C, total) of a panel, each series at the end of its ``lengths[n]`` steps
    and NaN before.
    """
    values = fitted.channels.values(panel, fitted.columns.target)
    out = np.full((len(values), int(lengths.sum())), np.nan)
    # only its lengths matter for the positions
    longer = replace(panel, lengths=lengths)
    out[:, longer.positions(lengths - panel.lengths, lengths)] = values
    return out
