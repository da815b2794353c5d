"""Draw predictions of series beside their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from fluxutils_py.data.arrays import is_list_of_series, plain_block, to_numpy
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.streams.streaming import unwrap
from fluxutils_py.validation import check_integer, require_package

Band = tuple[np.ndarray, np.ndarray]

# of Okabe and Ito (2008): told apart by the colour-blind too
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "0.4"


class SequencePredictionDisplay:
    """Truth, prediction and band of some series, with the residuals below each. Needs matplotlib.

    Create it with :meth:`from_estimator`.

    Parameters
    ----------
    names : sequence of str
        Titles, one per series.
    truth, predicted : sequence of arrays of shape (T,)
        NaN where there is none.
    bands : sequence of (lower, upper), optional
        Arrays of shape (T,), of each series.
    times : array of shape (T,), optional
        Numbers or dates of the steps. None: 0, 1, ...

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        Two per series: of values, and of residuals, truth minus prediction.
    figure_ : matplotlib Figure
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        truth: Sequence[np.ndarray],
        predicted: Sequence[np.ndarray],
        bands: Sequence[Band] = (),
        times: Any = None,
    ) -> None:
        self.names = names
        self.truth = truth
        self.predicted = predicted
        self.bands = bands
        self.times = times

    @classmethod
    def from_estimator(
        cls,
        est: object,
        x: Any,
        y: Any,
        *,
        series: int | Sequence[int] = 0,
        output: int = 0,
        band: Any = None,
        steps: slice | None = None,
        times: Any = None,
        axes: Any = None,
    ) -> Self:
        """Predict and draw.

        Parameters
        ----------
        est : fitted estimator, pipeline or search
        x, y : arrays of shape (F, N, T) and (G, N, T), lists of series, or views
            Targets of every step. Of arrays, only the series to draw are read.
        series : int or sequence of int
        output : int
            Which of the G targets.
        band : pair of int, or pair of arrays of shape (G, N, T), optional
            The outputs of the model that hold a lower and an upper quantile, or their values, such
            as ``(yhat - width, yhat + width)``. None: the interval of an estimator that was fitted
            with ``interval``, else none.
        steps : slice, optional
            Steps to draw. The prediction still has all the past. None: all.
        times : array of shape (T,), optional
            Numbers or dates of all steps.
        axes : sequence of matplotlib Axes, optional
            Two per series. None: make a new figure.

        Raises
        ------
        ValueError
            If there is no such series or output, or targets are not of every step.
        """
        chosen = [series] if isinstance(series, int | np.integer) else list(series)
        rows = _predict_series(est, x, y, chosen)
        drawn = slice(None) if steps is None else steps
        if not 0 <= output < len(rows[0].truth):
            raise ShapeError(f"output is {output}, but y has {len(rows[0].truth)}")
        bands = _bands_of(est, rows, band, output, drawn)
        if times is None and steps is not None:
            times = np.arange(rows[0].truth.shape[1])
        display = cls(
            names=[f"series {row.series}" for row in rows],
            truth=[row.truth[output, drawn] for row in rows],
            predicted=[row.predicted[output, drawn] for row in rows],
            bands=bands,
            times=None if times is None else np.asarray(times)[drawn],
        )
        return display.plot(axes)

    def plot(self, axes: Any = None) -> Self:
        """Draw on the given axes, two per series, or in a new figure."""
        n = len(self.names)
        if axes is None:
            axes = _new_axes(n)
        self.axes_ = np.ravel(np.asarray(axes, dtype=object))
        if len(self.axes_) != 2 * n:
            raise ShapeError(
                f"axes has {len(self.axes_)} entries; expected two per series, {2 * n}"
            )
        self.figure_ = self.axes_[0].figure
        for i, name in enumerate(self.names):
            above, below = self.axes_[2 * i : 2 * i + 2]
            self._draw_values(above, i)
            self._draw_residuals(below, i)
            above.set_title(name, loc="left")
        legend_above(self.axes_[0])
        if not np.issubdtype(self._steps(0).dtype, np.datetime64):
            self.axes_[-1].set_xlabel("step")
        return self

    def _steps(self, i: int) -> np.ndarray:
        n = len(self.truth[i])
        return np.arange(n) if self.times is None else np.asarray(self.times)[:n]

    def _draw_values(self, ax: Any, i: int) -> None:
        steps = self._steps(i)
        marker = "o" if len(steps) == 1 else None  # a line of one point cannot be seen
        ax.plot(steps, self.truth[i], color=GREY, label="truth", marker=marker)
        # the wider line below, the coloured one above: both are seen where they agree
        ax.plot(steps, self.predicted[i], color=BLUE, label="prediction", marker=marker, lw=1.2)
        if self.bands:
            lower, upper = self.bands[i]
            ax.fill_between(steps, lower, upper, color=BLUE, alpha=0.2, linewidth=0, label="band")
        format_times(ax, steps)

    def _draw_residuals(self, ax: Any, i: int) -> None:
        steps = self._steps(i)
        residuals = np.asarray(self.truth[i], dtype=np.float64) - self.predicted[i]
        ax.axhline(0, color=GREY, linewidth=0.8)
        marker = "o" if len(steps) == 1 else None
        ax.plot(steps, residuals, color=VERMILION, linewidth=0.9, marker=marker)
        ax.set_ylabel("residual")
        format_times(ax, steps)


# -- the look --------------------------------------------------------------------------------------


def format_times(ax: Any, times: Any) -> None:
    """Let the labels of dates be short, as the usual ones overlap in narrow panels."""
    if not np.issubdtype(np.asarray(times).dtype, np.datetime64):
        return
    dates = require_package("matplotlib.dates", "plot", "plot")
    locator = ax.xaxis.get_major_locator()
    ax.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def legend_above(ax: Any) -> None:
    """Put a legend above the right end of the axes, where no line is."""
    ax.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)


def _new_axes(n_series: int) -> Any:
    """Return the axes of a new figure, two per series, one below the other."""
    pyplot = require_package("matplotlib.pyplot", "plot", "SequencePredictionDisplay")
    _, axes = pyplot.subplots(
        2 * n_series,
        1,
        sharex=True,
        figsize=(7.0, 2.9 * n_series + 0.4),
        height_ratios=[2.4, 1] * n_series,
        layout="constrained",
    )
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes


# -- bands -----------------------------------------------------------------------------------------


def _bands_of(
    est: object, rows: Sequence[_PredictedSeries], band: Any, output: int, steps: slice
) -> list[Band]:
    """Return the bands of series: those that are given, else the intervals of the estimator."""
    if band is not None:
        return [_band_of(row, band, output, steps) for row in rows]
    parts = unwrap(est)
    widths = getattr(parts.estimator, "interval_width_", None)
    if widths is None or parts.of_targets:  # of transformed targets: in other units than these
        return []
    width = float(widths[output])
    predictions = [row.predicted[output, steps] for row in rows]
    return [(predicted - width, predicted + width) for predicted in predictions]


def _band_of(row: _PredictedSeries, band: Any, output: int, steps: slice) -> Band:
    """Return the lower and upper values of one series."""
    if not isinstance(band, tuple | list) or len(band) != 2:
        raise ShapeError("band must be a pair: of outputs of the model, or of arrays (G, N, T)")
    ends = []
    for end in band:
        if isinstance(end, int | np.integer):
            if not 0 <= end < len(row.predicted):
                raise ShapeError(f"band names output {end}, but the model has {len(row.predicted)}")
            ends.append(row.predicted[end, steps])
        elif np.ndim(end) == 3:
            ends.append(np.asarray(end[output, row.series])[steps])
        else:
            raise ShapeError(f"band has an array of shape {np.shape(end)}; expected (G, N, T)")
    return ends[0], ends[1]


# -- targets and predictions of some series, whatever the form of the inputs -----------------------


class _PredictedSeries(NamedTuple):
    """One series: targets (G, T), NaN where there are none, and the model's outputs (H, T)."""

    series: int
    truth: np.ndarray
    predicted: np.ndarray


def _predict_series(est: Any, x: Any, y: Any, series: Sequence[int]) -> list[_PredictedSeries]:
    """Predict some series, and only these where ``x`` is an array.

    Raises
    ------
    ShapeError
        If ``y`` is not of every step, or does not fit ``x``, or there is no such series.
    """
    if isinstance(x, SequenceView):
        return _of_view(est, x, y, series)
    arrays = x if isinstance(x, tuple) else (x,)
    is_list = is_list_of_series(arrays[0])
    chosen = _check_series(series, len(arrays[0]) if is_list else arrays[0].shape[1])
    shape = getattr(y, "shape", ())
    if not is_list and len(shape) != 3:
        raise ShapeError(
            f"this picture is of targets of every step, (G, N, T); y has shape {shape}"
        )
    parts = tuple(_only(a, chosen) for a in arrays)
    predicted = est.predict(parts if isinstance(x, tuple) else parts[0])
    return _checked(chosen, _each(_only(y, chosen)), _each(predicted))


def _check_series(series: Sequence[int], n_series: int) -> list[int]:
    """Return the numbers of series, counted from 0; raise ShapeError if there is no such one."""
    chosen = []
    for i in series:
        check_integer("series", i)
        if not -n_series <= i < n_series:
            raise ShapeError(f"series is {i}, but x has {n_series} series")
        chosen.append(int(i) % n_series)
    return chosen


def _of_view(est: Any, x: SequenceView, y: Any, series: Sequence[int]) -> list[_PredictedSeries]:
    if not isinstance(y, SequenceView):
        raise ShapeError(
            f"x is a view of every step, so y must be one too, as samples(y); got "
            f"{type(y).__name__}"
        )
    chosen = _check_series(series, x.native.shape[1])
    truth = np.asarray(y.native)
    predicted = np.asarray(est.predict(x))
    n_outputs = max(1, predicted.size // (truth.shape[1] * truth.shape[2]))
    outputs = np.asarray(type(x).from_rows(predicted.reshape(len(x), -1), n_outputs))
    return _checked(chosen, _each(truth[:, chosen]), _each(outputs[:, chosen]))


def _only(values: Any, chosen: list[int]) -> Any:
    """Return some series of a list of series, or of an array (F, N, T)."""
    if isinstance(values, list | tuple):
        return [values[i] for i in chosen]
    # one after the other: files are not indexed by lists
    blocks = [plain_block(to_numpy(values[:, i : i + 1, :])) for i in chosen]
    return np.concatenate(blocks, axis=1)


def _each(values: Any) -> list[np.ndarray]:
    """Return the series (F, T) of a list or of an array (F, N, T)."""
    if isinstance(values, list | tuple):
        return [to_numpy(v) for v in values]
    return list(np.asarray(values).transpose(1, 0, 2))


def _checked(
    chosen: list[int], truths: list[np.ndarray], outputs: list[np.ndarray]
) -> list[_PredictedSeries]:
    rows = []
    for i, truth, predicted in zip(chosen, truths, outputs, strict=True):
        if truth.ndim != 2 or truth.shape[1:] != predicted.shape[1:]:
            raise ShapeError(
                f"series {i} has targets of shape {truth.shape} and predictions of shape "
                f"{predicted.shape}; expected (G, T) of equal T"
            )
        rows.append(_PredictedSeries(i, truth, predicted))
    return rows
