"""The result of an explanation: how much each input of the past contributed to an output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.explaining.explanation_display import ExplanationDisplay


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
        """Draw a heat map; see :class:`fluxutils_py.explaining.ExplanationDisplay`."""
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


def _ranked(names: Iterable[Any], rows: Iterable[np.ndarray]) -> list[Share]:
    shares = [
        Share(name, float(row.sum()), float(abs(row).sum()))
        for name, row in zip(names, rows, strict=True)
    ]
    return sorted(shares, key=lambda share: -share.size)
