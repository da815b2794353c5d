"""Read series, and the weights of their values, from a data frame or an array (F, N, T)."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.errors import DataError, SpecError
from fluxutils_py.forecasting.panel_windows import PackedSeries
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
    sample_weight: str | None = None,
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
    if sample_weight is not None and not isinstance(sample_weight, str):
        raise SpecError("sample_weight must be the name of a column of df: add one to the frame")
    if is_frame(df):
        weights = {}
        if sample_weight is not None:
            weights = {WEIGHT: _weights_of(df, sample_weight)}
        return read_panel(df, columns, freq, static_df=static_df, zone=zone, extra=weights)
    if static_df is not None or sample_weight is not None:
        raise DataError(
            "static_df and sample_weight are for data frames; an array (F, N, T) has no columns"
        )
    # what is often given by mistake; other libraries expect the number of steps there
    if isinstance(df, int | np.integer | str | PathLike) or hasattr(type(df), "to_frame"):
        raise DataError(
            f"df is a {type(df).__name__}, expected a frame with the columns "
            f"{', '.join(columns.arguments())}, or an array (F, N, T); files are read by "
            "pandas or polars, and the number of steps to forecast is h of the constructor"
        )
    if columns.hist or columns.futr or columns.stat:
        raise DataError("covariates are columns of data frames; an array (F, N, T) has none")
    return _read_array(df, columns)


def _read_array(df: object, columns: Columns) -> Panel:
    """Return the series of an array."""
    array = as_series(df, "df")[0].array
    values = np.asarray(plain_block(array[:, :, :]), np.float64)
    # the networks' state would depend on it from then on
    if np.isinf(values).any():
        place = np.argwhere(np.isinf(values))[0].tolist()
        raise DataError(
            f"the array is infinite at {place} (feature, series, step); correct it, or set NaN"
        )
    n_features, n_series, n_steps = values.shape
    n = n_features * n_series
    return Panel(
        np.arange(n).astype(object),
        np.zeros(n, np.int64),
        np.full(n, n_steps),
        {columns.target: values.reshape(-1)},
        {},
        STEPS,
        zone=None,
        types={},
        shape=(n_features, n_series),
    )


def _weights_of(df: object, column: str) -> np.ndarray:
    """Return the weights of the rows of a frame."""
    frame = Frame(df, "df")
    frame.require({column: "sample_weight"})
    weights = frame.numbers(column, missing=True)
    bad = np.flatnonzero(~(weights >= 0) | np.isinf(weights))  # NaN is not at least 0
    if len(bad):
        raise DataError(
            f"column {column!r}, sample_weight of fit, is {weights[bad[0]]} in row {bad[0]}; "
            "weights must be finite and not negative: use 0 for what shall not be learnt"
        )
    return weights


def target_weights(panel: Panel) -> PackedSeries | None:
    """Return the weight of each value as a target, of mean 1 over those above 0; None without
    ``sample_weight``.

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
    return PackedSeries(weights[None] / live.mean(), panel.lengths)
