"""Convert forecasts to frames and arrays, and new data to steps of a history."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.forecasting.baselines import BASELINES
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.frames import Frame, make_frame
from fluxutils_py.forecasting.history import History, Steps, forecasts
from fluxutils_py.forecasting.panel import Panel, read_static, read_steps, series_name


def array_shape(array: Any) -> tuple[int, int] | None:
    """Return the numbers of features and series of an array; None for None."""
    return None if array is None else (int(array.shape[0]), int(array.shape[1]))


def column_names(fc: Any) -> list[str]:
    return [fc.alias, *(f"{fc.alias}-q{q:g}" for q in sorted(map(float, fc.quantiles)))]


def check_output_names(fc: Any) -> None:
    """Raise SpecError if a column that forecasts or cross-validation add has the name of a column
    of the user.

    Also if two added columns have one name.
    """
    keys = {"id_col": fc.id_col, "time_col": fc.time_col, "target_col": fc.target_col}
    added = [*column_names(fc), "cutoff", *BASELINES]
    for argument, name in keys.items():
        if name in added:
            raise SpecError(
                f"{argument}={name!r} is the name of a column that the forecasts have "
                f"({', '.join(added)}); rename the column of the data, or choose another alias"
            )
    twice = sorted({name for name in added if added.count(name) > 1})
    if twice:
        raise SpecError(
            f"two columns of the forecasts would be called {twice[0]!r} (alias={fc.alias!r}, "
            f"quantiles={tuple(fc.quantiles)!r}); choose another alias, or quantiles that differ "
            "in six digits"
        )


def warn_short_series(fc: Any, lengths: np.ndarray, panel: Panel | None) -> None:
    """Warn of series that are not longer than a season, and in training of a horizon that no series
    is longer than.
    """
    h, longest = fc.features_.h, int(lengths.max())
    if longest <= h and isinstance(fc._origin, tuple):
        warnings.warn(
            f"no series is longer than the horizon of {h} steps (the longest has {longest}): "
            f"training does not see what comes {longest} or more steps later, which is forecast "
            "as the season before",
            stacklevel=3,
        )
    season = fc.features_.season
    short = np.flatnonzero(lengths <= season)
    if len(short):
        first = short[0]
        warnings.warn(
            f"{len(short)} of {len(lengths)} series have no more steps than a season of {season} "
            f"(series {series_name(panel, first)} has {lengths[first]}): where the season before "
            "is not known, they are forecast from their last value",
            stacklevel=3,
        )


def forecast_values(fc: Any, history: History, ahead: np.ndarray) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h); ``ahead`` holds the covariates known ahead, (C, N,
    h).
    """
    _warn_small_series(fc.features_, history)
    K, h = history.tail.shape[2], fc.features_.h
    tail = np.concatenate([history.tail, np.full((*history.tail.shape[:2], h), np.nan)], axis=2)
    if len(ahead):
        tail[-len(ahead) :, :, K:] = ahead
    windows = fc._tail_windows(tail, history.static)
    at = np.full(history.n_series, K - 1)
    found = forecasts(fc.models_, windows, at, history.states, len(fc.quantiles))
    unknown = np.flatnonzero(np.isnan(found).any((1, 2)))
    if len(unknown):
        name = series_name(history.panel, unknown[0])
        warnings.warn(
            f"{len(unknown)} series have no value in their last {fc.features_.memory} steps (the "
            f"first is {name}): their forecasts are missing",
            stacklevel=4,
        )
    return found


def _warn_small_series(features: Features, history: History) -> None:
    """Warn of series whose changes are far below the smallest scale, so that the network cannot see
    them.
    """
    last = history.tail[0, :, -features.memory :]
    z = np.log(last) if features.log else last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # series without a value
        spread = np.nanmax(z, axis=1) - np.nanmin(z, axis=1)
        rounding = 1e-12 * np.nanmax(np.abs(z), axis=1)
    small = np.flatnonzero((spread > rounding) & (spread < 0.1 * features.smallest_scale))
    if len(small):
        warnings.warn(
            f"{len(small)} series change too little to be forecast beside the others: the first "
            f"is {series_name(history.panel, small[0])}, whose last {features.memory} steps span "
            f"{spread[small[0]]:.2g}{' in logarithms' if features.log else ''}, and the typical "
            f"change in fit was {features.unit:.2g}. Scale each series, or fit those of such "
            "different size apart",
            stacklevel=5,
        )


def forecast_frame(fc: Any, history: History, shape: tuple[int, int] | None, futr_df: Any) -> Any:
    """Implement ``Forecaster.predict`` for a history."""
    ahead = future_covariates(fc, history, futr_df)
    found = forecast_values(fc, history, ahead)
    names = column_names(fc)
    if shape is not None:
        arrays = {name: found[:, i].reshape(*shape, -1) for i, name in enumerate(names)}
        return arrays if len(arrays) > 1 else arrays[names[0]]
    columns, types = _key_columns(fc, history)
    columns.update({name: found[:, i].ravel() for i, name in enumerate(names)})
    return make_frame(columns, types, _require_panel(history).backend)


def future_frame(fc: Any, history: History) -> Any:
    columns, types = _key_columns(fc, history)
    return make_frame(columns, types, _require_panel(history).backend)


def _require_panel(history: History) -> Panel:
    if history.panel is None:
        raise DataError("the forecaster was fitted on an array, whose series have no ids and times")
    return history.panel


def _key_columns(fc: Any, history: History) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the id and time columns of the h steps after the end of each series, and their types."""
    panel, h = _require_panel(history), fc.features_.h
    series = np.repeat(np.arange(panel.n_series), h)
    steps = panel.lengths[series] + np.tile(np.arange(h), panel.n_series)
    return {fc.id_col: panel.ids[series], fc.time_col: panel.times(series, steps)}, panel.types


def future_covariates(fc: Any, history: History, futr_df: Any) -> np.ndarray:
    """Return the channels of covariates known ahead, at the next h steps: (C, N, h).

    Raises
    ------
    DataError
        If a row or a value is missing. The message names it.
    """
    h, n = fc.features_.h, history.n_series
    covariates = fc.covariates_.futr
    if not covariates:
        if futr_df is not None:
            raise DataError("futr_df is given, but futr_exog_list names no covariates")
        return np.empty((0, n, h))
    if futr_df is None:
        raise DataError(
            f"futr_exog_list names {', '.join(c.name for c in covariates)}: give their values at "
            "the times that are forecast, predict(futr_df=...); make_future_dataframe() has the "
            "rows"
        )
    panel = _require_panel(history)
    frame = Frame(futr_df, "futr_df")
    frame.require(fc._columns.arguments(target=False, hist=False))
    series, k, use = _rows_ahead(fc, frame, panel)
    has_row = np.zeros((n, h), bool)
    has_row[series[use], k[use]] = True
    if not has_row.all():
        i, step = (int(v) for v in np.argwhere(~has_row)[0])
        at = format_time(panel.times(np.array([i]), np.array([panel.lengths[i] + step]))[0])
        raise DataError(
            f"futr_df has no row of series {panel.ids[i]!r} at {at} (column {fc.time_col!r}); it "
            f"needs the {h} steps after the end of each series, see make_future_dataframe()"
        )
    found = np.empty((len(covariates), n, h))
    for channel, covariate in zip(found, covariates, strict=True):
        channel[series[use], k[use]] = covariate.channel(_read_column(frame, covariate.name))[use]
    return found


def _rows_ahead(fc: Any, frame: Frame, panel: Panel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each row its series, its step after the end of the series from 0, and whether this
    is forecast.
    """
    series, steps = read_steps(frame, fc._columns, panel)
    k = steps - panel.lengths[np.maximum(series, 0)]
    return series, k, (series >= 0) & (k >= 0) & (k < fc.features_.h)


def score_forecasts(fc: Any, df: Any) -> float:
    """Implement ``Forecaster.score``."""
    check_is_fitted(fc, "models_")
    history = fc._history
    panel = _require_panel(history)
    h, n = fc.features_.h, history.n_series
    frame = Frame(df, "df")
    frame.require(fc._columns.arguments(hist=False))
    series, k, use = _rows_ahead(fc, frame, panel)
    truth = frame.numbers(fc.target_col, missing=True)
    use &= ~np.isnan(truth)
    if not use.any():
        raise DataError(
            f"df has no row of the {h} steps after the ends of the series that the forecaster was "
            "fitted on, to score"
        )
    ahead = np.zeros((fc.channels_.n_ahead, n, h))
    for channel, covariate in zip(ahead, fc.covariates_.futr, strict=True):
        channel[series[use], k[use]] = covariate.channel(_read_column(frame, covariate.name))[use]
    found = forecast_values(fc, history, ahead)[series[use], 0, k[use]]
    tail = history.tail[0]
    season = min(fc.features_.season, tail.shape[1] - 1)
    change = np.abs(tail[:, season:] - tail[:, :-season])
    known = ~np.isnan(change)
    scale = np.where(known, change, 0).sum(1) / np.maximum(known.sum(1), 1)
    scale = np.maximum(scale, 1e-6 * (scale.max() or 1.0))
    return -float(np.mean(np.abs(found - truth[use]) / scale[series[use]]))


def format_time(time: Any) -> str:
    """Return a time of a panel as text for messages."""
    return str(time.astype("M8[s]") if isinstance(time, np.datetime64) else time)


def _read_column(frame: Any, name: str) -> np.ndarray:
    found: np.ndarray = (
        frame.labels(name) if frame.is_category(name) else frame.numbers(name, missing=False)
    )
    return found


# -- new data ------------------------------------------------------------------------------------------


def require_same_static(fc: Any, panel: Panel, static_df: Any) -> None:
    """Raise DataError if a stored series comes with another static value: its state has followed
    from the old one.
    """
    if not fc.covariates_.stat:
        return
    history = fc._history
    stored = _require_panel(history).ids
    if static_df is not None:  # it may also have series of which df has no row
        has_row, static = read_static(static_df, fc._columns, stored)
        panel = replace(panel, ids=stored[has_row], static=static)
    number = {label: i for i, label in enumerate(stored)}
    series = np.array([number.get(label, -1) for label in panel.ids], int)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of new categories: an error follows, or they are of new series
        given = fc.covariates_.static(panel)
    known = np.flatnonzero(series >= 0)
    changed = np.argwhere(given[known] != history.static[series[known]])
    if len(changed):
        i, column = known[changed[0, 0]], fc.covariates_.stat[changed[0, 1]]
        new = panel.static[column.name][i]
        raise DataError(
            f"static covariate {column.name!r} of series {panel.ids[i]!r} is "
            f"{new if column.categories is None else repr(new)}, and was "
            f"{column.describe(history.static[series[i], changed[0, 1]])} so far; update goes on "
            "from a state that the old value led to: give that value, or whole series to "
            "predict(df)"
        )


def _require_near(fc: Any, df: Any, old: Panel) -> None:
    """Raise DataError if a row is so much later than the row before it that none of the known
    values counts any more.

    Most often, its time is wrong. Correct rows would then be refused, since they overlap the steps
    up to that row.
    """
    series, steps = read_steps(Frame(df, "df"), fc._columns, old)
    order = np.lexsort((steps, series))
    order = order[series[order] >= 0]
    series, steps = series[order], steps[order]
    before = old.lengths[series] - 1
    same = series[1:] == series[:-1]
    before[1:][same] = steps[:-1][same]
    far = np.flatnonzero(steps - before > fc.features_.memory)
    if len(far):
        i = far[0]
        at, last = (
            format_time(t) for t in old.times(series[[i, i]], np.array([steps[i], before[i]]))
        )
        raise DataError(
            f"series {old.ids[series[i]]!r} has a row at {at} (column {fc.time_col!r}), "
            f"{steps[i] - before[i]} steps after the row before it at {last}: no value of the last "
            f"{fc.features_.memory} steps, which the forecasts depend on, would be known. Correct "
            "the time; or give a row with a missing value for each step between; or give whole "
            "series to predict(df)"
        )


def further_steps(fc: Any, panel: Panel, df: Any) -> Steps:
    """Convert a panel, as read from ``df``, to steps after the end of a forecaster's series."""
    old = _require_panel(fc._history)
    number = {label: i for i, label in enumerate(old.ids)}
    fresh = [label for label in panel.ids if label not in number]
    number.update({label: old.n_series + i for i, label in enumerate(fresh)})
    series = np.array([number[label] for label in panel.ids])
    known = series < old.n_series
    start = np.zeros(panel.n_series, int)
    where = series[known]
    begin, whole = panel.frequency.steps_between(old.first[where], panel.first[known])
    gap = begin - fc._history.lengths[where]
    bad = np.flatnonzero((gap < 0) | ~whole)
    if len(bad):
        i = int(np.flatnonzero(known)[bad[0]])
        at = format_time(panel.times(np.array([i]), np.array([0]))[0])
        last = format_time(old.times(where[bad[:1]], fc._history.lengths[where[bad[:1]]] - 1)[0])
        raise DataError(
            f"series {panel.ids[i]!r} has a row at {at} (column {fc.time_col!r}), and is known "
            f"until {last} already; update takes the rows that follow, predict(df) whole series"
        )
    _require_near(fc, df, old)
    start[known] = gap
    lengths = start + panel.lengths
    covariates = (fc.covariates_.steps(panel, kind) for kind in ("hist", "futr"))
    values = np.concatenate([panel.values[fc.target_col][None], *covariates])
    out = np.full((len(values), int(lengths.sum())), np.nan)
    ends, stops = np.cumsum(lengths), np.cumsum(panel.lengths)
    for end, stop, n in zip(ends, stops, panel.lengths, strict=True):
        out[:, end - n : end] = values[:, stop - n : stop]
    ids = np.concatenate([old.ids, panel.ids[~known]])
    total = np.concatenate([fc._history.lengths, np.zeros(len(fresh), int)])
    total[series] += lengths
    first = np.concatenate([old.first, np.zeros(len(fresh), np.int64)])
    first[series[~known]] = panel.first[~known]
    made = replace(old, ids=ids, first=first, lengths=total)
    return Steps(series, lengths, out, fc.covariates_.static(panel), made)


def array_steps(fc: Any, array: Any) -> Steps:
    """Convert an array (F, N, T) to the next steps of all series."""
    if array_shape(array) != fc._shape:
        raise ShapeError(
            f"df has shape {tuple(array.shape)}; expected (F, N, T) with {fc._shape} features and "
            "series"
        )
    n, length = fc._history.n_series, int(array.shape[2])
    values = np.asarray(array[:, :, :], np.float64).reshape(1, -1)
    return Steps(np.arange(n), np.full(n, length), values, fc._history.static)
