"""Data frames with a row per series and time as arrays (F, N, T), and predictions as frames."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.data import h5mmap
from fluxutils_py.data.hdf5.attributes import write_names
from fluxutils_py.data.hdf5.writing import allocate, new_file, take_room
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.frames.frames import Frame, as_target, make_frame
from fluxutils_py.frames.panel import (
    FrameRows,
    Panel,
    missing_values,
    require_one_role,
    value_per_series,
    warn_empty_steps,
)


def from_frame(
    df: Any,
    id_col: str | None = None,
    time_col: str | None = None,
    x: Sequence[str] | str = (),
    y: Sequence[str] | str | None = None,
    *,
    freq: Any = None,
    per_series: bool = False,
    dtype: DTypeLike | None = None,
    h5: str | os.PathLike[str] | None = None,
) -> FrameSeries:
    """Turn a data frame with one row per series and time into arrays that estimators take.

    Steps without a row between the first and the last one of a series are NaN (labels: None), from
    which nothing is learnt and which move the state as zeros do; so are missing values in rows.

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
        between times, months or business days where all times follow them.
    per_series : bool
        Whether a series has one target, which all of its rows have: ``y`` then is (N,) or (N, G).
        Not with ``h5``.
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
    if per_series and h5 is not None:
        raise ValueError(
            "a file h5 has a target per step; read those of series by "
            "from_frame(df, id_col, y=..., per_series=True)"
        )
    request = Request(
        id_col,
        time_col,
        _as_names(x, "x"),
        _as_names(y, "y"),
        per_series,
        freq,
        None if dtype is None else np.dtype(dtype),
    )
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
    """The arguments of :func:`from_frame`, for another frame of that kind.

    Raises
    ------
    SpecError
        If a column is named twice, apart from inputs that are targets too.
    """

    id_col: str | None
    time_col: str | None
    x: tuple[str, ...]
    y: tuple[str, ...]
    per_series: bool = False
    freq: Any = None
    dtype: np.dtype | None = None
    zone: str | None = None
    target_types: dict[str, np.dtype] = field(default_factory=dict)  # of the columns

    def __post_init__(self) -> None:
        lists = {"x": self.x, "y": self.y}
        require_one_role({"id_col": self.id_col, "time_col": self.time_col}, lists)
        for argument, columns in lists.items():
            if len(set(columns)) < len(columns):
                raise SpecError(f"{argument} names a column twice: {', '.join(columns)}")

    def rows(self, df: Any, in_parts: bool = False) -> FrameRows:
        """Return the rows of a frame, with the columns that are named here."""
        columns = dict.fromkeys(self.y, "y") | dict.fromkeys(self.x, "x")
        for argument in ("id_col", "time_col"):
            if (column := getattr(self, argument)) is not None:
                columns[column] = argument
        return FrameRows(df, columns, self.id_col, self.time_col, in_parts)


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
    place: np.ndarray | None = None  # of each row of the frame among the steps of all series
    index: Any = None  # of pandas

    @property
    def ids(self) -> np.ndarray:
        return self.panel.ids

    @property
    def names(self) -> tuple[str, ...]:
        return self.request.x

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.request.y

    @property
    def times(self) -> list[np.ndarray]:
        """The times of each series (T_i,): ``datetime64[ns]``, in UTC if they have a time zone, or
        integers.
        """
        return [
            self.panel.times(np.full(n, i), np.arange(n)) for i, n in enumerate(self.panel.lengths)
        ]

    def __repr__(self) -> str:
        n = self.panel.n_series
        return f"FrameSeries({n} series, x={list(self.names)}, y={list(self.target_names)})"

    def like(self, df: Any, h5: str | os.PathLike[str] | None = None) -> FrameSeries:
        """Read another frame, such as test data, by the same columns, step and types.

        Its series may be others. It may lack the columns of targets: ``y`` then is None.
        """
        request = replace(self.request, freq=self.panel.frequency, zone=self.panel.zone)
        if not {*request.rows(df).head.schema} & {*request.y}:
            # the names of predictions are those of the targets, which this frame lacks
            return replace(_read(df, replace(request, y=()), h5), request=request)
        return _read(df, request, h5)

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
        panel = self.panel
        place = np.arange(panel.lengths.sum()) if self.place is None else self.place
        series = np.repeat(np.arange(panel.n_series), panel.lengths)[place]
        values = self._flat(prediction)[:, place]
        columns: dict[str, Any] = {}
        if self.request.id_col is not None:
            columns[self.request.id_col] = self.ids[series]
        if self.request.time_col is not None:
            columns[self.request.time_col] = panel.times(series, place - panel.offsets[series])
        columns |= self._named_columns(names, values)
        frame = make_frame(columns, panel.types, panel.backend)
        if self.index is not None:
            frame.index = self.index
        return frame

    def _frame_per_series(self, values: np.ndarray, names: Sequence[str] | None) -> Any:
        if values.ndim == 0 or len(values) != self.panel.n_series:
            raise ShapeError(
                f"the predictions have shape {values.shape}; expected (G, N, T) with "
                f"N={self.panel.n_series} series, or one row per series"
            )
        matrix = values.reshape(len(values), -1)
        id_col = self.request.id_col
        columns = {} if id_col is None else {id_col: self.ids}
        types = {name: self.panel.types[name] for name in columns}
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
        if names is None or isinstance(names, str) or len(names) != n_outputs:
            raise ShapeError(
                f"the predictions have {n_outputs} outputs; give a list of {n_outputs} names, got "
                f"names={names!r}"
            )
        taken = {self.request.id_col, self.request.time_col} & set(names)
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


def _read(df: Any, request: Request, h5: str | os.PathLike[str] | None) -> FrameSeries:
    rows = request.rows(df, in_parts=h5 is not None)
    panel, n_rows, has_null = rows.scan(request.freq, request.zone, request.y)
    # before the arrays, which have room for each empty step too
    warn_empty_steps(panel, n_rows)
    with nullcontext() if h5 is None else new_file(os.fspath(h5)) as file:
        arrays = _Arrays(request, panel, n_rows, has_null, file)
        for frame, series, steps in rows.on_grid(panel):
            arrays.write(frame, series, steps)
        arrays.close()
    x = arrays.series("x", h5)
    y = arrays.series("y", h5)
    request = replace(
        request,
        dtype=arrays.columns["x"].dtype,
        target_types=request.target_types or arrays.target_types,
    )
    if h5 is not None:
        lengths = None if (panel.lengths == panel.lengths.max()).all() else panel.lengths
        return FrameSeries(x, y, lengths, panel, request)
    place = panel.offsets[series] + steps
    index = getattr(frame.frame.to_native(), "index", None)
    return FrameSeries(x, y, None, panel, request, place, index)


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


class _Arrays:
    """Inputs and targets, in memory or as maps of an HDF5 file, which are written part by part.

    The columns (places, F) have a row for each step of each series: step after step, or, where
    series in memory have different lengths, one series after the other. Targets of series have a
    row for each series.
    """

    def __init__(
        self,
        request: Request,
        panel: Panel,
        n_rows: np.ndarray,
        has_null: bool,
        file: h5py.File | None,
    ) -> None:
        self.request = request
        self.panel = panel
        self.has_null = has_null
        self.file = file
        self.shape = (int(panel.lengths.max()), panel.n_series)
        self.is_ragged = file is None and bool((panel.lengths < self.shape[0]).any())
        self.n_places = int(panel.lengths.sum()) if self.is_ragged else math.prod(self.shape)
        self.has_gaps = bool(n_rows.sum() < self.n_places)
        self.columns: dict[str, np.ndarray] = {}
        self.maps: list[np.memmap] = []
        self.target_types: dict[str, np.dtype] = {}

    def write(self, frame: Frame, series: np.ndarray, steps: np.ndarray) -> None:
        """Write the rows of a frame, which are ``steps`` of ``series``."""
        targets = {column: frame.typed(column, labels=True) for column in self.request.y}
        if not self.columns:  # the first part knows the types
            self._make_arrays(frame, targets)
        if self.is_ragged:
            place = self.panel.offsets[series] + steps
        else:
            place = steps * self.panel.n_series + series
        if self.file is not None:
            self._refuse_second_rows(frame, series, steps, place)
        x = self.columns["x"]
        for f, column in enumerate(self.request.x):
            x[place, f] = frame.converted(column, frame.typed(column), x.dtype)
        y = self.columns["y"]
        for g, (column, typed) in enumerate(targets.items()):
            values = frame.converted(column, typed, y.dtype, exact=True)
            if self.request.per_series:
                rule = "with per_series=True a series has one value"
                ids = self.panel.ids
                y[:, g] = value_per_series(frame, column, values, ids, series, rule)
            else:
                y[place, g] = values

    def _make_arrays(self, frame: Frame, targets: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        request = self.request
        dtype = request.dtype or _float_type(frame, request.x)
        if dtype.kind not in "fiu" or (self.has_gaps and dtype.kind != "f"):
            raise DataError(
                f"dtype={dtype} cannot hold the NaN of steps without a row; give a floating type, "
                "or add the rows"
            )
        self.target_types = {column: values.dtype for column, (values, _) in targets.items()}
        if self.file is not None and np.dtype(object) in self.target_types.values():
            raise DataError(
                f"a file h5 holds numbers, and {self.target_types} are the types of y; number the "
                "labels, or read them into memory (h5=None)"
            )
        lacks_targets = self.has_null or (self.has_gaps and not request.per_series)
        target_type = _target_type(self.target_types, lacks_targets)
        if self.file is not None:
            self.columns["has_row"] = self._make_map("has_row", 1, np.dtype("uint8"))
        self.columns["x"] = self._make("x", dtype)
        if request.per_series:
            shape = (self.panel.n_series, len(request.y))
            self.columns["y"] = missing_values(shape, target_type)
        else:
            self.columns["y"] = self._make("y", target_type)

    def _make(self, name: str, dtype: np.dtype) -> np.ndarray:
        n_columns = len(getattr(self.request, name))
        if self.file is None or n_columns == 0:
            return missing_values((self.n_places, n_columns), dtype)
        columns = self._make_map(name, n_columns, dtype)
        if self.has_gaps:
            columns[:] = np.nan
        return columns

    def _make_map(self, name: str, n_columns: int, dtype: np.dtype) -> np.ndarray:
        file = self.file
        assert file is not None
        dataset = allocate(file, name, (*self.shape, n_columns), dtype, "TNF")
        file.flush()  # the file is as long then
        offset = dataset.id.get_offset() or 0
        where = f"{file.filename}: dataset {name!r}"
        take_room(file.id.get_vfd_handle(), offset, dataset.nbytes, where)
        array = h5mmap(file.filename, name, mode="r+")
        self.maps.append(array)
        return array.transpose(2, 1, 0).reshape(-1, n_columns)

    def _refuse_second_rows(
        self, frame: Frame, series: np.ndarray, steps: np.ndarray, place: np.ndarray
    ) -> None:
        """Raise DataError if a step had a row in an earlier part."""
        has_row = self.columns["has_row"]
        again = has_row[place, 0] > 0
        if again.any():
            row = int(again.argmax())
            raise DataError(
                f"row {row} of {frame.name} is the second one of series "
                f"{self.panel.ids[series[row]]!r} at "
                f"{self.panel.time_text(series[row], steps[row])}; keep one, or aggregate them"
            )
        has_row[place] = 1

    def close(self) -> None:
        """Write what is left to the file, with the lengths of series and the names of columns."""
        if self.file is None:
            return
        for array in self.maps:
            array.flush()
        self.file["lengths"] = self.panel.lengths
        for name in {"x", "y"} & set(self.file):
            where = f"{self.file.filename}: dataset {name!r}"
            write_names(self.file[name], getattr(self.request, name), where)

    def series(self, name: str, h5: str | os.PathLike[str] | None) -> Any:
        """Return an array (F, N, T) in time-major memory, or a list of arrays (F, T_i); of targets
        of series (N,) or (N, G). None if no columns were named.
        """
        if not getattr(self.request, name):
            return None
        columns = self.columns[name]
        if name == "y" and self.request.per_series:
            return columns[:, 0] if columns.shape[1] == 1 else columns
        if h5 is not None:
            return h5mmap(h5, name)
        if self.is_ragged:
            return [a.T for a in np.split(columns, self.panel.offsets[1:])]
        return columns.reshape(*self.shape, -1).transpose(2, 1, 0)
