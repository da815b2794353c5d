"""Plot forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import DataError
from fluxutils_py.explaining.sequence_display import format_times, legend_above
from fluxutils_py.forecasting.fitted_state import FittedState
from fluxutils_py.forecasting.forecaster import Forecaster
from fluxutils_py.forecasting.history import History
from fluxutils_py.forecasting.outputs import forecast_any, require_frame, rows_ahead
from fluxutils_py.frames.frames import Frame, require
from fluxutils_py.frames.panel import series_numbers

Line = tuple[np.ndarray, np.ndarray]  # times and values, or lower and upper values


class ForecastDisplay:
    """Plot of history, forecast, band and truth, as a display object of scikit-learn. Needs
    matplotlib.

    Parameters
    ----------
    ids : sequence
        Titles of the panels, one per series.
    history : list of (times, values)
    forecast : list of (times, values)
    bands : list of (lower, upper)
        Lowest and highest quantile of each series. Empty: draw no band.
    truth : list of (times, values), optional

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
    figure_ : matplotlib Figure
    """

    def __init__(
        self,
        *,
        ids: Sequence[object],
        history: Sequence[Line],
        forecast: Sequence[Line],
        bands: Sequence[Line] = (),
        truth: Sequence[Line] | None = None,
    ) -> None:
        self.ids = ids
        self.history = history
        self.forecast = forecast
        self.bands = bands
        self.truth = truth

    @classmethod
    def from_forecaster(
        cls,
        fc: Forecaster,
        ids: Sequence[object] | None = None,
        *,
        futr_df: object = None,
        truth_df: object = None,
        n_history: int | None = None,
        axes: Any = None,
    ) -> Self:
        """Plot the forecasts of a fitted forecaster.

        Parameters
        ----------
        fc : Forecaster
        ids : sequence, optional
            Series to plot. None: the first four.
        futr_df : data frame, optional
            As for ``fc.predict``.
        truth_df : data frame, optional
            True values after the history, with ids and times.
        n_history : int, optional
            Number of past steps to plot. None: ``3 * h``.
        axes : sequence of matplotlib Axes, optional
            One per series. None: make a new figure.
        """
        check_is_fitted(fc, "state_")
        fitted = fc.state_
        history = fc.history_
        # more panels would not be legible in one figure
        ids = list(fc.ids_[:4] if ids is None else ids)
        series = series_numbers(ids, fc.ids_).tolist()
        if -1 in series:
            raise DataError(
                f"ids has {ids[series.index(-1)]!r}, which is none of the {len(fc.ids_)} series of "
                "the forecaster"
            )
        values = forecast_any(fitted, history, futr_df, None)
        ahead = np.arange(fitted.h)
        end = history.lengths
        if n_history is None:
            n_history = 3 * fitted.h
        n = min(n_history, history.n_kept)
        bands = []
        if fitted.n_quantiles > 1:
            # the outputs are the point forecast, then the quantiles in order
            bands = [(values[i, 1], values[i, -1]) for i in series]
        truth = None
        if truth_df is not None:
            truth = _read_truth(fitted, history, truth_df, series)
        # only numbers are kept: the display stays as it is when the forecaster is updated
        display = cls(
            ids=ids,
            history=[_last_values(history, i, n) for i in series],
            forecast=[(_step_times(history, i, end[i] + ahead), values[i, 0]) for i in series],
            bands=bands,
            truth=truth,
        )
        return display.plot(axes)

    def plot(self, axes: Any = None) -> Self:
        """Plot on the given axes, or on a new figure."""
        if axes is None:
            pyplot = require("matplotlib.pyplot", "plot")
            n = len(self.ids)
            size = (7.0, 2.2 * n + 0.4)
            _, axes = pyplot.subplots(n, 1, squeeze=False, figsize=size, layout="constrained")
        self.axes_ = np.ravel(np.asarray(axes, dtype=object))
        self.figure_ = self.axes_[0].figure
        for i, (ax, name) in enumerate(zip(self.axes_, self.ids, strict=True)):
            self._plot_series(ax, i)
            format_times(ax, self.forecast[i][0])
            ax.set_title(str(name), loc="left")
        legend_above(self.axes_[0])
        return self

    def _plot_series(self, ax: Any, i: int) -> None:
        times, values = self.forecast[i]
        marker = "o" if len(times) == 1 else None  # a line of one point cannot be seen
        ax.plot(*self.history[i], color="0.4", label="history")
        if self.truth is not None:
            ax.plot(*self.truth[i], color="0.4", linestyle=":", label="truth")
        ax.plot(times, values, color="C0", label="forecast", marker=marker)
        if self.bands:
            lower, upper = self.bands[i]
            ax.fill_between(times, lower, upper, color="C0", alpha=0.2, linewidth=0, label="band")


def _last_values(
    history: History,
    series: int,
    n: int,
) -> Line:
    """Return the times and values of the last ``n`` steps of a series, or fewer."""
    length = int(history.lengths[series])
    steps = np.arange(max(0, length - n), length)
    # the tail ends with the last step of each series, and is NaN before its first one
    values = history.tail[0, series, history.n_kept - len(steps) :]
    return _step_times(history, series, steps), values


def _step_times(
    history: History,
    series: int,
    steps: np.ndarray,
) -> np.ndarray:
    return history.panel.times(np.full(len(steps), series), steps)


def _read_truth(
    fitted: FittedState, history: History, truth_df: object, series: list[int]
) -> list[Line]:
    require_frame(history)
    columns = fitted.columns
    frame = Frame(truth_df, "truth_df")
    # without the covariates, which a picture does not need
    frame.require(replace(columns, hist=(), futr=()).arguments())
    # the truth may have gaps, rows of the past, and rows after the horizon
    rows, series_of_row, step = rows_ahead(fitted, frame, history.panel, fitted.h)
    values = frame.numbers(columns.target, missing=True)[rows]
    truth = []
    for i in series:
        at = np.flatnonzero(series_of_row == i)
        at = at[np.argsort(step[at])]
        truth.append((_step_times(history, i, history.lengths[i] + step[at]), values[at]))
    return truth
