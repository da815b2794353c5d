"""Cross-entropy of probabilities, and of scores with labels (..., 1), as in gomlx."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxutils_py.errors import DataError, ShapeError

# Probabilities are clipped to this and to 1 minus this; float32 cannot tell 1 - 1e-8 from 1.
EPSILON = {torch.float16: 1e-4, torch.bfloat16: 1e-2, torch.float32: 1e-7, torch.float64: 1e-8}


def categorical_cross_entropy(
    prediction: Tensor, target: Tensor, reduction: str = "mean"
) -> Tensor:
    """Compute the cross-entropy of predicted probabilities, such as those of a softmax.

    Parameters
    ----------
    prediction : Tensor of shape (..., V)
        Probabilities of V classes, which sum to 1.
    target : Tensor of shape (..., V)
        Probabilities too, such as one-hot vectors.
    reduction : {"mean", "sum", "none"}

    Returns
    -------
    Tensor
        A scalar, or of shape (...) with ``reduction="none"``.

    Raises
    ------
    ShapeError
        If the shapes differ.

    Notes
    -----
    Probabilities are first clipped to between 1e-7 and 1 - 1e-7 (float64: 1e-8), so that the loss
    is finite; no gradient comes from where they were clipped. Source: ``CategoricalCrossEntropy``
    of gomlx.

    Examples
    --------
    >>> categorical_cross_entropy(
    ...     torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    ... )
    tensor(0.3466)
    """
    if prediction.shape != target.shape:
        raise ShapeError(
            f"categorical_cross_entropy needs probabilities and targets of one shape (..., V), got "
            f"{tuple(prediction.shape)} and {tuple(target.shape)}; for labels (..., 1), see "
            "sparse_categorical_cross_entropy"
        )
    epsilon = EPSILON[prediction.dtype]
    clipped = prediction.clamp(epsilon, 1 - epsilon)
    return _reduced(-(target * clipped.log()).sum(-1), reduction)


def sparse_categorical_cross_entropy(
    prediction: Tensor, target: Tensor, reduction: str = "mean"
) -> Tensor:
    """Compute the cross-entropy of scores (logits) with one integer label in the last axis of the
    target.

    Parameters
    ----------
    prediction : Tensor of shape (..., V)
        Scores of V classes.
    target : Tensor of integers of shape (..., 1)
        Labels 0 to V - 1.
    reduction : {"mean", "sum", "none"}

    Returns
    -------
    Tensor
        A scalar, or of shape (...) with ``reduction="none"``; weights and masks of
        :class:`WeightedLoss` have that shape.

    Raises
    ------
    ShapeError
        If the target is not of shape (..., 1).
    DataError
        If the labels are not integers.

    Notes
    -----
    Source: ``SparseCategoricalCrossEntropyLogits`` of gomlx.

    Examples
    --------
    >>> sparse_categorical_cross_entropy(torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.int64))
    tensor(0.6931)
    """
    if target.shape != (*prediction.shape[:-1], 1):
        raise ShapeError(
            f"sparse_categorical_cross_entropy needs scores (..., V) and labels (..., 1), got "
            f"{tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    # long() would cut them to integers, and take a mask for two classes
    if target.is_floating_point() or target.dtype is torch.bool:
        raise DataError(
            f"sparse_categorical_cross_entropy needs integer labels, got {target.dtype}"
        )
    # torch wants classes on axis 1: rows of one axis avoid a transposed copy
    each = F.cross_entropy(prediction.flatten(0, -2), target.flatten().long(), reduction="none")
    return _reduced(each.view(prediction.shape[:-1]), reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return {"mean": each.mean, "sum": each.sum}[reduction]()
