"""Hold what a forecaster has learnt, and cut windows of series for its networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.channels import Channels, filled_forward
from fluxutils_py.forecasting.features import Correction, Features
from fluxutils_py.forecasting.forecaster_settings import RECURRENT, output_columns
from fluxutils_py.forecasting.panel_windows import PackedSeries, PanelWindows
from fluxutils_py.frames.frequency import Frequency
from fluxutils_py.frames.panel import Columns, Panel


@dataclass(frozen=True)
class FittedState:
    """What a forecaster has learnt; a file holds it, with the ends of the series.

    Attributes
    ----------
    features : Features
    channels : Channels
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
        values = self.channels.values(panel, self.columns.target)
        # not the target: the features tell given values from those that they fill in
        values[1:] = filled_forward(values[1:], panel.lengths)
        return self.packed_windows(values, panel.lengths, self.channels.static(panel))

    def tail_windows(self, tail: np.ndarray, static: np.ndarray) -> PanelWindows:
        """Return the windows of tails (C, N, K). Where only covariates are known ahead, other
        channels are NaN.
        """
        lengths = np.full(tail.shape[1], tail.shape[2])
        return self.packed_windows(tail.reshape(len(tail), -1), lengths, static)

    def packed_windows(
        self, values: np.ndarray, lengths: np.ndarray, static: np.ndarray
    ) -> PanelWindows:
        """Return the windows of series of these lengths, one after the other in ``values``, (C,
        total).
        """
        # those known ahead apart: windows read them beyond the end of the others
        n_ahead = len(self.channels.futr)
        n_source = len(values) - n_ahead
        source = PackedSeries(values[:n_source], lengths)
        ahead = PackedSeries(values[n_source:], lengths) if n_ahead else None
        return PanelWindows(source, self.features, self.channels, static, ahead)

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
