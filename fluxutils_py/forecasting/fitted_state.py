"""Hold what a forecaster has learnt, and cut windows of series for its networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.correction import SOURCES, Correction
from fluxutils_py.forecasting.covariates import Covariates, filled_forward
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.forecaster_settings import RECURRENT, output_columns
from fluxutils_py.forecasting.network_size import LEAST_STEPS
from fluxutils_py.forecasting.panel_windows import (
    Channels,
    PackedSeries,
    PanelWindows,
)
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Columns, Panel

LITTLE = 0.1  # weight of the networks in a forecast that others make


@dataclass(frozen=True)
class FittedState:
    """What a forecaster has learnt; a file holds it, with the ends of the series.

    Attributes
    ----------
    features : Features
    channels : Channels
    covariates : Covariates
    columns : Columns
        Of the frames that it reads.
    quantiles : tuple of float
        In the order of the networks' outputs.
    frequency : Frequency
    loss_name : str or callable
        The loss of the point forecast, chosen if it was "auto".
    network : str
        The kind of the networks, "recurrent" or "segments".
    models : tuple of nn.Module
        Empty before they are trained.
    correction : Correction or None
        Of their outputs; None before it is learnt, and where nothing is corrected.
    loss_curve, validation_loss_curve : tuple of float
        Loss per epoch, averaged over the networks.
    network_errors : dict of str to float
        Error of each kind of network on the end of the training part, relative to that of the
        seasonal naive forecast; empty if there was no choice.
    """

    features: Features
    channels: Channels
    covariates: Covariates
    columns: Columns
    quantiles: tuple[float, ...]
    frequency: Frequency
    loss_name: Any
    network: str = RECURRENT
    models: tuple[nn.Module, ...] = ()
    correction: Correction | None = None
    loss_curve: tuple[float, ...] = ()
    validation_loss_curve: tuple[float, ...] = ()
    network_errors: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Columns with forecasts: of the point forecast, then each quantile."""
        return [*output_columns(self.quantiles)]

    @property
    def h(self) -> int:
        """Number of steps to forecast."""
        return self.features.h

    @property
    def n_quantiles(self) -> int:
        return len(self.quantiles)

    def windows(self, panel: Panel) -> PanelWindows:
        """Return the windows of a panel, from its first step."""
        values = self.channel_values(panel)
        # not the target: the features tell given values from those that they fill in
        values[1:] = filled_forward(values[1:], panel.lengths)
        return self.packed_windows(values, panel.lengths, self.covariates.static(panel))

    def tail_windows(self, tail: np.ndarray, static: np.ndarray) -> PanelWindows:
        """Return the windows of tails (C, N, K). Where only covariates are known ahead, other
        channels are NaN.
        """
        lengths = np.full(tail.shape[1], tail.shape[2])
        return self.packed_windows(tail.reshape(len(tail), -1), lengths, static)

    def channel_values(self, panel: Panel) -> np.ndarray:
        """Return the target, past covariates and those known ahead: (C, total), NaN where
        missing.
        """
        target = panel.values[self.columns.target][None]
        covariates = [self.covariates.steps(panel, group) for group in ("hist", "futr")]
        return np.concatenate([target, *covariates])

    def packed_windows(
        self, values: np.ndarray, lengths: np.ndarray, static: np.ndarray
    ) -> PanelWindows:
        """Return the windows of series of these lengths, one after the other in ``values``, (C,
        total).
        """
        # those known ahead apart: windows read them beyond the end of the others
        n_source = len(values) - self.channels.n_ahead
        source = PackedSeries(values[:n_source], lengths)
        ahead = PackedSeries(values[n_source:], lengths) if self.channels.n_ahead else None
        return PanelWindows(source, self.features, self.channels, static, ahead, self.correction)

    def require_modelled(self, panel: Panel) -> None:
        """Raise DataError, with series and time, if a value has no logarithm and the networks model
        logarithms.
        """
        if not self.features.log:
            return
        target = self.columns.target
        values = panel.values[target]
        bad = np.flatnonzero(values <= 0)  # False for NaN
        if len(bad):
            place = int(bad[0])
            i = int(np.searchsorted(np.cumsum(panel.lengths), place, side="right"))
            raise DataError(
                f"column {target!r} of df is {values[place]:g} in series {panel.ids[i]!r} at "
                f"{panel.time_text(i, place - panel.offsets[i])}; the values were positive when "
                "the forecaster was fitted, and are modelled by their logarithms: correct it, set "
                "NaN, or fit with transform='none'"
            )


def warn_long_horizon(h: int, lengths: np.ndarray) -> None:
    """Warn, in training, of a horizon that no series is longer than."""
    # in training, targets end with the series
    longest = int(lengths.max())
    if longest <= h:
        warn(
            f"no series is longer than the horizon of {h} steps (the longest has {longest}): "
            f"training does not see what comes {longest} or more steps later, which is forecast "
            "as the season before"
        )


def warn_short_series(
    season: int, lengths: np.ndarray, ids: np.ndarray, only: np.ndarray | None = None
) -> None:
    """Warn of series that are not longer than a season, among all or those with the numbers
    ``only``.
    """
    # not an error: such series profit from the others
    series = np.arange(len(lengths)) if only is None else only
    short = series[lengths[series] <= season]
    if len(short):
        first = short[0]
        warn(
            f"{len(short)} of {len(series)} series have no more steps than a season of {season} "
            f"(series {ids[first]!r} has {lengths[first]}): where the season before "
            "is not known, they are forecast from their last value"
        )


def warn_little_learnt(correction: Correction | None, max_steps: int) -> None:
    """Warn where the networks have hardly a part in the forecasts, in the mean of the horizon."""
    # networks that were not trained do not show that there is nothing to learn
    if correction is None or max_steps < LEAST_STEPS:
        return
    # of what was learnt, before it was mixed with the network as it is
    learnt = 1 - (1 - correction.weights[0]) / correction.trust
    network = learnt.mean()
    simple = correction.weights[1:].mean(1)
    if network < LITTLE:
        best = int(np.argmax(simple))
        warn(
            f"the networks earned a weight of {network:.2f} on the held-out ends of the series, in "
            "the mean of the horizon: nothing was learnt beyond simple forecasts, of which the "
            f"{SOURCES[1 + best]} has the largest weight, {simple[best]:.2f} (correction_.weights "
            "has all). Covariates or more series may help; in a random walk nothing more is to "
            "learn"
        )
