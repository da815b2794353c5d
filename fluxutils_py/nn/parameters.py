"""Looking at a model's parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["gradinfo", "namedparams", "namedweights", "notrack", "weights"]


def module_of(m: Any) -> nn.Module:
    """The module behind ``m``: a module itself, or the model of an estimator (the fitted one, once there is one).

    Raises
    ------
    TypeError
        If there is no module to be found.
    """
    if isinstance(m, nn.Module):
        return m
    for attribute in ("model_", "model"):
        found = getattr(m, attribute, None)
        if isinstance(found, nn.Module):
            return found
    hint = ": it has no model yet, call fit first" if hasattr(m, "fit") else ""
    raise TypeError(f"expected a torch module or an estimator that holds one, got {type(m).__name__}{hint}")


def namedparams(m: Any) -> list[tuple[str, nn.Parameter]]:
    """All parameters with their dotted names, in the order of :func:`net2vec`; a shared one counts once.

    ``m`` is a module or an estimator. The parameters are the model's own, not copies.
    Source: ``namedparams`` of FluxUtils.jl (whose names are not unique; these are).

    >>> [name for name, _ in namedparams(nn.Linear(2, 3))]
    ['weight', 'bias']
    """
    return list(module_of(m).named_parameters())


def namedweights(m: Any) -> list[tuple[str, nn.Parameter]]:
    """:func:`weights` with their dotted names."""
    return [(name, p) for name, p in namedparams(m) if p.ndim >= 2]


def weights(m: Any) -> list[nn.Parameter]:
    """The weight arrays without biases and normalisation scales, for regularisation: parameters with two or more axes.

    ``m`` is a module or an estimator. The parameters are the model's own, not copies.
    Source: ``weights`` of FluxUtils.jl, as its README describes it (its code returns the biases too).

    >>> l2 = sum(w.square().sum() for w in weights(nn.Linear(2, 3)))
    """
    return [p for _, p in namedweights(m)]


def notrack(m: Any) -> nn.Module:
    """A copy of the model without gradients, in evaluation mode; the model itself if nothing in it is trained.

    ``m`` is a module or an estimator, and stays as it is. The copy has its own storage.
    Source: ``notrack`` of FluxUtils.jl (which shares storage).

    >>> any(p.requires_grad for p in notrack(nn.Linear(2, 3)).parameters())
    False
    """
    model = module_of(m)
    if not any(p.requires_grad for p in model.parameters()):
        return model
    return copy.deepcopy(model).requires_grad_(False).eval()


class GradInfo(NamedTuple):
    """What :func:`gradinfo` finds."""

    nan: int
    inf: int
    max: float
    l2: float


def gradinfo(grads: Iterable[Tensor | None]) -> GradInfo:
    """How many values of some gradients are NaN, how many infinite, the largest absolute value, and the sum of squares.

    Of what is neither NaN nor None. Source: ``gradinfo`` of PrayTools.jl (``l2`` is the sum of squares there too, not
    its root; but a single NaN hides the maximum).

    >>> import torch
    >>> gradinfo([torch.tensor([3.0, -4.0, float("nan")]), None])
    GradInfo(nan=1, inf=0, max=4.0, l2=25.0)
    """
    found = [g.detach().to_dense().reshape(-1) for g in grads if g is not None]
    numbers = [g[~g.isnan()] for g in found]
    return GradInfo(
        nan=sum(int(g.isnan().sum()) for g in found),
        inf=sum(int(g.isinf().sum()) for g in found),
        max=max((float(g.abs().max()) for g in numbers if g.numel()), default=0.0),
        l2=sum(float(g.square().sum()) for g in numbers),
    )
