"""Conformal prediction: how wide intervals and how large sets of classes have to be, from errors on
data that no fit has seen, once for arrays and step by step for streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, SpecError, warn
from fluxutils_py.estimator.streams.running_values import RunningValues, bounded

MOST_STEPS = 10_000  # of each held-out series that a fit keeps
MOST_SCORES = 1 << 17  # that a fit keeps of all series
BIAS_STEPS = 50.0  # half-life of the mean residual and of the mean deviation from it, in steps
RATE = 0.1  # how much the logarithm of the width learns from a step
DELAY = 8.0  # steps of delay that halve this rate: a late correction must not be too strong
LARGEST = 5.0  # deviations from which on a residual counts no more for mean and scale
LEAST_SCALE = 1e-6  # of that at the start: a series that is predicted exactly for a while keeps it


def check_level(name: str, value: object) -> float:
    """Return a level of coverage, checked to be a number between 0 and 1.

    Raises
    ------
    SpecError
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < 1:  # type: ignore[arg-type]
        raise SpecError(
            f"{name} must be a share between 0 and 1, such as 0.9, of the targets to hold; got "
            f"{value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def read_levels(level: object) -> tuple[float, ...]:
    """Return the levels of intervals, in per cent, from the lowest.

    Raises
    ------
    SpecError
        Unless it is a number between 0 and 100, or several.
    """
    given: list[Any] = list(level) if isinstance(level, Sequence | np.ndarray) else [level]
    for value in given or [None]:
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not 0 < value < 100:
            raise SpecError(f"level is in per cent, such as 80 or [80, 95]; got {level!r}")
        if value < 1:
            raise SpecError(f"level is in per cent: give {100 * value:g} for {value:g}")
    return tuple(sorted({float(value) for value in given}))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Errors of a model on data that it was not fitted on.

    Attributes
    ----------
    errors : ndarray of shape (G, M, S)
        Truth minus prediction, of M series and S steps, in the order of time; of classifiers 1
        minus the probability of the label, with G = 1. NaN where there is no target. For each level
        of a model with intervals, G more: relative to the distance to the end on their side.
    of_every_series : bool
        Whether these are the ends of all series of the fit, in their order, not whole ones.
    """

    errors: np.ndarray
    of_every_series: bool

    @classmethod
    def of(cls, errors: np.ndarray, of_every_series: bool) -> Calibration:
        """Keep the last steps, and evenly spaced series where there are very many.

        Raises
        ------
        DataError
            If no step has a target.
        """
        kept = errors[:, :, -MOST_STEPS:]
        n_series = max(1, MOST_SCORES // (kept.shape[0] * kept.shape[2]))
        if n_series < kept.shape[1]:
            chosen = np.linspace(0, kept.shape[1] - 1, n_series).round().astype(int)
            kept = kept[:, chosen]
            of_every_series = False
        if not np.isfinite(kept).any():
            raise DataError("no step that is held out for intervals has a target and a prediction")
        return cls(np.array(kept, dtype=np.float64), of_every_series)

    def outputs(self, n_outputs: int, level: int | None = None) -> Calibration:
        """Return the errors of so many outputs, or those relative to the intervals of a level."""
        first = 0 if level is None else (1 + level) * n_outputs
        return replace(self, errors=self.errors[first : first + n_outputs])

    def is_of(self, n_series: int) -> bool:
        """Return whether these are errors of the same series as those of a stream of so many."""
        return self.of_every_series and self.errors.shape[1] == n_series

    def quantile(self, level: float) -> np.ndarray:
        """Return what holds the absolute error of an exchangeable step with this probability, (G,).

        Infinite, with a warning, where there are too few errors to tell.
        """
        return np.array([conformal_quantile(np.abs(of_output), level) for of_output in self.errors])


def conformal_quantile(scores: np.ndarray, level: float) -> float:
    """Return the quantile of scores, of which NaNs do not count, that split conformal prediction
    takes: the ``ceil((n + 1) * level)``-th smallest.

    A further score, if it is exchangeable with these, is at most as large with a probability of at
    least ``level``.

    Notes
    -----
    Source: Vovk, Gammerman & Shafer (2005), Algorithmic Learning in a Random World; Lei et al.
    (2018), Distribution-free predictive inference for regression, algorithm 2.
    """
    known = np.sort(scores[~np.isnan(scores)], axis=None)
    # a product such as 10 * 0.9 must not be rounded up to the next number
    rank = math.ceil((len(known) + 1) * level - 1e-9)
    if rank > len(known):
        least = math.ceil(level / (1 - level) - 1e-9)
        warn(
            f"{len(known)} held-out targets are too few for level {100 * level:g}, which needs "
            f"{least}: intervals are infinite, and sets hold all classes. A fifth is held out: "
            f"fit on {5 * least} targets, of series or of steps, or give {least} as "
            "validation_data, or take a lower level"
        )
        return math.inf
    return float(known[rank - 1])


class AdaptiveInterval(RunningValues):
    """How far below and above the prediction the next target of each series lies, kept up to date
    by the residuals seen so far.

    The interval is ``prediction + offset -+ scale * exp(log_width)``. ``offset`` and ``scale`` are
    running robust means of residuals and of their deviations; ``log_width`` grows by ``rate *
    level`` after a target outside, and shrinks by ``rate * (1 - level)`` after one inside, where
    ``rate`` is ``RATE``, or less if targets come late. So the share of targets inside differs from
    the level after T steps by the change of ``log_width`` over ``rate * T``, whatever the series
    does.

    Parameters
    ----------
    level : float
    shape : (G, N)

    Notes
    -----
    Source: Gibbs & Candès (2021), Adaptive conformal inference under distribution shift, NeurIPS,
    eq. 2, in the form of Angelopoulos, Candès & Tibshirani (2023), Conformal PID control for time
    series prediction, NeurIPS: quantile tracking, here of the logarithm of the score, with
    ``offset`` and ``scale`` as the scorecaster.
    """

    def __init__(self, level: float, shape: tuple[int, int]) -> None:
        self.level = level
        self._smoothing = 1 - 0.5 ** (1 / BIAS_STEPS)
        super().__init__(np.zeros((4, *shape)))  # offset, scale, log_width, least scale

    def calibrate(self, calibration: Calibration) -> None:
        """Start from residuals: of the same series, one after the other; of others, pooled."""
        errors = calibration.errors
        pooled = [_initial_values(of_output, self.level) for of_output in errors]
        self.values[:] = np.array(pooled).T[:, :, None]
        is_own = calibration.is_of(self.values.shape[2])
        # a series without any target starts as all others
        for g, n in np.argwhere(is_own & ~np.isnan(errors).all(2)):
            self.values[:, g, n] = _initial_values(errors[g, n], self.level)
        self._refresh()
        if is_own:
            for t in range(errors.shape[2]):
                self.observe(errors[:, :, t], self.below, self.above)
        self.initial = self.values.copy()

    def observe(
        self, residual: np.ndarray, below: np.ndarray, above: np.ndarray, delay: int = 0
    ) -> None:
        """Learn from residuals (G, N), NaN where unknown, of predictions that were given with these
        distances (G, N) to both ends, ``delay`` steps before the last one.
        """
        rate = RATE / (1 + delay / DELAY)
        offset, scale, log_width, least = self.values
        known = ~np.isnan(residual)
        missed = (residual < -below) | (residual > above)
        deviation = bounded(np.where(known, residual - offset, 0.0), LARGEST * scale)
        offset += self._smoothing * deviation
        scale += self._smoothing * known * (np.abs(deviation) - scale)
        np.maximum(scale, least, out=scale)
        log_width += rate * known * (missed - (1 - self.level))
        self._refresh()

    def _refresh(self) -> None:
        offset, scale, log_width, _ = self.values
        width = scale * np.exp(log_width)
        # new arrays: predictions whose target is missing keep theirs
        self.below = width - offset
        self.above = width + offset


def _initial_values(residuals: np.ndarray, level: float) -> tuple[float, float, float, float]:
    """Return offset, scale, logarithm of the width and least scale for some residuals."""
    residuals = residuals[~np.isnan(residuals)]
    offset = float(np.median(residuals))
    deviations = np.abs(residuals - offset)
    scale = float(np.mean(deviations)) or 1e-9
    # too few to tell: the largest, and the steps to come widen it
    rank = min(math.ceil((len(residuals) + 1) * level - 1e-9), len(residuals))
    width = float(np.sort(deviations)[rank - 1])
    return offset, scale, math.log(max(width / scale, 1e-3)), LEAST_SCALE * scale
