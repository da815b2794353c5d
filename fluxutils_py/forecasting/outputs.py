"""Convert forecasts to frames and arrays, and new data to steps of a history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.fitted_state import FittedState, History, forecasts
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frames import Frame, make_frame
from fluxutils_py.frames.panel import Panel, read_steps, series_numbers
from fluxutils_py.validation import check_integer


def forecast_any(
    fitted: FittedState,
    history: History,
    futr_df: object,
    h: int | None,
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h) after the ends of the series.

    Raises
    ------
    SpecError
        If ``h`` is beyond that of training.
    """
    h = check_integer("h", h, 1, optional=True) or fitted.h
    if h > fitted.h:
        raise SpecError(
            f"h={h} is more than the {fitted.h} steps that the forecaster was trained on; fit one "
            f"with h={h}"
        )
    ahead = future_covariates(fitted, history, futr_df, h)
    # the h steps after the end, at which only the covariates known ahead have values; NaN: what the
    # networks say of a step does not depend on covariates of later ones
    later = np.full((*history.tail.shape[:2], fitted.h), np.nan)
    later[len(later) - len(ahead) :, :, :h] = ahead
    # the last kept step is the one that is run again, with what is known ahead
    windows = fitted.tail_windows(np.concatenate([history.tail, later], axis=2), history.static)
    last = np.full(history.n_series, history.n_kept - 1)
    values = forecasts(fitted, windows, last, history.states)
    unknown = history.panel.ids[np.isnan(values).any((1, 2))]
    if len(unknown):
        warn(
            f"{len(unknown)} series have no value in their last {fitted.features.memory} steps "
            f"(the first is {unknown[0]!r}): their forecasts are missing"
        )
    return values[:, :, :h]


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
    frame = Frame(futr_df, "futr_df", remedy="fill it in: each step ahead needs a value")
    frame.require(fitted.columns.arguments(target=False, hist=False))
    rows, series, step = rows_ahead(fitted, frame, panel, h)
    # rows of other series and times are no error: a calendar covers more than is asked for
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
    for channel, covariate in zip(channels, fitted.channels.futr, strict=True):
        channel[series, step] = covariate.channel(frame.values(covariate.name))[rows]
    return channels


def score_forecasts(
    fitted: FittedState,
    history: History,
    df: object,
) -> float:
    """Implement ``Forecaster.score``."""
    panel = require_frame(history)
    frame = Frame(df, "df")
    frame.require(fitted.columns.arguments(hist=False))
    # a missing target cannot be scored
    y_true = frame.numbers(fitted.columns.target, missing=True)
    rows, series, step = rows_ahead(fitted, frame, panel, fitted.h)
    known = ~np.isnan(y_true[rows])
    rows, series, step = rows[known], series[known], step[known]
    if not len(rows):
        raise DataError(
            f"df has no row of the {fitted.h} steps after the ends of the series that the "
            "forecaster was fitted on, to score"
        )
    futr_df = df if fitted.channels.futr else None
    values = forecast_any(fitted, history, futr_df, None)[series, 0, step]
    # of each series the mean absolute change from season to season, above 0
    last = history.tail[0]  # which may be shorter than a season
    season = min(fitted.features.season, last.shape[1] - 1)
    change = np.ma.masked_invalid(np.abs(last[:, season:] - last[:, :-season]))
    scale = change.mean(1).filled(0.0)
    scale = np.maximum(scale, 1e-6 * (scale.max() or 1.0))
    return -float(np.mean(np.abs(values - y_true[rows]) / scale[series]))


# -- new data --------------------------------------------------------------------------------------


def extended_history(
    fitted: FittedState, history: History, panel: Panel
) -> tuple[History, np.ndarray]:
    """Return a history with the steps of a panel after the ends of its series, and the numbers of
    these series.
    """
    old = history.panel
    # new series follow the stored ones, in the order of their ids
    series = series_numbers(panel.ids, old.ids)
    known = np.flatnonzero(series >= 0)
    new = series < 0
    series[new] = old.n_series + np.arange(int(new.sum()))
    static = fitted.channels.static(panel)
    # the state of a series has followed from the static values that it had
    changed = np.argwhere(static[known] != history.static[series[known]])
    if len(changed):
        i = known[changed[0, 0]]
        name = fitted.channels.stat[changed[0, 1]].name
        raise DataError(
            f"static covariate {name!r} of series {panel.ids[i]!r} is {panel.static[name][i]!r}, "
            "but had another value before; update continues from a state of the old value: give "
            "the old value, or whole series to predict(df)"
        )
    gap = np.zeros(panel.n_series, int)
    gap[known] = _gaps(fitted, old, panel, known, series[known])
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
    values = fitted.channels.values(panel, fitted.columns.target)
    after_gaps = np.full((len(values), int(lengths.sum())), np.nan)
    # only its lengths matter for the positions
    positions = replace(panel, lengths=lengths).positions(gap, lengths)
    after_gaps[:, positions] = values
    return history.extended(
        fitted, longer, series, PackedSeries(after_gaps, lengths), static
    ), series


def _gaps(
    fitted: FittedState, old: Panel, panel: Panel, known: np.ndarray, stored: np.ndarray
) -> np.ndarray:
    """Return the steps without a row between the end of each of the ``known`` series, whose numbers
    are ``stored`` so far, and its first new row.

    Raises
    ------
    DataError
        If a row is not after the end of its series, or so long after it that none of the known
        values counts any more: most often, its time is wrong, and correct rows would then overlap.
    """
    begin, whole = panel.frequency.steps_between(old.first[stored], panel.first[known])
    gap = begin - old.lengths[stored]
    bad = np.flatnonzero((gap < 0) | ~whole | (gap >= fitted.features.memory))
    if len(bad):
        i = known[bad[0]]
        end = stored[bad[0]]
        raise DataError(
            f"series {panel.ids[i]!r} has a row at {panel.time_text(i, 0)} (column "
            f"{fitted.columns.time!r}), but is known until "
            f"{old.time_text(end, old.lengths[end] - 1)}; give update the rows that follow, "
            f"less than {fitted.features.memory} steps later, since forecasts depend on so many, "
            "or whole series to predict(df)"
        )
    return gap
