"""Encode labels of any type as integers from 0, and decode class scores to labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn

from fluxutils_py.data import SampleWeight
from fluxutils_py.data.arrays import plain_block, to_numpy
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.indexing import Index, as_key
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.data.ragged import RaggedArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.weights import LossBlock
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
    # by name, because pandas may not be installed; NaN differs from itself
    kinds = ("NoneType", "NAType", "NaTType")
    are_labels = [type(v).__name__ not in kinds and bool(v == v) for v in labels.ravel()]
    return np.array(are_labels, bool).reshape(labels.shape)


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
    ignored : sequence
        Labels outside ``classes`` that stand for no label.
    """

    classes: np.ndarray
    unknown: int | None = None
    name: str = "y"
    ignored: Sequence[Any] = ()

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        labelled = is_label(labels)
        for label in self.ignored:
            labelled &= labels != label
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
                    "partial_fit(x, y, classes=...), or give such steps no label (NaN, None)"
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
    return LazyArray(labels, functions=(encode,), dtype=np.int64)


@dataclass(frozen=True)
class LabelDecoder:
    """Turns the class scores (S, B, K) of a model into labels, probabilities and decisions.

    ``log_weight`` (K,) is what the weights of classes add to scores. Labels and decisions are what
    the weights favour; probabilities are those of the data, without the weights.
    """

    classes: np.ndarray
    log_weight: np.ndarray

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
        scores = self._check_scores(outputs)
        # torch takes no negative strides
        scores = np.ascontiguousarray(scores - self.log_weight.astype(scores.dtype))
        return torch.log_softmax(torch.from_numpy(scores), -1).numpy()

    def decision_function(self, outputs: np.ndarray) -> np.ndarray:
        scores = self._check_scores(outputs)
        # as in scikit-learn: for two classes one number, positive for the second
        return scores[:, :, 1:] - scores[:, :, :1] if len(self.classes) == 2 else scores

    def _check_scores(self, outputs: np.ndarray) -> np.ndarray:
        if outputs.shape[-1] != len(self.classes):
            raise DataError(
                f"the model gives {outputs.shape[-1]} scores for {len(self.classes)} classes; a "
                "model given as class or function gets their number as n_out"
            )
        return outputs


class Classify(nn.Module):
    """Turn class scores (S, B, K) into labels (S, B, 1), or their places among the classes, and
    probabilities, as :class:`LabelDecoder` does.

    Parameters
    ----------
    classes : ndarray of shape (K,)
        Numbers become labels; anything else stays a place.
    log_weight : ndarray of shape (K,)
    """

    classes: Tensor
    log_weight: Tensor

    def __init__(self, classes: np.ndarray, log_weight: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("log_weight", torch.from_numpy(log_weight))
        self.as_numbers = classes.dtype.kind in "iufb"
        if self.as_numbers:
            # ONNX has few operations for unsigned and short integers
            dtype = np.int64 if classes.dtype.kind in "iu" else classes.dtype
            self.register_buffer("classes", torch.from_numpy(np.array(classes, dtype)))

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        place = scores.argmax(-1, keepdim=True)
        label = self.classes[place] if self.as_numbers else place
        return label, torch.log_softmax(scores - self.log_weight.to(scores.dtype), -1).exp()


def find_classes(
    labels: Any,
    weight: SampleWeight | None,
    rows: Segments | None = None,
) -> tuple[np.ndarray, int]:
    """Return the sorted labels in an array (1, N, T) at steps that have a loss, and the number of
    these steps, in one pass over blocks.

    The rule is that of :func:`fluxutils_py.data.weights.loss_blocks`, for labels that are not
    encoded yet. There may be none; see :func:`check_classes`.
    """
    labels_of_blocks: list[np.ndarray] = []
    n_labels = 0
    for series, steps in block_slices(labels.shape[1], labels.shape[2]):
        block = plain_block(labels[:, series, steps], "y")[0]
        # a label that counts nowhere, as in padding, is no class
        counts = is_label(block)
        if weight is not None:
            counts &= weight.block(series, steps) > 0
        if rows is not None:
            exists = rows.coverage_mask(series, steps)
            counts &= True if exists is None else exists
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


def ignored_labels(class_weight: object) -> list[Any]:
    """Return the labels to which a dict gives the weight 0: their steps have no loss, as with a
    ``sample_weight`` of 0, so they are no classes.
    """
    if not isinstance(class_weight, Mapping):
        return []
    return [label for label, weight in class_weight.items() if weight == 0]


def weighted_classes(class_weight: object, labels: np.ndarray) -> np.ndarray:
    """Return the classes among the labels that occur: without the :func:`ignored_labels`.

    Raises
    ------
    ValueError, DataError
        If an ignored label does not occur, or none is left.
    """
    ignored = ignored_labels(class_weight)
    if not ignored:
        return labels
    _require_labels(ignored, labels)
    kept = labels[[label not in ignored for label in labels.tolist()]]
    return check_classes(kept, 2 * len(kept))  # many classes have been warned of


def _require_labels(names: list[Any], labels: np.ndarray) -> None:
    """Raise ValueError if a ``class_weight`` names others."""
    known = labels.tolist()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"class_weight names {unknown}, but the classes are {known}")


def weights_of_classes(
    class_weight: str | Mapping[Any, float], classes: np.ndarray, counts: Callable[[], np.ndarray]
) -> np.ndarray:
    """Return the weight of each class, (K,), above 0.

    Parameters
    ----------
    class_weight : "balanced", "sqrt_balanced" or dict of class to weight
        "balanced": inversely proportional to the frequency of the class, which counts steps by
        their weights. "sqrt_balanced": to its square root.
    classes : ndarray of shape (K,)
    counts : callable
        Returns the sum of the weights of the steps of each class, see :func:`count_classes`.

    Raises
    ------
    ValueError
        If the dict names a label that is no class, or gives one no weight.
    """
    power = POWERS.get(class_weight) if isinstance(class_weight, str) else None
    of_class = np.ones(len(classes))
    if isinstance(class_weight, Mapping):
        given = {c: w for c, w in class_weight.items() if w != 0}  # see ignored_labels
        _require_labels(list(given), classes)
        for label, weight in given.items():
            if not (isinstance(weight, float | int | np.number) and 0 < weight < np.inf):
                raise ValueError(
                    f"class_weight gives {label!r} the weight {weight!r}; expected a number from 0"
                )
        of_class[:] = [given.get(c, 1) for c in classes.tolist()]
        return of_class
    if power is None:  # raises the error of scikit-learn for what is none
        return np.asarray(compute_class_weight(class_weight, classes=classes, y=classes))
    n = counts()
    occurs = n > 0
    # a class without steps keeps 1: its weight would be infinite
    of_class[occurs] = (n.sum() / (occurs.sum() * n[occurs])) ** power
    return of_class


def count_classes(blocks: Iterable[LossBlock], n_classes: int) -> np.ndarray:
    """Return the sum of the weights of the steps of each class, (K,), among codes of labels."""
    counts = np.zeros(n_classes)
    for (codes,), (has_loss,), weight, _ in blocks:
        weights = None if weight is None else weight[has_loss[0]]
        counts += np.bincount(codes[has_loss], weights, n_classes)
    return counts


def class_weight_array(of_class: np.ndarray, codes: Any, weight: SampleWeight | None) -> LazyArray:
    """Return weights of steps times weights of their classes, as an array (1, N, T) that is
    computed when it is read.

    Parameters
    ----------
    of_class : ndarray of shape (K,)
    codes : array of int, shape (1, N, T)
    weight : SampleWeight, optional
    """
    return LazyArray(codes, at=partial(_weights_of_codes, of_class, weight), dtype=float)


def _weights_of_codes(
    of_class: np.ndarray,
    weight: SampleWeight | None,
    codes: np.ndarray,
    series: Index,
    steps: Index,
) -> np.ndarray:
    # a step without a label has no loss: its weight does not matter, but must be a number
    weights = np.where(codes >= 0, of_class[np.maximum(codes, 0)], 1.0)
    return weights if weight is None else weights * weight.block(as_key(series), as_key(steps))
