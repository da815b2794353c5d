"""Losses that take weights and masks from the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import ShapeError
from fluxutils_py.gomlx.element_weights import target_and_weight
from fluxutils_py.nn.losses import require_equal_shapes, unreduced


class WeightedLoss:
    """Adapt a torch criterion to a :class:`Trainer` whose batches have weights or a mask among the
    labels.

    Parameters
    ----------
    loss : callable
        ``loss(prediction, target)``: a loss of ``torch.nn`` or ``torch.nn.functional`` with any
        reduction, or a function that returns one value per element.

    Returns
    -------
    Tensor
        When called with a prediction and a target, or a tuple of a target and extras: the loss of
        each element times its weight, and 0 where the mask is False. A bool extra is the mask, a
        float extra the weights. Both must have the shape of the unreduced loss, which is the shape
        of the target (for cross-entropy, of the class indices).

    Raises
    ------
    DataError
        When called, if an extra is neither bool nor float, or there are two masks or two weights.
    ShapeError
        When called, if the shape of an extra differs from the shape of the loss.

    Notes
    -----
    The trainer takes the mean over **all** elements, masked ones included, as gomlx did before
    0.17.1: a mask that is half False halves a constant loss. Weights never change the divisor. With
    the weights of a :class:`Minibatch` it divides by the number of nonzero weights instead:
    ``Minibatch((x,), (y, mask), weight=mask)`` gives the masked mean of later gomlx. A float target
    may be NaN where the mask is False or the weight 0; no gradient comes from there. Metrics of the
    trainer get the first label as target and take weighted means, divided by the sum of the
    weights. Source: ``losses`` of gomlx.

    Examples
    --------
    >>> prediction, target = torch.tensor([1.0, 3.0]), torch.tensor([0.0, torch.nan])
    >>> WeightedLoss(torch.nn.MSELoss())(prediction, (target, torch.tensor([True, False])))
    tensor([1., 0.])
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        if isinstance(loss, type) or not callable(loss):
            raise TypeError(f"WeightedLoss needs a loss(prediction, target), not {loss!r}")
        self.loss = loss
        # the name of a metric of this loss
        self.__name__ = getattr(loss, "__name__", None) or type(loss).__name__

    def __call__(self, prediction: Any, labels: object) -> Tensor:
        target, share = target_and_weight(labels)
        require_equal_shapes(self.loss, prediction, target)
        if share is None:
            return unreduced(self.loss)(prediction, target)
        if target.is_floating_point() and target.shape == share.shape:
            # a NaN would come back in the gradient, as 0 times NaN
            target = torch.where(share != 0, target, 0)
        each = unreduced(self.loss)(prediction, target)
        if each.shape != share.shape:
            raise ShapeError(
                f"weights and mask have shape {tuple(share.shape)}, the loss has "
                f"{tuple(each.shape)}; give them one value for each of its elements, and a loss "
                "that can do without reduction"
            )
        return torch.where(share != 0, each * share, 0)
