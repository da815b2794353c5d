"""Gradients that several environments agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fluxutils_py.parallel.gradients import Gradients, tree_reduce

__all__ = ["maskedgrad", "signalign"]


def signalign(xs: Sequence[Tensor | None], tau: float) -> Tensor | None:
    """The mean of tensors, with zeros where their signs do not agree enough.

    Parameters
    ----------
    xs : sequence of Tensor or None, of one shape
        None is left out; nothing but None gives None.
    tau : float
        How far signs must agree: their mean is at least this, 1 or below, away from 0. 0 gives the plain mean.

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
    found = [x.to_dense() if x.is_sparse else x for x in xs if x is not None]
    if not found:
        return None
    agreed = tree_reduce([x.sign() for x in found], torch.add).abs() >= tau * len(found)  # sums of signs are exact
    return torch.where(agreed, tree_reduce(found, torch.add) / len(found), 0.0)


def maskedgrad(grads: Sequence[Sequence[Tensor | None]], tau: float) -> Gradients:
    """:func:`signalign` for each parameter, of the gradients of several environments; that of one alone stays as it is.

    Raises
    ------
    ValueError
        If there are none.
    """
    if len(grads) == 0:
        raise ValueError("zero number of gradient, nothing to aggregate")
    if len(grads) == 1:
        return tuple(grads[0])
    return tuple(signalign(of_one, tau) for of_one in zip(*grads, strict=True))
