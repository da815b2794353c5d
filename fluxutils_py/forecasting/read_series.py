"""Read series, and the weights of their values, from a data frame or an array (F, N, T); take the
part that is trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.errors import DataError, ShapeError, warn
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.frames.frames import Frame, is_frame
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Columns, Panel, read_panel
from fluxutils_py.inputs import as_series
from fluxutils_py.validation import check_integer

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


def check_val_size(val_size: int, h: int) -> None:
    """Raise ValueError unless so many steps can be held out for validation."""
    check_integer("val_size", val_size, 0)
    if 0 < val_size < h:
        raise ValueError(
            f"val_size is {val_size}, fewer steps than the horizon of {h}: the last steps of "
            f"forecasts would never be validated; give 0, or at least {h}"
        )


def training_part(panel: Panel, val_size: int) -> Panel:
    """Return the series without their last ``val_size`` steps.

    Warns of series that have no other steps.

    Raises
    ------
    DataError
        If no step is left.
    """
    if val_size == 0:
        return panel
    lengths = panel.lengths
    left = np.maximum(lengths - val_size, 0)
    if left.max() < 2:
        raise DataError(
            f"val_size={val_size} leaves nothing to train on: the longest series has "
            f"{lengths.max()} steps"
        )
    short = np.flatnonzero(left == 0)
    if len(short):
        warn(
            f"{len(short)} of {panel.n_series} series have no more than the {val_size} steps of "
            f"val_size, and are not trained on (series {panel.ids[short[0]]!r} has "
            f"{lengths[short[0]]})"
        )
    return panel.cut(np.zeros(panel.n_series, int), left)


def target_weights(panel: Panel) -> PackedSeries | None:
    """Return the weight of each value as a target, of mean 1 over those above 0; None if all are
    equal.

    Raises
    ------
    DataError
        If all weights are 0.
    """
    weights = panel.values.get(WEIGHT)
    if weights is None:
        return None
    known = ~np.isnan(next(iter(panel.values.values())))
    live = weights[known & (weights > 0)]
    if not live.size:
        raise DataError(
            "sample_weight leaves nothing to learn from: it is 0 wherever there is a value"
        )
    if live.min() == live.max():
        if not (weights[known & (weights == 0)]).size:
            return None
        weights = (weights > 0).astype(float)
    else:
        weights = weights / live.mean()
    return PackedSeries(weights[None], panel.lengths)


def equal_weights(panel: Panel) -> PackedSeries:
    """Return weights of 1."""
    return PackedSeries(np.ones((1, int(panel.lengths.sum()))), panel.lengths)
