"""What a forecaster is fitted with besides series: a validation part, weights, networks to start
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.data.lazy import select
from fluxutils_py.errors import DataError, ShapeError, warn
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.panel_windows import ArrayFNT, ArraySource, PackedSeries
from fluxutils_py.frames.frames import Frame, is_frame
from fluxutils_py.frames.panel import Panel
from fluxutils_py.validation import check_integer

WEIGHT = "sample_weight of fit"  # name of the weights among the values of a panel


@dataclass(frozen=True)
class FitOptions:
    """Arguments of ``Forecaster.fit``, see there, and the fit that it continues.

    Attributes
    ----------
    val_size : int
    weights : ndarray of shape (F, N, T), or None
        Of the values of an array; those of a panel are among its values.
    start : FittedForecaster or None
    """

    val_size: int = 0
    weights: np.ndarray | None = None
    start: FittedForecaster | None = None

    def check(self, h: int) -> None:
        """Raise ValueError, which names the argument, if one is invalid."""
        check_integer("val_size", self.val_size, 0)
        if 0 < self.val_size < h:
            raise ValueError(
                f"val_size is {self.val_size}, fewer steps than the horizon of {h}: the last steps "
                f"of forecasts would never be validated; give 0, or at least {h}"
            )

    def traits(self) -> dict[str, object]:
        """Return what ranks compare."""
        weights = self.weights
        return {
            "val_size": self.val_size,
            "the sum of sample_weight": None if weights is None else float(weights.sum()),
            "whether it continues an earlier fit": self.start is not None,
        }


def training_part(series: Panel | ArrayFNT, val_size: int) -> Panel | ArrayFNT:
    """Return the series without their last ``val_size`` steps.

    Warns of series that have no other steps.

    Raises
    ------
    DataError
        If no step is left.
    """
    if val_size == 0:
        return series
    lengths = series.lengths if isinstance(series, Panel) else np.array([series.shape[2]])
    left = np.maximum(lengths - val_size, 0)
    if left.max() < 2:
        raise DataError(
            f"val_size={val_size} leaves nothing to train on: the longest series has "
            f"{lengths.max()} steps"
        )
    if not isinstance(series, Panel):
        array: ArrayFNT = select(series, None, range(int(left[0])))
        return array
    short = np.flatnonzero(left == 0)
    if len(short):
        warn(
            f"{len(short)} of {series.n_series} series have no more than the {val_size} steps of "
            f"val_size, and are not trained on (series {series.ids[short[0]]!r} has "
            f"{lengths[short[0]]})"
        )
    return series.cut(np.zeros(series.n_series, int), left)


# -- weights ---------------------------------------------------------------------------------------


def frame_weights(df: object, sample_weight: object) -> dict[str, np.ndarray]:
    """Return the weights of the rows of a frame as a column for its panel; empty without
    weights.

    ``sample_weight`` is the name of a column, or an array with a weight for each row.
    """
    if sample_weight is None or not is_frame(df):
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


def array_weights(series: Panel | ArrayFNT, sample_weight: Any) -> np.ndarray | None:
    """Return weights (F, N, T) of the values of an array, a view of what was given; None for a
    panel.
    """
    if sample_weight is None or isinstance(series, Panel):
        return None
    shape = tuple(int(n) for n in series.shape)
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


Weights = PackedSeries | ArraySource


def target_weights(
    series: Panel | ArrayFNT,
    options: FitOptions,
) -> Weights | None:
    """Return the weight of each value as a target, of mean 1 over those above 0; None if all are
    equal.

    Raises
    ------
    DataError
        If all weights are 0.
    """
    if isinstance(series, Panel):
        weights = series.values.get(WEIGHT)
        known = ~np.isnan(next(iter(series.values.values())))
    else:
        weights = options.weights
        if weights is not None:
            weights = weights[:, :, : series.shape[2]]
        known = np.True_
    if weights is None:
        return None
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
    return _source(series, weights)


def _source(series: Panel | ArrayFNT, weights: np.ndarray) -> Weights:
    if isinstance(series, Panel):
        return PackedSeries(weights[None], series.lengths)
    return ArraySource(np.broadcast_to(weights, tuple(series.shape)))


def equal_weights(series: Panel | ArrayFNT) -> Weights:
    """Return weights of 1."""
    n = int(series.lengths.sum()) if isinstance(series, Panel) else 1
    return _source(series, np.ones(n))
