"""The AND-mask: the parts of gradients that several environments agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.praytools.sample_gradients import (
    Gradients,
    WithGradient,
    map_in_threads,
    tree_reduce,
    value_and_gradient,
)
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.loss_checks import as_params


def signalign(xs: Sequence[Any], tau: float) -> Tensor | None:
    """Return the mean of tensors, zero where their signs do not agree enough.

    Parameters
    ----------
    xs : sequence of Tensor, array or None
        All of one shape. None is left out; if all are None, so is the result.
    tau : float
        Smallest absolute mean of the signs that counts as agreement: from 0 (plain mean) to 1 (all
        signs equal).

    Returns
    -------
    Tensor or None

    Notes
    -----
    The sign of 0 is 0. Source: ``signalign`` of PrayTools.jl; Parascandolo et al. (2020), "Learning
    explanations that are hard to vary", arXiv:2009.00329.

    Examples
    --------
    >>> signalign([torch.tensor([1.0, 1.0]), torch.tensor([3.0, -2.0])], tau=0.5)
    tensor([2., 0.])
    """
    tensors = [torch.as_tensor(x).to_dense() for x in xs if x is not None]
    if not tensors:
        return None
    # whole numbers, so that rounding cannot decide which entries agree
    agreement = tree_reduce([x.sign() for x in tensors], torch.add).abs()
    mean = tree_reduce(tensors, torch.add) / len(tensors)
    needed = tau * len(tensors)
    return torch.where(agreement >= needed, mean, 0.0)


def maskedgrad(grads: Sequence[Sequence[Any]], tau: float) -> Gradients:
    """Apply :func:`signalign` to the gradients of each parameter, one sequence of gradients per
    environment.

    The gradients of a single environment are returned unchanged; without any, a ValueError is
    raised.
    """
    if not grads:
        raise ValueError("maskedgrad needs the gradients of at least one environment")
    if len(grads) == 1:
        return tuple(grads[0])
    return tuple(signalign(of_one, tau) for of_one in zip(*grads, strict=True))


def igradient(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    samples: Sequence[tuple[Any, ...]],
    tau: float = 0.5,
    *,
    threads: Threads | None = None,
) -> WithGradient:
    """Return the mean of a loss over several environments, and the part of its gradient that they
    agree on.

    Parameters
    ----------
    loss, params, threads
        As for :func:`fluxutils_py.praytools.pgradient`.
    samples : sequence of tuples
        One per environment; all have equal weight, whatever their sizes.
    tau : float
        See :func:`signalign`.

    Notes
    -----
    Source: ``igradient`` of PrayTools.jl; Parascandolo et al. (2020), arXiv:2009.00329.
    """
    tensors = as_params(params)

    def compute(sample: tuple[Any, ...]) -> WithGradient:
        return value_and_gradient(loss(*sample), tensors)

    parts = map_in_threads(compute, samples, threads)
    gradients = maskedgrad([gradient for _, gradient in parts], tau)
    return tree_reduce([value for value, _ in parts], float.__add__) / len(parts), gradients
