"""Draw residuals over time."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.explaining.drawing import (
    COLORS,
    GREY,
    column_starts,
    format_times,
    legend_above,
    new_axes,
)
from fluxutils_py.explaining.predicted_series import predict_series

MOST_COLUMNS = 200


class ResidualDisplay:
    """Residuals over time, truth minus prediction: their median and the middle 80 per cent over
    series and neighbouring steps, and below the root of the mean square. Needs matplotlib.

    Create it with :meth:`from_predictions`, :meth:`from_stream` or :meth:`from_estimator`.

    Parameters
    ----------
    residuals : array of shape (N, T)
        NaN where there is no target.
    times : array of shape (T,), optional
        Numbers or dates of the steps.

    Attributes
    ----------
    median_, lower_, upper_, rms_ : ndarray of shape (columns,)
        What is drawn; at most 200 columns of equally many steps.
    axes_ : ndarray of matplotlib Axes
    figure_ : matplotlib Figure
    """

    def __init__(self, residuals: Any, times: Any = None) -> None:
        self.residuals = np.atleast_2d(np.asarray(residuals, dtype=np.float64))
        self.times = times
        if self.residuals.ndim != 2 or not self.residuals.size:
            raise ShapeError(f"residuals must have shape (N, T), got {self.residuals.shape}")
        if np.isnan(self.residuals).all():
            raise DataError("residuals are all NaN: no step has a target and a prediction")

    @classmethod
    def from_predictions(
        cls, y: Any, predicted: Any, *, output: int = 0, times: Any = None, axes: Any = None
    ) -> Self:
        """Draw the residuals of predictions (G, N, T), (N, T) or (T,), as a service keeps them."""
        truth, values = np.asarray(y), np.asarray(predicted)
        if truth.shape != values.shape:
            raise ShapeError(f"y has shape {truth.shape} and the predictions {values.shape}")
        if truth.ndim == 3:
            _check_output(output, len(truth))
            truth, values = truth[output], values[output]
        return cls(truth.astype(np.float64) - values, times).plot(axes)

    @classmethod
    def from_stream(
        cls, stream: Any, x: Any, y: Any, *, output: int = 0, times: Any = None, axes: Any = None
    ) -> Self:
        """Hand the steps of ``x`` (F, N, T) to a running stream, and draw the residuals.

        The stream goes on from its state, and ends with that after the last step.
        """
        truth = np.asarray(y)
        if np.ndim(x) != 3 or truth.ndim != 3 or truth.shape[1:] != np.shape(x)[1:]:
            raise ShapeError(
                f"x and y must be (F, N, T) and (G, N, T), got shapes {np.shape(x)} and "
                f"{truth.shape}"
            )
        _check_output(output, len(truth))
        has_more = hasattr(stream, "observe")  # intervals or alarms, behind the prediction
        steps = []
        for t in range(truth.shape[2]):
            found = stream.step(plain_block(x[:, :, t]))
            if has_more and isinstance(found, tuple):
                found = found[0]
            steps.append(np.asarray(found)[output])
        return cls(truth[output].astype(np.float64) - np.stack(steps, 1), times).plot(axes)

    @classmethod
    def from_estimator(
        cls, est: object, x: Any, y: Any, *, output: int = 0, times: Any = None, axes: Any = None
    ) -> Self:
        """Predict all series, and draw the residuals; shorter series of a list end earlier."""
        native = x.native if isinstance(x, SequenceView) else x
        first = native[0] if isinstance(native, tuple) else native
        n_series = len(first) if isinstance(first, list) else first.shape[1]
        rows = predict_series(est, x, y, range(n_series))
        residuals = np.full((n_series, max(r.truth.shape[1] for r in rows)), np.nan)
        for i, row in enumerate(rows):
            _check_output(output, len(row.truth))
            difference = row.truth[output].astype(np.float64) - row.predicted[output]
            residuals[i, : len(difference)] = difference
        return cls(residuals, times).plot(axes)

    def plot(self, axes: Any = None) -> Self:
        """Draw on two axes, or in a new figure."""
        if axes is None:
            axes = new_axes(2, 3.8, type(self).__name__, height_ratios=[1.6, 1])
        self.axes_ = np.ravel(np.asarray(axes, dtype=object))
        if len(self.axes_) != 2:
            raise ShapeError(f"axes has {len(self.axes_)} entries; expected 2")
        self.figure_ = self.axes_[0].figure
        starts = column_starts(self.residuals.shape[1], MOST_COLUMNS)
        columns = [c[~np.isnan(c)] for c in np.split(self.residuals, starts[1:], axis=1)]
        parts = [np.quantile(c, [0.1, 0.5, 0.9]) if len(c) else np.full(3, np.nan) for c in columns]
        self.lower_, self.median_, self.upper_ = np.array(parts).T
        self.rms_ = np.array([np.sqrt(np.square(c).mean()) if len(c) else np.nan for c in columns])
        times = starts if self.times is None else np.asarray(self.times)[starts]
        self._draw(times, int(starts[1] - starts[0]) if len(starts) > 1 else 1)
        return self

    def _draw(self, times: np.ndarray, width: int) -> None:
        above, below = self.axes_
        marker = "o" if len(times) == 1 else None
        above.axhline(0, color=GREY, linewidth=0.8)
        above.fill_between(
            times, self.lower_, self.upper_, color=COLORS[0], alpha=0.2, lw=0, label="middle 80 %"
        )
        above.plot(times, self.median_, color=COLORS[0], label="median", marker=marker, lw=1.2)
        above.set_ylabel("residual")
        over = "" if width == 1 else f", over {width} steps each"
        above.set_title(f"{len(self.residuals)} series{over}", loc="left")
        legend_above(above)
        below.plot(times, self.rms_, color=COLORS[5], marker=marker, lw=1.2)
        below.set_ylim(bottom=0)
        below.set_ylabel("RMS error")
        if self.times is None:
            below.set_xlabel("step")
        format_times(below, times)


def _check_output(output: int, n_outputs: int) -> None:
    if not 0 <= output < n_outputs:
        raise ShapeError(f"output is {output}, but y has {n_outputs}")
