"""Draw predictions of series beside their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fluxutils_py.data.arrays import plain_block, to_numpy
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.streams.streaming import unwrap
from fluxutils_py.validation import check_integer, require_package

Band = tuple[np.ndarray, np.ndarray]

# of Okabe and Ito (2008): told apart by the colour-blind too
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "0.4"


@dataclass(kw_only=True, eq=False, repr=False)
class SequencePredictionDisplay:
    """Targets, predictions and band of some series, with residuals below each. Needs matplotlib.

    Create it with :meth:`from_estimator`.

    Parameters
    ----------
    names : sequence of str
        Titles, one per series.
    y_true, y_pred : sequence of arrays of shape (T,)
        NaN where there is none.
    bands : sequence of (lower, upper)
        Arrays of shape (T,), of each series; empty if there are none.
    times : array of shape (T,)
        Numbers or dates of the steps.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        Two per series: of values, and of residuals, target minus prediction.
    figure_ : matplotlib Figure
    """

    names: Sequence[str]
    y_true: Sequence[np.ndarray]
    y_pred: Sequence[np.ndarray]
    bands: Sequence[Band]
    times: np.ndarray

    @classmethod
    def from_estimator(
        cls,
        est: Any,
        x: Any,
        y: Any,
        *,
        series: int | Sequence[int] = 0,
        output: int = 0,
        band: tuple[Any, Any] | None = None,
        steps: slice | None = None,
        times: Any = None,
        axes: Any = None,
    ) -> Self:
        """Predict and draw.

        Parameters
        ----------
        est : fitted estimator, pipeline or search
        x, y : arrays of shape (F, N, T) and (G, N, T)
            Only the series to draw are read. Several inputs are a tuple.
        series : int or sequence of int
        output : int
            Which of the G targets.
        band : pair of arrays of shape (G, N, T), optional
            Lower and upper values, such as ``(yhat - width, yhat + width)``. None: the interval of
            an estimator that was fitted with ``level``, else none.
        steps : slice, optional
            Steps to draw. The prediction still has all the past. None: all.
        times : array of shape (T,), optional
            Numbers or dates of all steps. None: 0, 1, ...
        axes : sequence of matplotlib Axes, optional
            Two per series. None: make a new figure.

        Raises
        ------
        ShapeError
            If there is no such series or output, or an array is not (F, N, T).
        """
        inputs = x if isinstance(x, tuple) else (x,)
        n_series, n_steps = _check_arrays(inputs, y, band, output)
        drawn = steps or slice(None)
        y_true, y_pred, bands = [], [], []
        chosen = _series_to_draw(series, n_series)
        for n in chosen:
            parts = tuple(_only(a, n) for a in inputs)
            given = parts if isinstance(x, tuple) else parts[0]
            of_series = [a[output, 0, drawn] for a in _predict(est, given, band is not None)]
            y_pred.append(of_series[0])
            y_true.append(_only(y, n)[output, 0, drawn])
            if band is not None:
                lower, upper = band
                bands.append((_only(lower, n)[output, 0, drawn], _only(upper, n)[output, 0, drawn]))
            elif len(of_series) > 1:
                bands.append((of_series[1], of_series[2]))
        display = cls(
            names=[f"series {n}" for n in chosen],
            y_true=y_true,
            y_pred=y_pred,
            bands=bands,
            times=np.asarray(np.arange(n_steps) if times is None else times)[drawn],
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
        marker = "o" if len(self.times) == 1 else None  # a line of one point cannot be seen
        for i, name in enumerate(self.names):
            above, below = self.axes_[2 * i : 2 * i + 2]
            above.set_title(name, loc="left")
            above.plot(self.times, self.y_true[i], color=GREY, label="target", marker=marker)
            # the wider line below, the coloured one above: both are seen where they agree
            above.plot(
                self.times, self.y_pred[i], color=BLUE, label="prediction", marker=marker, lw=1.2
            )
            if self.bands:
                fill = {"color": BLUE, "alpha": 0.2, "linewidth": 0, "label": "band"}
                above.fill_between(self.times, *self.bands[i], **fill)
            residuals = np.asarray(self.y_true[i], dtype=np.float64) - self.y_pred[i]
            below.axhline(0, color=GREY, linewidth=0.8)
            below.plot(self.times, residuals, color=VERMILION, linewidth=0.9, marker=marker)
            below.set_ylabel("residual")
        # above the right end of the axes, where no line is
        self.axes_[0].legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2
        )
        if self.times.dtype.kind != "M":  # dates are named by their labels
            self.axes_[-1].set_xlabel("step")
        return self


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


def _check_arrays(inputs: Sequence[Any], y: Any, band: Any, output: int) -> tuple[int, int]:
    """Check that arrays have equal series and steps, and y the output; return how many."""
    shapes: list[Any] = [getattr(a, "shape", ()) for a in (*inputs, y, *(band or ()))]
    if {len(shape) for shape in shapes} != {3} or len({shape[1:] for shape in shapes}) > 1:
        raise ShapeError(
            "this picture takes arrays (F, N, T) and (G, N, T) of equal N and T, got shapes "
            f"{shapes}: give the array of a view, and one series of a list as x[0][:, None]"
        )
    if not 0 <= output < len(y):
        raise ShapeError(f"output is {output}, but y has {len(y)}")
    return shapes[0][1:]


def _series_to_draw(series: int | Sequence[int], n_series: int) -> list[int]:
    """Return numbers of series, counted from the first."""
    chosen: list[int] = np.atleast_1d(series).tolist()
    for i in chosen:
        check_integer("series", i)
        if not -n_series <= i < n_series:
            raise ShapeError(f"series is {i}, but x has {n_series} series")
    return [i % n_series for i in chosen]


def _only(array: Any, n: int) -> np.ndarray:
    """Return one series (F, 1, T) of an array or a file."""
    return plain_block(to_numpy(array[:, n : n + 1, :]))


def _predict(est: Any, x: Any, has_band: bool) -> tuple[np.ndarray, ...]:
    """Return predictions, and without a band of the user the ends of the widest interval, if the
    estimator was fitted with any.
    """
    parts = unwrap(est)
    level = getattr(parts.estimator, "level", None)
    # of transformed targets, ends would be in other units than these
    if has_band or level is None or parts.of_targets or hasattr(parts.estimator, "classes_"):
        return (est.predict(x),)
    for _, transformer in parts.transformers:
        x = transformer.transform(x)
    return tuple(parts.estimator.predict_interval(x, level=np.max(level)))
