"""A model's parameters: by name, without biases, without gradients; and statistics of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn

from fluxutils_py.errors import SpecError

__all__ = ["gradinfo", "namedparams", "namedweights", "notrack", "weights"]


def module_of(m: object) -> nn.Module:
    """Return ``m`` if it is a module, else the model of an estimator: the fitted one if there is
    one.

    Raises
    ------
    TypeError
        If ``m`` is neither a module nor an estimator that holds one.
    """
    if isinstance(m, nn.Module):
        return m
    for attribute in ("model_", "model"):  # the fitted model first
        model = getattr(m, attribute, None)
        if isinstance(model, nn.Module):
            return model
    remedy = ": it has no model yet, call fit first" if hasattr(m, "fit") else ""
    raise TypeError(
        f"expected a torch module or an estimator that holds one, got {type(m).__name__}{remedy}"
    )


def namedparams(m: object) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters with their dotted names, in the order of :func:`net2vec`; a shared one
    counts once.

    ``m`` is a module or an estimator. The parameters are those of the model, not copies. Source:
    ``namedparams`` of FluxUtils.jl, whose names are not unique.

    >>> [name for name, _ in namedparams(nn.Linear(2, 3))]
    ['weight', 'bias']
    """
    return list(module_of(m).named_parameters())


def namedweights(m: object) -> list[tuple[str, nn.Parameter]]:
    """Return what :func:`weights` returns, with dotted names."""
    return [(name, p) for name, p in namedparams(m) if p.ndim >= 2]


def weights(m: object) -> list[nn.Parameter]:
    """Return the parameters with two or more axes, for regularisation: no biases, no scales of
    normalisation layers.

    ``m`` is a module or an estimator. The parameters are those of the model, not copies. Source:
    ``weights`` of FluxUtils.jl, as its README describes it; its code returns the biases too.

    >>> l2 = sum(w.square().sum() for w in weights(nn.Linear(2, 3)))
    """
    return [p for _, p in namedweights(m)]


def notrack(m: object) -> nn.Module:
    """Return a copy of the model without gradients, in evaluation mode, or the model itself if it
    has none to train.

    ``m`` is a module or an estimator, and does not change. The copy has separate storage. Source:
    ``notrack`` of FluxUtils.jl, which shares storage.

    >>> any(p.requires_grad for p in notrack(nn.Linear(2, 3)).parameters())
    False
    """
    model = module_of(m)
    # a second copy of a large model is worth avoiding
    if not any(p.requires_grad for p in model.parameters()):
        return model
    return copy.deepcopy(model).requires_grad_(False).eval()


# What does not learn: names of parameters and layers, or a function of a parameter's name and
# value.
Freeze = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | None


def freeze_parameters(m: object, freeze: Freeze) -> None:
    """Hold some parameters of a model still, by ``requires_grad``.

    Parameters
    ----------
    m : nn.Module or estimator
    freeze : str, iterable of str, callable, or None
        Dotted names of parameters, or of layers, all of whose parameters are meant; or
        ``freeze(name, parameter)``, which returns whether to hold it still.

    Raises
    ------
    SpecError
        If there is no such name, or nothing is left to learn.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> freeze_parameters(model, ["0"])
    >>> [name for name, p in namedparams(model) if p.requires_grad]
    ['1.weight', '1.bias']
    """
    model = module_of(m)
    named = namedparams(model)
    is_frozen = freeze if callable(freeze) else _by_name(model, freeze)
    for name, p in named:
        if is_frozen(name, p):
            p.requires_grad_(False)
    if not any(p.requires_grad for _, p in named):
        names = ", ".join(name for name, _ in named)
        raise SpecError(f"freeze={freeze!r} leaves nothing to learn; the parameters are {names}")


def _by_name(
    model: nn.Module, freeze: str | Iterable[str] | None
) -> Callable[[str, nn.Parameter], bool]:
    chosen = [freeze] if isinstance(freeze, str) else list(freeze or ())
    known = [name for name, _ in [*model.named_modules(), *model.named_parameters()] if name]
    for name in chosen:
        if name not in known:
            raise SpecError(
                f"freeze: the model has no parameter or layer {name!r}; it has {', '.join(known)}"
            )
    return lambda name, p: any(name == c or name.startswith(f"{c}.") for c in chosen)


class GradInfo(NamedTuple):
    """The statistics that :func:`gradinfo` returns."""

    nan: int
    inf: int
    max: float
    l2: float


def gradinfo(grads: Iterable[Tensor | None]) -> GradInfo:
    """Count the NaN and infinite values of gradients; return their largest absolute value and their
    sum of squares too.

    The maximum and the sum leave out NaN. A gradient may be None. Source: ``gradinfo`` of
    PrayTools.jl, where ``l2`` is the sum of squares as well, not its root; there, a single NaN
    hides the maximum.

    >>> import torch
    >>> gradinfo([torch.tensor([3.0, -4.0, float("nan")]), None])
    GradInfo(nan=1, inf=0, max=4.0, l2=25.0)
    """
    n_nan = 0
    n_inf = 0
    largest = 0.0
    sum_of_squares: float = 0
    for grad in grads:
        if grad is None:
            continue
        values = grad.detach().to_dense().reshape(-1)
        # a maximum with a NaN is NaN, which would hide the size of the others
        numbers = values[~values.isnan()]
        n_nan += len(values) - len(numbers)
        n_inf += int(numbers.isinf().sum())
        if len(numbers):  # max of nothing is an error
            largest = max(largest, float(numbers.abs().max()))
        sum_of_squares += float(numbers.square().sum())
    return GradInfo(n_nan, n_inf, largest, sum_of_squares)
