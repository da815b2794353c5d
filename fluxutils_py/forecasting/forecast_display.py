"""Plot forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.errors import DataError
from fluxutils_py.forecasting.frames import Frame, require
from fluxutils_py.forecasting.outputs import column_names, forecast_values, future_covariates
from fluxutils_py.forecasting.panel import read_steps


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
        self, *, ids: Sequence[Any], history: Any, forecast: Any, bands: Any = (), truth: Any = None
    ) -> None:
        self.ids = ids
        self.history = history
        self.forecast = forecast
        self.bands = bands
        self.truth = truth

    @classmethod
    def from_forecaster(
        cls,
        fc: Any,
        ids: Sequence[Any] | None = None,
        *,
        futr_df: Any = None,
        truth_df: Any = None,
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
        check_is_fitted(fc, "models_")
        history, h = fc._history, fc.features_.h
        number = {label: i for i, label in enumerate(fc.ids_)}
        ids = list(fc.ids_[:4]) if ids is None else list(ids)
        unknown = [i for i in ids if i not in number]
        if unknown:
            raise DataError(
                f"ids has {unknown[0]!r}, which is none of the {len(number)} series of the "
                "forecaster"
            )
        forecasts = forecast_values(fc, history, future_covariates(fc, history, futr_df))
        n = min(3 * h if n_history is None else n_history, history.n_kept)
        past, forecast, bands = [], [], []
        for series in (number[i] for i in ids):
            length = int(history.lengths[series])
            steps = np.arange(max(0, length - n), length)
            past.append(
                (
                    _step_times(history, series, steps),
                    history.tail[0, series, history.n_kept - len(steps) :],
                )
            )
            forecast.append(
                (_step_times(history, series, length + np.arange(h)), forecasts[series, 0])
            )
            if len(column_names(fc)) > 2:
                bands.append((forecasts[series, 1], forecasts[series, -1]))
        truth = (
            None
            if truth_df is None
            else _read_truth(fc, history, truth_df, [number[i] for i in ids])
        )
        return cls(ids=ids, history=past, forecast=forecast, bands=bands, truth=truth).plot(axes)

    def plot(self, axes: Any = None) -> Self:
        """Plot on the given axes, or on a new figure."""
        dates = require("matplotlib.dates", "plot")
        if axes is None:
            pyplot = require("matplotlib.pyplot", "plot")
            size = (7.0, 2.2 * len(self.ids) + 0.4)
            _, axes = pyplot.subplots(
                len(self.ids), 1, squeeze=False, figsize=size, layout="constrained"
            )
        self.axes_ = np.ravel(np.asarray(axes, dtype=object))
        self.figure_ = self.axes_[0].figure
        for i, (ax, name) in enumerate(zip(self.axes_, self.ids, strict=True)):
            times, values = self.forecast[i]
            ax.plot(*self.history[i], color="0.4", label="history")
            if self.truth is not None:
                ax.plot(*self.truth[i], color="0.4", linestyle=":", label="truth")
            ax.plot(
                times, values, color="C0", label="forecast", marker="o" if len(times) == 1 else None
            )
            if len(self.bands):
                ax.fill_between(
                    times, *self.bands[i], color="C0", alpha=0.2, linewidth=0, label="band"
                )
            if np.issubdtype(np.asarray(times).dtype, np.datetime64):
                ax.xaxis.set_major_formatter(
                    dates.ConciseDateFormatter(ax.xaxis.get_major_locator())
                )
            ax.set_title(str(name), loc="left")
        self.axes_[0].legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2
        )
        return self


def _step_times(history: Any, series: int, steps: np.ndarray) -> np.ndarray:
    if history.panel is None:
        return steps
    found: np.ndarray = history.panel.times(np.full(len(steps), series), steps)
    return found


def _read_truth(
    fc: Any, history: Any, truth_df: Any, series: list[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    if history.panel is None:
        raise DataError("the forecaster was fitted on an array; truth_df is for frames")
    frame = Frame(truth_df, "truth_df")
    frame.require({fc.id_col: "id_col", fc.time_col: "time_col", fc.target_col: "target_col"})
    of, steps = read_steps(frame, fc._columns, history.panel)
    values = frame.numbers(fc.target_col, missing=True)
    found = []
    for i in series:
        here = np.flatnonzero(
            (of == i)
            & (steps >= history.lengths[i])
            & (steps < history.lengths[i] + fc.features_.h)
        )
        here = here[np.argsort(steps[here])]
        found.append((_step_times(history, i, steps[here]), values[here]))
    return found
