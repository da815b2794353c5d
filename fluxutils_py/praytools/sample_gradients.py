"""Gradients of several samples, added up in a fixed order, also in threads or of environments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.gradient_step import as_scalar, require_gradient
from fluxutils_py.training.loss_checks import as_params, require_no_batch_norm, watching_modules

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


# -- in threads ------------------------------------------------------------------------------------


def pgradient(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    samples: Sequence[tuple[Any, ...]],
    weights: Sequence[float] | None = None,
    *,
    threads: Threads | None = None,
) -> WithGradient:
    """Compute the mean of a loss over several samples and its gradient, each sample in a separate
    thread.

    Results are bit-identical from run to run, and to the same computation in one thread.

    Parameters
    ----------
    loss : callable
        ``loss(*sample)`` returns a scalar tensor. It may run in several threads at once.
    params : nn.Module or iterable of Tensor
    samples : sequence of tuples
        For example the parts of a minibatch from :func:`fluxutils_py.data.parts.dividebatch`.
    weights : sequence of float, optional
        Weights of the samples in the mean; pass their sizes for the gradient of the whole
        minibatch. None: equal.
    threads : Threads, optional
        Threads that run already; by default this call starts one per sample.

    Returns
    -------
    loss : float
    gradients : tuple of Tensor or None
        One per parameter; None if the loss does not depend on it.

    Raises
    ------
    ValueError
        If several threads would change the model at once: its recurrent state, or the statistics of
        batch normalisation.

    Notes
    -----
    Random numbers (dropout) are reproducible, but differ from the numbers in one thread: each
    sample draws from a generator of its own. Source: ``pgradient`` of PrayTools.jl, which takes the
    plain mean.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> samples = dividebatch(2, torch.randn(5, 2), torch.randn(5, 1))
    >>> mse = nn.MSELoss()
    >>> value, grads = pgradient(lambda x, y: mse(model(x), y), model, samples, weights=[3, 2])
    >>> [tuple(g.shape) for g in grads]
    [(1, 2), (1,)]
    """
    if not samples:
        raise ValueError("there are no samples to compute a gradient of")
    tensors = as_params(params)
    shares = [1.0] * len(samples) if weights is None else [float(w) for w in weights]
    total = sum(shares)
    if not total > 0:  # NaN too, of which each comparison is False
        raise ValueError(f"the weights of the samples must have a positive sum, it is {total}")

    def compute(part: tuple[tuple[Any, ...], float]) -> WithGradient:
        sample, share = part
        value = loss(*sample)
        # scaled before its gradient, so that gradients only have to be added up
        if share != total:
            value = value * (share / total)
        return value_and_gradient(value, tensors)

    parts = map_in_threads(compute, [*zip(samples, shares, strict=True)], threads)
    return tree_reduce(parts, lambda a, b: (a[0] + b[0], addgrad(a[1], b[1])))


def tgradient(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    preparesamples: Callable[[], tuple[Any, ...]],
    n: int | None = None,
) -> WithGradient:
    """Compute a mean loss and gradient like :func:`pgradient`, over ``n`` samples that the threads
    prepare.

    By default ``n`` is torch's number of threads; samples have equal weight. ``preparesamples()``
    runs in every thread and must be thread-safe. Numbers that it draws from torch's default
    generator are the same in every run; numbers from a NumPy generator that the threads share are
    not. Source: ``tgradient`` of PrayTools.jl.
    """
    with Threads(torch.get_num_threads() if n is None else n) as threads:
        samples = threads.map(lambda _: preparesamples(), range(threads.n))
        return pgradient(loss, params, samples, threads=threads)


def parallelization_stats(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    prepare_minibatch: Callable[[], tuple[Any, ...]],
    minibatch_size: int,
    steps: int = 10,
    try_parts: Sequence[int] | None = None,
    *,
    axis: int | str = 0,
) -> list[dict[str, Any]]:
    """Measure how long the gradient of a minibatch takes for several numbers of parts, each in a
    thread.

    The parameters stay unchanged.

    Parameters
    ----------
    loss, params
        See :func:`pgradient`.
    prepare_minibatch : callable
        Returns a minibatch; called once.
    minibatch_size : int
        Number of observations in a minibatch.
    steps : int
        Number of gradients to average the time over, after one warm-up.
    try_parts : sequence of int, optional
        Numbers of parts; by default the powers of two up to the one nearest to ``minibatch_size``.
    axis : int or str
        Axis of the observations, see :func:`fluxutils_py.data.parts.dividebatch`.

    Returns
    -------
    list of dict
        ``parts`` and ``time``, in seconds per gradient. The first row is the undivided minibatch on
        torch's threads.

    Notes
    -----
    Source: ``paralelization_stats`` of PrayTools.jl; this name works here too.
    """
    params = as_params(params)
    minibatch = prepare_minibatch()
    if try_parts is None:
        try_parts = [2**k for k in range(round(math.log2(minibatch_size)) + 1)]
    rows = []
    # the undivided minibatch first, with which the others are compared
    for parts in (1, *try_parts):
        samples = dividebatch(parts, *minibatch, axis=axis)
        # as many as there are samples, which may be fewer than parts
        with Threads(len(samples)) as threads:
            pgradient(loss, params, samples, threads=threads)  # warms up
            began = time.perf_counter()
            for _ in range(steps):
                pgradient(loss, params, samples, threads=threads)
        rows.append({"parts": parts, "time": (time.perf_counter() - began) / steps})
    return rows


paralelization_stats = parallelization_stats  # as PrayTools.jl spells it


# -- the AND-mask ----------------------------------------------------------------------------------


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
