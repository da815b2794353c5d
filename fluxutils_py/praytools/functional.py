"""Train without an estimator, from a loss, parameters, and a function that prepares samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice, dividebatch
from fluxutils_py.errors import ShapeError
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools.callbacks import cb as as_cb
from fluxutils_py.praytools.callbacks import cby as as_cby
from fluxutils_py.praytools.sample_gradients import (
    igradient,
    parallelization_stats,
    pgradient,
    with_gradients,
)
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.loss_checks import as_params
from fluxutils_py.training.make_optimizer import make_optimizer
from fluxutils_py.training.sharding import n_observations, shard
from fluxutils_py.training.step_info import BatchLoss

Loss = Callable[..., Tensor]
Params = nn.Module | Iterable[Tensor]
Sample = tuple[Any, ...]


def train(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sample],
    opt: Any,
    iterations: int,
    *,
    axis: int = 0,
    **settings: Any,
) -> None:
    """Train: in each iteration prepare a minibatch, compute the gradient of its loss, and step the
    optimizer.

    Parameters
    ----------
    loss : callable
        ``loss(*sample)`` returns a scalar tensor, a mean over observations.
    params : nn.Module or iterable of Tensor
        Parameters to train. Recurrent layers are reset and truncated only if you pass the module.
    preparesamples : callable
        Returns the arguments of ``loss`` as a tuple. ``StopIteration`` ends training. A
        :class:`fluxutils_py.data.BackgroundDataLoader` works too.
    opt : torch.optim.Optimizer, or a class or callable that makes one from the parameters
        None: ``AdamW``.
    iterations : int
    axis : int
        Axis of the observations, along which several ranks divide a minibatch.
    **settings
        ``cb``: a function without arguments, or a sequence of functions, called after each
        iteration; :class:`StopTraining` ends training. ``cby``: called with the loss after
        ``cb``. ``comm``, ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful``: see
        :class:`GradientStep`.

    Raises
    ------
    FloatingPointError
        If a loss or gradient is NaN or infinite. That iteration leaves the parameters unchanged. If
        ``params`` is a module, ``loss`` is called once more with the same sample, and the error
        names the module in it that first gave such a number.
    RankError
        On every rank, before the first iteration, if ranks differ in a setting or, with the same
        batches, in ``iterations``.

    Notes
    -----
    Uses the same :class:`Loop` as the estimators. Source: ``train!`` of PrayTools.jl.

    Examples
    --------
    >>> model, mse = nn.Linear(3, 1), nn.MSELoss()
    >>> losses = []
    >>> def preparesamples():
    ...     x = torch.randn(20, 3)
    ...     return x, x.sum(1, keepdim=True)
    >>> train(
    ...     lambda x, y: mse(model(x), y),
    ...     model,
    ...     preparesamples,
    ...     torch.optim.Adam,
    ...     300,
    ...     cby=losses.append,
    ... )
    >>> len(losses), losses[-1] < losses[0]
    (300, True)
    """

    def compute(sample: Sample, params: Sequence[Tensor]) -> BatchLoss:
        return BatchLoss(loss(*sample), n_observations(sample, axis) or 1)

    settings |= {"divide": partial(shard, axis=axis), "told": {"axis": axis}}
    _train(compute, params, preparesamples, opt, iterations, **settings)


def ptrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Any],
    opt: Any,
    iterations: int,
    *,
    bs: int | str | None = "auto",
    axis: int = 0,
    **settings: Any,
) -> None:
    """Train like :func:`train`, with each minibatch divided over threads.

    ``loss`` must be a mean over observations. Then the result equals that of :func:`train` up to
    rounding, and is bit-identical from run to run.

    Parameters
    ----------
    loss, params, preparesamples, opt, iterations, **settings
        See :func:`train`. ``preparesamples`` returns the whole minibatch and runs in the calling
        thread only.
    bs : int, "auto" or None
        Number of parts; each part has a thread. "auto": as many as torch has threads. None:
        ``preparesamples`` returns a tuple of samples, already divided.
    axis : int or {"series", "time"}
        Axis of the observations, see :func:`fluxutils_py.data.parts.dividebatch`.

    Notes
    -----
    Each part is weighted by its number of observations. For random numbers and models that change
    as they run, see :func:`pgradient`.

    Source: ``ptrain!`` of PrayTools.jl, which takes plain means.
    """
    n = torch.get_num_threads() if bs is None or bs == "auto" else int(bs)
    threads = Threads(n)

    def samples_of(minibatch: Any) -> Sequence[Sample]:
        if bs is None:
            return minibatch
        try:
            return dividebatch(n, *minibatch, axis=axis)
        except ShapeError as error:
            error.add_note("name the axis of the observations (axis=), or train in one thread")
            raise

    def compute(minibatch: Any, tensors: Sequence[Tensor]) -> BatchLoss:
        samples = samples_of(minibatch)
        weights = [n_observations(sample, axis) or 1 for sample in samples]
        found = pgradient(loss, tensors, samples, weights, threads=threads)
        return BatchLoss(with_gradients(*found, tensors), sum(weights))

    settings |= {
        "divide": share_samples if bs is None else partial(shard, axis=axis),
        # both decide which share of a minibatch a rank has, so all ranks need the same
        "told": {"axis": axis, "whether bs is None": bs is None},
    }
    with threads:
        _train_samples(
            loss, compute, params, preparesamples, opt, iterations, samples_of, **settings
        )


def ttrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sample],
    opt: Any,
    iterations: int,
    *,
    n: int | None = None,
    **settings: Any,
) -> None:
    """Train like :func:`train`, on the mean over ``n`` samples; a separate thread prepares each
    sample.

    Parameters
    ----------
    loss, params, opt, iterations, **settings
        See :func:`train`.
    preparesamples : callable
        Returns the sample of one thread. It runs in several threads at once and must be
        thread-safe. Numbers that it draws from torch's default generator are the same in every run.
    n : int, optional
        Number of threads; by default as many as torch has. Several ranks with the same batches
        divide the samples.

    Notes
    -----
    Source: ``ttrain!`` of PrayTools.jl.
    """
    threads = Threads(torch.get_num_threads() if n is None else n)

    def prepare() -> list[Sample]:
        return threads.map(lambda _: as_sample(preparesamples()), range(threads.n))

    def compute(samples: Sequence[Sample], tensors: Sequence[Tensor]) -> BatchLoss:
        found = pgradient(loss, tensors, samples, threads=threads)
        return BatchLoss(with_gradients(*found, tensors), len(samples))

    settings["divide"] = share_samples
    with threads:
        _train_samples(loss, compute, params, prepare, opt, iterations, **settings)


def itrain(
    loss: Loss,
    params: Params,
    preparesamples: Callable[[], Sequence[Sample]],
    opt: Any,
    iterations: int,
    *,
    tau: float = 0.5,
    **settings: Any,
) -> None:
    """Train like :func:`train` on several environments, using only gradient entries they agree on
    (AND-mask).

    Parameters
    ----------
    loss, params, opt, iterations, **settings
        See :func:`train`. All ranks get the same environments, and each rank computes all of them.
    preparesamples : callable
        Returns one sample per environment, as a tuple of tuples. Environments have equal weight,
        whatever their sizes.
    tau : float
        Required agreement of the signs of gradients, see
        :func:`fluxutils_py.praytools.signalign`; 0 takes the plain mean.

    Notes
    -----
    Source: ``itrain!`` of PrayTools.jl; Parascandolo et al. (2020), arXiv:2009.00329.
    """
    # a rank masks what it computes: the mean over different environments would not be masked
    if settings.get("batches", "same") != "same":
        raise ValueError("itrain needs the same environments on every rank: leave out batches=")

    def prepare() -> list[Sample]:
        return [as_sample(sample) for sample in preparesamples()]

    def compute(samples: Sequence[Sample], tensors: Sequence[Tensor]) -> BatchLoss:
        found = igradient(loss, tensors, samples, tau, threads=threads)
        return BatchLoss(with_gradients(*found, tensors))

    # the signs of all count on every rank
    settings |= {"divide": lambda samples, rank, size: samples, "told": {"tau": tau}}
    with Threads(torch.get_num_threads()) as threads:
        _train_samples(loss, compute, params, prepare, opt, iterations, **settings)


def autotrain(
    loss: Loss,
    params: Params,
    prepare_minibatch: Callable[[], Sample],
    minibatch_size: int,
    opt: Any,
    iterations: int,
    *,
    steps: int = 10,
    stats: Sequence[dict[str, Any]] | None = None,
    **settings: Any,
) -> None:
    """Train like :func:`ptrain`, with the number of parts that is fastest; with several ranks, rank
    0 measures it.

    Parameters
    ----------
    loss, params, opt, iterations, **settings
        See :func:`ptrain`.
    prepare_minibatch, minibatch_size, steps
        See :func:`parallelization_stats`. Measuring takes one extra minibatch.
    stats : list of dict, optional
        An earlier result of that function, to use instead of measuring now.

    Notes
    -----
    Source: ``autotrain!`` of PrayTools.jl.
    """
    with RankGroup.from_comm(settings.get("comm", "auto"), "training") as ranks:
        if stats is None:
            measure = partial(parallelization_stats, steps=steps, axis=settings.get("axis", 0))
            stats = ranks.guard(measure, loss, params, prepare_minibatch, minibatch_size)
        fastest = stats and min(stats, key=lambda row: row["time"])["parts"]
        # the times of the ranks differ, the division of minibatches must not
        settings |= {"comm": ranks, "bs": ranks.allgather(fastest)[0]}
        ptrain(loss, params, prepare_minibatch, opt, iterations, **settings)


def _train_samples(
    loss: Loss,
    compute: Callable[..., BatchLoss],
    params: Params,
    prepare: Callable[[], Any],
    opt: Any,
    iterations: int,
    samples_of: Callable[..., Sequence[Sample]] = tuple,
    **settings: Any,
) -> None:
    """Train on minibatches of samples, which ``compute`` divides over threads."""

    # in this thread: the hooks that look for the first module are not made for several
    def run_again(minibatch: Any) -> None:
        for sample in samples_of(minibatch):
            loss(*sample)

    settings |= {"compute_again": run_again, "defer": False}
    _train(compute, params, prepare, opt, iterations, **settings)


def as_sample(sample: object) -> Sample:
    """Return a sample that a user's function has prepared; TypeError if it is no tuple or list."""
    if not isinstance(sample, tuple | list):
        raise TypeError(
            "preparesamples must return the arguments of loss as a tuple, such as (x, y) or (x,); "
            f"it returned a {type(sample).__name__}"
        )
    return tuple(sample)


def share_samples(samples: Sequence[Sample], rank: int, size: int) -> Sequence[Sample] | None:
    """Return a rank's share of the samples of a minibatch; None if it has none."""
    return samples[array_split_slice(len(samples), size, rank)] or None


def _train(
    compute: Callable[..., BatchLoss],
    params: Params,
    prepare: Callable[[], Any],
    opt: Any,
    iterations: int,
    *,
    divide: Callable[..., Any],
    told: Mapping[str, Any] | None = None,
    cb: Any = (),
    cby: Any = None,
    **settings: Any,
) -> None:
    """Step the optimizer on one minibatch after another, with the loss ``compute(minibatch,
    params)``; ``told`` are further settings that ranks compare.
    """
    tensors = as_params(params)
    optimizer = make_optimizer(opt, [p for p in tensors if p.requires_grad])

    def loss_of(model: object, minibatch: Any) -> BatchLoss:
        return compute(minibatch, step.params)

    def describe(sample: object) -> str:
        return f" at iteration {loop.step + 1}"

    step = BatchStep(
        loss_of,
        params if isinstance(params, nn.Module) else None,
        optimizer,
        params=tensors,
        shard=divide,
        describe=describe,
        **settings,
    )
    told = {**(told or {}), "batches": settings.get("batches", "same")}
    if step.shares_batches:  # a rank with separate batches may have fewer
        told["iterations"] = iterations
    # before the first step: different settings would leave a rank waiting for the others
    with step.ranks as ranks:
        ranks.require_equal(told)
    loop = Loop(step, step.ranks)
    for call in [cb] if callable(cb) else cb:
        loop.hooks.attach(as_cb(call))
    if cby is not None:
        loop.hooks.attach(as_cby(cby))
    # a map ends where its function raises StopIteration
    loop.run_epochs(map(lambda _: as_sample(prepare()), range(iterations)), 1)
