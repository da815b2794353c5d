"""Read series, and the weights of their values, from a data frame or an array (F, N, T)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.frames.frames import Frame, is_frame
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Columns, Panel, read_panel
from fluxutils_py.inputs import as_series

WEIGHT = "sample_weight of fit"  # name of the weights among the values of a panel
STEPS = Frequency("integer", 1, text="1")  # of an array, whose times are 0, 1, 2, ...


def read_series(
    df: object,
    columns: Columns,
    freq: Any,
    *,
    static_df: object = None,
    sample_weight: Any = None,
    zone: str | None = None,
) -> Panel:
    """Return the series of a frame, or those of an array: feature ``f`` of series ``n`` is series
    ``f * N + n``, at integer times from 0 on.

    ``freq``, ``static_df`` and ``zone`` as in :func:`read_panel`, ``sample_weight`` as in
    ``Forecaster.fit``.

    Raises
    ------
    DataError, ShapeError
        If the data or the weights cannot be used.
    """
    if is_frame(df):
        weights = _frame_weights(df, sample_weight)
        return read_panel(df, columns, freq, static_df=static_df, zone=zone, extra=weights)
    if static_df is not None:
        raise DataError("static_df is for data frames; an array (F, N, T) has no static covariates")
    _require_array(df, columns)
    array = as_series(df, "df")[0].array
    values = np.asarray(plain_block(array[:, :, :]), np.float64)
    _refuse_infinite(values)
    n_features, n_series, n_steps = values.shape
    n = n_features * n_series
    packed = {columns.target: values.reshape(-1)}
    if sample_weight is not None:
        packed[WEIGHT] = _array_weights(values.shape, sample_weight).reshape(-1)
    return Panel(
        np.arange(n).astype(object),
        np.zeros(n, np.int64),
        np.full(n, n_steps),
        packed,
        {},
        STEPS,
        zone=None,
        types={},
        shape=(n_features, n_series),
    )


def _require_array(df: object, columns: Columns) -> None:
    """Raise TypeError or DataError, with a remedy, for what is often given by mistake."""
    # other libraries expect the number of steps there
    if isinstance(df, int | np.integer):
        raise TypeError(
            f"df={df} is no data: the number of steps to forecast is h of the constructor"
        )
    if hasattr(type(df), "to_frame"):  # of pandas or polars
        frame = "a frame with the columns " + ", ".join(columns.arguments())
        if hasattr(df, "rename_axis"):
            frame += (
                f", as df.rename({columns.target!r}).rename_axis({columns.time!r})"
                f".reset_index().assign({columns.id}='a')"
            )
        raise DataError(f"df is a {type(df).__name__}, expected {frame}; or an array (F, N, T)")
    if columns.hist or columns.futr or columns.stat:
        raise DataError("covariates are columns of data frames; an array (F, N, T) has none")


def _refuse_infinite(values: np.ndarray) -> None:
    # the networks' state would depend on it from then on
    bad = np.argwhere(np.isinf(values))
    if len(bad):
        f, n, t = (int(i) for i in bad[0])
        raise DataError(
            f"the array is {values[f, n, t]} at [{f}, {n}, {t}] (feature, series, step); correct "
            "it, or set NaN"
        )


def _frame_weights(df: object, sample_weight: object) -> dict[str, np.ndarray]:
    """Return the weights of the rows of a frame as a column for its panel; empty without
    weights.

    ``sample_weight`` is the name of a column, or an array with a weight for each row.
    """
    if sample_weight is None:
        return {}
    frame = Frame(df, "df")
    if isinstance(sample_weight, str):
        frame.require({sample_weight: "sample_weight"})
        weights = frame.numbers(sample_weight, missing=True)
    else:
        weights = np.asarray(sample_weight, float)
        if weights.shape != (frame.n_rows,):
            raise ShapeError(
                f"sample_weight has shape {weights.shape}; expected ({frame.n_rows},), one for "
                "each row of df, or the name of a column"
            )
    _require_weights(weights, "row")
    return {WEIGHT: weights}


def _array_weights(shape: tuple[int, ...], sample_weight: Any) -> np.ndarray:
    """Return weights (F, N, T) of the values of an array, a view of what was given."""
    if isinstance(sample_weight, str):
        raise DataError(
            f"sample_weight={sample_weight!r} names a column, and an array (F, N, T) has none: "
            f"give an array of shape {shape[1:2]}, {shape[1:]} or {shape}"
        )
    weights = np.asarray(plain_block(np.asarray(sample_weight), "sample_weight"), float)
    if weights.shape not in (shape[1:2], shape[1:], shape):
        raise ShapeError(
            f"sample_weight has shape {weights.shape}; expected {shape[1:2]}, {shape[1:]} or "
            f"{shape} for an array of shape {shape}"
        )
    _require_weights(weights, "place")
    if weights.ndim == 1:
        weights = weights[:, None]
    return np.broadcast_to(weights, shape)


def _require_weights(weights: np.ndarray, place: str) -> None:
    bad = np.argwhere(~(weights >= 0) | np.isinf(weights))  # NaN is not at least 0
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        shown = ", ".join(map(str, at))
        raise DataError(
            f"sample_weight is {weights[at]} in {place} {shown}; weights must be finite and not "
            "negative: use 0 for what shall not be learnt"
        )
