"""The result of an explanation, how much each input of the past contributed to an output, and its
picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from fluxutils_py.validation import check_integer, require_package

MOST_COLUMNS = 400  # of a heat map: more would be finer than its pixels
MOST_NAMES = 40  # of features, that can be read beside a heat map
COVERED = 0.99  # of all attributions, by the steps that are drawn


class Share(NamedTuple):
    """What a feature, a step or an input contributed.

    Attributes
    ----------
    name : str, int or tuple
        Name of the feature, number of the step, or both.
    total : float
        Sum of its attributions, in the units of the output.
    size : float
        Sum of their absolute values, by which shares are ranked.
    """

    name: Any
    total: float
    size: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """How much each input of the past contributed to one output, as
    :func:`fluxutils_py.explain` returns it.

    Attributes
    ----------
    attributions : ndarray of shape (F, T), float64, or a tuple of them for several inputs
        In the units of the output. T is the number of explained steps.
    steps : ndarray of int, shape (T,)
        Which steps of the series these are; the last is usually the explained one.
    feature_names : tuple of str, or a tuple of them for several inputs
    value, baseline_value : float
        The output for the inputs, and for the baseline.
    completeness : float
        What the sum of all attributions lacks of ``value - baseline_value``, relative to it (or to
        a hundredth of the sum of absolute attributions, if that is more).
    n_points : int
        Points of the path that were used.
    series, step : int
    output : str
        What was explained, such as "output 0" or "score of 'walking'".
    explained : str
        What the attributions are of: "inputs", or what reaches the model of a pipeline.
    """

    attributions: Any
    steps: np.ndarray
    feature_names: Any
    value: float
    baseline_value: float
    completeness: float
    n_points: int
    series: int
    step: int
    output: str
    explained: str = "inputs"

    def by_feature(self) -> list[Share]:
        """Rank the features, over all steps, the largest absolute share first."""
        matrix, names = self.stacked()
        return _ranked(names, matrix)

    def by_step(self) -> list[Share]:
        """Rank the steps, over all features."""
        matrix, _ = self.stacked()
        return _ranked(self.steps.tolist(), matrix.T)

    def by_input(self) -> list[Share]:
        """Rank the several inputs of a model, over all features and steps: "x[0]", "x[1]", ..."""
        arrays = self._arrays()
        names = ["x"] if len(arrays) == 1 else [f"x[{i}]" for i in range(len(arrays))]
        return _ranked(names, [a.ravel() for a in arrays])

    def by_channel(self, n: int | None = 20) -> list[Share]:
        """Rank single channels, the pairs (feature, step), and return the ``n`` largest; None:
        all.
        """
        matrix, names = self.stacked()
        order = np.argsort(-abs(matrix), axis=None, kind="stable")[:n]
        features, steps = np.unravel_index(order, matrix.shape)
        shares = []
        for f, t in zip(features, steps, strict=True):
            value = float(matrix[f, t])
            shares.append(Share((names[f], int(self.steps[t])), value, abs(value)))
        return shares

    def stacked(self) -> tuple[np.ndarray, list[str]]:
        """Return the attributions of all inputs as one matrix (F, T), with the features' names."""
        arrays = self._arrays()
        if len(arrays) == 1:
            return arrays[0], list(self.feature_names)
        names = [f"x[{i}] {name}" for i, of in enumerate(self.feature_names) for name in of]
        return np.concatenate(arrays), names

    def plot(self, axes: Any = None, *, last: int | None = None) -> ExplanationDisplay:
        """Draw a heat map, of the ``last`` steps if given; return its ``ExplanationDisplay``."""
        return ExplanationDisplay(self, last).plot(axes)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        if isinstance(self.attributions, tuple):
            return self.attributions
        return (self.attributions,)

    def __repr__(self) -> str:
        first = ", ".join(f"{s.name} {s.total:+.3g}" for s in self.by_feature()[:3])
        return (
            f"Explanation({self.output} of series {self.series} at step {self.step}: "
            f"{self.value:.4g}, baseline {self.baseline_value:.4g}; {first}; "
            f"completeness {self.completeness:.1e})"
        )


class ExplanationDisplay:
    """A heat map of attributions, features by steps, with bars of the totals of each step above
    and of each feature beside it. Needs matplotlib.

    ``explain(...).plot()`` makes it.

    Parameters
    ----------
    explanation : Explanation
    last : int, optional
        Number of the last steps to draw. None: as many as hold 99 per cent of all attributions.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes
        Of the steps' totals, the heat map, and the features' totals; of the heat map alone if one
        was given.
    image_ : matplotlib AxesImage
    figure_ : matplotlib Figure
    """

    def __init__(self, explanation: Explanation, last: int | None = None) -> None:
        check_integer("last", last, 1, optional=True)
        self.explanation = explanation
        self.last = last

    def plot(self, axes: Any = None) -> Self:
        """Draw the heat map on one matplotlib Axes, or all in a new figure."""
        matrix, names = self.explanation.stacked()
        first = matrix.shape[1] - self._n_drawn(matrix)
        matrix, edges = _pooled(matrix[:, first:], self.explanation.steps[first:])
        if axes is None:
            pyplot = require_package("matplotlib.pyplot", "plot", "ExplanationDisplay")
            height = 2.4 + 0.22 * min(len(names), MOST_NAMES)
            self.figure_, grid = pyplot.subplots(
                2,
                2,
                figsize=(7.5, height),
                width_ratios=[5, 1.2],
                height_ratios=[1, max(1.6, 0.25 * min(len(names), MOST_NAMES))],
                layout="constrained",
            )
            above, corner, main, beside = grid.ravel()
            corner.set_axis_off()
            _draw_totals(above, main, beside, matrix, edges)
            self.axes_ = np.array([above, main, beside], dtype=object)
            title = above
        else:
            main = title = axes
            self.figure_ = axes.figure
            self.axes_ = np.array([axes], dtype=object)
        self.image_ = self._draw_map(main, matrix, names, edges)
        title.set_title(self._title(), loc="left", fontsize="medium")
        return self

    def _draw_map(self, ax: Any, matrix: np.ndarray, names: list[str], edges: np.ndarray) -> Any:
        largest = float(abs(matrix).max()) or 1.0
        extent = (edges[0], edges[-1], len(names) - 0.5, -0.5)
        # blue and red differ for the colour-blind too; white is nothing
        image = ax.imshow(
            matrix,
            cmap="RdBu_r",
            vmin=-largest,
            vmax=largest,
            aspect="auto",
            interpolation="nearest",
            extent=extent,
        )
        ax.set_xlabel("step")
        if len(names) <= MOST_NAMES:
            ax.set_yticks(range(len(names)), names)
        else:
            ax.set_ylabel("feature")
        bar = self.figure_.colorbar(image, ax=ax, location="bottom", aspect=40, shrink=0.6)
        bar.set_label("share of the output: blue lowers it, red raises it")
        return image

    def _title(self) -> str:
        e = self.explanation
        title = f"{e.output} of series {e.series} at step {e.step}: {e.value:.4g}"
        title += f" (baseline {e.baseline_value:.4g})"
        return title if e.explained == "inputs" else f"{title}\n{e.explained}"

    def _n_drawn(self, matrix: np.ndarray) -> int:
        n_steps = matrix.shape[1]
        if self.last is not None:
            return min(self.last, n_steps)
        sizes = abs(matrix).sum(0)[::-1].cumsum()
        if sizes[-1] == 0:
            return n_steps
        n = int(np.searchsorted(sizes, COVERED * sizes[-1])) + 1
        return min(max(n, 10), n_steps)


def _pooled(matrix: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sums over equal numbers of steps (F, columns), and the edges of the columns."""
    n_steps = len(steps)
    width = -(-n_steps // MOST_COLUMNS)
    # the first column may have fewer steps, so that the last step is not among strangers
    starts = np.arange(n_steps - width, -width, -width)[::-1].clip(min=0)
    edges = np.append(steps[starts], steps[-1] + 1) - 0.5
    return np.add.reduceat(matrix, starts, axis=1), edges


def _draw_totals(above: Any, main: Any, beside: Any, matrix: np.ndarray, edges: np.ndarray) -> None:
    for ax in (above, beside):
        ax.spines[["top", "right"]].set_visible(False)
    of_steps = matrix.sum(0)
    of_features = matrix.sum(1)
    above.stairs(of_steps, edges, fill=True, color="0.4")
    above.axhline(0, color="0.4", linewidth=0.8)
    above.set_ylabel("total")
    above.sharex(main)
    above.tick_params(labelbottom=False)
    beside.barh(range(len(of_features)), of_features, color="0.4")
    beside.axvline(0, color="0.4", linewidth=0.8)
    beside.sharey(main)
    beside.tick_params(labelleft=False)
    beside.set_xlabel("total")


def _ranked(names: Iterable[Any], rows: Iterable[np.ndarray]) -> list[Share]:
    shares = [
        Share(name, float(row.sum()), float(abs(row).sum()))
        for name, row in zip(names, rows, strict=True)
    ]
    return sorted(shares, key=lambda share: -share.size)
