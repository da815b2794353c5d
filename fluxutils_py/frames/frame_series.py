"""Data frames with a row per series and time as arrays (F, N, T), and predictions as frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.frames.frames import Frame, make_frame
from fluxutils_py.frames.panel import (
    Panel,
    missing_values,
    read_rows,
    require_one_role,
    value_per_series,
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
) -> FrameSeries:
    """Turn a data frame with one row per series and time into arrays that estimators take.

    Steps without a row, between the first and the last of a series, become NaN (labels: None), as
    do missing values in rows. Nothing is learnt from NaN; it moves the state as zeros do.

    Parameters
    ----------
    df : data frame of pandas or polars, or table of pyarrow
        Rows may be in any order.
    id_col : str, optional
        Column that says which series a row belongs to. None: all rows are one series. Series are
        in increasing order of their ids.
    time_col : str, optional
        Column of dates or integers. None: the rows of a series are its steps, in their order.
    x, y : str or list of str
        Columns of inputs, which are numbers, and of targets, which are numbers, or labels (text,
        categories). Inputs are float32 if all of them are, else float64. Targets keep the type of
        their column; integers and booleans are float64 where some are missing, and labels objects.
    freq : str or int, optional
        Length of a step, such as ``"h"``, ``"15min"``, ``"MS"``. None: the most frequent difference
        between times, or months or business days where all times follow them.
    per_series : bool
        Whether a series has one target, which all its rows repeat: ``y`` is then (N,) or (N, G).

    Returns
    -------
    FrameSeries
        With ``x`` and ``y`` for ``fit``, and ``to_frame`` for predictions.

    Raises
    ------
    DataError
        If the data cannot be used: two rows of one time, times between two steps, a missing id or
        time. It names column and row.

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
    return _read(
        df, Request(id_col, time_col, _as_names(x, "x"), _as_names(y, "y"), per_series, freq)
    )


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
    zone: str | None = None

    def __post_init__(self) -> None:
        lists = {"x": self.x, "y": self.y}
        require_one_role({"id_col": self.id_col, "time_col": self.time_col}, lists)
        for argument, columns in lists.items():
            if len(set(columns)) < len(columns):
                raise SpecError(f"{argument} names a column twice: {', '.join(columns)}")

    def columns(self) -> dict[str, str]:
        """Return the columns that are named here, each with its argument."""
        columns = dict.fromkeys(self.y, "y") | dict.fromkeys(self.x, "x")
        for argument in ("id_col", "time_col"):
            if (column := getattr(self, argument)) is not None:
                columns[column] = argument
        return columns


@dataclass(frozen=True, eq=False)
class FrameSeries:
    """Series of a data frame, from :func:`from_frame`.

    Attributes
    ----------
    x : ndarray (F, N, T), or list of ndarray (F, T_i)
        Inputs; a list if series have different lengths. None if no columns were named.
    y : ndarray (G, N, T), list of ndarray (G, T_i), or ndarray (N,) or (N, G)
        Targets; None if no columns were named.
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
    panel: Panel
    request: Request
    place: np.ndarray  # of each row of the frame among the steps of all series
    index: Any  # of pandas

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

    def like(self, df: Any) -> FrameSeries:
        """Read another frame, such as test data, by the same columns and step.

        Its series may differ. It may lack the columns of targets: ``y`` is then None.
        """
        request = replace(self.request, freq=self.panel.frequency, zone=self.panel.zone)
        y = request.y if {*Frame(df, "df").schema} & {*request.y} else ()
        made = _read(df, replace(request, y=y))
        if (made.panel.zone is None) != (self.panel.zone is None):
            raise DataError(
                f"the times of df have the time zone {made.panel.zone}, those read before "
                f"{self.panel.zone}: give both a zone, as with dt.tz_localize"
            )
        # the names of predictions are those of the targets, which the frame may lack
        return replace(made, request=request)

    def to_frame(self, prediction: Any, names: Sequence[str] | None = None) -> Any:
        """Return predictions as a frame of the library that the series came from.

        Parameters
        ----------
        prediction : array (G, N, T), list of arrays (G, T_i), or array (N,) or (N, G)
            What ``predict`` returned for ``x``: one value per step, or per series.
        names : list of str, optional
            Names of the G columns. None: names of the targets, with ``_hat`` appended.

        Returns
        -------
        data frame
            Ids, times and predictions, in the rows of the frame that was read, in their order (of
            pandas, with their index); for predictions per series, one row each. NaN becomes null
            where the library has both.

        Raises
        ------
        ShapeError
            If the predictions are not of these series.
        """
        panel = self.panel
        place = self.place
        has_steps = isinstance(prediction, list | tuple) or len(np.shape(prediction)) > 2
        if has_steps:
            series = np.repeat(np.arange(panel.n_series), panel.lengths)[place]
            values = self._flat(prediction)[:, place]
        else:
            series = np.arange(panel.n_series)
            values = np.asarray(prediction)
            if values.ndim == 0 or len(values) != panel.n_series:
                raise ShapeError(
                    f"the predictions have shape {values.shape}; expected (G, N, T) with "
                    f"N={panel.n_series} series, or one row per series"
                )
            values = values.reshape(len(values), -1).T
        columns: dict[str, Any] = {}
        if self.request.id_col is not None:
            columns[self.request.id_col] = self.ids[series]
        if self.request.time_col is not None and has_steps:
            columns[self.request.time_col] = panel.times(series, place - panel.offsets[series])
        types = {name: panel.types[name] for name in columns}
        columns |= zip(self._column_names(names, len(values)), values, strict=True)
        frame = make_frame(columns, types, panel.backend)
        if self.index is not None and has_steps:
            frame.index = self.index
        return frame

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
            raise DataError(f"names={list(names)} repeats a column, or has that of ids or times")
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
        return np.asarray(prediction)[:, np.arange(longest) < lengths[:, None]]


def _read(df: Any, request: Request) -> FrameSeries:
    frame, panel, series, steps = read_rows(
        df, request.columns(), request.id_col, request.time_col, request.freq, request.zone
    )
    columns = [frame.numbers(column, missing=True) for column in request.x]
    is_single = {str(frame.dtype(column)) for column in request.x} == {"Float32"}
    dtype = np.dtype("float32" if is_single else "float64")
    x = _series(columns, panel, series, steps, dtype)
    typed = {column: frame.typed(column, labels=True) for column in request.y}
    lacks_steps = frame.n_rows < panel.lengths.sum() and not request.per_series
    dtype = _target_type(typed.values(), lacks_steps)
    columns = [frame.targets(column, values, dtype) for column, values in typed.items()]
    if not request.per_series:
        y = _series(columns, panel, series, steps, dtype)
    else:
        rule = "with per_series=True a series has one value"
        per_series = [
            value_per_series(frame, column, values, panel.ids, series, rule)
            for column, values in zip(typed, columns, strict=True)
        ]
        y = np.stack(per_series, 1) if len(per_series) > 1 else next(iter(per_series), None)
    index = getattr(frame.frame.to_native(), "index", None)
    return FrameSeries(x, y, panel, request, panel.offsets[series] + steps, index)


def _target_type(typed: Iterable[tuple[np.ndarray, np.ndarray]], lacks_steps: bool) -> np.dtype:
    """Return the type of an array of targets of these values, with these missing."""
    types = [values.dtype for values, _ in typed]
    if not types or np.dtype(object) in types:
        return np.dtype(object)
    dtype = np.result_type(*types)
    # NaN marks what is missing
    lacks_targets = lacks_steps or any(missing.any() for _, missing in typed)
    return np.dtype(np.float64) if lacks_targets and dtype.kind != "f" else dtype


def _series(
    columns: Sequence[np.ndarray],
    panel: Panel,
    series: np.ndarray,
    steps: np.ndarray,
    dtype: np.dtype,
) -> Any:
    """Return columns, whose rows are these steps of these series, as an array (F, N, T) in
    time-major memory, or a list of arrays (F, T_i), missing where there is no row; None if there
    are none.
    """
    if not columns:
        return None
    lengths = panel.lengths
    is_list = (lengths < lengths.max()).any()
    place = panel.offsets[series] + steps if is_list else steps * len(lengths) + series
    placed = missing_values((lengths.sum(), len(columns)), dtype)
    for f, values in enumerate(columns):
        placed[place, f] = values
    if is_list:
        return [a.T for a in np.split(placed, panel.offsets[1:])]
    return placed.reshape(-1, len(lengths), len(columns)).transpose(2, 1, 0)
