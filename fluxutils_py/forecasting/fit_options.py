"""What a forecaster is fitted with besides series: a validation part, weights, networks to start
from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.fitted_forecaster import FittedForecaster
from fluxutils_py.forecasting.panel_windows import PackedSeries
from fluxutils_py.forecasting.reading import WEIGHT
from fluxutils_py.frames.panel import Panel
from fluxutils_py.validation import check_integer


@dataclass(frozen=True)
class FitOptions:
    """Arguments of ``Forecaster.fit``, see there, and the fit that it continues.

    Attributes
    ----------
    val_size : int
    start : FittedForecaster or None
    """

    val_size: int = 0
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
        return {
            "val_size": self.val_size,
            "whether it continues an earlier fit": self.start is not None,
        }


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
