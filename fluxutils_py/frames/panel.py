"""Read series from a long data frame with one row per series and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.frames.frames import Frame, require, to_absolute, to_local
from fluxutils_py.frames.frequency import (
    Frequency,
    first_times,
    infer_frequency,
    parse_frequency,
)

COUNTED = Frequency("integer", 1, text="1")  # where no column says the time
FEW_ROWS = 4  # of fewer rows it is not said that they leave most steps empty
LEAST_FILLED = 0.2  # share of the steps of a series that have a row


def require_one_role(keys: Mapping[str, str | None], lists: Mapping[str, tuple[str, ...]]) -> None:
    """Raise SpecError if a column of ids, times or targets is named again; both map arguments to
    columns.
    """
    named: dict[str, str] = {}
    pairs = [(argument, column) for argument, columns in lists.items() for column in columns]
    for argument, column in (*keys.items(), *pairs):
        if column in named:
            raise SpecError(
                f"{named[column]} and {argument} are both {column!r}; name two columns, or leave "
                "one out"
            )
        if column is not None and argument in keys:
            named[column] = argument


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
        require_one_role(
            {"id_col": self.id, "time_col": self.time, "target_col": self.target},
            {
                "hist_exog_list": self.hist,
                "futr_exog_list": self.futr,
                "stat_exog_list": self.stat,
            },
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
        Data types of narwhals of the id and time columns.
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
    freq : Frequency, str, int, or None
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
    frame, panel, series, steps = read_rows(
        df, columns.arguments(), columns.id, columns.time, freq, zone
    )
    values = {columns.target: frame.numbers(columns.target, missing=True)}
    # rows without a value, after the last value of all series
    times = panel.frequency.add_steps(panel.first[series], steps)
    known = times[~np.isnan(values[columns.target])]
    future = times > known.max(initial=np.iinfo(times.dtype).min)
    if future.any():
        row = int(future.argmax())
        warn(
            f"{int(future.sum())} rows of {len(np.unique(series[future]))} series have no value of "
            f"{columns.target!r}, and no series has a later one (row {row} of df, series "
            f"{panel.ids[series[row]]!r} at {panel.time_text(series[row], steps[row])}): forecasts "
            "begin after them. To forecast these times, leave the rows out, and give covariates "
            "known ahead as futr_df"
        )
    for column in (*columns.hist, *columns.futr):
        values[column] = frame.values(column, missing=column not in columns.futr)
    place = panel.offsets[series] + steps
    for column, given in (values | dict(extra or {})).items():
        panel.values[column] = missing_values((panel.lengths.sum(),), given.dtype)
        panel.values[column][place] = given
    # the static covariates, of their frame or, without one, that of the series
    if static_df is not None:
        if not columns.stat:
            raise DataError("static_df is given, but stat_exog_list names no covariates")
        frame = Frame(static_df, "static_df")
        frame.require({columns.id: "id_col"})
        series = series_numbers(frame.labels(columns.id), panel.ids)
        has_row = np.isin(np.arange(len(panel.ids)), series)
        if not has_row.all():
            label = panel.ids[int((~has_row).argmax())]
            raise DataError(f"static_df has no row of series {label!r}")
    frame.require(dict.fromkeys(columns.stat, "stat_exog_list"))
    rule = "a static covariate has one value per series"
    for column in columns.stat:
        rows = frame.values(column)
        panel.static[column] = value_per_series(frame, column, rows, panel.ids, series, rule)
    return panel


def read_rows(
    df: Any,
    columns: dict[str, str],
    id_col: str | None,
    time_col: str | None,
    freq: Any,
    zone: str | None = None,
) -> tuple[Frame, Panel, np.ndarray, np.ndarray]:
    """Return a frame, its series without values, and the series and the step of each row.

    Parameters
    ----------
    df : data frame
    columns : dict of str to str
        The columns that are read, each with the argument that names it.
    id_col, time_col : str or None
        The columns of ids and of times. None: all rows are one series; the rows of a series are its
        steps, in their order.
    freq, zone : as of :func:`read_panel`

    Raises
    ------
    DataError
        If there are no rows, times are of another kind than the steps or between two of them, or
        two rows of a series have one time.
    """
    frame = Frame(df, "df")
    frame.require(columns)
    if frame.n_rows == 0:
        raise DataError("df has no rows")
    labels = np.full(frame.n_rows, None) if id_col is None else frame.labels(id_col)
    # not a set: labels that cannot be compared keep the order of the rows
    different = dict.fromkeys(labels)
    try:
        ids = np.array(sorted(different), object)
    except TypeError:  # labels of different types
        ids = np.array(sorted(different, key=str), object)
    series = series_numbers(labels, ids)
    if time_col is None:
        at, zone = count_within(series), None
        frequency = COUNTED
    else:
        at, zone = frame.times(time_col, zone)
        is_integer = at.dtype.kind == "i"
        frequency = freq
        if freq is None:
            local = None if is_integer else _numbers(at, zone, True)
            frequency = infer_frequency(at.astype(np.int64), local, series)
        elif not isinstance(freq, Frequency):
            frequency = parse_frequency(freq, is_integer)
        _require_kind(frame, time_col, at, frequency)
    times = _numbers(at, zone, frequency.is_local)
    first = first_times(times, series)
    last = -first_times(-times, series)
    lengths = frequency.steps_between(first, last)[0] + 1
    # predictions are joined by these columns
    types = {column: frame.dtype(column) for column in (id_col, time_col) if column is not None}
    panel = Panel(ids, first, lengths, {}, {}, frequency, zone, types, frame.backend)
    # before the arrays, which have an element for each empty step too
    n_rows = np.bincount(series)
    # as where one is hourly and another daily
    sparse = np.flatnonzero((n_rows >= FEW_ROWS) & (n_rows < LEAST_FILLED * lengths))
    if len(sparse):
        i = sparse[0]
        warn(
            f"{len(sparse)} of {panel.n_series} series have rows at few of their steps of "
            f"freq={frequency.text!r} (series {ids[i]!r} at {n_rows[i]} of {lengths[i]}): all "
            "other steps count as missing. Separate series of different frequency, and write "
            "rows with 0 where no row means 0"
        )
    return frame, panel, series, grid_steps(frame, time_col or "", panel, series, times)


def count_within(series: np.ndarray) -> np.ndarray:
    """Return how many rows of the same series are before each row."""
    counts = require("pandas").Series(series).groupby(series).cumcount()
    return np.asarray(counts)


def missing_values(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of missing values, or of zeros where the type has no such value."""
    value: Any = {"O": None, "f": np.nan}.get(dtype.kind, 0)
    return np.full(shape, value, dtype)


def _numbers(at: np.ndarray, zone: str | None, is_local: bool) -> np.ndarray:
    """Return times as integers, or nanoseconds since 1970: in local time if ``is_local``."""
    absolute = at.astype(np.int64)
    return to_local(absolute, zone) if is_local else absolute


def _require_kind(frame: Frame, column: str, at: np.ndarray, frequency: Frequency) -> None:
    is_integer = at.dtype.kind == "i"
    if is_integer != (frequency.kind == "integer"):
        held, expected = ("integers", "dates") if is_integer else ("dates", "integers")
        raise DataError(
            f"column {column!r} of {frame.name} holds {held}, and the steps of "
            f"freq={frequency.text!r} are of {expected}"
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
    steps, whole = panel.frequency.steps_between(panel.first[series], times)
    # the step of a time between two is rounded down, and could be another row's
    between = known & ~whole
    if between.any():
        label = panel.ids[series[between.argmax()]]
        remedy = (
            f", no whole number of steps of freq={panel.frequency.text!r} from the first time of "
            f"series {label!r}; give the freq of the data, or round the times, as "
            f"df[{time_col!r}].dt.round does in pandas and polars"
        )
        frame.refuse(time_col, between, remedy)
    # sorted, rows of one step are neighbours
    order = np.lexsort((steps, series))
    again = (np.diff(series[order]) == 0) & (np.diff(steps[order]) == 0) & known[order[1:]]
    if again.any():
        place = int(again.argmax())
        row, other = sorted(order[place : place + 2])
        raise DataError(
            f"rows {row} and {other} of {frame.name} are both of series "
            f"{panel.ids[series[row]]!r} at {frame.frame[time_col][int(other)]}; keep one, or "
            "aggregate them"
        )
    return steps


def value_per_series(
    frame: Frame,
    column: str,
    rows: np.ndarray,
    ids: np.ndarray,
    series: np.ndarray,
    rule: str,
) -> np.ndarray:
    """Return the one value (N,) that the rows of each series have, missing for those without rows.

    ``rows`` are the values of a column of the frame; those of series -1 are left out.

    Raises
    ------
    DataError
        If two rows of a series differ. It names them, and ends with ``rule``.
    """
    values = missing_values(ids.shape, rows.dtype)
    used = np.flatnonzero(series >= 0)
    which, first = np.unique(series[used], return_index=True)
    values[which] = rows[used[first]]
    of_series = values[series]
    differs = (rows != of_series) & (series >= 0)
    if rows.dtype.kind == "f":
        differs &= ~(np.isnan(rows) & np.isnan(of_series))
    if differs.any():
        row = int(differs.argmax())
        raise DataError(
            f"column {column!r} of {frame.name} is {rows[row]} in row {row} and {of_series[row]} "
            f"before in series {ids[series[row]]!r}; {rule}"
        )
    return values


def read_steps(
    frame: Frame,
    columns: Columns,
    panel: Panel,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the series and the step in a panel of each row of a frame; steps count from the
    series' first one.

    Both are (rows,). The series is -1 if the panel does not have it.
    """
    series = series_numbers(frame.labels(columns.id), panel.ids)
    at, zone = frame.times(columns.time)
    _require_kind(frame, columns.time, at, panel.frequency)
    if (zone is None) != (panel.zone is None):
        raise DataError(
            f"column {columns.time!r} of {frame.name} is in the time zone {zone}, the series "
            f"are in {panel.zone}; give both a zone, or none, as with dt.tz_localize(None)"
        )
    # the local times are those of the frame's zone, which may be another one
    times = _numbers(at, panel.zone, panel.frequency.is_local)
    return series, grid_steps(frame, columns.time, panel, series, times)
