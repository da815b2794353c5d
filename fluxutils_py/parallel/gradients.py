"""Gradients of several samples, added up in a fixed order."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.nn.precision import as_float32, without_autocast
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.parallel.threads import Threads

__all__ = ["paralelization_stats", "parallelization_stats", "pgradient", "tgradient"]

T = TypeVar("T")
Gradients = tuple[Tensor | None, ...]
OWN_BATCHES = "set batches='per_rank', or take nn.LayerNorm"  # the way out for ranks
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def tree_reduce(items: Sequence[T], op: Callable[[T, T], T]) -> T:
    """Combine items pairwise: first each half, then the two results.

    The order depends only on the number of items, so sums of floats are the same in every run. Rounding errors grow
    with the logarithm of this number. Source: the reduction of PrayTools.jl.

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
    half = len(items) // 2
    return op(tree_reduce(items[:half], op), tree_reduce(items[half:], op)) if half else items[0]


def addgrad(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Gradients:
    """Return the sum of two gradients, parameter by parameter, as new tensors; None counts as zero.

    Source: ``addgrad!`` of PrayTools.jl, which changes its first argument.
    """
    return tuple(g if h is None else h if g is None else g + h for g, h in zip(a, b, strict=True))


def as_scalar(loss: Any) -> Tensor:
    """Return a loss as a tensor without axes.

    Raises
    ------
    TypeError, ValueError
        If it is not a tensor, or has several elements.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must return a scalar, got a tensor of shape {tuple(loss.shape)}; average it with .mean()"
        )
    return loss.reshape(())


def require_gradient(loss: Tensor) -> None:
    """Raise ValueError unless a loss depends on a trained parameter."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on the model's parameters: compute it from the model's output, without "
            "detach, item or numpy"
        )


def value_and_gradient(
    loss: Any, params: Sequence[Tensor], scaled: Callable[[Tensor], Tensor] | None = None
) -> tuple[float, Gradients]:
    """Return a loss as a number, and its gradient with one entry per parameter, None if there is none.

    With ``scaled``, the gradient is that of ``scaled(loss)``.

    Does not write to ``.grad``, so threads may share the parameters: ``backward()`` in several threads would add to
    the same ``.grad`` in random order.
    """
    value = as_float32(as_scalar(loss))
    require_gradient(value)
    differentiated = value if scaled is None else scaled(value)
    with without_autocast(value.device):
        found = torch.autograd.grad(differentiated, [p for p in params if p.requires_grad], allow_unused=True)
    gradients = iter(found)
    return value.item(), tuple(laid_out_like(p, next(gradients)) if p.requires_grad else None for p in params)


def laid_out_like(p: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in the memory order of its parameter, as ``backward`` leaves it in ``.grad``.

    Fused optimizers go through the memory of both side by side, whatever their strides.
    """
    if gradient is None or gradient.layout != torch.strided or gradient.stride() == p.stride():
        return gradient
    return torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)


def sum_gradients(parts: Sequence[tuple[float, Gradients]]) -> tuple[float, Gradients]:
    """Return the sum of losses and the sum of gradients, by :func:`tree_reduce`."""
    return tree_reduce(parts, lambda a, b: (a[0] + b[0], addgrad(a[1], b[1])))


def pgradient(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    samples: Sequence[tuple[Any, ...]],
    weights: Sequence[float] | None = None,
    *,
    threads: Threads | None = None,
) -> tuple[float, Gradients]:
    """Compute the mean of a loss over several samples and its gradient, each sample in a separate thread.

    Results are bit-identical from run to run, and to the same computation in one thread.

    Parameters
    ----------
    loss : callable
        ``loss(*sample)`` returns a scalar tensor. It may run in several threads at once.
    params : nn.Module or iterable of Tensor
    samples : sequence of tuples
        For example the parts of a minibatch from :func:`fluxutils_py.data.parts.dividebatch`.
    weights : sequence of float, optional
        Weights of the samples in the mean; pass their sizes for the gradient of the whole minibatch. None: equal.
    threads : Threads, optional
        Running threads to use; by default this call starts one per sample.

    Returns
    -------
    loss : float
    gradients : tuple of Tensor or None
        One per parameter; None if the loss does not depend on it.

    Raises
    ------
    ValueError
        If several threads would change the model at once: its recurrent state, or the statistics of batch
        normalisation. Train recurrent models with
        ``Estimator(n_jobs=...)``.

    Notes
    -----
    Random numbers (dropout) are reproducible, but differ from the numbers in one thread: see :class:`Threads`. Source:
    ``pgradient`` of PrayTools.jl, which takes the plain mean.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> samples = dividebatch(2, torch.randn(5, 2), torch.randn(5, 1))
    >>> mse = nn.MSELoss()
    >>> value, grads = pgradient(lambda x, y: mse(model(x), y), model, samples, weights=[3, 2])
    >>> [tuple(g.shape) for g in grads]
    [(1, 2), (1,)]
    """
    samples, params_or_model, params = list(samples), params, as_params(params)
    if not samples:
        raise ValueError("there are no samples to compute a gradient of")
    shares = [1.0] * len(samples) if weights is None else [float(w) for w in weights]
    if len(shares) != len(samples):
        raise ValueError(f"there are {len(samples)} samples, but {len(shares)} weights")
    total = sum(shares)
    if not total > 0:
        raise ValueError(f"the weights of the samples must have a positive sum, it is {total}")

    def leaf(part: tuple[tuple[Any, ...], float]) -> tuple[float, Gradients]:
        sample, share = part
        watch()
        value = loss(*sample)
        return value_and_gradient(value if share == total else value * (share / total), params)

    if len(samples) > 1:
        require_thread_safe(params_or_model)
    check = require_thread_safe if len(samples) > 1 else _accept
    with watching_modules(check) as watch, threads or Threads(len(samples)) as at_work:
        return sum_gradients(at_work.map(leaf, list(zip(samples, shares, strict=True)), idempotent=True))


def tgradient(
    loss: Callable[..., Tensor],
    params: nn.Module | Iterable[Tensor],
    preparesamples: Callable[[], tuple[Any, ...]],
    n: int | None = None,
    *,
    threads: Threads | None = None,
) -> tuple[float, Gradients]:
    """Compute a mean loss and gradient like :func:`pgradient`, over ``n`` samples that the threads prepare.

    By default ``n`` is torch's number of threads; samples have equal weight. ``preparesamples()`` runs in every thread
    and must be thread-safe. Numbers that it draws from torch's default generator are the same in every run; numbers
    from a NumPy generator that the threads share are not. Source: ``tgradient`` of PrayTools.jl.
    """
    n = (threads.n if threads else torch.get_num_threads()) if n is None else n
    with threads or Threads(n) as at_work:
        return pgradient(loss, params, at_work.map(lambda _: preparesamples(), range(n)), threads=at_work)


def require_thread_safe(model: Any, way_out: str = "use one thread, or Estimator(n_jobs=...)") -> None:
    """Raise ValueError if a module changes its state as it runs, which is not safe in several threads.

    Parameters
    ----------
    model : Any
        Not checked if it is not a module.
    way_out : str
        Advice for the error message.
    """
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, Recur):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) carries a state, which threads cannot share: {way_out}"
            )
    require_no_batch_norm(model, "threads", f"{way_out}; or take nn.LayerNorm or nn.GroupNorm")


def _accept(module: nn.Module) -> None:
    """Accept any module: one thread runs it."""


def require_no_batch_norm(model: nn.Module, workers: str, way_out: str) -> None:
    """Raise ValueError if a model in training mode normalises over a batch that workers divide."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) normalises over the whole minibatch, which is divided over "
                f"{workers}: {way_out}"
            )


@contextlib.contextmanager
def watching_modules(check: Callable[[nn.Module], None]) -> Iterator[Callable[[], None]]:
    """Call ``check(module)`` before a module runs in a thread that has called the function yielded here.

    So modules are found whose parameters alone were given. An error of ``check`` ends the call before the module runs.
    """
    watched: set[int] = set()

    def before(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() in watched:
            check(module)

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield lambda: watched.add(threading.get_ident())
    finally:
        handle.remove()


def call_without_batch_norm(compute: Callable[[Any], T], batch: Any, workers: str, way_out: str) -> T:
    """Return ``compute(batch)``; raise ValueError before a module runs that normalises over a divided batch."""

    def check(module: nn.Module) -> None:
        require_no_batch_norm(module, workers, way_out)

    with watching_modules(check) as watch:
        watch()
        return compute(batch)


def as_params(params: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a module, or the given parameters, as a list."""
    return list(params.parameters() if isinstance(params, nn.Module) else params)


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
    """Measure how long the gradient of a minibatch takes for several numbers of parts, each in a thread.

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
        ``parts`` and ``time``, in seconds per gradient. The first row is the undivided minibatch on torch's threads.

    Notes
    -----
    Source: ``paralelization_stats`` of PrayTools.jl; this name works here too.
    """
    if minibatch_size < 1 or steps < 1:
        raise ValueError(f"minibatch_size and steps must be at least 1, got {minibatch_size} and {steps}")
    params, minibatch = as_params(params), prepare_minibatch()
    if try_parts is None:
        try_parts = [2**k for k in range(round(math.log2(minibatch_size)) + 1)]
    rows = []
    for parts in (1, *try_parts):
        samples = dividebatch(parts, *minibatch, axis=axis)
        with Threads(len(samples)) as threads:
            for step in range(-1, steps):
                if step == 0:
                    began = time.perf_counter()
                pgradient(loss, params, samples, threads=threads)
        rows.append({"parts": parts, "time": (time.perf_counter() - began) / steps})
    return rows


paralelization_stats = parallelization_stats
