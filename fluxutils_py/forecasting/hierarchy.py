"""Sums of series over groups, and forecasts that add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.history import History, forecasts_along, start_history
from fluxutils_py.forecasting.outputs import key_columns, require_panel
from fluxutils_py.frames.frames import Frame, make_frame, require
from fluxutils_py.frames.panel import Panel
from fluxutils_py.validation import require_package

METHODS = ("mint", "bottom_up")
FAR = 6.0  # errors that no normal distribution has

Groups = Mapping[Any, Sequence[Any]]


def sum_groups(
    df: Any,
    hierarchy: Groups,
    *,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
) -> Any:
    """Append the sums of groups of series to a long frame, as further series.

    Parameters
    ----------
    df : data frame of pandas, polars or pyarrow
    hierarchy : dict
        The ids of each group's series, by the id that its sum gets. A group may name other groups.
    id_col, time_col, target_col : str

    Returns
    -------
    data frame
        Of the same library. A sum has a row at each time at which all of its series have a value;
        other columns are missing there.

    Raises
    ------
    DataError
        If a member is no series of ``df``, or the id of a group is.

    Examples
    --------
    >>> import pandas as pd
    >>> df = pd.DataFrame({"unique_id": ["a", "a", "b"], "ds": [1, 2, 2], "y": [1.0, 2.0, 5.0]})
    >>> sum_groups(df, {"all": ["a", "b"]}).tail(1).values.tolist()
    [['all', 2, 7.0]]
    """
    nw = require("narwhals")
    frame = Frame(df, "df")
    frame.require({id_col: "id_col", time_col: "time_col", target_col: "target_col"})
    ids = list(dict.fromkeys(frame.labels(id_col)))
    members = expand_groups(hierarchy, ids)
    whole = frame.frame
    parts = [whole]
    for name, series in members.items():
        rows = whole.filter(nw.col(id_col).is_in(series), ~nw.col(target_col).is_null())
        sums = rows.group_by(time_col).agg(
            nw.col(target_col).sum(), nw.len().alias("number of members")
        )
        sums = sums.filter(nw.col("number of members") == len(series)).sort(time_col)
        sums = sums.with_columns(nw.lit(name).cast(whole.schema[id_col]).alias(id_col))
        parts.append(sums.select(id_col, time_col, target_col))
    return nw.concat(parts, how="diagonal").to_native()


def expand_groups(hierarchy: Groups, ids: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return the series of each group, with those of groups that it names.

    Raises
    ------
    DataError
        If a member is neither a series nor a group, or a group names itself, also through others.
    """
    known = set(ids)
    both = [name for name in hierarchy if name in known]
    if both:
        raise DataError(f"hierarchy names a group {both[0]!r}, which is a series; rename the group")
    expanded = {name: _series_of(name, hierarchy, known, ()) for name in hierarchy}
    for name, series in expanded.items():
        if not series:
            raise DataError(f"hierarchy: group {name!r} has no series")
        twice = [s for s in series if series.count(s) > 1]
        if twice:
            raise DataError(f"hierarchy: group {name!r} counts {twice[0]!r} twice")
    return expanded


def _series_of(
    name: Any,
    hierarchy: Groups,
    known: Collection[Any],
    path: tuple[Any, ...],
) -> list[Any]:
    """Return the series of a group, or a series itself; ``path`` are the groups that lead to it."""
    if name in known:
        return [name]
    if name not in hierarchy:
        raise DataError(
            f"hierarchy: {name!r} of group {path[-1]!r} is neither a series nor a group"
        )
    if name in path:
        raise DataError(f"hierarchy: group {name!r} is a part of itself")
    parts = [_series_of(member, hierarchy, known, (*path, name)) for member in hierarchy[name]]
    return list(chain.from_iterable(parts))


@dataclass(frozen=True)
class Sums:
    """A hierarchy over the series of a forecaster.

    Attributes
    ----------
    names : list
        Ids of the groups.
    of_group : ndarray of int, shape (G,)
        The number of the series that a group is, -1 where it is none.
    bottom : ndarray of int, shape (B,)
        The numbers of the other series.
    matrix : ndarray of shape (G, B)
        1 where a series is in a group.
    """

    names: list[Any]
    of_group: np.ndarray
    bottom: np.ndarray
    matrix: np.ndarray

    @classmethod
    def of(cls, hierarchy: Groups, ids: np.ndarray) -> Sums:
        number = {label: i for i, label in enumerate(ids)}
        names = list(hierarchy)
        bottom = [label for label in ids if label not in hierarchy]
        members = expand_groups(hierarchy, bottom)
        matrix = np.array([[label in set(members[g]) for label in bottom] for g in names], float)
        of_group = np.array([number.get(g, -1) for g in names], int)
        return cls(names, of_group, np.array([number[label] for label in bottom], int), matrix)


def reconciled_frame(
    fitted: FittedForecaster,
    history: History,
    values: np.ndarray,
    hierarchy: Groups,
    method: str,
) -> Any:
    """Return the frame of forecasts (N, 1 + quantiles, h) that add up, with a series for each
    group; see ``Forecaster.predict``.
    """
    check_method(method)
    panel = require_panel(history)
    sums = Sums.of(hierarchy, panel.ids)
    _require_one_end(panel)
    values = _add_up(fitted, history, values, sums, method)
    new = np.flatnonzero(sums.of_group < 0)
    totals = np.full((len(new), *values.shape[1:]), np.nan)
    totals[:, 0] = sums.matrix[new] @ values[sums.bottom, 0]
    if len(new) and fitted.n_quantiles:
        warn(
            f"group {sums.names[new[0]]!r} has no quantiles: those of a sum do not follow from "
            "those of its series; append it with sum_groups(df, hierarchy) before fit"
        )
    values = np.concatenate([values, totals])
    longer = _with_groups(panel, [sums.names[g] for g in new])
    columns = key_columns(fitted, longer, values.shape[2])
    columns |= {name: values[:, i].ravel() for i, name in enumerate(fitted.names)}
    return make_frame(columns, panel.types, panel.backend)


def check_method(method: str) -> None:
    """Raise SpecError unless there is such a method."""
    if method not in METHODS:
        raise SpecError(f"reconcile must be one of {METHODS}, got {method!r}")


def reconciled_at_cutoff(
    fitted: FittedForecaster,
    past: Panel,
    values: np.ndarray,
    hierarchy: Groups,
    method: str,
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h) after the end of a panel that add up, as of the frame
    of :func:`reconciled_frame`.

    Raises
    ------
    DataError
        If a group is none of the series, or series end at different times.
    """
    check_method(method)
    sums = Sums.of(hierarchy, past.ids)
    lacks = [name for name, i in zip(sums.names, sums.of_group, strict=True) if i < 0]
    if lacks:
        raise DataError(
            f"group {lacks[0]!r} of the hierarchy is none of the series, so that there is no "
            "truth to compare its forecasts with: give sum_groups(df, hierarchy)"
        )
    _require_one_end(past)
    history = start_history(fitted.models, fitted.windows(past), past)
    return _add_up(fitted, history, values, sums, method)


def _add_up(
    fitted: FittedForecaster, history: History, values: np.ndarray, sums: Sums, method: str
) -> np.ndarray:
    """Return forecasts (N, 1 + quantiles, h) in which the groups among the series are sums."""
    if method == "mint":
        values = _by_mint(fitted, history, values, sums)
    known = np.flatnonzero(sums.of_group >= 0)
    totals = sums.matrix[known] @ values[sums.bottom, 0]
    return _moved(values, sums.of_group[known], totals)


def _with_groups(panel: Panel, names: Sequence[Any]) -> Panel:
    """Return a panel with further series, whose times are those of the first one."""
    ids = np.empty(len(names), object)
    ids[:] = names
    return replace(
        panel,
        ids=np.concatenate([panel.ids, ids]),
        first=np.concatenate([panel.first, np.repeat(panel.first[:1], len(names))]),
        lengths=np.concatenate([panel.lengths, np.repeat(panel.lengths[:1], len(names))]),
    )


def _moved(values: np.ndarray, series: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return forecasts with other points (n, h) of some series, and quantiles moved as far."""
    out = values.copy()
    change = points - values[series, 0]
    out[series] += change[:, None]
    out[series, 0] = points
    return out


def _require_one_end(panel: Panel) -> None:
    """Raise DataError unless all series end at one time."""
    series = np.arange(panel.n_series)
    ends = panel.times(series, panel.lengths - 1)
    other = np.flatnonzero(ends != ends.max())
    if len(other):
        i = int(other[0])
        last = int(np.argmax(ends))
        raise DataError(
            f"forecasts of series that end at different times do not add up: series "
            f"{panel.ids[i]!r} ends at {panel.time_text(i, panel.lengths[i] - 1)}, and "
            f"{panel.ids[last]!r} at {panel.time_text(last, panel.lengths[last] - 1)}; write rows "
            "with a missing value up to the end"
        )


def _by_mint(
    fitted: FittedForecaster, history: History, values: np.ndarray, sums: Sums
) -> np.ndarray:
    """Return forecasts whose points are reconciled by minimum trace with a shrunk covariance."""
    lacks = [name for name, i in zip(sums.names, sums.of_group, strict=True) if i < 0]
    if lacks:
        raise DataError(
            f"reconcile='mint' needs a forecast of each group, and {lacks[0]!r} is none of the "
            "series: append the sums before fit, sum_groups(df, hierarchy), or use "
            "reconcile='bottom_up'"
        )
    methods = require_package(
        "hierarchicalforecast.methods", None, "reconcile='mint' (but not 'bottom_up')"
    )
    # the library has groups first
    rows = np.concatenate([sums.of_group, sums.bottom])
    truth, forecast = past_steps(fitted, history)
    truth = forecast + clipped_errors(truth - forecast)
    whole = ~np.isnan(truth - forecast).any(0)
    if whole.sum() < 3:
        raise DataError(
            f"reconcile='mint' needs past errors of all series at the same times, and has "
            f"{whole.sum()} of them; use reconcile='bottom_up'"
        )
    reconciler = methods.MinTrace(method="mint_shrink")
    found = reconciler.fit_predict(
        S=np.concatenate([sums.matrix, np.eye(len(sums.bottom))]),
        y_hat=values[rows, 0],
        y_insample=truth[rows][:, whole],
        y_hat_insample=forecast[rows][:, whole],
    )
    return _moved(values, rows, np.asarray(found["mean"]))


def clipped_errors(errors: np.ndarray) -> np.ndarray:
    """Return the errors (N, K) of series, clipped where they are far larger than is usual for their
    series: more than ``FAR`` normal standard deviations, as 1.4826 times the median size has it.

    One old spike would else decide how much the forecasts of its series count from then on.
    """
    usual = 1.4826 * np.nanmedian(np.abs(errors), axis=1, keepdims=True)
    # most errors of a series may be 0
    bound = np.where(usual > 0, FAR * usual, np.inf)
    return np.clip(errors, -bound, bound)


def past_steps(fitted: FittedForecaster, history: History) -> tuple[np.ndarray, np.ndarray]:
    """Return the last known values and their forecasts of one step ahead, (N, K), NaN where not
    known.
    """
    n_kept = history.n_kept
    lengths = np.minimum(history.lengths, n_kept)
    inside = np.arange(n_kept) >= n_kept - lengths[:, None]
    windows = fitted.packed_windows(history.tail[:, inside], lengths, history.static)
    # of each series the last half: the networks have read the first
    last = lengths - 2
    origins = last[:, None] - np.arange(int(last.max()) // 2, -1, -1)
    origins[origins < np.maximum(last // 2, 0)[:, None]] = -1
    forecasts = forecasts_along(fitted.models, windows, origins, fitted.quantiles)
    ahead = [values[:, 0, 0] for values in forecasts]
    truth = history.tail[0, :, n_kept - len(ahead) :]
    return truth, np.stack(ahead, 1)
