"""How much each input of the past contributed to an output, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.validation import require_package

MOST_NAMES = 40  # of features, that can be read beside a heat map
COVERED = 0.99  # of all attributions, by the steps that are drawn


class Share(NamedTuple):
    """What a feature or a step contributed.

    Attributes
    ----------
    name : str or int
        Name of the feature, or number of the step.
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
        Difference of the sum of all attributions from ``value - baseline_value``, relative to it
        (or to a hundredth of the sum of absolute attributions, if that is more).
    n_points : int
        Points of the path that were used.
    series, step : int
    output : str
        What was explained, such as "output 0" or "score of 'walking'".
    explained : str
        What the attributions belong to: "inputs", or what reaches the model of a pipeline.
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

    def stacked(self) -> tuple[np.ndarray, list[str]]:
        """Return the attributions of all inputs as one matrix (F, T), with the features' names."""
        if not isinstance(self.attributions, tuple):
            return self.attributions, list(self.feature_names)
        names = [f"x[{i}] {name}" for i, of in enumerate(self.feature_names) for name in of]
        return np.concatenate(self.attributions), names

    def plot(self, axes: Any = None) -> Any:
        """Draw a heat map, features by the last steps that hold 99 per cent of all attributions, on
        one matplotlib Axes or in a new figure.

        Returns
        -------
        matplotlib AxesImage
            Its ``figure`` and ``axes`` are where it was drawn.
        """
        matrix, names = self.stacked()
        # the last steps that hold nearly all attributions, at least 10
        sizes = abs(matrix).sum(0)[::-1].cumsum()
        n_drawn = max(int(np.searchsorted(sizes, COVERED * sizes[-1])) + 1, 10)
        n_drawn = min(n_drawn, len(self.steps))
        matrix = matrix[:, -n_drawn:]
        if axes is None:
            pyplot = require_package("matplotlib.pyplot", "plot", "Explanation.plot")
            height = 2.4 + 0.22 * min(len(names), MOST_NAMES)
            _, axes = pyplot.subplots(figsize=(7.5, height), layout="constrained")
        largest = float(abs(matrix).max()) or 1.0
        # blue and red differ for the colour-blind too; white is nothing
        image = axes.imshow(
            matrix,
            cmap="RdBu_r",
            vmin=-largest,
            vmax=largest,
            aspect="auto",
            extent=(self.steps[-n_drawn] - 0.5, self.steps[-1] + 0.5, len(names) - 0.5, -0.5),
        )
        axes.set_xlabel("step")
        if len(names) <= MOST_NAMES:
            axes.set_yticks(range(len(names)), names)
        else:
            axes.set_ylabel("feature")
        bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=40, shrink=0.6)
        bar.set_label("share of the output: blue lowers it, red raises it")
        title = f"{self.output} of series {self.series} at step {self.step}: {self.value:.4g}"
        title += f" (baseline {self.baseline_value:.4g})"
        if self.explained != "inputs":
            title += f"\n{self.explained}"
        axes.set_title(title, loc="left", fontsize="medium")
        return image

    def __repr__(self) -> str:
        first = ", ".join(f"{s.name} {s.total:+.3g}" for s in self.by_feature()[:3])
        return (
            f"Explanation({self.output} of series {self.series} at step {self.step}: "
            f"{self.value:.4g}, baseline {self.baseline_value:.4g}; {first}; "
            f"completeness {self.completeness:.1e})"
        )


def _ranked(names: Iterable[Any], rows: Iterable[np.ndarray]) -> list[Share]:
    shares = [
        Share(name, float(row.sum()), float(abs(row).sum()))
        for name, row in zip(names, rows, strict=True)
    ]
    return sorted(shares, key=lambda share: -share.size)
