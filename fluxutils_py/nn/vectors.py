"""A model's parameters, or their gradients, as one flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.parameters import module_of

__all__ = ["grad2net", "net2grad", "net2vec", "vec2net", "windices"]

M = TypeVar("M")


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
            indices = torch.arange(start, stop)
            units = len(p) if maxnorm else 1
            indices_of_weights.extend(indices.reshape(units, -1))
        start = stop
    return indices_of_weights


def net2grad(m: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return the gradients of all parameters in one vector, in the order of :func:`net2vec`; zeros
    where there is none.

    ``m`` is a module or an estimator. The vector is a detached copy of shape ``(P,)``. Source:
    ``net2grad`` of FluxUtils.jl.
    """
    params = module_of(m).parameters()
    grads = dense_gradients(params)
    return _flatten(grads, dtype)


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


def flatten_into(tensors: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy tensors one after another into the vector ``out``, in one kernel and without an
    allocation.
    """
    parts = [t.reshape(-1) for t in tensors]
    return torch.cat(parts, out=out)


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
    parts = vector.detach().split(sizes)
    pairs = zip(params, parts, strict=True)
    return [(p, part.view_as(p)) for p, part in pairs]


def _flatten(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    if not parts:  # of which torch.cat makes no vector
        parts = [torch.empty(0)]
    return torch.cat(parts).to(dtype)
