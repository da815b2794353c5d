"""The AND-mask: the parts of gradients that several environments agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.parallel.gradients import Gradients, tree_reduce

__all__ = ["maskedgrad", "signalign"]


def signalign(xs: Sequence[Any], tau: float) -> Tensor | None:
    """The mean of tensors, with zeros where their signs do not agree enough.

    Parameters
    ----------
    xs : sequence of Tensor, array or None
        All of one shape. None is left out; if all are None, so is the result.
    tau : float
        The least absolute value of the mean of the signs, from 0 (the plain mean) to 1 (all signs agree).

    Returns
    -------
    Tensor or None

    Notes
    -----
    The sign of 0 is 0. Source: ``signalign`` of PrayTools.jl; Parascandolo et al. (2020), "Learning explanations that
    are hard to vary", arXiv:2009.00329.

    Examples
    --------
    >>> signalign([torch.tensor([1.0, 1.0]), torch.tensor([3.0, -2.0])], tau=0.5)
    tensor([2., 0.])
    """
    tensors = [x.to_dense() for x in (torch.as_tensor(x) for x in xs if x is not None)]
    if not tensors:
        return None
    agreement = tree_reduce([x.sign() for x in tensors], torch.add).abs()  # sums of signs are exact
    mean = tree_reduce(tensors, torch.add) / len(tensors)
    return torch.where(agreement >= tau * len(tensors), mean, 0.0)


def maskedgrad(grads: Sequence[Sequence[Any]], tau: float) -> Gradients:
    """Apply :func:`signalign` to the gradients of each parameter, one sequence of gradients per environment.

    The gradients of a single environment are returned unchanged; without any, a ValueError is raised.
    """
    if len(grads) == 0:
        raise ValueError("maskedgrad needs the gradients of at least one environment")
    if len(grads) == 1:
        return tuple(grads[0])
    return tuple(signalign(of_one, tau) for of_one in zip(*grads, strict=True))
