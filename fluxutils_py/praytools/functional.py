"""Train without an estimator, from a loss, parameters, and a function that prepares samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice, dividebatch
from fluxutils_py.errors import ShapeError
from fluxutils_py.parallel import RankGroup
from fluxutils_py.praytools.and_mask import igradient
from fluxutils_py.praytools.callbacks import cb as as_cb
from fluxutils_py.praytools.callbacks import cby as as_cby
from fluxutils_py.praytools.sample_gradients import require_thread_safe, with_gradients
from fluxutils_py.praytools.threaded_gradients import parallelization_stats, pgradient
from fluxutils_py.praytools.threads import Threads
from fluxutils_py.training.batch_step import BatchStep
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.loss_checks import as_params
from fluxutils_py.training.make_optimizer import make_optimizer
from fluxutils_py.training.sharding import n_observations, shard
from fluxutils_py.training.step_info import BatchLoss

__all__ = ["autotrain", "itrain", "ptrain", "train", "ttrain"]

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

    divide = partial(shard, axis=axis)
    prepare = checked(preparesamples)
    _train(compute, divide, params, prepare, opt, iterations, told={"axis": axis}, **settings)


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

    def parts(minibatch: Any) -> Sequence[Sample]:
        if bs is None:
            return minibatch
        try:
            return dividebatch(n, *minibatch, axis=axis)
        except ShapeError as error:
            raise ShapeError(
                f"{n} threads cannot share the batch: {error}; name the axis of its observations "
                "(axis=), or train in one thread, by train"
            ) from error

    def weigh(sample: Sample) -> float:
        return n_observations(sample, axis) or 1

    divide = share_samples if bs is None else partial(shard, axis=axis)
    prepare = preparesamples if bs is None else checked(preparesamples)
    # both decide which share of a minibatch a rank has, so all ranks need the same
    told = {"axis": axis, "whether bs is None": bs is None}
    with Threads(n) as threads:
        settings |= {"told": told, **_in_threads(loss, params, threads, parts, weigh)}
        _train(
            divide=divide,
            params=params,
            prepare=prepare,
            opt=opt,
            iterations=iterations,
            **settings,
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

    prepare_one = checked(preparesamples)

    def prepare() -> tuple[Sample, ...]:
        samples = threads.map(lambda _: prepare_one(), range(threads.n))
        return tuple(samples)

    with Threads(torch.get_num_threads() if n is None else n) as threads:
        settings |= _in_threads(loss, params, threads, tuple, lambda sample: 1.0)
        _train(
            divide=share_samples,
            params=params,
            prepare=prepare,
            opt=opt,
            iterations=iterations,
            **settings,
        )


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
        :func:`fluxutils_py.praytools.and_mask.signalign`; 0 takes the plain mean.

    Notes
    -----
    Source: ``itrain!`` of PrayTools.jl; Parascandolo et al. (2020), arXiv:2009.00329.
    """
    # a rank masks what it computes: the mean over different environments would not be masked
    if settings.get("batches", "same") != "same":
        raise ValueError("itrain needs the same environments on every rank: leave out batches=")

    params = params if isinstance(params, nn.Module) else list(params)

    def prepare() -> tuple[Sample, ...]:
        return tuple(map(as_sample, preparesamples()))

    def compute(samples: Sequence[Sample], tensors: Sequence[Tensor]) -> BatchLoss:
        if len(samples) > 1:
            require_thread_safe(params)
        value, gradients = igradient(loss, tensors, samples, tau, threads=threads)
        return BatchLoss(with_gradients(value, gradients, tensors))

    # to find the module that gave a NaN; only the forward pass matters for that
    def run_again(samples: Sequence[Sample]) -> None:
        for sample in samples:
            loss(*sample)

    def divide(samples: Sequence[Sample], rank: int, size: int) -> Sequence[Sample]:
        return samples  # the signs of all environments count on every rank

    together: dict[str, Any] = {
        "told": {"tau": tau},
        "compute_again": run_again,
        "defer": False,
    }
    with Threads(torch.get_num_threads()) as threads:
        _train(compute, divide, params, prepare, opt, iterations, **settings, **together)


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
    axis: int = 0,
    comm: Any = "auto",
    **settings: Any,
) -> None:
    """Train like :func:`ptrain`, with the number of parts that is fastest; with several ranks, rank
    0 measures it.

    Parameters
    ----------
    loss, params, opt, iterations, axis, comm, **settings
        See :func:`ptrain`.
    prepare_minibatch, minibatch_size, steps, try_parts
        See :func:`parallelization_stats`. Measuring takes one extra minibatch.
    stats : list of dict, optional
        An earlier result of that function, to use instead of measuring now.

    Notes
    -----
    Source: ``autotrain!`` of PrayTools.jl.
    """
    ranks = RankGroup.from_comm(comm, "training")
    if stats is None:
        measure = partial(parallelization_stats, steps=steps, try_parts=try_parts, axis=axis)
        stats = ranks.guard(measure, loss, params, prepare_minibatch, minibatch_size)
    with ranks:
        fastest = stats and min(stats, key=lambda row: row["time"])["parts"]
        # the times of the ranks differ, the division of minibatches must not
        parts = ranks.allgather(fastest)[0]
        settings |= {"axis": axis, "comm": ranks}
        ptrain(loss, params, prepare_minibatch, opt, iterations, bs=parts, **settings)


def _in_threads(
    loss: Loss,
    params: Params,
    threads: Threads,
    divide: Callable[[Any], Sequence[Sample]],
    weigh: Callable[[Sample], float],
) -> dict[str, Any]:
    """Return settings of a step that computes each sample of a minibatch in a thread."""

    def compute(minibatch: Any, tensors: Sequence[Tensor]) -> BatchLoss:
        samples = divide(minibatch)
        if len(samples) > 1:
            require_thread_safe(params)
        weights = [weigh(sample) for sample in samples]
        value, gradients = pgradient(loss, tensors, samples, weights, threads=threads)
        return BatchLoss(with_gradients(value, gradients, tensors), sum(weights))

    # in this thread: the hooks that look for the first module are not made for several
    def run_again(minibatch: Any) -> None:
        for sample in divide(minibatch):
            loss(*sample)

    return {"compute": compute, "compute_again": run_again, "defer": False}


def checked(preparesamples: Callable[[], object]) -> Callable[[], Sample]:
    """Return a function that prepares a sample and checks it."""
    # a tensor returned alone would be taken for its rows
    return lambda: as_sample(preparesamples())


def as_sample(sample: object) -> Sample:
    """Return a sample that a user's function has prepared, after checking it.

    Raises
    ------
    TypeError
        If it is not a tuple or list.
    """
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
    compute: Callable[[Any, Sequence[Tensor]], BatchLoss],
    divide: Callable[[Any, int, int], Any],
    params: Params,
    prepare: Callable[[], Any],
    opt: Any,
    iterations: int,
    *,
    cb: Callable[[], Any] | Sequence[Callable[[], Any]] = (),
    cby: Callable[[float], Any] | None = None,
    told: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Step the optimizer on one minibatch after another, with the loss ``compute(minibatch,
    params)``; ``told`` are further settings that ranks compare.
    """
    tensors = as_params(params)
    optimizer = make_optimizer(opt, [p for p in tensors if p.requires_grad])

    def describe(sample: object) -> str:
        return f" at iteration {loop.step + 1}"

    def loss_of(model: object, minibatch: Any) -> BatchLoss:
        return compute(minibatch, step.params)

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
    loop.run_epochs(islice(_prepared_samples(prepare), iterations), 1)


def _prepared_samples(prepare: Callable[[], Any]) -> Iterator[Any]:
    """Yield the results of a function, call after call, until it raises StopIteration."""
    while True:
        # a StopIteration that leaves a generator becomes a RuntimeError
        try:
            sample = prepare()
        except StopIteration:
            return
        yield sample
