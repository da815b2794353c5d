"""Encode labels of any type as integers from 0, and decode them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from fluxutils_py.data import SampleWeight
from fluxutils_py.data.arrays import DuckArray, plain_block, read_block
from fluxutils_py.data.blocks import block_slices
from fluxutils_py.data.indexing import Index, as_key
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError
from fluxutils_py.inputs.targets import MISSING_LABEL, is_label


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

    def __init__(self, classes: np.ndarray, unknown: int | None = None, name: str = "y") -> None:
        self.classes, self.unknown, self.name = classes, unknown, name

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        labelled = is_label(labels)
        labels = np.where(labelled, labels, self.classes[0])
        try:
            places = np.searchsorted(self.classes, labels)
        except TypeError:
            raise _unordered_labels(np.concatenate([self.classes, labels[labelled]])) from None
        codes = np.minimum(places, len(self.classes) - 1).astype(np.int64)
        unknown = self.classes[codes] != labels
        if unknown.any():
            if self.unknown is None:
                raise ValueError(
                    f"{self.name} has labels {np.unique(labels[unknown]).tolist()} that are not in "
                    f"the classes {self.classes.tolist()}; name all of them at the first call, "
                    "partial_fit(x, y, classes=...)"
                )
            codes[unknown] = self.unknown
        return np.where(labelled, codes, MISSING_LABEL)


def find_largest(labels: Any) -> int:
    """Return the largest of integer labels in an array (G, N, T), in one pass over blocks."""
    n_outputs, n_series, n_steps = labels.shape
    return max(
        int(plain_block(labels[:, n, t], "y").max())
        for n, t in block_slices(n_series, n_steps, n_outputs)
    )


def find_classes(
    labels: Any, weight: SampleWeight | None, rows: Segments | None = None
) -> np.ndarray:
    """Return the sorted labels in an array (1, N, T) at steps of nonzero weight, in one pass over
    blocks.

    ``rows`` holds the existing steps of each series. The result may be empty; see
    :func:`check_classes`.
    """
    labels_of_blocks: list[np.ndarray] = []
    for series, steps in block_slices(labels.shape[1], labels.shape[2]):
        block = plain_block(labels[:, series, steps], "y")[0]
        counts = is_label(block)
        if weight is not None:
            counts &= weight.block(series, steps) > 0
        if rows is not None and (exists := rows.coverage_mask(series, steps)) is not None:
            counts &= exists
        labels_of_blocks.append(unique_labels(block[counts]))
    return unique_labels(np.concatenate(labels_of_blocks))


def check_classes(classes: np.ndarray) -> np.ndarray:
    """Return the classes of a fit.

    Raises
    ------
    DataError, ValueError
        If there are none, or they are not labels, such as fractions.
    """
    if len(classes) == 0:
        raise DataError("there is nothing to learn from: no step of y that counts has a label")
    check_classification_targets(classes)
    return classes


class ClassWeightArray(DuckArray):
    """Weights of steps times weights of their classes, as an array (1, N, T) that is computed when
    it is read.

    Parameters
    ----------
    class_weight : "balanced" or dict of class to weight
        "balanced": inversely proportional to the frequency of the class, which counts steps by
        their weights.
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
        class_weight: Any,
        classes: np.ndarray,
        codes: Any,
        weight: SampleWeight | None,
        rows: Segments,
        add_up: Callable[[np.ndarray], np.ndarray] = lambda counts: counts,
    ) -> None:
        self.codes, self.weight, self.shape = codes, weight, tuple(codes.shape)
        self.of_class = np.ones(len(classes))
        if class_weight == "balanced":
            counts = np.zeros(len(classes))
            for series, steps in block_slices(*self.shape[1:]):
                block = np.asarray(codes[:, series, steps])[0]
                w = np.ones(block.shape) if weight is None else weight.block(series, steps)
                counted = block >= 0
                if (exists := rows.coverage_mask(series, steps)) is not None:
                    counted &= exists
                counts += np.bincount(block[counted], w[counted], len(classes))
            counts = add_up(counts)
            occurs = counts > 0
            self.of_class[occurs] = counts.sum() / (occurs.sum() * counts[occurs])
        else:
            if isinstance(class_weight, dict) and (
                unknown := [c for c in class_weight if c not in classes.tolist()]
            ):
                raise ValueError(
                    f"class_weight names {unknown}, but the classes are {classes.tolist()}"
                )
            self.of_class = compute_class_weight(class_weight, classes=classes, y=classes)

    def read(self, *index: Index) -> np.ndarray:
        block = read_block(self.codes, *index)
        w = np.where(block >= 0, self.of_class[np.maximum(block, 0)], 1.0)
        return w if self.weight is None else w * self.weight.block(*map(as_key, index[1:]))


def unique_labels(labels: np.ndarray) -> np.ndarray:
    """Return the distinct labels, sorted; DataError if they cannot be sorted."""
    try:
        return np.unique(labels)
    except TypeError:
        raise _unordered_labels(labels) from None


def _unordered_labels(labels: np.ndarray) -> DataError:
    kinds = sorted({type(v).__name__ for v in labels})
    return DataError(
        f"y has labels of types {', '.join(kinds)}, which have no order; make all of one type"
    )
