"""Encode targets for the model and decode its outputs: scales and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError
from fluxutils_py.inputs.moments import Standardize, moments, safe_scale

Transform = Callable[[np.ndarray], np.ndarray]
Merge = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class TargetScale:
    """One mean and one scale per output.

    Attributes
    ----------
    mean, scale : ndarray of shape (G,), float64
    dtype : numpy.dtype, or its name
        Type of the targets. Predictions have at least its precision, so that a large mean costs
        them no digits.
    """

    mean: np.ndarray
    scale: np.ndarray
    dtype: Any

    @classmethod
    def of(
        cls,
        y: SeriesArray,
        segments: Segments,
        weight: SampleWeight | None,
        merge: Merge = lambda *moments: moments,
    ) -> TargetScale:
        """Compute mean and standard deviation of the targets over the live steps, in one pass over
        blocks.

        Parameters
        ----------
        y : SeriesArray
        segments : Segments
            Segment ``n`` holds the existing steps of series ``n``.
        weight : SampleWeight, optional
        merge : callable, optional
            Merges these moments with those of other series: of ranks that have series of their own.
        """
        count, mean, squares = merge(*moments(_live_blocks(y, segments, weight), y.F))
        variance = np.maximum(squares, 0) / np.where(
            count > 0, count, 1
        )  # below 0 only for invalid weights
        return cls(mean, safe_scale(mean, variance), y.dtype)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        """Convert model outputs (S, B, G) to the units of the targets."""
        return (outputs * self.scale + self.mean).astype(np.result_type(outputs.dtype, self.dtype))


def _live_blocks(
    y: SeriesArray, segments: Segments, weight: SampleWeight | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield blocks of targets (G, B, S), with NaN where one is missing, and their weights (B, S)."""
    for series, steps in block_slices(y.N, y.T, y.F):
        part, t = segments[series], np.arange(steps.start, steps.stop)
        y.prefetch(part, steps.start, steps.stop)
        block = y.stored_block(series, steps)
        start = part.start[:, None]
        live = (
            (t >= start) & (t < start + part.length[:, None]) & np.isfinite(block)
        )  # infinite: rejected later
        yield np.where(live, block, np.nan), None if weight is None else weight.block(series, steps)


@dataclass(frozen=True)
class TargetCodec:
    """Encodes targets for the model and decodes its outputs.

    Attributes
    ----------
    classes : ndarray of shape (K,), optional
        Sorted labels; only for classifiers.
    scale : TargetScale, optional
        Mean and scale that standardise the targets.
    per_series : bool
        Whether there is one target per series, at its last step.
    ndim : int
        Number of axes of the targets in ``fit``; after a vector, predictions are a vector too.
    """

    classes: np.ndarray | None = None
    scale: TargetScale | None = None
    per_series: bool = False
    ndim: int = 3

    def encode(self, y: tuple[SeriesArray, ...]) -> tuple[SeriesArray, ...]:
        """Return standardised targets, lazily; without a scale, the targets. Labels are already
        integers.
        """
        if self.scale is None:
            return y
        return tuple(
            s.map(Standardize(self.scale.mean, self.scale.scale, inverse=False)) for s in y
        )

    def decoders(self) -> dict[str, Transform]:
        """Map each prediction method to the function that decodes model outputs (S, B, G)."""
        if self.classes is not None:
            return LabelDecoder(self.classes).methods()
        return {"predict": _unchanged if self.scale is None else self.scale.decode}

    def as_vector(self, result: np.ndarray, method: str) -> np.ndarray:
        """Return a one-column matrix as a vector where scikit-learn expects one; else the array
        unchanged.
        """
        if result.ndim != 2 or result.shape[1] != 1:
            return result
        binary = self.classes is not None and len(self.classes) == 2
        is_vector = (
            self.ndim == 1 if method == "predict" else method == "decision_function" and binary
        )
        return result[:, 0] if is_vector else result


@dataclass(frozen=True)
class LabelDecoder:
    """Turns the class scores (S, B, K) of a model into labels, probabilities and decisions."""

    classes: np.ndarray

    def methods(self) -> dict[str, Transform]:
        return {
            "predict": self.labels,
            "predict_proba": self.probabilities,
            "predict_log_proba": self.log_probabilities,
            "decision_function": self.decision_function,
        }

    def labels(self, outputs: np.ndarray) -> np.ndarray:
        return self.classes[self._check_scores(outputs).argmax(-1)][:, :, None]

    def probabilities(self, outputs: np.ndarray) -> np.ndarray:
        return np.exp(self.log_probabilities(outputs))

    def log_probabilities(self, outputs: np.ndarray) -> np.ndarray:
        return torch.log_softmax(
            torch.from_numpy(np.ascontiguousarray(self._check_scores(outputs))), -1
        ).numpy()

    def decision_function(self, outputs: np.ndarray) -> np.ndarray:
        scores = self._check_scores(outputs)
        return scores[:, :, 1:] - scores[:, :, :1] if len(self.classes) == 2 else scores

    def _check_scores(self, outputs: np.ndarray) -> np.ndarray:
        if outputs.shape[-1] != len(self.classes):
            raise DataError(
                f"the model gives {outputs.shape[-1]} scores for {len(self.classes)} classes; a "
                "class or function as model is told their number as n_out"
            )
        return outputs


def _unchanged(outputs: np.ndarray) -> np.ndarray:
    return outputs
