"""Encode labels of any type as integers from 0, and decode class scores to labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn

from fluxutils_py.data import SampleWeight
from fluxutils_py.data.arrays import DuckArray, plain_block, read_block, to_numpy
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.indexing import Index, as_key
from fluxutils_py.data.lazy import DerivedArray
from fluxutils_py.data.ragged import RaggedArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError

MISSING_LABEL = -100  # marks a step without a label, as in torch
# Of the inverse frequency of a class, in its weight.
POWERS = {"balanced": 1.0, "sqrt_balanced": 0.5}

# Turns blocks of labels into integers, or outputs of a model into predictions.
Transform = Callable[[np.ndarray], np.ndarray]


def is_label(labels: np.ndarray) -> np.ndarray:
    """Return a mask of labels that are not missing: not NaN and, among objects, not None or pandas'
    NA or NaT.
    """
    if labels.dtype.kind == "f":
        return ~np.isnan(labels)
    if labels.dtype.kind != "O":
        return np.ones(labels.shape, bool)
    return np.array([_is_label_object(v) for v in labels.ravel()], bool).reshape(labels.shape)


def _is_label_object(value: object) -> bool:
    # by name, because pandas may not be installed
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return False
    return bool(value == value)  # NaN differs from itself


@dataclass(frozen=True, eq=False)
class LabelEncoder:
    """Encode labels as integers: their positions in ``classes``, ``MISSING_LABEL`` for missing ones
    (NaN, None).

    Parameters
    ----------
    classes : ndarray, sorted
    unknown : int or None
        Code of labels outside ``classes``. None: they raise a ValueError.
    name : str
        Name of the labels in error messages.
    """

    classes: np.ndarray
    unknown: int | None = None
    name: str = "y"

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        labelled = is_label(labels)
        # a missing label has no order among the others: any class stands for it
        labels = np.where(labelled, labels, self.classes[0])
        try:
            places = np.searchsorted(self.classes, labels)
        except TypeError:
            raise _unordered_labels(np.concatenate([self.classes, labels[labelled]])) from None
        # the place of a label above all classes is behind the last
        codes = np.minimum(places, len(self.classes) - 1).astype(np.int64)
        is_unknown = self.classes[codes] != labels
        if is_unknown.any():
            if self.unknown is None:
                raise ValueError(
                    f"{self.name} has labels {np.unique(labels[is_unknown]).tolist()} that are not "
                    f"in the classes {self.classes.tolist()}; name all of them at the first call, "
                    "partial_fit(x, y, classes=...)"
                )
            codes[is_unknown] = self.unknown
        return np.where(labelled, codes, MISSING_LABEL)


def encode_labels(labels: Any, encode: Transform) -> Any:
    """Turn labels into integers: at once if they are in memory, else when they are read."""
    if isinstance(labels, RaggedArray):
        return labels.map(lambda series: encode_labels(series, encode), fill=MISSING_LABEL)
    if not hasattr(labels, "shape"):
        labels = np.asarray(labels)
    labels = to_numpy(labels)
    if type(labels) is np.ndarray:  # a memory map, a subclass, is read later
        return encode(labels)
    return EncodedLabels(labels, encode)


class EncodedLabels(DerivedArray):
    """Labels that become integers when they are read."""

    dtype = np.dtype(np.int64)

    def __init__(
        self,
        source: Any,
        encode: Transform,
    ) -> None:
        self.source = source
        self.encode = encode
        self.shape = tuple(source.shape)

    def read(self, *index: Index) -> np.ndarray:
        return self.encode(read_block(self.source, *index))


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
        # torch takes no negative strides
        scores = np.ascontiguousarray(self._check_scores(outputs))
        return torch.log_softmax(torch.from_numpy(scores), -1).numpy()

    def decision_function(self, outputs: np.ndarray) -> np.ndarray:
        scores = self._check_scores(outputs)
        # as in scikit-learn: for two classes one number, positive for the second
        return scores[:, :, 1:] - scores[:, :, :1] if len(self.classes) == 2 else scores

    def _check_scores(self, outputs: np.ndarray) -> np.ndarray:
        if outputs.shape[-1] != len(self.classes):
            raise DataError(
                f"the model gives {outputs.shape[-1]} scores for {len(self.classes)} classes; a "
                "class or function as model is told their number as n_out"
            )
        return outputs

    def as_module(self) -> Classify:
        return Classify(self.classes)


class Classify(nn.Module):
    """Turn class scores (S, B, K) into labels (S, B, 1), or their places among the classes, and
    probabilities.

    Parameters
    ----------
    classes : ndarray of shape (K,)
        Numbers become labels; anything else stays a place.
    """

    classes: Tensor

    def __init__(self, classes: np.ndarray) -> None:
        super().__init__()
        self.as_numbers = classes.dtype.kind in "iufb"
        if self.as_numbers:
            # ONNX has few operations for unsigned and short integers
            dtype = np.int64 if classes.dtype.kind in "iu" else classes.dtype
            self.register_buffer("classes", torch.from_numpy(np.array(classes, dtype)))

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        place = scores.argmax(-1, keepdim=True)
        label = self.classes[place] if self.as_numbers else place
        return label, torch.log_softmax(scores, -1).exp()


def find_largest(labels: Any) -> int:
    """Return the largest of integer labels in an array (G, N, T), in one pass over blocks."""
    n_outputs, n_series, n_steps = labels.shape
    return max(
        int(plain_block(labels[:, n, t], "y").max())
        for n, t in block_slices(n_series, n_steps, n_outputs)
    )


def find_classes(
    labels: Any,
    weight: SampleWeight | None,
    rows: Segments | None = None,
) -> tuple[np.ndarray, int]:
    """Return the sorted labels in an array (1, N, T) at steps of nonzero weight, and the number of
    these steps, in one pass over blocks.

    ``rows`` holds the existing steps of each series. There may be none; see :func:`check_classes`.
    """
    labels_of_blocks: list[np.ndarray] = []
    n_labels = 0
    for series, steps in block_slices(labels.shape[1], labels.shape[2]):
        block = plain_block(labels[:, series, steps], "y")[0]
        # a label that counts nowhere, as in padding, is no class
        counts = is_label(block)
        if weight is not None:
            counts &= weight.block(series, steps) > 0
        if rows is not None and (exists := rows.coverage_mask(series, steps)) is not None:
            counts &= exists
        labels_of_blocks.append(unique_labels(block[counts]))
        n_labels += int(counts.sum())
    return unique_labels(np.concatenate(labels_of_blocks)), n_labels


def check_classes(classes: np.ndarray, n_labels: int) -> np.ndarray:
    """Return the classes of a fit; scikit-learn warns if they are more than half of the labels.

    Raises
    ------
    DataError, ValueError
        If there are none, or they are not labels, such as fractions.
    """
    if len(classes) == 0:
        raise DataError("there is nothing to learn from: no step of y that counts has a label")
    # as many labels as there are, up to two of each class: that is all that matters
    check_classification_targets(np.resize(classes, min(n_labels, 2 * len(classes))))
    return classes


def unique_labels(labels: np.ndarray) -> np.ndarray:
    """Return the distinct labels, sorted; DataError if they cannot be sorted."""
    try:
        return np.unique(labels)
    except TypeError:
        raise _unordered_labels(labels) from None


def _unordered_labels(labels: np.ndarray) -> DataError:
    type_names = sorted({type(v).__name__ for v in labels})
    return DataError(
        f"y has labels of types {', '.join(type_names)}, which have no order; make all of one type"
    )


class ClassWeightArray(DuckArray):
    """Weights of steps times weights of their classes, as an array (1, N, T) that is computed when
    it is read.

    Parameters
    ----------
    class_weight : "balanced", "sqrt_balanced" or dict of class to weight
        "balanced": inversely proportional to the frequency of the class, which counts steps by
        their weights. "sqrt_balanced": to its square root.
    classes : ndarray
    codes : array of int, shape (1, N, T)
    weight : SampleWeight, optional
    rows : Segments
        The existing steps of each series; padding does not count.
    add_up : callable, optional
        Adds the counts of the other ranks, if each rank has its own series.
    """

    dtype = np.dtype(float)

    def __init__(
        self,
        class_weight: str | Mapping[Any, float] | None,
        classes: np.ndarray,
        codes: Any,
        weight: SampleWeight | None,
        rows: Segments,
        add_up: Callable[[np.ndarray], np.ndarray] = lambda counts: counts,
    ) -> None:
        self.codes = codes
        self.weight = weight
        self.shape = tuple(codes.shape)
        power = POWERS.get(class_weight) if isinstance(class_weight, str) else None
        if power is not None:
            counts = add_up(self._count_classes(len(classes), rows))
            occurs = counts > 0
            # a class without steps keeps 1: its weight would be infinite
            self.of_class = np.ones(len(classes))
            balanced = counts.sum() / (occurs.sum() * counts[occurs])
            self.of_class[occurs] = balanced**power
            return
        if isinstance(class_weight, dict):
            unknown = [c for c in class_weight if c not in classes.tolist()]
            if unknown:
                raise ValueError(
                    f"class_weight names {unknown}, but the classes are {classes.tolist()}"
                )
        # what depends on the frequencies in y is done above
        self.of_class = compute_class_weight(class_weight, classes=classes, y=classes)

    def _count_classes(
        self,
        n_classes: int,
        rows: Segments,
    ) -> np.ndarray:
        """Return the sum of the weights of the steps of each class."""
        counts = np.zeros(n_classes)
        for series, steps in block_slices(*self.shape[1:]):
            block = np.asarray(self.codes[:, series, steps])[0]
            weight = np.ones(block.shape)
            if self.weight is not None:
                weight = self.weight.block(series, steps)
            counted = block >= 0
            exists = rows.coverage_mask(series, steps)
            if exists is not None:
                counted &= exists
            counts += np.bincount(block[counted], weight[counted], n_classes)
        return counts

    def read(self, *index: Index) -> np.ndarray:
        block = read_block(self.codes, *index)
        # a step without a label has no loss: its weight does not matter, but must be a number
        of_class = np.where(block >= 0, self.of_class[np.maximum(block, 0)], 1.0)
        if self.weight is None:
            return of_class
        return of_class * self.weight.block(*map(as_key, index[1:]))
