"""Read a panel of series from a long data frame with one row per series and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.frames.frames import Frame, TimeColumn, to_absolute, to_local
from fluxutils_py.frames.frequency import (
    Frequency,
    first_times,
    infer_frequency,
    parse_frequency,
)

FEW_ROWS = 4  # of fewer rows it is not said that they leave most steps empty
LEAST_FILLED = 0.2  # share of the steps of a series that have a row


@dataclass(frozen=True)
class Columns:
    """Column names of a long frame; defaults as in NeuralForecast and utilsforecast.

    Raises
    ------
    SpecError
        If two of id, time and target are one column, or one of them is a covariate.
    """

    id: str = "unique_id"
    time: str = "ds"
    target: str = "y"
    hist: tuple[str, ...] = ()
    futr: tuple[str, ...] = ()
    stat: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # a column in two roles would be forecast from itself
        named: dict[str, str] = {}
        for argument, column in (
            ("id_col", self.id),
            ("time_col", self.time),
            ("target_col", self.target),
        ):
            if column in named:
                raise SpecError(
                    f"{named[column]} and {argument} are both {column!r}; name two columns"
                )
            named[column] = argument
        lists = {
            "hist_exog_list": self.hist,
            "futr_exog_list": self.futr,
            "stat_exog_list": self.stat,
        }
        for argument, columns in lists.items():
            for column in columns:
                if column in named:
                    raise SpecError(
                        f"{argument} names {column!r}, which is {named[column]}; leave it out"
                    )

    def arguments(self, *, target: bool = True, hist: bool = True) -> dict[str, str]:
        """Map each column that a frame must have to the argument that names it."""
        return {
            self.id: "id_col",
            self.time: "time_col",
            **({self.target: "target_col"} if target else {}),
            **(dict.fromkeys(self.hist, "hist_exog_list") if hist else {}),
            **dict.fromkeys(self.futr, "futr_exog_list"),
        }


@dataclass(frozen=True)
class Panel:
    """Series on a regular grid of times, each with its first and last time.

    Attributes
    ----------
    ids : ndarray of object, shape (N,)
        In increasing order.
    first : ndarray of int64, shape (N,)
        First time of each series, see :class:`Frequency`.
    lengths : ndarray of int, shape (N,)
        Number of steps of each series. The series follow one another in ``values``.
    values : dict of str to ndarray, shape (total,)
        Values of each column: float64 (NaN where missing), or object for categories (None where
        missing).
    static : dict of str to ndarray, shape (N,)
        Values of each static covariate.
    frequency : Frequency
    zone : str or None
        Time zone.
    types : dict
        Data types of the id and time columns, of narwhals, or of pyarrow for its ids.
    backend : str
        Library of the frames to return.
    shape : tuple of int, optional
        Numbers of features and series of the array that the series came as. None: they came as a
        frame.
    """

    ids: np.ndarray
    first: np.ndarray
    lengths: np.ndarray
    values: dict[str, np.ndarray]
    static: dict[str, np.ndarray]
    frequency: Frequency
    zone: str | None
    types: dict[str, Any]
    backend: str = "pandas"
    shape: tuple[int, int] | None = None

    @property
    def n_series(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def positions(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the positions in ``values`` of the steps ``start[n]`` to ``stop[n]`` of each
        series.
        """
        # no loop over the series, of which there may be very many
        count = stop - start
        return np.repeat(self.offsets + start - (np.cumsum(count) - count), count) + np.arange(
            count.sum()
        )

    def cut(self, start: np.ndarray, stop: np.ndarray) -> Panel:
        """Return a copy with the steps ``start[n]`` to ``stop[n]`` of each series, without series
        that have none.
        """
        at = self.positions(start, stop)
        has = stop > start
        return replace(
            self,
            ids=self.ids[has],
            first=self.frequency.add_steps(self.first, start)[has],
            lengths=(stop - start)[has],
            values={name: v[at] for name, v in self.values.items()},
            static={name: v[has] for name, v in self.static.items()},
        )

    def times(self, series: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the times of ``steps`` of ``series``, as ``datetime64[ns]`` in UTC, or as
        integers.
        """
        first = self.first[series]
        times = self.frequency.add_steps(first, steps)
        # int64 wraps around after its last nanosecond
        if ((times < first) & (steps > 0)).any():
            raise DataError(
                f"{int(np.max(steps))} steps of freq={self.frequency.text!r} after the first time "
                "of a series are beyond the year 2261, the last of dates in nanoseconds; give "
                "integer times, such as the year"
            )
        if self.frequency.kind == "integer":
            return times
        if self.frequency.is_local:
            times = to_absolute(times, self.zone)
        return times.astype("M8[ns]")

    def time_text(self, series: int, step: int) -> str:
        """Return the time of one step of one series, as text for messages."""
        time = self.times(np.array([series]), np.array([step]))[0]
        return str(time.astype("M8[s]") if isinstance(time, np.datetime64) else time)


def series_numbers(labels: Iterable[object], ids: np.ndarray) -> np.ndarray:
    """Return the number of each label among ids, -1 where it is none of them."""
    number = {label: i for i, label in enumerate(ids)}
    return np.array([number.get(label, -1) for label in labels], int)


def read_panel(
    df: object,
    columns: Columns,
    freq: Any = None,
    *,
    static_df: object = None,
    zone: str | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Panel:
    """Read a long frame, whose rows may be in any order.

    Parameters
    ----------
    df : data frame of pandas, polars or pyarrow
    columns : Columns
    freq : Frequency, str, pandas offset, int, or None
        None: inferred from the times.
    static_df : data frame, optional
        One row per series with the static covariates. None: ``df`` holds them.
    zone : str, optional
        Time zone to which times of another zone are converted. None: they stay in theirs.
    extra : dict of str to ndarray of shape (rows,), optional
        Further numbers of the rows, which become values of the panel.

    Warns of rows without a value of the target after the last value of all series.

    Raises
    ------
    DataError
        If the data cannot be used. The message names column and row.
    """
    frame = Frame(df, "df")
    frame.require(columns.arguments())
    # before the types: columns of a frame without rows may have any
    if frame.n_rows == 0:
        raise DataError("df has no rows")
    labels = frame.labels(columns.id)
    ids = sorted_labels(labels)
    series = series_numbers(labels, ids)
    at = frame.times(columns.time)
    # in local time, days and months would begin at other hours than those of the stored series
    if zone is not None and at.zone not in (None, zone):
        at = replace(at, local=to_local(at.absolute, zone), zone=zone)
    frequency = read_frequency(freq, at, series, frame.is_polars)
    _require_kind(frame, columns, at, frequency)
    times = at.on(frequency.is_local)
    if (outside := frequency.is_outside(times)).any():
        frame.refuse(columns.time, outside, frequency.outside_remedy())
    # of the frame: the forecasts are to be joined with it
    types = {columns.id: frame.label_type(columns.id), columns.time: frame.dtype(columns.time)}
    # filled below, when the steps of the rows are known
    lengths = np.zeros(len(ids), int)
    first = first_times(times, series)
    panel = Panel(ids, first, lengths, {}, {}, frequency, at.zone, types, frame.backend)
    steps = grid_steps(frame, columns.time, panel, series, times)
    np.maximum.at(lengths, series, steps + 1)
    # before the arrays, which have an element for each empty step too
    warn_empty_steps(panel, np.bincount(series))
    place = panel.offsets[series] + steps
    rows = {columns.target: frame.numbers(columns.target, missing=True)}
    known = ~np.isnan(rows[columns.target])
    future = times > times[known].max(initial=np.iinfo(times.dtype).min)
    _warn_future_rows(panel, columns.target, series, steps, future)
    for column in (*columns.hist, *columns.futr):
        rows[column] = frame.values(column, missing=column not in columns.futr)
    rows |= extra or {}
    for column, given in rows.items():
        values = np.full(lengths.sum(), None if given.dtype == object else np.nan)
        values[place] = given
        panel.values[column] = values
    panel.static.update(_read_all_static(static_df, frame, columns, series, ids))
    return panel


def sorted_labels(labels: np.ndarray) -> np.ndarray:
    # not a set: labels that cannot be compared keep the order of the rows
    different = dict.fromkeys(labels)
    try:
        ordered = sorted(different)
    except TypeError:  # labels of different types
        ordered = sorted(different, key=str)
    return np.array(ordered, object)


def read_frequency(
    freq: Any,
    at: TimeColumn,
    series: np.ndarray,
    polars: bool,
) -> Frequency:
    if isinstance(freq, Frequency):
        return freq
    if freq is not None:
        return parse_frequency(freq, at.is_integer, polars)
    return infer_frequency(at.absolute, at.local, series)


def _require_kind(
    frame: Frame,
    columns: Columns,
    at: TimeColumn,
    frequency: Frequency,
) -> None:
    if (frequency.kind == "integer") != at.is_integer:
        held, fitted = ("integers", "dates") if at.is_integer else ("dates", "integers")
        raise DataError(
            f"column {columns.time!r} of {frame.name} holds {held}, the forecaster was fitted on "
            f"{fitted}"
        )


def grid_steps(
    frame: Frame,
    time_col: str,
    panel: Panel,
    series: np.ndarray,
    times: np.ndarray,
) -> np.ndarray:
    """Return the step of each row, from the first one of its series; rows of series -1 are not
    checked.

    Raises
    ------
    DataError
        If a time is between two steps, or a series has two rows of one step.
    """
    known = series >= 0
    steps, whole = panel.frequency.steps_between(panel.first[np.maximum(series, 0)], times)
    # the step of a time between two is rounded down, and could be another row's
    between = known & ~whole
    if between.any():
        label = panel.ids[series[between.argmax()]]
        which = "the series" if label is None else f"series {label!r}"
        remedy = (
            f", no whole number of steps of freq={panel.frequency.text!r} from the first time of "
            f"{which}; give the freq of the data, or round the times, as "
            f"df[{time_col!r}].dt.round does in pandas and polars"
        )
        frame.refuse(time_col, between, remedy)
    # sorted, rows of one step are neighbours
    order = np.lexsort((steps, series))
    again = (np.diff(series[order]) == 0) & (np.diff(steps[order]) == 0) & known[order[1:]]
    if again.any():
        place = int(again.argmax())
        row, other = sorted(order[place : place + 2])
        label = panel.ids[series[row]]
        which = "both" if label is None else f"both of series {label!r}"
        raise DataError(
            f"rows {row} and {other} of {frame.name} are {which} at "
            f"{frame.frame[time_col][int(other)]}; keep one, or aggregate them"
        )
    return steps


def warn_empty_steps(panel: Panel, n_rows: np.ndarray) -> None:
    """Warn of series with a row at few of their steps, as where one is hourly and another daily."""
    sparse = np.flatnonzero((n_rows >= FEW_ROWS) & (n_rows < LEAST_FILLED * panel.lengths))
    if len(sparse):
        i = sparse[0]
        warn(
            f"{len(sparse)} of {panel.n_series} series have rows at few of their steps of "
            f"freq={panel.frequency.text!r} (series {panel.ids[i]!r} at {n_rows[i]} of "
            f"{panel.lengths[i]}): all other steps count as missing. Take series of different "
            "frequency apart, and write rows with 0 where no row means 0"
        )


def _warn_future_rows(
    panel: Panel,
    target: str,
    series: np.ndarray,
    steps: np.ndarray,
    future: np.ndarray,
) -> None:
    """Warn of rows without a value, after the last value of all series."""
    if not future.any():
        return
    i = series[future.argmax()]
    rows = np.flatnonzero(future & (series == i))
    rows = rows[np.argsort(steps[rows])]
    begin, end = (panel.time_text(i, steps[row]) for row in rows[[0, -1]])
    warn(
        f"{int(future.sum())} rows of {len(np.unique(series[future]))} series have no value of "
        f"{target!r}, and no series has a later one (series {panel.ids[i]!r}: from row {rows[0]} "
        f"of df at {begin} to row {rows[-1]} at {end}): forecasts begin after them. To forecast "
        "these times, leave the rows out, and give covariates known ahead as futr_df"
    )


def _read_all_static(
    static_df: object,
    frame: Frame,
    columns: Columns,
    series: np.ndarray,
    ids: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the static covariates from their frame, or from that of the series if there is
    none.
    """
    if static_df is None:
        return _static_values(frame, columns, series, ids)
    if not columns.stat:
        raise DataError("static_df is given, but stat_exog_list names no covariates")
    has_row, static = read_static(static_df, columns, ids)
    if not has_row.all():
        raise DataError(f"static_df has no row of series {ids[int((~has_row).argmax())]!r}")
    return static


def read_static(
    static_df: object,
    columns: Columns,
    ids: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read the static covariates of series from a separate frame.

    Returns
    -------
    has_row : ndarray of bool, shape (N,)
        Whether the frame has a row of each of ``ids``.
    static : dict of str to ndarray
        Values of each static covariate, of the series with a row.
    """
    frame = Frame(static_df, "static_df")
    frame.require({columns.id: "id_col", **dict.fromkeys(columns.stat, "stat_exog_list")})
    series = series_numbers(frame.labels(columns.id), ids)
    return np.isin(np.arange(len(ids)), series), _static_values(frame, columns, series, ids)


def _static_values(
    frame: Frame,
    columns: Columns,
    series: np.ndarray,
    ids: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the one value of each static covariate in each series; ``series`` are those of the
    rows, or -1.
    """
    # here too: without static_df they are columns of df
    frame.require(dict.fromkeys(columns.stat, "stat_exog_list"))
    keep = np.flatnonzero(series >= 0)
    _, begin, number = np.unique(series[keep], return_index=True, return_inverse=True)
    static: dict[str, np.ndarray] = {}
    for column in columns.stat:
        rows = frame.values(column)
        static[column] = rows[keep[begin]]
        # the value of its series, for each row
        first = static[column][number]
        changed = np.flatnonzero(first != rows[keep])
        if len(changed):
            row = int(keep[changed[0]])
            raise DataError(
                f"column {column!r} of {frame.name} is {rows[row]} in row {row} and "
                f"{first[changed[0]]} before in series {ids[series[row]]!r}; a static "
                "covariate has one value per series"
            )
    return static


def read_steps(
    frame: Frame,
    columns: Columns,
    panel: Panel,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the series and the step in a panel of each row of a frame; steps count from the
    series' first one.

    Both are (rows,). The series is -1 if the panel does not have it, and on weekends of business
    days.
    """
    series = series_numbers(frame.labels(columns.id), panel.ids)
    at = frame.times(columns.time)
    _require_kind(frame, columns, at, panel.frequency)
    which = f"column {columns.time!r} of {frame.name}"
    if at.zone is None and panel.zone is not None:
        raise DataError(f"{which} has no time zone, the series are in {panel.zone}")
    if at.zone is not None and panel.zone is None:
        raise DataError(
            f"{which} is in the time zone {at.zone}, the series have no time zone; give times "
            "without one, as with dt.tz_localize(None)"
        )
    # the local times are those of the frame's zone, which may be another one
    times = to_local(at.absolute, panel.zone) if panel.frequency.is_local else at.absolute
    series = np.where(panel.frequency.is_outside(times), -1, series)
    return series, grid_steps(frame, columns.time, panel, series, times)
