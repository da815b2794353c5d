"""A model's parameters, or their gradients, as one flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.parameters import module_of

__all__ = ["grad2net", "net2grad", "net2vec", "vec2net", "windices"]

M = TypeVar("M")


def net2vec(m: Any, dtype: torch.dtype | None = None) -> Tensor:
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
    return _flatten_tensors((p.detach() for p in module_of(m).parameters()), dtype)


def vec2net(m: M, v: Any) -> M:
    """Copy a vector, as :func:`net2vec` made it, into the parameters of a model, and return ``m``.

    ``v`` is a tensor, or anything that ``torch.as_tensor`` takes, of shape ``(P,)``. The model
    never shares its memory, and the parameters keep their types.

    Raises
    ------
    ShapeError
        If ``v`` is not a vector of exactly as many values as the model has parameters. Nothing is
        changed then.

    Notes
    -----
    Source: ``vec2net!`` of FluxUtils.jl. It ignores surplus values, and so does
    ``torch.nn.utils.vector_to_parameters``, which also lets the model share memory with the vector.
    """
    with torch.no_grad():
        for p, part in _split_vector("vec2net", m, v):
            p.copy_(part)
    return m


def windices(m: Any, maxnorm: bool = False) -> list[Tensor]:
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
    indices_of_weights, begin = [], 0
    for p in module_of(m).parameters():
        if p.ndim >= 2:
            indices = torch.arange(begin, begin + p.numel())
            indices_of_weights += list(indices.reshape(p.shape[0], -1)) if maxnorm else [indices]
        begin += p.numel()
    return indices_of_weights


def net2grad(m: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the gradients of all parameters in one vector, in the order of :func:`net2vec`; zeros
    where there is none.

    ``m`` is a module or an estimator. The vector is a detached copy of shape ``(P,)``. Source:
    ``net2grad`` of FluxUtils.jl.
    """
    return _flatten_tensors((g.detach() for g in dense_gradients(module_of(m).parameters())), dtype)


def grad2net(m: M, v: Any) -> M:
    """Set the gradients of all parameters from a vector, as :func:`net2grad` made it, and return
    ``m``.

    ``v`` is a tensor, or anything that ``torch.as_tensor`` takes, of shape ``(P,)``. It is copied;
    each gradient has the type and device of its parameter. An optimizer's next ``step`` then uses
    these gradients.

    Raises
    ------
    ShapeError
        If ``v`` is not a vector of exactly as many values as the model has parameters. Nothing is
        changed then.

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
    grads = (torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad for p in params)
    return [g.to_dense() if g.is_sparse else g for g in grads]


def flatten_into(tensors: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy tensors one after another into the vector ``out``, in one kernel and without an
    allocation.
    """
    return torch.cat([t.reshape(-1) for t in tensors], out=out)


def _split_vector(caller: str, m: Any, v: Any) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter of a model with its part of the vector, in its shape."""
    params = list(module_of(m).parameters())
    v = torch.as_tensor(v)
    n = sum(p.numel() for p in params)
    if v.ndim != 1:
        raise ShapeError(f"{caller}: expected a vector of shape ({n},), got shape {tuple(v.shape)}")
    if v.numel() != n:
        raise ShapeError(f"{caller}: vector has {v.numel()} values, the model has {n} parameters")
    parts = v.detach().split([p.numel() for p in params])
    return [(p, part.view_as(p)) for p, part in zip(params, parts, strict=True)]


def _flatten_tensors(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> Tensor:
    parts = [t.reshape(-1) for t in tensors]
    v = torch.cat(parts) if parts else torch.empty(0)
    return v if dtype is None else v.to(dtype)
