"""Training without an estimator: a loss, parameters, and a function that prepares samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.parallel import Threads
from fluxutils_py.parallel.and_mask import maskedgrad
from fluxutils_py.parallel.gradients import (
    Gradients,
    as_params,
    parallelization_stats,
    pgradient,
    tgradient,
    tree_reduce,
    value_and_gradient,
)
from fluxutils_py.training.adapters import cb as as_cb
from fluxutils_py.training.adapters import cby as as_cby
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.step_info import StepInfo

__all__ = ["autotrain", "itrain", "ptrain", "train", "ttrain"]

Loss = Callable[..., Tensor]
Params = nn.Module | Iterable[Tensor]
Sample = tuple[Any, ...]
Call = Callable[[], Any]


def train(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sample],
    opt: Any,
    iterations: int,
    *,
    cb: Call | Sequence[Call] = (),
    cby: Callable[[float], Any] | None = None,
) -> None:
    """Train: at each iteration prepare a minibatch, compute the gradient of its loss, and let the optimizer step.

    Parameters
    ----------
    loss : callable
        ``loss(*sample)`` gives a scalar tensor.
    params : nn.Module or iterable of Tensor
        What to train.
    preparesamples : callable
        Returns the arguments of ``loss`` as a tuple. ``StopIteration`` ends training; a
        :class:`fluxutils_py.data.BackgroundDataLoader` will do.
    opt : torch.optim.Optimizer, or a class or callable that makes one of the parameters
    iterations : int
    cb : callable without arguments, or sequence of such
        Called after each update. :class:`StopTraining` ends training.
    cby : callable, optional
        Called after each update, and after ``cb``, with the loss.

    Raises
    ------
    FloatingPointError
        If a loss or gradient is NaN or infinite; the parameters are as before that iteration.

    Notes
    -----
    Runs on the :class:`Loop` that estimators run on. Source: ``train!`` of PrayTools.jl.

    Examples
    --------
    >>> model, mse = nn.Linear(3, 1), nn.MSELoss()
    >>> losses = []
    >>> def preparesamples():
    ...     x = torch.randn(20, 3)
    ...     return x, x.sum(1, keepdim=True)
    >>> train(lambda x, y: mse(model(x), y), model, preparesamples, torch.optim.Adam, 300, cby=losses.append)
    >>> len(losses), losses[-1] < losses[0]
    (300, True)
    """
    params = as_params(params)
    _run(lambda: value_and_gradient(loss(*as_sample(preparesamples())), params), params, opt, iterations, cb, cby)


def ptrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Any],
    opt: Any,
    iterations: int,
    *,
    bs: int | str | None = "auto",
    axis: int | str = 0,
    cb: Call | Sequence[Call] = (),
    cby: Callable[[float], Any] | None = None,
) -> None:
    """:func:`train`, with each minibatch divided over threads.

    ``loss`` must be a mean over observations; then the result is that of :func:`train`, to rounding, and bit-identical
    from run to run.

    Parameters
    ----------
    loss, params, preparesamples, opt, iterations, cb, cby
        As for :func:`train`. ``preparesamples`` gives the whole minibatch and is called in one thread, the caller's.
    bs : int, "auto" or None
        How many parts, each with a thread. "auto": as many as torch has threads. None: ``preparesamples`` returns a
        tuple of samples, divided already.
    axis : int or {"series", "time"}
        Of the observations, as for :func:`fluxutils_py.data.dividebatch`.

    Notes
    -----
    Parts count by their number of observations. About random numbers and models that change as they run, see
    :func:`fluxutils_py.parallel.pgradient`. Source: ``ptrain!`` of PrayTools.jl, which takes plain means.
    """
    params = as_params(params)
    n = torch.get_num_threads() if bs is None or bs == "auto" else int(bs)

    def one() -> tuple[float, Gradients]:
        minibatch = preparesamples()
        samples = minibatch if bs is None else dividebatch(n, *as_sample(minibatch), axis=axis)
        sizes = [math.prod(np.shape(sample[0])) for sample in samples]  # in proportion to the observations
        return pgradient(loss, params, samples, sizes, threads=threads)

    with Threads(n) as threads:
        _run(one, params, opt, iterations, cb, cby)


def ttrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sample],
    opt: Any,
    iterations: int,
    *,
    n: int | None = None,
    cb: Call | Sequence[Call] = (),
    cby: Callable[[float], Any] | None = None,
) -> None:
    """:func:`train` on the mean over ``n`` samples, each prepared in a thread of its own.

    Parameters
    ----------
    loss, params, opt, iterations, cb, cby
        As for :func:`train`.
    preparesamples : callable
        Returns the sample of one thread. It is called in several at a time and must be thread-safe; the numbers that it
        draws from torch's default generator are the same in every run.
    n : int, optional
        How many threads; by default as many as torch has.

    Notes
    -----
    Source: ``ttrain!`` of PrayTools.jl.
    """
    params = as_params(params)
    with Threads(torch.get_num_threads() if n is None else n) as threads:
        _run(
            lambda: tgradient(loss, params, lambda: as_sample(preparesamples()), threads.n, threads=threads),
            *(params, opt, iterations, cb, cby),
        )


def itrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sequence[Sample]],
    opt: Any,
    iterations: int,
    *,
    tau: float = 0.5,
    cb: Call | Sequence[Call] = (),
    cby: Callable[[float], Any] | None = None,
) -> None:
    """:func:`train` on several environments, of whose gradients only that counts which they agree on (AND-mask).

    Parameters
    ----------
    loss, params, opt, iterations, cb, cby
        As for :func:`train`.
    preparesamples : callable
        Returns one sample per environment, as a tuple of tuples. Environments weigh alike, whatever their sizes.
    tau : float
        How far the signs of gradients must agree, see :func:`fluxutils_py.parallel.signalign`; 0 takes the plain mean.

    Notes
    -----
    Source: ``itrain!`` of PrayTools.jl; Parascandolo et al. (2020), arXiv:2009.00329.
    """
    params = as_params(params)

    def one() -> tuple[float, Gradients]:
        found = threads.map(
            lambda sample: value_and_gradient(loss(*as_sample(sample)), params), preparesamples(), idempotent=True
        )
        values, grads = zip(*found, strict=True)
        return tree_reduce(values, float.__add__) / len(values), maskedgrad(grads, tau)

    with Threads(torch.get_num_threads()) as threads:
        _run(one, params, opt, iterations, cb, cby)


def autotrain(
    loss: Loss,
    params: Params,
    prepare_minibatch: Callable[[], Sample],
    minibatch_size: int,
    opt: Any,
    iterations: int,
    *,
    steps: int = 10,
    try_parts: Sequence[int] | None = None,
    stats: Sequence[dict[str, Any]] | None = None,
    axis: int | str = 0,
    cb: Call | Sequence[Call] = (),
    cby: Callable[[float], Any] | None = None,
) -> None:
    """:func:`ptrain` in as many parts as are found to be fastest.

    Parameters
    ----------
    loss, params, opt, iterations, axis, cb, cby
        As for :func:`ptrain`.
    prepare_minibatch, minibatch_size, steps, try_parts
        As for :func:`fluxutils_py.parallel.parallelization_stats`. One minibatch is prepared for it.
    stats : list of dict, optional
        What that gave earlier, in place of measuring now.

    Notes
    -----
    Source: ``autotrain!`` of PrayTools.jl.
    """
    params = as_params(params)
    if stats is None:
        stats = parallelization_stats(loss, params, prepare_minibatch, minibatch_size, steps, try_parts, axis=axis)
    parts = min(stats, key=lambda row: row["time"])["parts"]
    ptrain(loss, params, prepare_minibatch, opt, iterations, bs=parts, axis=axis, cb=cb, cby=cby)


def as_sample(found: Any) -> Sample:
    """What a user's function has prepared, if it is a sample.

    Raises
    ------
    TypeError
        If it is no tuple.
    """
    if not isinstance(found, tuple | list):
        raise TypeError(
            f"preparesamples must return the arguments of loss as a tuple, such as (x, y) or (x,); it returned a "
            f"{type(found).__name__}"
        )
    return tuple(found)


def _run(
    gradients: Callable[[], tuple[float, Gradients]],
    params: list[Tensor],
    opt: Any,
    iterations: int,
    cb: Call | Sequence[Call],
    cby: Callable[[float], Any] | None,
) -> None:
    """Let the optimizer step on one gradient after another."""
    optimizer = opt if isinstance(opt, torch.optim.Optimizer) else opt([p for p in params if p.requires_grad])

    def step(found: tuple[float, Gradients]) -> StepInfo:
        value, grads = found
        largest = max((float(torch.linalg.vector_norm(g.to_dense())) for g in grads if g is not None), default=0.0)
        for what, number in (("loss", value), ("gradient norm", largest)):
            if not math.isfinite(number):
                raise FloatingPointError(
                    f"{what} is {number} at iteration {loop.step + 1}; the parameters are as before it. Lower the "
                    "learning rate, or look for extreme values in the samples"
                )
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        for p in params:
            p.grad = None
        return StepInfo(value)

    loop = Loop(step)
    for call in (cb,) if callable(cb) else cb:
        loop.hooks.attach(as_cb(call))
    if cby is not None:
        loop.hooks.attach(as_cby(cby))
    loop.run_steps(_calls(gradients, loop), iterations)


def _calls(fn: Callable[[], Any], loop: Loop) -> Iterator[Any]:
    """What a function returns, call after call, until it raises StopIteration: then the run ends too."""
    while True:
        try:
            found = fn()
        except StopIteration:
            loop.stop()
            return
        yield found
