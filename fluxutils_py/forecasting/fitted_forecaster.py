"""Hold what a forecaster has learnt, and cut windows of series for its networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fluxutils_py.errors import DataError, warn
from fluxutils_py.forecasting.covariates import Covariates, filled_forward
from fluxutils_py.forecasting.features import Features
from fluxutils_py.forecasting.forecaster_settings import (
    ForecasterSettings,
    column_names,
    columns_of,
)
from fluxutils_py.forecasting.panel import Columns, Panel, format_time, series_name
from fluxutils_py.forecasting.panel_windows import (
    ArrayFNT,
    ArraySource,
    Channels,
    PackedSeries,
    PanelWindows,
)


@dataclass(frozen=True)
class FittedForecaster:
    """What a forecaster needs to forecast: what it has learnt, and the names of its columns.

    Attributes
    ----------
    features : Features
    channels : Channels
    covariates : Covariates
    columns : Columns
        Those that it reads.
    names : list of str
        Columns with forecasts: of the point forecast, then each quantile.
    models : sequence of nn.Module
        Empty before they are trained.
    """

    features: Features
    channels: Channels
    covariates: Covariates
    columns: Columns
    names: list[str]
    models: Sequence[nn.Module] = ()

    @classmethod
    def of(
        cls,
        settings: ForecasterSettings,
        features: Features,
        channels: Channels,
        covariates: Covariates,
        models: Sequence[nn.Module] = (),
    ) -> FittedForecaster:
        """Add the names of the columns, which are settings that may change after ``fit``."""
        names = column_names(settings)
        return cls(features, channels, covariates, columns_of(settings), names, models)

    @property
    def h(self) -> int:
        """Number of steps to forecast."""
        return self.features.h

    @property
    def n_quantiles(self) -> int:
        return len(self.names) - 1

    def windows(self, panel: Panel | None, array: ArrayFNT | None) -> PanelWindows:
        """Return the windows of a panel or an array, from its first step."""
        if panel is None:
            assert array is not None
            return PanelWindows(ArraySource(array), self.features, self.channels)
        hist = filled_forward(self.covariates.steps(panel, "hist"), panel.lengths)
        futr = filled_forward(self.covariates.steps(panel, "futr"), panel.lengths)
        target = panel.values[self.columns.target][None]
        source = PackedSeries(np.concatenate([target, hist]), panel.lengths)
        ahead = PackedSeries(futr, panel.lengths) if len(futr) else None
        static = self.covariates.static(panel)
        return PanelWindows(source, self.features, self.channels, static, ahead)

    def tail_windows(self, tail: np.ndarray, static: np.ndarray) -> PanelWindows:
        """Return the windows of tails (C, N, K). Where only covariates are known ahead, other
        channels are NaN.
        """
        n_source = len(tail) - self.channels.n_ahead
        lengths = np.full(tail.shape[1], tail.shape[2])
        flat = tail.reshape(len(tail), -1)
        source = PackedSeries(flat[:n_source], lengths)
        ahead = PackedSeries(flat[n_source:], lengths) if self.channels.n_ahead else None
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
            series = np.searchsorted(np.cumsum(panel.lengths), bad[:1], side="right")
            time = panel.times(series, bad[:1] - panel.offsets[series])[0]
            raise DataError(
                f"column {target!r} of df is {values[bad[0]]:g} in series "
                f"{panel.ids[series[0]]!r} at {format_time(time)}; the values were positive when "
                "the forecaster was fitted, and are modelled by their logarithms: correct it, set "
                "NaN, or fit with transform='none'"
            )

    def require_finite(self, values: np.ndarray) -> None:
        """Raise DataError if a value of an array (F, N, T) is infinite, or not positive where
        logarithms are modelled.
        """
        bad = np.isinf(values)
        need = "finite"
        if self.features.log:
            bad |= values <= 0
            need = "finite and positive, as in fit"
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"df[{', '.join(map(str, at))}] is {values[at]:g}; values must be {need}, or NaN"
            )


def warn_long_horizon(h: int, lengths: np.ndarray) -> None:
    """Warn, in training, of a horizon that no series is longer than."""
    longest = int(lengths.max())
    if longest <= h:
        warn(
            f"no series is longer than the horizon of {h} steps (the longest has {longest}): "
            f"training does not see what comes {longest} or more steps later, which is forecast "
            "as the season before",
        )


def warn_short_series(season: int, lengths: np.ndarray, panel: Panel | None) -> None:
    """Warn of series that are not longer than a season."""
    short = np.flatnonzero(lengths <= season)
    if len(short):
        first = short[0]
        warn(
            f"{len(short)} of {len(lengths)} series have no more steps than a season of {season} "
            f"(series {series_name(panel, first)} has {lengths[first]}): where the season before "
            "is not known, they are forecast from their last value",
        )
