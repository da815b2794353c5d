"""Compute the loss and gradient of a batch in several threads, each with its share of the
observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice, dividebatch
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.losses import Loss, SeqLoss, live_steps
from fluxutils_py.nn.model_windows import (
    context_steps,
    needs_context,
    replica,
    run_window,
    takes_windows,
)
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import Threads
from fluxutils_py.training.gradients import (
    Gradients,
    as_scalar,
    require_no_batch_norm,
    require_thread_safe,
    sum_gradients,
    value_and_gradient,
    watching_modules,
)
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.step_info import BatchLoss
from fluxutils_py.tree import tree_map


def window_loss(
    loss: Loss,
    model: nn.Module,
    xs: Any,
    ys: Any,
    ws: Tensor | None,
    n_overlap: int = 0,
    factors: list[float] | None = None,
) -> Tensor:
    """Return the loss over a window without its first ``n_overlap`` steps, through which gradients
    still flow.

    A recurrent model runs through these steps before the loss is called. For a model that needs its
    context in the same call, they are put before each window that the loss passes to it, and cut
    off from its outputs. So a user's loss always gets the window without them. ``factors`` multiply
    the loss: one for each output of a :class:`SeqLoss`, one for any other loss.
    """
    if n_overlap:
        before, xs = _slice_steps(xs, slice(0, n_overlap)), _slice_steps(xs, slice(n_overlap, None))
        steps = (before,) if isinstance(before, Tensor) else before
        if needs_context(model, steps):
            with context_steps(model, steps):
                return window_loss(loss, model, xs, ys, ws, factors=factors)
        run_window(model, before)
    if factors is None:
        return call_loss(loss, model, xs, ys, ws)
    if isinstance(loss, SeqLoss):
        return call_loss(partial(loss, factors=factors), model, xs, ys, ws)
    return call_loss(loss, model, xs, ys, ws) * factors[0]


def call_loss(loss: Loss, model: nn.Module, xs: Any, ys: Any, ws: Tensor | None) -> Tensor:
    """Return the loss over a window, after checking that it is a scalar tensor."""
    return as_scalar(loss(model, xs, ys) if ws is None else loss(model, xs, ys, ws))


def _slice_steps(xs: Any, which: slice) -> Any:
    return xs[which] if isinstance(xs, Tensor) else tuple(x[which] for x in xs)


class ThreadedLoss:
    """Divide each batch over threads as over ranks; the losses of the parts add up to that of the
    batch.

    The sum, weighted by ``n_live`` and added in a fixed order, is bit-identical from run to run.

    Parameters
    ----------
    compute : callable
        ``compute(part, model, i)`` returns the :class:`BatchLoss` of part ``i``, or None, computed
        by this replica of the model. It must be thread-safe.
    model : nn.Module, optional
        Without replicas, ``compute`` gets the model itself, which then must not change as it runs.
    params : sequence of Tensor
    threads : Threads
    divide : callable
        ``divide(batch, n)`` returns the parts of a batch for ``n`` threads.
    reduction : {"mean", "sum"}
    replicate : bool
        Whether the model is ``compute``'s argument, so that each thread can have a replica of it.
    """

    def __init__(
        self,
        compute: Callable[..., BatchLoss | None],
        model: nn.Module | None,
        params: Sequence[Tensor],
        threads: Threads,
        divide: Callable[[Any, int], Sequence[Any]],
        reduction: str = "mean",
        replicate: bool = True,
    ) -> None:
        self.compute, self.model, self.params, self.threads = compute, model, params, threads
        self.divide, self.reduction = divide, reduction
        self._layers = [] if model is None else recurrent_layers(model)
        self._replicas = Replicas(model, threads) if replicate and model is not None else None
        self.scaled: Callable[[Tensor], Tensor] | None = None

    def __call__(self, batch: Any) -> BatchLoss | None:
        """Return the loss and gradient of a batch.

        Raises
        ------
        ShapeError
            If the batch cannot be divided.
        ValueError
            If threads would change the model at once.
        """
        n = self.threads.n
        try:
            parts = self.divide(batch, n)
        except ShapeError as error:
            raise ShapeError(
                f"n_jobs={n} threads cannot share the batch, train with n_jobs=1: {error}"
            ) from error

        def compute_part(i: int, model: Any) -> tuple[BatchLoss, tuple[float, Gradients]] | None:
            found = self.compute(parts[i], model, i)
            if found is None:
                return None
            weight = (
                1.0
                if self.reduction == "sum"
                else found.n_live
                if found.weight is None
                else found.weight
            )
            value, gradients = value_and_gradient(found.loss, self.params, self.scaled)
            return found, (value * weight, tuple(g if g is None else g * weight for g in gradients))

        if self._replicas is not None:
            n_series = next(
                (s.shape[d] for s, d in map(_first_state, self._layers) if s is not None), 0
            )
            series = [array_split_slice(n_series, n, i) for i in range(len(parts))]
            found: Sequence[Any] = self._replicas.map(compute_part, series)
        else:
            if len(parts) > 1:
                require_thread_safe(self.model)
            found = self._map_watched(compute_part, len(parts))
        return self._merge_losses([part for part in found if part is not None])

    def run_again(self, batch: Any) -> None:
        """Compute the loss of a batch in this thread, with the model itself."""
        parts = [batch] if self._replicas is not None else self.divide(batch, self.threads.n)
        for i, part in enumerate(parts):
            self.compute(part, self.model, i)

    def _map_watched(self, compute_part: Callable[[int, Any], Any], n_parts: int) -> Sequence[Any]:
        """Compute the parts; raise ValueError before a module runs that several threads would
        change at once.
        """
        if n_parts == 1:
            return self.threads.map(
                lambda i: compute_part(i, self.model), range(1), idempotent=True
            )

        def watched_part(i: int) -> Any:
            watch()
            return compute_part(i, self.model)

        with watching_modules(require_thread_safe) as watch:
            return self.threads.map(watched_part, range(n_parts), idempotent=True)

    def _merge_losses(
        self, found: Sequence[tuple[BatchLoss, tuple[float, Gradients]]]
    ) -> BatchLoss | None:
        if not found:
            return None
        losses = [loss for loss, _ in found]
        n_live = sum(loss.n_live for loss in losses)
        weight = sum(loss.n_live if loss.weight is None else loss.weight for loss in losses)
        divisor = 1.0 if self.reduction == "sum" else weight or 1.0
        value, gradients = sum_gradients([part for _, part in found])
        columns = zip(*(loss.numbers for loss in losses), strict=True)
        shares = [loss.n_live / (n_live or 1.0) for loss in losses]
        numbers = [
            sum(share * v for share, v in zip(shares, column, strict=True)) for column in columns
        ]
        divided = tuple(g if g is None else g / divisor for g in gradients)
        own = None if all(loss.weight is None for loss in losses) else weight
        return BatchLoss(value / divisor, n_live, own, divided, numbers)


def _first_state(layer: Any) -> tuple[Tensor | None, int]:
    state = layer.state
    return (state if state is None or isinstance(state, Tensor) else state[0]), layer.batch_dim


def shares(shard: Callable[[Any, int, int], Any]) -> Callable[[Any, int], list[Any]]:
    """Return a function that divides a batch by ``shard(batch, i, n)``, which returns None for an
    empty part.
    """
    return lambda batch, n: [part for i in range(n) if (part := shard(batch, i, n)) is not None]


def join_parts(parts: Sequence[Any], axis: int) -> Any:
    """Return the parts of a batch's predictions or labels as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tuple | list):
        return tuple(join_parts(v, axis) for v in zip(*parts, strict=True))
    return torch.cat(list(parts), axis) if isinstance(parts[0], Tensor) else parts[0]


def detached(prediction: Any) -> Any:
    """Return a prediction, a tree, without its graph."""
    return tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, prediction)


SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})
T = TypeVar("T")


class Replicas:
    """Run parts of a batch in threads.

    Each thread has a replica of the model that shares its parameters and buffers; the first thread
    has the model itself. Before a batch, each replica copies the state of its series and the
    numbers, flags and strings of the model. Afterwards the model gets the state of all series, so
    that between batches it is as after a run in one thread. There may be fewer parts than threads.

    Parameters
    ----------
    model : nn.Module
    threads : Threads
        Must be running when you call :meth:`map`.
    """

    def __init__(self, model: nn.Module, threads: Threads) -> None:
        self.model, self.threads = model, threads
        self._models: list[nn.Module] = []  # made for the first batch

    def map(self, compute: Callable[[int, nn.Module], T], parts: Sequence[slice]) -> list[T]:
        """Return ``compute(i, replica)`` for each part i, which has these series; the state moves
        on, detached.

        Raises
        ------
        ValueError
            If the model computes across series (batch normalisation), or changes its buffers.
        """
        if not self._models:
            self._models = [self.model, *(replica(self.model) for _ in range(1, self.threads.n))]
            self._layers = [recurrent_layers(model) for model in self._models]
            self._modules = list(zip(*(model.modules() for model in self._models), strict=True))
        self._copy_settings()
        buffers = [(module, name, b, b._version) for module, name, b in self._buffers()]
        memories = [layer.memory() for layer in self._layers[0]]

        def compute_part(i: int) -> T:
            for layer, memory in zip(self._layers[i], memories, strict=True):
                layer.take_series(memory, parts[i])
            return compute(i, self._models[i])

        try:
            found = self.threads.map(compute_part, range(len(parts)), idempotent=True)
            for name, same in (
                (name, module._buffers[name] is b and b._version == v)
                for module, name, b, v in buffers
            ):
                if not same:
                    raise ValueError(
                        f"the model changes its buffer {name!r} as it runs, which several threads "
                        "would do at once: train it with n_jobs=1"
                    )
            for layers in zip(*self._layers[: len(parts)], strict=True):
                layers[0].join_series([layer.memory() for layer in layers])
        finally:
            for model in self._models[1:]:
                reset(model)  # and release the graph
        return found

    def _copy_settings(self) -> None:
        """Copy the model's settings to the replicas: a hook may have changed a dropout rate, or
        frozen a layer.
        """
        require_no_batch_norm(
            self.model, "threads", "train with n_jobs=1, or take nn.LayerNorm or nn.GroupNorm"
        )
        for original, *copies in self._modules:
            plain = {
                name: value for name, value in vars(original).items() if type(value) in SIMPLE_TYPES
            }
            for copy in copies:
                vars(copy).update(plain)
                copy._buffers.update(original._buffers)

    def _buffers(self) -> Iterable[tuple[nn.Module, str, Tensor]]:
        for original, *_ in self._modules:
            for name, buffer in original._buffers.items():
                if buffer is not None:
                    yield original, name, buffer


class WindowReplicas(Replicas):
    """Divide the series of each window over threads, and sum losses and gradients.

    The loss must be a mean over the live steps of its window. Losses of
    :func:`fluxutils_py.seqloss` that are not means (sums, class weights) are rescaled. The sum of
    the parts, weighted by live steps and added in a fixed order, is the loss and gradient of the
    whole window, bit-identical from run to run.

    Parameters
    ----------
    model : nn.Module
    loss : callable
        ``loss(model, xs, ys)`` or ``loss(model, xs, ys, ws)``, thread-safe.
    threads : Threads
    """

    def __init__(self, model: nn.Module, loss: Loss, threads: Threads) -> None:
        super().__init__(model, threads)
        self.loss, self._params = loss, list(model.parameters())

    def gradient(
        self, batch: Minibatch, ws: Tensor | None, scaled: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[float, Gradients]:
        """Return the loss over a window and its gradient by parameter; advance the model's state,
        detached.

        With ``scaled``, the gradient is that of ``scaled(loss)``. For errors see
        :meth:`Replicas.map`.
        """
        xs, ys = (v if isinstance(v, tuple) else (v,) for v in (batch.x, batch.y))
        if not self._models and isinstance(
            self.loss, SeqLoss
        ):  # otherwise all threads would try it at once
            takes_windows(self.model, xs)
        chunks = dividebatch(self.threads.n, *xs, *ys, *(() if ws is None else (ws,)), axis=1)
        divisors, n_overlap = (
            self._divisors(batch.y, ws),
            0 if batch.index is None else batch.index.n_overlap,
        )
        series, begin = [], 0
        for chunk in chunks:
            series.append(slice(begin, begin := begin + chunk[0].shape[1]))

        def compute(i: int, model: nn.Module) -> tuple[float, Gradients]:
            x, y = chunks[i][: len(xs)], chunks[i][len(xs) : len(xs) + len(ys)]
            x, y = (
                own if isinstance(v, tuple) else own[0] for own, v in ((x, batch.x), (y, batch.y))
            )
            w, factors = None if ws is None else chunks[i][-1], None
            if divisors is not None:
                own = self._divisors(y, w)
                assert own is not None
                factors = [
                    mine / all_ if all_ else 0.0 for mine, all_ in zip(own, divisors, strict=True)
                ]
            if factors is not None and not any(factors):  # advance the state without training
                with torch.no_grad():
                    window_loss(self.loss, model, x, y, w, n_overlap)
                return 0.0, (None,) * len(self._params)
            loss = window_loss(self.loss, model, x, y, w, n_overlap, factors)
            return value_and_gradient(loss, self._params, scaled)

        return sum_gradients(self.map(compute, series))

    def _divisors(self, ys: Any, ws: Tensor | None) -> list[float] | None:
        return (
            self.loss.divisors(ys, ws) if isinstance(self.loss, SeqLoss) else [live_steps(ys, ws)]
        )
