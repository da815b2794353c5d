"""A model's parameters and gradients: by name, without biases, as one vector, and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError, SpecError, warn
from fluxutils_py.nn.states import module_of

__all__ = [
    "grad2net",
    "gradinfo",
    "namedparams",
    "namedweights",
    "net2grad",
    "net2vec",
    "notrack",
    "vec2net",
    "weights",
    "windices",
]

M = TypeVar("M")


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


def net2vec(m: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return all parameters of a model in one vector.

    Parameters
    ----------
    m : nn.Module or estimator
    dtype : torch.dtype, optional
        Type of the vector. The default is that of the parameters, the widest if they differ.

    Returns
    -------
    Tensor of shape (P,)
        A detached copy, in the order of :func:`namedparams`, each parameter row-major; a shared one
        counts once.

    Notes
    -----
    Source: ``net2vec`` of FluxUtils.jl.

    Examples
    --------
    >>> net2vec(nn.Linear(2, 3)).shape
    torch.Size([9])
    """
    return _flatten(module_of(m).parameters(), dtype)


def vec2net(m: M, v: object) -> M:
    """Copy a vector, as :func:`net2vec` made it, into the parameters of a model, and return ``m``.

    ``v`` is a tensor, or anything that ``torch.as_tensor`` takes, of shape ``(P,)``. The model
    never shares its memory, and the parameters keep their types.

    Raises
    ------
    ShapeError
        If ``v`` is not a vector of exactly as many values as the model has parameters. The model
        is left unchanged.

    Notes
    -----
    Source: ``vec2net!`` of FluxUtils.jl. It ignores surplus values, and so does
    ``torch.nn.utils.vector_to_parameters``, which also lets the model share memory with the vector.
    """
    parts = _split_vector("vec2net", m, v)
    with torch.no_grad():  # a parameter that requires gradients cannot be written to otherwise
        for p, part in parts:
            p.copy_(part)
    return m


def windices(m: object, maxnorm: bool = False) -> list[Tensor]:
    """Return the indices of the weights, as ``weights`` lists them, in the vector of
    :func:`net2vec`.

    Parameters
    ----------
    m : nn.Module or estimator
    maxnorm : bool
        One index per output unit (axis 0 of a weight), for constraints on the norm of each unit's
        incoming weights.

    Returns
    -------
    list of Tensor of int64
        One-dimensional, in the order of :func:`namedparams`, row-major.

    Notes
    -----
    Source: ``windices`` of FluxUtils.jl, which omits weights of more than two axes.

    Examples
    --------
    >>> model = nn.Linear(2, 3)
    >>> [i.tolist() for i in windices(model, maxnorm=True)]
    [[0, 1], [2, 3], [4, 5]]
    """
    indices_of_weights: list[Tensor] = []
    start = 0
    for p in module_of(m).parameters():
        stop = start + p.numel()
        if p.ndim >= 2:  # no bias
            units = len(p) if maxnorm else 1
            indices_of_weights.extend(torch.arange(start, stop).reshape(units, -1))
        start = stop
    return indices_of_weights


def net2grad(m: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return the gradients of all parameters in one vector, in the order of :func:`net2vec`; zeros
    where there is none, with a warning if there is none at all.

    ``m`` is a module or an estimator. The vector is a detached copy of shape ``(P,)``. Source:
    ``net2grad`` of FluxUtils.jl.
    """
    params = list(module_of(m).parameters())
    if params and all(p.grad is None for p in params):
        warn(
            "net2grad: no parameter has a gradient, so the vector is all zeros: call backward() "
            "first; after a step of a fit they are gone, see loop.trainer.gradient_norm and "
            "evaluate(x, y, gradient=True)"
        )
    return _flatten(dense_gradients(params), dtype)


def grad2net(m: M, v: object) -> M:
    """Set the gradients of all parameters from a vector, as :func:`net2grad` made it, and return
    ``m``.

    ``v`` is a tensor, or anything that ``torch.as_tensor`` takes, of shape ``(P,)``. It is copied;
    each gradient has the type and device of its parameter. An optimizer's next ``step`` then uses
    these gradients.

    Raises
    ------
    ShapeError
        If ``v`` is not a vector of exactly as many values as the model has parameters. The model
        is left unchanged.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> grad2net(model, [1.0, 2.0, 3.0]).weight.grad
    tensor([[1., 2.]])
    """
    for p, part in _split_vector("grad2net", m, v):
        # in the memory order of p, as fused optimizers need it
        p.grad = torch.empty_like(p).copy_(part)
    return m


def dense_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of each parameter as a dense tensor, copied only if sparse; zeros where
    there is none.
    """
    grads: list[Tensor] = []
    for p in params:
        grad = p.grad
        if grad is None:
            grad = torch.zeros_like(p, requires_grad=False)
        elif grad.is_sparse:
            grad = grad.to_dense()
        grads.append(grad)
    return grads


def _split_vector(
    caller: str,
    m: object,
    v: object,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return each parameter of a model with its part of the vector, in its shape."""
    params = list(module_of(m).parameters())
    vector = torch.as_tensor(v)
    sizes = [p.numel() for p in params]
    n = sum(sizes)
    # an exact fit, because split and torch's vector_to_parameters would ignore surplus values
    if vector.ndim != 1:
        raise ShapeError(
            f"{caller}: expected a vector of shape ({n},), got shape {tuple(vector.shape)}"
        )
    if vector.numel() != n:
        raise ShapeError(
            f"{caller}: vector has {vector.numel()} values, the model has {n} parameters"
        )
    pairs = zip(params, vector.detach().split(sizes), strict=True)
    return [(p, part.view_as(p)) for p, part in pairs]


def _flatten(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    if not parts:  # of which torch.cat makes no vector
        parts = [torch.empty(0)]
    return torch.cat(parts).to(dtype)


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
