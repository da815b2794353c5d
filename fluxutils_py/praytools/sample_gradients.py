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
from fluxutils_py.training.loss_checks import require_no_batch_norm, watching_modules

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
    if len(items) == 1:
        return items[0]
    half = len(items) // 2
    return op(tree_reduce(items[:half], op), tree_reduce(items[half:], op))


def addgrad(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Gradients:
    """Return the sum of two gradients, parameter by parameter, as new tensors; None counts as zero.

    Source: ``addgrad!`` of PrayTools.jl, which changes its first argument.
    """
    sums: list[Tensor | None] = []
    for g, h in zip(a, b, strict=True):
        if g is None or h is None:
            sums.append(h if g is None else g)
        else:
            sums.append(g + h)
    return tuple(sums)


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
    return value.item(), tuple(next(gradients) if p.requires_grad else None for p in params)


def sum_gradients(parts: Sequence[WithGradient]) -> WithGradient:
    """Return the sum of losses and the sum of gradients, by :func:`tree_reduce`."""
    return tree_reduce(parts, lambda a, b: (a[0] + b[0], addgrad(a[1], b[1])))


def map_in_threads(
    compute: Callable[[S], T], items: Sequence[S], threads: Threads | None = None
) -> list[T]:
    """Compute the parts of a batch in threads, by default in one for each.

    Raises
    ------
    ValueError
        Before a module runs that several threads would change at once.
    """
    if threads is None:
        with Threads(max(1, len(items))) as threads:
            return map_in_threads(compute, items, threads)
    # a single part runs in this thread, where modules may change
    if len(items) < 2:
        return threads.map(compute, items)

    # a loss may call other modules than those of the model, which is often not even known
    def watched(item: S) -> T:
        watch()
        return compute(item)

    with watching_modules(_require_thread_safe) as watch:
        return threads.map(watched, items, idempotent=True)


def _require_thread_safe(module: nn.Module) -> None:
    remedy = "use one thread"
    if isinstance(module, Recur):
        raise ValueError(
            f"{type(module).__name__} carries a state, which threads cannot share: {remedy}"
        )
    require_no_batch_norm(module, "threads", f"{remedy}; or use nn.LayerNorm or nn.GroupNorm")
