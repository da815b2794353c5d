"""Data frames with a row per series and time as arrays (F, N, T), and predictions as frames."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data import h5mmap
from fluxutils_py.data.hdf5.attributes import write_names
from fluxutils_py.data.hdf5.writing import allocate, new_file, take_room
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.frames.frame_rows import FrameRows, Roles, scan_series
from fluxutils_py.frames.frames import Frame, as_target, make_frame
from fluxutils_py.frames.panel import Panel, warn_empty_steps

FILL_BYTES = 32 << 20


def from_frame(
    df: Any,
    id_col: str | None = None,
    time_col: str | None = None,
    x: Sequence[str] | str = (),
    y: Sequence[str] | str | None = None,
    *,
    freq: Any = None,
    gaps: str = "nan",
    per_series: bool = False,
    dtype: DTypeLike | None = None,
    h5: str | os.PathLike[str] | None = None,
) -> FrameSeries:
    """Turn a data frame with one row per series and time into arrays that estimators take.

    Parameters
    ----------
    df : data frame of pandas or polars, table of pyarrow, or path
        The path of a Parquet file, or of a folder of such files; only the columns that are named
        are read. Rows may be in any order.
    id_col : str, optional
        Column that says which series a row belongs to. None: all rows are one series. Series are
        in increasing order of their ids.
    time_col : str, optional
        Column of dates or integers. None: the rows of a series are its steps, in their order.
    x, y : str or list of str
        Columns of inputs, which are numbers, and of targets, which are numbers, or labels (text,
        categories). Targets keep the type of their column; integers and booleans are float64 where
        some are missing, and labels objects.
    freq : str, int or pandas offset, optional
        Length of a step, such as ``"h"``, ``"15min"``, ``"MS"``. None: the most usual difference
        between times, or what ``pandas.infer_freq`` says.
    gaps : "nan" or "error"
        What becomes of steps without a row between the first and the last one of a series: inputs
        and targets of NaN (labels: None), from which nothing is learnt and which move the state as
        zeros do; or a DataError. Missing values in rows are NaN in any case.
    per_series : bool
        Whether a series has one target, which all of its rows have: ``y`` then is (N,) or (N, G).
    dtype : dtype, optional
        Of ``x``. None: float32 if all columns of ``x`` are, else float64.
    h5 : path-like, optional
        HDF5 file to write ``x`` and ``y`` to, in two passes over the data with memory for a few
        hundred thousand rows at a time. A file of that name is replaced when the new one is
        complete. Shorter series are NaN after their end; a dataset ``lengths``, (N,), has the
        number of steps of each.

    Returns
    -------
    FrameSeries
        With ``x`` and ``y`` for ``fit``, and ``to_frame`` for predictions.

    Raises
    ------
    DataError
        If the data cannot be used: two rows of one time, times between two steps, a missing id or
        time, a number that a type does not hold. It names column and row.

    Examples
    --------
    >>> import pandas as pd
    >>> hours = pd.date_range("2024-01-01", periods=48, freq="h")
    >>> df = pd.DataFrame({"town": "Graz", "at": hours, "wind": range(48), "load": range(48)})
    >>> series = from_frame(df, "town", "at", x=["wind"], y="load")
    >>> series.x.shape, series.y.shape
    ((1, 1, 48), (1, 1, 48))
    >>> list(series.to_frame(series.y).columns)
    ['town', 'at', 'load_hat']
    """
    if gaps not in ("nan", "error"):
        raise ValueError(f"gaps must be 'nan' or 'error', got {gaps!r}")
    roles = Roles(id_col, time_col, _as_names(x, "x"), _as_names(y, "y"), per_series)
    request = Request(roles, freq, gaps, None if dtype is None else np.dtype(dtype))
    return _read(df, request, h5)


def _as_names(columns: Sequence[str] | str | None, argument: str) -> tuple[str, ...]:
    if columns is None:
        return ()
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be names of columns, got {columns!r}")
    return names


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`from_frame`, for another frame of that kind."""

    roles: Roles
    freq: Any
    gaps: str
    dtype: np.dtype | None
    zone: str | None = None
    target_types: dict[str, np.dtype] = field(default_factory=dict)  # of the columns


@dataclass(frozen=True, eq=False)
class FrameSeries:
    """Series of a data frame, from :func:`from_frame`.

    Attributes
    ----------
    x : ndarray or H5Map (F, N, T), or list of ndarray (F, T_i)
        Inputs; a list if series have different lengths. None if no columns were named.
    y : ndarray or H5Map (G, N, T), list of ndarray (G, T_i), or ndarray (N,) or (N, G)
        Targets; None if no columns were named.
    lengths : ndarray of int, shape (N,), or None
        Of arrays in a file whose series have different lengths: hand it to ``fit`` and ``predict``.
    ids : ndarray of object, shape (N,)
        [None] if there is no ``id_col``.
    names, target_names : tuple of str
        Columns of ``x`` and ``y``. Estimators and explanations know them of
        ``samples(x, feature_names=names)``.
    panel : Panel
        The steps that each series has, and their times.
    """

    x: Any
    y: Any
    lengths: np.ndarray | None
    panel: Panel
    request: Request
    places: Places | None = None

    @property
    def ids(self) -> np.ndarray:
        return self.panel.ids

    @property
    def names(self) -> tuple[str, ...]:
        return self.request.roles.x

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.request.roles.y

    @property
    def times(self) -> list[np.ndarray]:
        """The times of each series (T_i,): ``datetime64[ns]``, in UTC if they have a time zone, or
        integers.
        """
        return [
            self.panel.times(np.full(n, i), np.arange(n)) for i, n in enumerate(self.panel.lengths)
        ]

    def __repr__(self) -> str:
        lengths = self.panel.lengths
        steps = f"{lengths.min()}"
        if lengths.min() != lengths.max():
            steps += f" to {lengths.max()}"
        return (
            f"FrameSeries({len(lengths)} series of {steps} steps, x={list(self.names)}, "
            f"y={list(self.target_names)})"
        )

    def like(self, df: Any, h5: str | os.PathLike[str] | None = None) -> FrameSeries:
        """Read another frame, such as test data, by the same columns, step and types.

        Its series may be others. It may lack the columns of targets: ``y`` then is None.
        """
        roles = self.request.roles
        has = set(FrameRows(df, replace(roles, x=(), y=())).columns())
        if not has & set(roles.y):
            roles = replace(roles, y=())
        request = replace(
            self.request, roles=roles, freq=self.panel.frequency, zone=self.panel.zone
        )
        series = _read(df, request, h5)
        # the names of predictions are those of the targets, which this frame may lack
        return replace(series, request=replace(request, roles=self.request.roles))

    def to_frame(self, prediction: Any, names: Sequence[str] | None = None) -> Any:
        """Return predictions as a frame of the library that the series came from.

        Parameters
        ----------
        prediction : array (G, N, T), list of arrays (G, T_i), or array (N,) or (N, G)
            What ``predict`` returned for ``x``: one value per step, or per series.
        names : list of str, optional
            Names of the G columns. None: those of the targets with ``_hat`` behind them.

        Returns
        -------
        data frame
            With the columns of ids and times, and the predictions. It has the rows of the frame
            that was read, in their order (of pandas, with their index); of a file ``h5``, all steps
            of the series. Of predictions per series, a row for each. Whole numbers for targets that
            are integers come back as integers, and so do booleans. NaN is null where the library
            has both. Parquet files give a table of pyarrow.

        Raises
        ------
        ShapeError
            If the predictions are not of these series.
        """
        if not isinstance(prediction, list | tuple) and len(np.shape(prediction)) < 3:
            return self._frame_per_series(np.asarray(prediction), names)
        places = self.places or Places.of_all(self.panel)
        values = self._flat(prediction)[:, self.panel.offsets[places.series] + places.steps]
        columns: dict[str, Any] = {}
        roles = self.request.roles
        if roles.id is not None:
            columns[roles.id] = self.ids[places.series]
        if roles.time is not None:
            columns[roles.time] = self.panel.times(places.series, places.steps)
        columns |= self._named_columns(names, values)
        frame = make_frame(columns, self.panel.types, self.panel.backend)
        if places.index is not None:
            frame.index = places.index
        return frame

    def _frame_per_series(self, values: np.ndarray, names: Sequence[str] | None) -> Any:
        matrix = values[:, None] if values.ndim == 1 else values
        if matrix.ndim != 2 or len(matrix) != self.panel.n_series:
            raise ShapeError(
                f"the predictions have shape {values.shape}; expected (G, N, T) with "
                f"N={self.panel.n_series} series, or one row per series"
            )
        columns: dict[str, Any] = {}
        types = {}
        if self.request.roles.id is not None:
            columns[self.request.roles.id] = self.ids
            types[self.request.roles.id] = self.panel.types[self.request.roles.id]
        columns |= self._named_columns(names, matrix.T)
        return make_frame(columns, types, self.panel.backend)

    def _named_columns(
        self, names: Sequence[str] | None, values: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return predictions (G, rows) by name, in the types of the targets."""
        columns = dict(zip(self._column_names(names, len(values)), values, strict=True))
        types = [self.request.target_types.get(name) for name in self.target_names]
        if len(types) == len(columns):
            for name, dtype in zip(columns, types, strict=True):
                if dtype is not None:
                    columns[name] = as_target(columns[name], dtype)
        return columns

    def _column_names(self, names: Sequence[str] | None, n_outputs: int) -> list[str]:
        if names is None and len(self.target_names) == n_outputs:
            names = [f"{name}_hat" for name in self.target_names]
        elif names is None and n_outputs == 1:
            names = ["yhat"]
        if names is None or isinstance(names, str) or len(names) != n_outputs:
            raise ShapeError(
                f"the predictions have {n_outputs} outputs; give a list of {n_outputs} names, got "
                f"names={names!r}"
            )
        taken = {self.request.roles.id, self.request.roles.time} & set(names)
        if taken or len(set(names)) < len(names):
            raise DataError(f"names={list(names)} has a column twice, or that of ids or times")
        return list(names)

    def _flat(self, prediction: Any) -> np.ndarray:
        """Return predictions of all steps, one series after the other, (G, total)."""
        lengths = self.panel.lengths
        longest = int(lengths.max())
        if isinstance(prediction, list | tuple):
            shapes = [np.shape(values) for values in prediction]
            if [shape[-1:] for shape in shapes] != [(n,) for n in lengths]:
                raise ShapeError(
                    f"the predictions are a list of shapes {shapes[:5]}; expected (G, T_i) with "
                    f"the lengths {lengths[:5].tolist()} of {len(lengths)} series"
                )
            return np.concatenate([np.asarray(values) for values in prediction], axis=1)
        if tuple(prediction.shape[1:]) != (len(lengths), longest):
            raise ShapeError(
                f"the predictions have shape {tuple(prediction.shape)}; expected (G, "
                f"{len(lengths)}, {longest}) = (outputs, series, time steps)"
            )
        values = np.asarray(prediction)
        exists = np.arange(longest) < lengths[:, None]  # (N, T)
        return values[:, exists]


@dataclass(frozen=True, eq=False)
class Places:
    """The series and the step of each row of a frame, and the index of pandas."""

    series: np.ndarray
    steps: np.ndarray
    index: Any = None

    @classmethod
    def of_all(cls, panel: Panel) -> Places:
        """Return those of all steps of all series."""
        series = np.repeat(np.arange(panel.n_series), panel.lengths)
        return cls(series, np.arange(len(series)) - panel.offsets[series])


def _read(df: Any, request: Request, h5: str | os.PathLike[str] | None) -> FrameSeries:
    rows = FrameRows(df, request.roles, in_parts=h5 is not None)
    panel, n_rows, lacks_targets = scan_series(rows, request.freq, request.zone)
    if request.gaps == "error":
        _refuse_gaps(rows, panel, n_rows)
    # before the arrays, which have room for each empty step too
    warn_empty_steps(panel, n_rows)
    if h5 is None:
        return _read_into_memory(rows, panel, request, lacks_targets)
    return _read_into_file(rows, panel, request, os.fspath(h5), n_rows, lacks_targets)


def _refuse_gaps(rows: FrameRows, panel: Panel, n_rows: np.ndarray) -> None:
    """Raise DataError if a series has fewer rows than steps; two rows of a step are refused before
    or after.
    """
    short = np.flatnonzero(n_rows < panel.lengths)
    if not len(short):
        return
    n = int(short[0])
    has_row = np.zeros(panel.lengths[n], bool)
    for _, series, steps in rows.on_grid(panel):
        has_row[steps[series == n]] = True
    at = panel.time_text(n, int(has_row.argmin()))
    raise DataError(
        f"series {panel.ids[n]!r} has no row at {at} ({len(short)} of {panel.n_series} series have "
        f"gaps at steps of freq={panel.frequency.text!r}); add the rows, or give gaps='nan'"
    )


def _read_into_memory(
    rows: FrameRows, panel: Panel, request: Request, lacks_targets: bool
) -> FrameSeries:
    roles = request.roles
    (frame, series, steps) = next(rows.on_grid(panel))
    has_gaps = len(series) < panel.lengths.sum()
    dtype = request.dtype or _float_type(frame, roles.x)
    _require_floats(dtype, has_gaps)
    place = panel.offsets[series] + steps
    x = _Flat(panel, place, roles.x, dtype)
    for f, column in enumerate(roles.x):
        x.put(f, frame.converted(column, frame.typed(column), dtype))
    targets = {column: frame.typed(column, labels=True) for column in roles.y}
    types = {column: values.dtype for column, (values, _) in targets.items()}
    kind = _target_type(types, lacks_targets or (has_gaps and not roles.per_series))
    columns = {c: frame.converted(c, typed, kind, exact=True) for c, typed in targets.items()}
    index = getattr(frame.frame.to_native(), "index", None)
    return FrameSeries(
        x=x.series() if roles.x else None,
        y=_arranged(frame, panel, series, place, columns, kind, roles.per_series),
        lengths=None,
        panel=panel,
        request=replace(request, dtype=dtype, target_types=request.target_types or types),
        places=Places(series, steps, index),
    )


def _target_type(types: dict[str, np.dtype], lacks_targets: bool) -> np.dtype:
    """Return the type of an array of targets of these types."""
    if not types or np.dtype(object) in types.values():
        return np.dtype(object)
    dtype = np.result_type(*types.values())
    # NaN marks what is missing
    return np.dtype(np.float64) if lacks_targets and dtype.kind != "f" else dtype


def _float_type(frame: Frame, columns: tuple[str, ...]) -> np.dtype:
    types = {str(frame.dtype(column)) for column in columns}
    return np.dtype("float32" if types == {"Float32"} else "float64")


def _require_floats(dtype: np.dtype, has_gaps: bool) -> None:
    if dtype.kind not in "fiu" or (has_gaps and dtype.kind != "f"):
        raise DataError(
            f"dtype={dtype} cannot hold the NaN of steps without a row; give a floating type, or "
            "add the rows"
        )


class _Flat:
    """Values of all steps, one series after the other, filled column by column."""

    def __init__(
        self,
        panel: Panel,
        place: np.ndarray,
        columns: tuple[str, ...],
        dtype: np.dtype,
    ) -> None:
        self.panel = panel
        self.place = place
        total = int(panel.lengths.sum())
        self.values = _missing((total, len(columns)), dtype)

    def put(self, column: int, values: np.ndarray) -> None:
        self.values[self.place, column] = values

    def series(self) -> Any:
        """Return an array (F, N, T) in time-major memory, or a list of arrays (F, T_i)."""
        lengths = self.panel.lengths
        if (lengths == lengths[0]).all():
            by_series = self.values.reshape(len(lengths), lengths[0], -1)
            return np.ascontiguousarray(by_series.transpose(1, 0, 2)).transpose(2, 1, 0)
        return [a.T for a in np.split(self.values, self.panel.offsets[1:])]


def _missing(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of missing values, or of zeros where the type has no such value."""
    value: Any = {"O": None, "f": np.nan}.get(dtype.kind, 0)
    return np.full(shape, value, dtype)


def _arranged(
    frame: Frame,
    panel: Panel,
    series: np.ndarray,
    place: np.ndarray,
    columns: dict[str, np.ndarray],
    dtype: np.dtype,
    per_series: bool,
) -> Any:
    """Return targets of rows as an array (G, N, T) or a list of arrays (G, T_i); with
    ``per_series`` (N,) or (N, G).
    """
    if not columns:
        return None
    if per_series:
        y = _missing((panel.n_series, len(columns)), dtype)
        seen = np.zeros(panel.n_series, bool)
        for g, (column, values) in enumerate(columns.items()):
            _put_per_series(y[:, g], seen, frame, column, values, panel, series)
        return y[:, 0] if len(columns) == 1 else y
    flat = _Flat(panel, place, tuple(columns), dtype)
    for g, values in enumerate(columns.values()):
        flat.put(g, values)
    return flat.series()


def _put_per_series(
    of_series: np.ndarray,
    seen: np.ndarray,
    frame: Frame,
    column: str,
    values: np.ndarray,
    panel: Panel,
    series: np.ndarray,
) -> None:
    """Write the one value of each series that was not ``seen`` before to ``of_series``; DataError
    names two rows of a series that differ.
    """
    which, first = np.unique(series, return_index=True)
    is_new = ~seen[which]
    of_series[which[is_new]] = values[first[is_new]]
    differs = values != of_series[series]
    if values.dtype.kind == "f":
        differs &= ~(np.isnan(values) & np.isnan(of_series[series]))
    if differs.any():
        row = int(differs.argmax())
        raise DataError(
            f"column {column!r} of {frame.name} is {values[row]} in row {row} and "
            f"{of_series[series[row]]} before in series {panel.ids[series[row]]!r}; with "
            "per_series=True a series has one value"
        )


def _read_into_file(
    rows: FrameRows,
    panel: Panel,
    request: Request,
    path: str,
    n_rows: np.ndarray,
    lacks_targets: bool,
) -> FrameSeries:
    """Write x and y to a new HDF5 file, part after part, and map them."""
    roles = request.roles
    longest = int(panel.lengths.max())
    has_gaps = bool(n_rows.sum() < panel.n_series * longest)
    with new_file(path) as file:
        writer: _FileWriter | None = None
        for frame, series, steps in rows.on_grid(panel):
            if writer is None:  # the first part knows the types
                dtype = request.dtype or _float_type(frame, roles.x)
                _require_floats(dtype, has_gaps)
                types = _types_of_numbers(frame, roles.y)
                lacks_targets |= has_gaps and not roles.per_series
                kind = _target_type(types, lacks_targets)
                writer = _FileWriter(file, panel, roles, {"x": dtype, "y": kind}, has_gaps)
            writer.write(frame, series, steps)
        assert writer is not None  # a frame without rows has been refused
        y_per_series = writer.close()
    lengths = None if (panel.lengths == longest).all() else panel.lengths
    return FrameSeries(
        x=h5mmap(path, "x") if roles.x else None,
        y=h5mmap(path, "y") if roles.y and not roles.per_series else y_per_series,
        lengths=lengths,
        panel=panel,
        request=replace(request, dtype=dtype, target_types=request.target_types or types),
    )


def _types_of_numbers(frame: Frame, columns: tuple[str, ...]) -> dict[str, np.dtype]:
    """Return the types of columns; DataError if one holds no numbers."""
    types = {}
    for column in columns:
        if frame.is_category(column):
            raise DataError(
                f"column {column!r} of {frame.name} is of type {frame.dtype(column)}, and a file "
                "h5 holds numbers; number the labels, or read them into memory (h5=None)"
            )
        types[column] = frame.typed(column)[0].dtype
    return types


class _FileWriter:
    """Writes rows into maps of an HDF5 file: ``x``, ``y``, and ``has_row``, which tells where rows
    were; beside them the ``lengths`` of the series.
    """

    def __init__(
        self,
        file: h5py.File,
        panel: Panel,
        roles: Roles,
        types: dict[str, np.dtype],
        has_gaps: bool,
    ) -> None:
        self.file = file
        self.panel = panel
        self.roles = roles
        self.types = types
        self.maps = {"has_row": self._make_map("has_row", 1, np.dtype("uint8"))}
        columns = {"x": roles.x, "y": () if roles.per_series else roles.y}
        self.columns = {name: names for name, names in columns.items() if names}
        for name, names in self.columns.items():
            self.maps[name] = self._make_map(name, len(names), types[name])
            if has_gaps:
                _fill(self.maps[name])
        self.targets = _missing((panel.n_series, len(roles.y)), types["y"])
        self.seen = np.zeros(panel.n_series, bool)

    def _make_map(self, name: str, n_features: int, dtype: np.dtype) -> Any:
        where = f"{self.file.filename}: dataset {name!r}"
        shape = (int(self.panel.lengths.max()), self.panel.n_series, n_features)
        dataset = allocate(self.file, name, shape, dtype, "TNF")
        self.file.flush()  # the file is as long then
        offset = dataset.id.get_offset() or 0
        take_room(self.file.id.get_vfd_handle(), offset, dataset.nbytes, where)
        return h5mmap(self.file.filename, name, mode="r+")

    def write(self, frame: Frame, series: np.ndarray, steps: np.ndarray) -> None:
        has_row = self.maps["has_row"]
        again = has_row[0, series, steps] > 0
        if again.any():
            row = int(again.argmax())
            label = self.panel.ids[series[row]]
            which = "" if label is None else f" of series {label!r}"
            raise DataError(
                f"row {row} of {frame.name} is the second one{which} at "
                f"{self.panel.time_text(series[row], steps[row])}; keep one, or aggregate them"
            )
        has_row[0, series, steps] = 1
        for name, columns in self.columns.items():
            for f, column in enumerate(columns):
                self.maps[name][f, series, steps] = self._read(frame, name, column)
        if self.roles.per_series:
            for g, column in enumerate(self.roles.y):
                values = self._read(frame, "y", column)
                of_series = self.targets[:, g]
                _put_per_series(of_series, self.seen, frame, column, values, self.panel, series)
            self.seen[series] = True

    def _read(self, frame: Frame, name: str, column: str) -> np.ndarray:
        return frame.converted(column, frame.typed(column), self.types[name], exact=name == "y")

    def close(self) -> np.ndarray | None:
        """Write what is left, and return the targets if series have one each."""
        for array in self.maps.values():
            array.flush()
        self.maps.clear()
        self.file["lengths"] = self.panel.lengths
        for name, names in self.columns.items():
            write_names(self.file[name], names, f"{self.file.filename}: dataset {name!r}")
        if not self.roles.per_series or not self.roles.y:
            return None
        return self.targets[:, 0] if len(self.roles.y) == 1 else self.targets


def _fill(array: Any) -> None:
    """Set all values to NaN, some steps at a time."""
    n_features, n_series, n_steps = array.shape
    size = max(1, FILL_BYTES // (n_features * n_series * array.dtype.itemsize))
    for start in range(0, n_steps, size):
        array[:, :, start : start + size] = np.nan
