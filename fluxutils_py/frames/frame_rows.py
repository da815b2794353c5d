"""Read the rows of a frame or of Parquet files, and find their place among the steps of series."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.frames.frames import Frame, TimeColumn, to_local
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import (
    Panel,
    grid_steps,
    read_frequency,
    series_numbers,
    sorted_labels,
)
from fluxutils_py.validation import require_package

PART_ROWS = 1 << 17
COUNTED = Frequency("integer", 1, text="1")  # where no column says the time


@dataclass(frozen=True)
class Roles:
    """Which columns of a frame are ids, times, inputs and targets.

    Raises
    ------
    SpecError
        If a column is named twice, apart from inputs that are targets too.
    """

    id: str | None
    time: str | None
    x: tuple[str, ...]
    y: tuple[str, ...]
    per_series: bool = False

    def __post_init__(self) -> None:
        keys = [column for column in (self.id, self.time) if column is not None]
        for argument, columns in (("x", self.x), ("y", self.y)):
            named = [*keys, *columns]
            twice = sorted({column for column in named if named.count(column) > 1})
            if twice:
                raise SpecError(
                    f"{argument} names {twice[0]!r}, which is named before; leave it out"
                )

    def arguments(self) -> dict[str, str]:
        """Map each column to the argument that names it."""
        columns = dict.fromkeys(self.y, "y") | dict.fromkeys(self.x, "x")
        if self.id is not None:
            columns[self.id] = "id_col"
        if self.time is not None:
            columns[self.time] = "time_col"
        return columns


class FrameRows:
    """The rows of a frame or of Parquet files, in one part or in several.

    Parameters
    ----------
    df : data frame, or path of a Parquet file or a folder of them
    roles : Roles
    in_parts : bool
        Whether files are read in parts of ``PART_ROWS`` rows.
    """

    def __init__(self, df: Any, roles: Roles, in_parts: bool = False) -> None:
        require_package("narwhals", "forecast", "from_frame")
        self.roles = roles
        self.in_parts = in_parts
        self.df = df
        self.is_path = isinstance(df, str | os.PathLike)
        if self.is_path:
            dataset = require_package("pyarrow.dataset", "forecast", "from_frame of a path")
            self.df = dataset.dataset(os.fspath(df), format="parquet")

    def columns(self) -> list[str]:
        """Return the names of all columns."""
        if self.is_path:
            return list(self.df.schema.names)
        return list(map(str, Frame(self.df, "df").frame.columns))

    def frames(self) -> Iterator[Frame]:
        """Yield the rows, in parts; at least one."""
        wanted = self.roles.arguments()
        if not self.is_path:
            frame = Frame(self.df, "df")
            frame.require(wanted)
            yield frame
            return
        # on a part without rows, before columns are chosen
        Frame(self.df.schema.empty_table(), "df").require(wanted)
        if not self.in_parts:
            yield Frame(self.df.to_table(columns=list(wanted)), "df")
            return
        yield from self._parts(list(wanted))

    def _parts(self, columns: list[str]) -> Iterator[Frame]:
        pyarrow = require_package("pyarrow", "forecast", "from_frame of a path")
        start = 0
        # few parts ahead: pyarrow would else read many files at once
        for batch in self.df.to_batches(
            columns=columns, batch_size=PART_ROWS, batch_readahead=1, fragment_readahead=1
        ):
            if batch.num_rows == 0:
                continue
            name = f"df[{start}:]" if start else "df"
            start += batch.num_rows
            yield Frame(pyarrow.Table.from_batches([batch]), name)

    def labels(self, frame: Frame) -> np.ndarray:
        """Return the ids of rows, None if there is one series."""
        if self.roles.id is None:
            return np.full(frame.n_rows, None, object)
        return frame.labels(self.roles.id)

    def times(self, frame: Frame, zone: str | None) -> TimeColumn | None:
        """Return the times of rows, in a zone if that is given."""
        if self.roles.time is None:
            return None
        at = frame.times(self.roles.time)
        if zone is not None and at.zone not in (None, zone):
            return replace(at, local=to_local(at.absolute, zone), zone=zone)
        return at

    def on_grid(self, panel: Panel) -> Iterator[tuple[Frame, np.ndarray, np.ndarray]]:
        """Yield parts, with the series and the step of each row.

        Raises
        ------
        DataError
            If a time is between two steps, or two rows of a part have one time.
        """
        n_before = np.zeros(panel.n_series, int)
        for frame in self.frames():
            series = series_numbers(self.labels(frame), panel.ids)
            at = self.times(frame, panel.zone)
            if at is None:
                steps = count_within(series) + n_before[series]
                n_before += np.bincount(series, minlength=panel.n_series)
            else:
                assert self.roles.time is not None
                times = at.on(panel.frequency.is_local)
                steps = grid_steps(frame, self.roles.time, panel, series, times)
            yield frame, series, steps


def scan_series(rows: FrameRows, freq: Any, zone: str | None) -> tuple[Panel, np.ndarray, bool]:
    """Find the series of a frame in one pass: their ids, first times and lengths.

    Returns
    -------
    panel : Panel
        Without values.
    n_rows : ndarray of int, shape (N,)
        Number of rows of each series.
    lacks_targets : bool
        Whether a target is missing in a row.
    """
    scan = _Scan(rows, freq, zone)
    for frame in rows.frames():
        scan.add(frame)
    return scan.panel()


class _Scan:
    """First and last time, and number of rows, of the series that were seen."""

    def __init__(self, rows: FrameRows, freq: Any, zone: str | None) -> None:
        self.rows = rows
        self.freq = freq
        self.zone = zone
        self.numbers: dict[object, int] = {}
        self.first = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.n_rows = np.zeros(0, int)
        self.frequency: Frequency | None = None
        self.frame: Frame | None = None
        self.lacks_targets = False

    def add(self, frame: Frame) -> None:
        if frame.n_rows == 0:
            return
        targets = [frame.frame[column] for column in self.rows.roles.y]
        self.lacks_targets |= any(values.is_null().any() for values in targets)
        labels = self.rows.labels(frame)
        for label in dict.fromkeys(labels):
            self.numbers.setdefault(label, len(self.numbers))
        self._make_room(len(self.numbers))
        series = np.array([self.numbers[label] for label in labels])
        at = self.rows.times(frame, self.zone)
        if at is not None:
            self.zone = at.zone
        if self.frame is None:
            self.frame = frame
            self.frequency = self._read_frequency(at, series)
        self.n_rows += np.bincount(series, minlength=len(self.n_rows))
        if at is None:
            return
        assert self.frequency is not None
        self._require_kind(at, self.frequency)
        times = at.on(self.frequency.is_local)
        assert self.rows.roles.time is not None
        if (outside := self.frequency.is_outside(times)).any():
            frame.refuse(self.rows.roles.time, outside, self.frequency.outside_remedy())
        np.minimum.at(self.first, series, times)
        np.maximum.at(self.last, series, times)

    def _make_room(self, n_series: int) -> None:
        n_new = n_series - len(self.n_rows)
        bounds = np.iinfo(np.int64)
        self.first = np.append(self.first, np.full(n_new, bounds.max))
        self.last = np.append(self.last, np.full(n_new, bounds.min))
        self.n_rows = np.append(self.n_rows, np.zeros(n_new, int))

    def _read_frequency(self, at: TimeColumn | None, series: np.ndarray) -> Frequency:
        if at is None:
            return COUNTED
        assert self.frame is not None
        return read_frequency(self.freq, at, series, self.frame.is_polars)

    def _require_kind(self, at: TimeColumn, frequency: Frequency) -> None:
        if at.is_integer != (frequency.kind == "integer"):
            held, expected = ("integers", "dates") if at.is_integer else ("dates", "integers")
            raise DataError(
                f"column {self.rows.roles.time!r} of df holds {held}, and the steps of "
                f"freq={frequency.text!r} are of {expected}"
            )

    def panel(self) -> tuple[Panel, np.ndarray, bool]:
        if self.frame is None or self.frequency is None:
            raise DataError("df has no rows")
        roles = self.rows.roles
        ids = sorted_labels(np.array([*self.numbers], object))
        order = np.array([self.numbers[label] for label in ids])
        if roles.time is None:
            first = np.zeros(len(ids), np.int64)
            lengths = self.n_rows[order]
        else:
            first = self.first[order]
            lengths = self.frequency.steps_between(first, self.last[order])[0] + 1
        types = {}
        if roles.id is not None:
            types[roles.id] = self.frame.label_type(roles.id)
        if roles.time is not None:
            types[roles.time] = self.frame.dtype(roles.time)
        panel = Panel(
            ids,
            first,
            lengths,
            {},
            {},
            self.frequency,
            self.zone,
            types,
            self.frame.backend,
        )
        return panel, self.n_rows[order], self.lacks_targets


def count_within(series: np.ndarray) -> np.ndarray:
    """Return how many rows of the same series are before each row."""
    order = np.argsort(series, kind="stable")
    counts = np.bincount(series)
    starts = np.cumsum(counts) - counts
    within = np.empty(len(series), int)
    within[order] = np.arange(len(series)) - starts[series[order]]
    return within
