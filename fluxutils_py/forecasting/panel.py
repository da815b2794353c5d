"""Read a panel of series from a long data frame with one row per series and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.forecasting.frames import Frame, TimeColumn, to_absolute, to_local
from fluxutils_py.forecasting.frequency import Frequency, infer_frequency, parse_frequency

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

    @property
    def n_series(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(int)

    def positions(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the positions in ``values`` of the steps ``start[n]`` to ``stop[n]`` of each
        series.
        """
        count = stop - start
        return np.repeat(self.offsets + start - (np.cumsum(count) - count), count) + np.arange(
            count.sum()
        )

    def cut(self, start: np.ndarray, stop: np.ndarray) -> Panel:
        """Return a copy with the steps ``start[n]`` to ``stop[n]`` of each series, without series
        that have none.
        """
        at, has = self.positions(start, stop), stop > start
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
        found = self.frequency.add_steps(first, steps)
        if ((found < first) & (steps > 0)).any():
            raise DataError(
                f"{int(np.max(steps))} steps of freq={self.frequency.text!r} after the first time "
                "of a series are beyond the year 2261, the last of dates in nanoseconds; give "
                "integer times, such as the year"
            )
        if self.frequency.kind == "integer":
            return found
        return (to_absolute(found, self.zone) if self.frequency.is_local else found).astype(
            "M8[ns]"
        )


def series_name(panel: Panel | None, series: int) -> str:
    """Name a series in messages: by its id, or by its number if there are no ids."""
    return f"number {series}" if panel is None else repr(panel.ids[series])


def format_time(time: object) -> str:
    """Return a time of a panel as text for messages."""
    return str(time.astype("M8[s]") if isinstance(time, np.datetime64) else time)


# More than 12 branches: each fault of a frame is one case, in the order of mending.
def read_panel(
    df: Any,
    columns: Columns,
    freq: Any = None,
    *,
    static_df: Any = None,
    zone: str | None = None,
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

    Raises
    ------
    DataError
        If the data cannot be used. The message names column and row.
    """
    frame = Frame(df, "df")
    frame.require(columns.arguments())
    if frame.n_rows == 0:
        raise DataError("df has no rows")
    codes, ids = _number_labels(frame.labels(columns.id))
    at = frame.times(columns.time)
    if zone is not None and at.zone not in (None, zone):
        at = TimeColumn(at.absolute, to_local(at.absolute, zone), zone, at.dtype)
    frequency = freq if isinstance(freq, Frequency) else None
    if frequency is None and freq is not None:
        frequency = parse_frequency(freq, at.is_integer, frame.is_polars)
    if frequency is None:
        local = at.on(True)
        order = np.lexsort((local, codes))
        same = np.diff(codes[order]) == 0
        steps = np.diff(at.absolute[np.lexsort((at.absolute, codes))])[same]
        frequency = infer_frequency(
            steps, local, at.is_integer, _first_times(local, codes, len(ids))[codes]
        )
    _require_kind(frame, columns, at, frequency)
    times = at.on(frequency.is_local)
    order = np.lexsort((times, codes))
    first = _first_times(times, codes, len(ids))
    steps, whole = frequency.steps_between(first[codes], times)
    _refuse_weekends(frame, columns, frequency.is_weekend(times), frequency)
    _require_grid(frame, columns, whole, frequency, ids, codes)
    _require_unique(frame, columns, codes[order], steps[order], order, ids)
    lengths = np.zeros(len(ids), int)
    np.maximum.at(lengths, codes, steps + 1)
    _warn_empty_steps(np.bincount(codes, minlength=len(ids)), lengths, ids, frequency)
    offsets = np.cumsum(lengths) - lengths
    place = offsets[codes] + steps
    total = int(lengths.sum())
    values = {}
    for column in (columns.target, *columns.hist, *columns.futr):
        if column != columns.target and frame.is_category(column):
            labels = np.full(total, None, dtype=object)
            labels[place] = frame.labels(column, missing=column not in columns.futr)
            values[column] = labels
        else:
            found = np.full(total, np.nan)
            found[place] = frame.numbers(column, missing=column not in columns.futr)
            values[column] = found
    types = {columns.id: frame.label_type(columns.id), columns.time: frame.dtype(columns.time)}
    static: dict[str, np.ndarray] = {}
    if static_df is not None:
        if not columns.stat:
            raise DataError("static_df is given, but stat_exog_list names no covariates")
        has_row, static = read_static(static_df, columns, ids)
        if not has_row.all():
            raise DataError(f"static_df has no row of series {ids[int((~has_row).argmax())]!r}")
    elif columns.stat:
        static = _static_values(frame, columns, codes, ids)
    return Panel(ids, first, lengths, values, static, frequency, at.zone, types, frame.backend)


def _number_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each label among the sorted unique labels, and these labels."""
    numbers: dict[Any, int] = {}
    codes = np.fromiter(
        (numbers.setdefault(label, len(numbers)) for label in labels), int, len(labels)
    )
    ids = list(numbers)
    try:
        order = sorted(range(len(ids)), key=ids.__getitem__)
    except TypeError:  # labels of different types
        order = sorted(range(len(ids)), key=lambda i: str(ids[i]))
    rank = np.empty(len(ids), int)
    rank[order] = np.arange(len(ids))
    made = np.empty(len(ids), object)
    made[:] = [ids[i] for i in order]
    return rank[codes], made


def _require_kind(frame: Frame, columns: Columns, at: TimeColumn, frequency: Frequency) -> None:
    if (frequency.kind == "integer") != at.is_integer:
        kinds = ("dates", "integers") if at.is_integer else ("integers", "dates")
        raise DataError(
            f"column {columns.time!r} of {frame.name} holds {kinds[1]}, the forecaster was fitted "
            f"on {kinds[0]}"
        )


def _first_times(times: np.ndarray, codes: np.ndarray, n_series: int) -> np.ndarray:
    first = np.full(n_series, np.iinfo(np.int64).max)
    np.minimum.at(first, codes, times)
    return first


def _refuse_weekends(
    frame: Frame, columns: Columns, weekend: np.ndarray, frequency: Frequency
) -> None:
    if weekend.any():
        row = int(weekend.argmax())
        raise DataError(
            f"column {columns.time!r} of {frame.name} is "
            f"{frame.frame[columns.time].to_list()[row]} in row {row}, on a weekend, and "
            f"freq={frequency.text!r} has business days only; leave the row out, or give freq='D'"
        )


def _warn_empty_steps(
    n_rows: np.ndarray, lengths: np.ndarray, ids: np.ndarray, frequency: Frequency
) -> None:
    """Warn of series with a row at few of their steps, as where one is hourly and another daily."""
    sparse = np.flatnonzero((n_rows >= FEW_ROWS) & (n_rows < LEAST_FILLED * lengths))
    if len(sparse):
        i = sparse[0]
        warn(
            f"{len(sparse)} of {len(ids)} series have rows at few of their steps of "
            f"freq={frequency.text!r} (series {ids[i]!r} at {n_rows[i]} of {lengths[i]}): all "
            "other steps count as missing. Forecast series of different frequency apart, and "
            "write rows with 0 where no row means 0",
        )


def _require_grid(
    frame: Frame,
    columns: Columns,
    whole: np.ndarray,
    frequency: Frequency,
    ids: np.ndarray,
    codes: np.ndarray,
) -> None:
    if not whole.all():
        row = int((~whole).argmax())
        raise DataError(
            f"column {columns.time!r} of {frame.name} is "
            f"{frame.frame[columns.time].to_list()[row]} in row {row}, no whole number of steps of "
            f"freq={frequency.text!r} from the first time of series {ids[codes[row]]!r}; give the "
            "freq of the data, or round the times"
        )


def _require_unique(
    frame: Frame,
    columns: Columns,
    codes: np.ndarray,
    steps: np.ndarray,
    order: np.ndarray,
    ids: np.ndarray,
) -> None:
    twice = (np.diff(codes) == 0) & (np.diff(steps) == 0) & (codes[1:] >= 0)
    if twice.any():
        at = int(twice.argmax())
        rows = sorted((int(order[at]), int(order[at + 1])))
        raise DataError(
            f"rows {rows[0]} and {rows[1]} of {frame.name} are both of series {ids[codes[at]]!r} "
            f"at {frame.frame[columns.time].to_list()[rows[1]]}; keep one, or add them up"
        )


def read_static(
    static_df: Any, columns: Columns, ids: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read the static covariates of series from a frame of their own.

    Returns
    -------
    has_row : ndarray of bool, shape (N,)
        Whether the frame has a row of each of ``ids``.
    static : dict of str to ndarray
        Values of each static covariate, of the series with a row.
    """
    frame = Frame(static_df, "static_df")
    frame.require({columns.id: "id_col", **dict.fromkeys(columns.stat, "stat_exog_list")})
    number = {label: i for i, label in enumerate(ids)}
    codes = np.array([number.get(label, -1) for label in frame.labels(columns.id)], int)
    return np.isin(np.arange(len(ids)), codes), _static_values(frame, columns, codes, ids)


def _static_values(
    frame: Frame, columns: Columns, codes: np.ndarray, ids: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the one value of each static covariate in each series; ``codes`` are the series of the
    rows, or -1.
    """
    frame.require(dict.fromkeys(columns.stat, "stat_exog_list"))
    keep = np.flatnonzero(codes >= 0)
    _, begin, number = np.unique(codes[keep], return_index=True, return_inverse=True)
    found: dict[str, np.ndarray] = {}
    for column in columns.stat:
        category = frame.is_category(column)
        rows = frame.labels(column) if category else frame.numbers(column, missing=False)
        each = rows[keep[begin]]
        other = np.flatnonzero(each[number] != rows[keep])
        if len(other):
            row = int(keep[other[0]])
            raise DataError(
                f"column {column!r} of {frame.name} is {rows[row]} in row {row} and "
                f"{each[number[other[0]]]} before in series {ids[codes[row]]!r}; a static "
                "covariate has one value per series"
            )
        found[column] = each
    return found


def read_steps(frame: Frame, columns: Columns, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """Return the series and the step in a panel of each row of a frame; steps count from the
    series' first one.

    Both are (rows,). The series is -1 if the panel does not have it, and on weekends of business
    days.
    """
    name = frame.name
    number = {label: i for i, label in enumerate(panel.ids)}
    series = np.array([number.get(label, -1) for label in frame.labels(columns.id)])
    at = frame.times(columns.time)
    _require_kind(frame, columns, at, panel.frequency)
    if at.zone is None and panel.zone is not None:
        raise DataError(
            f"column {columns.time!r} of {name} has no time zone, the series are in {panel.zone}"
        )
    if at.zone is not None and panel.zone is None:
        raise DataError(
            f"column {columns.time!r} of {name} is in the time zone {at.zone}, the series have no "
            "time zone; give times without one, as with dt.tz_localize(None)"
        )
    times = to_local(at.absolute, panel.zone) if panel.frequency.is_local else at.absolute
    series = np.where(panel.frequency.is_weekend(times), -1, series)
    steps, whole = panel.frequency.steps_between(panel.first[np.maximum(series, 0)], times)
    _require_grid(frame, columns, whole | (series < 0), panel.frequency, panel.ids, series)
    order = np.lexsort((steps, series))
    _require_unique(frame, columns, series[order], steps[order], order, panel.ids)
    return series, steps
