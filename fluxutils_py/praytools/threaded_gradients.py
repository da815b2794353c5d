"""Gradients of several samples, each in a thread, under the names of PrayTools.jl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.praytools.sample_gradients import (
    WithGradient,
    map_in_threads,
    sum_gradients,
    value_and_gradient,
)
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.loss_checks import as_params


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

    parts = [*zip(samples, shares, strict=True)]
    return sum_gradients(map_in_threads(compute, parts, threads))


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
