"""Read a panel of series from a long data frame with one row per series and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.frames import Frame, to_absolute, to_local
from fluxutils_py.forecasting.frequency import Frequency, infer_frequency, parse_frequency


@dataclass(frozen=True)
class Columns:
    """Column names of a long frame; defaults as in NeuralForecast and utilsforecast."""

    id: str = "unique_id"
    time: str = "ds"
    target: str = "y"
    hist: tuple[str, ...] = ()
    futr: tuple[str, ...] = ()
    stat: tuple[str, ...] = ()

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
        Values of each column: float64 (NaN where missing), or object for categories (None where missing).
    static : dict of str to ndarray, shape (N,)
        Values of each static covariate.
    frequency : Frequency
    zone : str or None
        Time zone.
    types : dict
        narwhals data types of the id and time columns.
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
        """Return the positions in ``values`` of the steps ``start[n]`` to ``stop[n]`` of each series."""
        count = stop - start
        return np.repeat(self.offsets + start - (np.cumsum(count) - count), count) + np.arange(count.sum())

    def cut(self, start: np.ndarray, stop: np.ndarray) -> Panel:
        """Return a copy with the steps ``start[n]`` to ``stop[n]`` of each series, without series that have none."""
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
        """Return the times of ``steps`` of ``series``, as ``datetime64[ns]`` in UTC, or as integers."""
        found = self.frequency.add_steps(self.first[series], steps)
        if self.frequency.kind == "integer":
            return found
        return (to_absolute(found, self.zone) if self.frequency.is_local else found).astype("M8[ns]")


def series_name(panel: Panel | None, series: int) -> str:
    """Name a series in messages: by its id, or by its number if there are no ids."""
    return f"number {series}" if panel is None else repr(panel.ids[series])


def read_panel(
    df: Any,
    columns: Columns,
    freq: Any = None,
    *,
    static_df: Any = None,
) -> Panel:
    """Read a long frame, whose rows may be in any order.

    Parameters
    ----------
    df : data frame of pandas or polars
    columns : Columns
    freq : Frequency, str, pandas offset, int, or None
        None: inferred from the times.
    static_df : data frame, optional
        One row per series with the static covariates. None: ``df`` holds them.

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
    frequency = freq if isinstance(freq, Frequency) else None
    if frequency is None and freq is not None:
        frequency = parse_frequency(freq, at.is_integer, frame.is_polars)
    if frequency is None:
        local = at.on(True)
        order = np.lexsort((local, codes))
        same = np.diff(codes[order]) == 0
        steps = np.diff(at.absolute[np.lexsort((at.absolute, codes))])[same]
        frequency = infer_frequency(steps, local, at.is_integer)
    if (frequency.kind == "integer") != at.is_integer:
        kinds = ("dates", "integers") if at.is_integer else ("integers", "dates")
        raise DataError(f"column {columns.time!r} of df holds {kinds[1]}, the forecaster was fitted on {kinds[0]}")
    times = at.on(frequency.is_local)
    order = np.lexsort((times, codes))
    first = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(first, codes, times)
    steps, whole = frequency.steps_between(first[codes], times)
    _require_grid(frame, columns, whole, frequency, ids, codes)
    _require_unique(frame, columns, codes[order], steps[order], order, ids)
    lengths = np.zeros(len(ids), int)
    np.maximum.at(lengths, codes, steps + 1)
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
    types = {c: frame.dtype(c) for c in (columns.id, columns.time)}
    static = _read_static(frame, static_df, columns, codes, ids) if columns.stat else {}
    return Panel(ids, first, lengths, values, static, frequency, at.zone, types, frame.backend)


def _number_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each label among the sorted unique labels, and these labels."""
    numbers: dict[Any, int] = {}
    codes = np.fromiter((numbers.setdefault(label, len(numbers)) for label in labels), int, len(labels))
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


def _require_grid(
    frame: Frame, columns: Columns, whole: np.ndarray, frequency: Frequency, ids: np.ndarray, codes: np.ndarray
) -> None:
    if not whole.all():
        row = int((~whole).argmax())
        raise DataError(
            f"column {columns.time!r} of {frame.name} is {frame.frame[columns.time].to_list()[row]} in row {row}, no "
            f"whole number of steps of freq={frequency.text!r} from the first time of series {ids[codes[row]]!r}; give "
            "the freq of the data, or round the times"
        )


def _require_unique(
    frame: Frame, columns: Columns, codes: np.ndarray, steps: np.ndarray, order: np.ndarray, ids: np.ndarray
) -> None:
    twice = (np.diff(codes) == 0) & (np.diff(steps) == 0)
    if twice.any():
        at = int(twice.argmax())
        rows = sorted((int(order[at]), int(order[at + 1])))
        raise DataError(
            f"rows {rows[0]} and {rows[1]} of {frame.name} are both of series {ids[codes[at]]!r} at "
            f"{frame.frame[columns.time].to_list()[rows[1]]}; keep one, or add them up"
        )


def _read_static(
    frame: Frame, static_df: Any, columns: Columns, codes: np.ndarray, ids: np.ndarray
) -> dict[str, np.ndarray]:
    if static_df is not None:
        frame = Frame(static_df, "static_df")
        frame.require({columns.id: "id_col", **dict.fromkeys(columns.stat, "stat_exog_list")})
        number = {label: i for i, label in enumerate(ids)}
        codes = np.array([number.get(label, -1) for label in frame.labels(columns.id)])
        has_row = np.isin(np.arange(len(ids)), codes)
        if not has_row.all():
            raise DataError(f"static_df has no row of series {ids[int((~has_row).argmax())]!r}")
    else:
        frame.require(dict.fromkeys(columns.stat, "stat_exog_list"))
    found: dict[str, np.ndarray] = {}
    for column in columns.stat:
        category = frame.is_category(column)
        rows = frame.labels(column) if category else frame.numbers(column, missing=False)
        keep = np.flatnonzero(codes >= 0)
        _, begin = np.unique(codes[keep], return_index=True)
        each = rows[keep[begin]]
        other = keep[each[codes[keep]] != rows[keep]]
        if len(other):
            row = int(other[0])
            raise DataError(
                f"column {column!r} of {frame.name} is {rows[row]} in row {row} and {each[codes[row]]} before in "
                f"series {ids[codes[row]]!r}; a static covariate has one value per series"
            )
        found[column] = each
    return found


def read_steps(frame: Frame, columns: Columns, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """Return the series and the step in a panel of each row of a frame; steps count from the series' first one.

    Both are (rows,). The series is -1 if the panel does not have it.
    """
    name = frame.name
    number = {label: i for i, label in enumerate(panel.ids)}
    series = np.array([number.get(label, -1) for label in frame.labels(columns.id)])
    at = frame.times(columns.time)
    if at.zone is None and panel.zone is not None:
        raise DataError(f"column {columns.time!r} of {name} has no time zone, the series are in {panel.zone}")
    times = to_local(at.absolute, panel.zone) if panel.frequency.is_local else at.absolute
    steps, whole = panel.frequency.steps_between(panel.first[np.maximum(series, 0)], times)
    _require_grid(frame, columns, whole | (series < 0), panel.frequency, panel.ids, series)
    return series, steps
