"""Encode targets for the model and decode its outputs: scales and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.data import SeriesArray
from fluxutils_py.data.weights import LossBlock
from fluxutils_py.errors import DataError
from fluxutils_py.inputs.labels import Classify, LabelDecoder, Transform
from fluxutils_py.inputs.moments import (
    Affine,
    Moments,
    moments,
)


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
        blocks: Iterable[LossBlock],
        merge: Callable[[Moments], Moments] = lambda moments: moments,
    ) -> TargetScale:
        """Compute mean and standard deviation of the targets that have a loss, in one pass.

        Parameters
        ----------
        y : SeriesArray
        blocks : iterable of LossBlock
            See :func:`fluxutils_py.data.weights.loss_blocks`.
        merge : callable, optional
            Merges these moments with those of other series: of ranks that have separate series.

        Raises
        ------
        DataError
            If some outputs never have a target, and others do.
        """
        # infinite targets do not count here: a message rejects them when they are trained on
        counted = (
            (np.where(has_loss & np.isfinite(values), values, np.nan), weight)
            for (values,), (has_loss,), weight, _ in blocks
        )
        total = merge(moments(counted, y.F))
        if total.count.any() and not total.count.all():
            missing = np.flatnonzero(total.count == 0).tolist()
            raise DataError(
                f"output {missing} has no target at a step that counts: leave it out of y"
            )
        return cls(total.mean, total.scale(y.name), y.dtype)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        """Convert model outputs (S, B, G) to the units of the targets."""
        decoded = outputs * self.scale + self.mean
        # computed in float64, the type of mean and scale
        return decoded.astype(np.result_type(outputs.dtype, self.dtype))

    def as_module(self, dtype: torch.dtype) -> Affine:
        """Return :meth:`decode` as a module, for outputs of this type."""
        # NumPy's rule for the type of the result, which torch does not share
        name = str(dtype).removeprefix("torch.")
        result = np.result_type(name, self.dtype)
        return Affine(
            self.mean,
            self.scale,
            inverse=True,
            dtype=getattr(torch, result.name),
        )


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
    class_weight : ndarray of shape (K,), optional
        What the steps of each class were weighted by, above 0. Scores are of weighted steps, and
        the probabilities of the data are those without the weights.
    """

    classes: np.ndarray | None = None
    scale: TargetScale | None = None
    per_series: bool = False
    ndim: int = 3
    class_weight: np.ndarray | None = None

    def encode(self, y: tuple[SeriesArray, ...]) -> tuple[SeriesArray, ...]:
        """Return standardised targets, lazily; without a scale, the targets. Labels are already
        integers.
        """
        if self.scale is None:
            return y
        standardize = Affine(self.scale.mean, self.scale.scale)
        return tuple(s.map(standardize.transform_block) for s in y)

    @property
    def log_weight(self) -> np.ndarray:
        """What the weight of each class adds to its score, (K,)."""
        assert self.classes is not None
        if self.class_weight is None:
            return np.zeros(len(self.classes))
        return np.log(self.class_weight)

    def decoders(self) -> dict[str, Transform]:
        """Map each prediction method to the function that decodes model outputs (S, B, G)."""
        if self.classes is not None:
            return LabelDecoder(self.classes, self.log_weight).methods()
        # a function with a name, not a lambda, so that it can be pickled
        return {"predict": _unchanged if self.scale is None else self.scale.decode}

    def decoding_modules(self, dtype: torch.dtype) -> list[nn.Module]:
        """Return the modules that decode outputs (S, B, G) of this type, one after the other."""
        modules: list[nn.Module] = []
        if self.scale is not None:
            modules.append(self.scale.as_module(dtype))
        if self.classes is not None:
            modules.append(Classify(self.classes, self.log_weight))
        return modules

    def as_vector(
        self,
        result: np.ndarray,
        method: str,
    ) -> np.ndarray:
        """Return a one-column matrix as a vector where scikit-learn expects one; else the array
        unchanged.
        """
        # only of matrices: one output of an array (1, N, T) keeps its axis
        if result.ndim != 2 or result.shape[1] != 1:
            return result
        if method == "predict":
            is_vector = self.ndim == 1
        else:  # scikit-learn's scorers expect one decision of two classes as a vector
            is_binary = self.classes is not None and len(self.classes) == 2
            is_vector = method == "decision_function" and is_binary
        return result[:, 0] if is_vector else result


def _unchanged(outputs: np.ndarray) -> np.ndarray:
    return outputs
