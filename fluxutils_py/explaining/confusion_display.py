"""Draw what a classifier takes each class for, over time."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from fluxutils_py.data.arrays import plain_block
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.streaming import stream
from fluxutils_py.explaining.drawing import COLORS, column_starts, format_times, new_axes
from fluxutils_py.explaining.predicted_series import predict_series
from fluxutils_py.validation import require_package

MOST_COLUMNS = 60
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")


class ConfusionOverTimeDisplay:
    """For each true class, the shares of the classes that are predicted, over time. Needs
    matplotlib.

    One panel per true class. The share that is right is at the bottom; colours tell the others,
    from the ninth class on with hatches. Create it with :meth:`from_predictions` or
    :meth:`from_estimator`.

    Parameters
    ----------
    classes : array of shape (K,)
    truth, predicted : arrays of labels, shape (N, T)
    live : array of bool, shape (N, T), optional
        Steps that count. None: all.
    times : array of shape (T,), optional

    Attributes
    ----------
    shares_ : ndarray of shape (K, K, columns)
        Of the steps of true class i, those that are taken for j; NaN where there are none.
    axes_ : ndarray of matplotlib Axes
    figure_ : matplotlib Figure
    """

    def __init__(
        self, *, classes: Any, truth: Any, predicted: Any, live: Any = None, times: Any = None
    ) -> None:
        self.classes = np.asarray(classes)
        self.truth = np.asarray(truth)
        self.predicted = np.asarray(predicted)
        self.live = np.ones(self.truth.shape, bool) if live is None else np.asarray(live)
        self.times = times
        if self.truth.ndim != 2 or self.truth.shape != self.predicted.shape:
            raise ShapeError(
                f"labels must have shape (N, T), got {self.truth.shape} and {self.predicted.shape}"
            )
        unknown = np.setdiff1d(self.truth[self.live], self.classes)
        if len(unknown):
            raise DataError(
                f"the label {unknown.tolist()[0]!r} is none of the classes {self.classes.tolist()}"
            )

    @classmethod
    def from_predictions(
        cls, y: Any, predicted: Any, *, classes: Any = None, times: Any = None, axes: Any = None
    ) -> Self:
        """Draw labels (1, N, T), (N, T) or (T,). NaN labels do not count."""
        truth, labels = (_matrix(v) for v in (y, predicted))
        if truth.shape != labels.shape:
            raise ShapeError(f"y has shape {truth.shape} and the predictions {labels.shape}")
        # only NaN is not equal to itself
        live = np.asarray(truth == truth)
        if classes is None:
            classes = np.unique(np.concatenate([truth[live], labels[live]]))
        display = cls(classes=classes, truth=truth, predicted=labels, live=live, times=times)
        return display.plot(axes)

    @classmethod
    def from_estimator(
        cls, est: Any, x: Any, y: Any, *, times: Any = None, axes: Any = None
    ) -> Self:
        """Predict and draw.

        With one label per series, each step shows what the classifier says after so many steps,
        from a stream: how early it is right. Steps without any input do not count.

        Parameters
        ----------
        est : fitted classifier, pipeline or search
        x : array of shape (F, N, T)
        y : array of labels, shape (1, N, T) or (N,)
        times : array of shape (T,), optional
        axes : sequence of matplotlib Axes, optional
            One per class.
        """
        if not hasattr(est, "classes_"):
            raise TypeError(f"{type(est).__name__} has no classes_: it is no fitted classifier")
        if np.ndim(x) != 3:
            raise ShapeError(f"x must be an array (F, N, T), got shape {np.shape(x)}")
        n_series, n_steps = np.shape(x)[1:]
        if np.ndim(y) == 3:
            rows = predict_series(est, x, np.asarray(y), range(n_series))
            truth = np.stack([row.truth[0] for row in rows])
            predicted = np.stack([row.predicted[0] for row in rows])
        else:
            labels = np.asarray(y).ravel()
            if len(labels) != n_series:
                raise ShapeError(f"y has {len(labels)} labels for {n_series} series")
            live = stream(est, n_series)
            steps, gaps = [], []
            for t in range(n_steps):
                x_t = plain_block(x[:, :, t])
                steps.append(np.asarray(live.step(x_t))[0])
                gaps.append(np.isnan(x_t).all(0))
            predicted = np.stack(steps, 1)
            truth = np.broadcast_to(labels[:, None], predicted.shape)
            if np.any(gaps):  # such as after the end of a series: there is no label
                truth = np.where(np.stack(gaps, 1), np.nan, truth.astype(object))
        return cls.from_predictions(truth, predicted, classes=est.classes_, times=times, axes=axes)

    def plot(self, axes: Any = None) -> Self:
        """Draw on one axes per class, or in a new figure."""
        n = len(self.classes)
        if axes is None:
            axes = new_axes(n, 1.25 * n + 0.9, type(self).__name__)
        self.axes_ = np.ravel(np.asarray(axes, dtype=object))
        if len(self.axes_) != n:
            raise ShapeError(f"axes has {len(self.axes_)} entries for {n} classes")
        self.figure_ = self.axes_[0].figure
        n_steps = self.truth.shape[1]
        starts = column_starts(n_steps, MOST_COLUMNS)
        self.shares_ = self._shares(starts)
        times = np.arange(n_steps) if self.times is None else np.asarray(self.times)
        # each column reaches up to the next, the last one step further than its last step
        one = times[-1] - times[-2] if n_steps > 1 else 1
        edges = np.append(times[starts], times[-1] + one)
        for i, ax in enumerate(self.axes_):
            self._draw_class(ax, i, edges)
        self._draw_legend()
        if self.times is None:
            self.axes_[-1].set_xlabel("step")
        format_times(self.axes_[-1], times)
        return self

    def _shares(self, starts: np.ndarray) -> np.ndarray:
        shares = np.empty((len(self.classes), len(self.classes), len(starts)))
        for i, of in enumerate(self.classes):
            is_true = (self.truth == of) & self.live
            n_true = np.add.reduceat(is_true.sum(0), starts).astype(np.float64)
            n_true[n_true == 0] = np.nan
            for j, taken in enumerate(self.classes):
                hits = (is_true & (self.predicted == taken)).sum(0)
                shares[i, j] = np.add.reduceat(hits, starts) / n_true
        return shares

    def _draw_class(self, ax: Any, i: int, edges: np.ndarray) -> None:
        bottom = np.zeros(self.shares_.shape[2])
        others = [j for j in range(len(self.classes)) if j != i]
        for j in [i, *others]:
            top = bottom + np.nan_to_num(self.shares_[i, j])
            color, hatch = _look(j)
            ax.stairs(
                top,
                edges,
                baseline=bottom,
                fill=True,
                facecolor=color,
                hatch=hatch,
                lw=0,
                edgecolor="white",
            )
            bottom = top
        ax.set_ylim(0, 1)
        ax.set_xlim(edges[0], edges[-1])
        ax.set_yticks([0, 1], ["0", "100 %"])
        ax.set_title(f"true: {self.classes.tolist()[i]}", loc="left", fontsize="medium")

    def _draw_legend(self) -> None:
        patches = require_package("matplotlib.patches", "plot", type(self).__name__)
        handles = []
        for j, name in enumerate(self.classes.tolist()):
            color, hatch = _look(j)
            handles.append(
                patches.Patch(facecolor=color, hatch=hatch, edgecolor="white", label=str(name))
            )
        self.axes_[0].legend(
            handles=handles,
            title="predicted",
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
        )


def _look(j: int) -> tuple[str, str]:
    """Return colour and hatch of a class; both repeat, but not together."""
    return COLORS[j % len(COLORS)], HATCHES[(j // len(COLORS)) % len(HATCHES)]


def _matrix(labels: Any) -> np.ndarray:
    array = np.asarray(labels)
    if array.ndim == 3 and len(array) == 1:
        return array[0]
    return np.atleast_2d(array)
