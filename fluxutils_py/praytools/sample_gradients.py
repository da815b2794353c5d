"""Gradients of several samples, added up in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.gradient_step import as_scalar, require_gradient
from fluxutils_py.training.loss_checks import (
    require_no_batch_norm,
    watching_modules,
)

S = TypeVar("S")
T = TypeVar("T")
Gradients = tuple[Tensor | None, ...]
WithGradient = tuple[float, Gradients]  # a loss and its gradient


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Gradients, *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, None, *ctx.gradients)


def with_gradients(value: float, gradients: Gradients, params: Sequence[Tensor]) -> Tensor:
    """Return a loss as a tensor whose ``backward()`` gives these gradients to the parameters."""
    of = next((p for p in params if p.requires_grad), torch.zeros(()))
    result: Tensor = _Known.apply(of.new_tensor(value), gradients, *params)
    return result


def tree_reduce(items: Sequence[T], op: Callable[[T, T], T]) -> T:
    """Combine items pairwise: first each half, then the two results.

    The order depends only on the number of items, so sums of floats are the same in every run.
    Rounding errors grow with the logarithm of this number. Source: the reduction of PrayTools.jl.

    Parameters
    ----------
    items : sequence, not empty
    op : callable with two arguments

    Examples
    --------
    >>> tree_reduce("abcde", lambda a, b: f"({a}{b})")
    '((ab)(c(de)))'
    """
    if len(items) == 0:
        raise ValueError("there is nothing to reduce: tree_reduce needs at least one item")
    if len(items) == 1:
        return items[0]
    half = len(items) // 2
    first = tree_reduce(items[:half], op)
    second = tree_reduce(items[half:], op)
    return op(first, second)


def addgrad(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Gradients:
    """Return the sum of two gradients, parameter by parameter, as new tensors; None counts as zero.

    Source: ``addgrad!`` of PrayTools.jl, which changes its first argument.
    """
    return tuple(_add(g, h) for g, h in zip(a, b, strict=True))


def _add(g: Tensor | None, h: Tensor | None) -> Tensor | None:
    if g is None or h is None:
        return h if g is None else g
    return g + h


def value_and_gradient(loss: object, params: Sequence[Tensor]) -> tuple[float, Gradients]:
    """Return a loss as a number, and its gradient with one entry per parameter, None if there is
    none.

    Does not write to ``.grad``, so threads may share the parameters: ``backward()`` in several
    threads would add to the same ``.grad`` in random order.
    """
    value = as_float32(as_scalar(loss))
    require_gradient(value)
    # Frozen parameters keep their place, as None: optimizers go by position.
    trained = [p for p in params if p.requires_grad]
    with without_autocast(value.device):
        gradients = iter(torch.autograd.grad(value, trained, allow_unused=True))
    return value.item(), tuple(
        laid_out_like(p, next(gradients)) if p.requires_grad else None for p in params
    )


def laid_out_like(p: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in the memory order of its parameter, as ``backward`` leaves it in
    ``.grad``.

    Fused optimizers go through the memory of both side by side, whatever their strides.
    """
    if gradient is None or gradient.layout != torch.strided:
        return gradient
    if gradient.stride() == p.stride():
        return gradient
    return torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)


def sum_gradients(parts: Sequence[WithGradient]) -> WithGradient:
    """Return the sum of losses and the sum of gradients, by :func:`tree_reduce`."""

    def add(a: WithGradient, b: WithGradient) -> WithGradient:
        value_a, gradients_a = a
        value_b, gradients_b = b
        return value_a + value_b, addgrad(gradients_a, gradients_b)

    return tree_reduce(parts, add)


def map_in_threads(
    compute: Callable[[S], T],
    items: Sequence[S],
    model: object,
    threads: Threads,
) -> list[T]:
    """Compute the parts of a batch in threads that share a model, which must not change meanwhile.

    Raises
    ------
    ValueError
        Before a module runs that several threads would change at once, of ``model`` or any other
        that ``compute`` calls.
    """
    # a single part runs in this thread, where modules may change
    if len(items) < 2:
        return threads.map(compute, items, idempotent=True)
    require_thread_safe(model)

    # A loss may call other modules than those of the model, which is often not even known.
    def watched(item: S) -> T:
        watch()
        return compute(item)

    with watching_modules(require_thread_safe) as watch:
        return threads.map(watched, items, idempotent=True)


def require_thread_safe(model: object) -> None:
    """Raise ValueError if a module changes its state as it runs, which is not safe in several
    threads.

    Anything but a module is not checked.
    """
    if not isinstance(model, nn.Module):
        return
    remedy = "use one thread"
    for name, module in model.named_modules():
        if isinstance(module, Recur):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) carries a state, which threads cannot share: "
                f"{remedy}"
            )
    require_no_batch_norm(model, "threads", f"{remedy}; or use nn.LayerNorm or nn.GroupNorm")
