"""Compute the loss and gradient of a batch in several threads, each with its share of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

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
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import Threads
from fluxutils_py.torch_private import buffers_of, version_of
from fluxutils_py.training.gradients import (
    Gradients,
    as_scalar,
    map_in_threads,
    require_no_batch_norm,
    sum_gradients,
    value_and_gradient,
)
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.step_info import BatchLoss
from fluxutils_py.tree import tree_map

T = TypeVar("T")
Scaled = Callable[[Tensor], Tensor]

# -- batches ---------------------------------------------------------------------------------------


class PartLoss(NamedTuple):
    """Loss of a part of a batch, and the same times its weight, with the gradient."""

    loss: BatchLoss
    weighted: tuple[float, Gradients]


@dataclass(eq=False)
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
    threads : Threads
    divide : callable
        ``divide(batch, n)`` returns the parts of a batch for ``n`` threads.
    reduction : {"mean", "sum"}
    replicate : bool
        Whether the model is ``compute``'s argument, so that each thread can have a replica of it.
    """

    compute: Callable[..., BatchLoss | None]
    model: nn.Module | None
    threads: Threads
    divide: Callable[[Any, int], Sequence[Any]]
    reduction: str = "mean"
    replicate: bool = True

    def __post_init__(self) -> None:
        self._layers = [] if self.model is None else recurrent_layers(self.model)
        self._replicas: Replicas | None = None
        if self.replicate and self.model is not None:
            self._replicas = Replicas(self.model, self.threads)

    def __call__(
        self,
        batch: object,
        params: Sequence[Tensor],
        scaled: Scaled | None = None,
    ) -> BatchLoss | None:
        """Return the loss of a batch, and its gradient with respect to ``params``.

        With ``scaled``, the gradient is that of ``scaled(loss)``.

        Raises
        ------
        ShapeError
            If the batch cannot be divided.
        ValueError
            If threads would change the model at once.
        """
        parts = self._parts_of(batch)

        def compute_part(
            i: int,
            model: nn.Module | None,
        ) -> PartLoss | None:
            loss = self.compute(parts[i], model, i)
            if loss is None:
                return None
            # Weighted here, in the thread, so that parts only have to be added up.
            weight = 1.0 if self.reduction == "sum" else loss.weight_in_mean
            value, gradients = value_and_gradient(loss.loss, params, scaled)
            weighted = tuple(None if g is None else g * weight for g in gradients)
            return PartLoss(loss, (value * weight, weighted))

        n_parts = len(parts)
        if self._replicas is not None:
            series = self._series_of_parts(n_parts)
            losses = self._replicas.map(compute_part, series)
        else:
            in_thread = partial(compute_part, model=self.model)
            losses = map_in_threads(in_thread, range(n_parts), self.model, self.threads)
        return self._merge_losses([loss for loss in losses if loss is not None])

    def run_again(self, batch: object) -> None:
        """Compute the loss of a batch in this thread, with the model itself."""
        parts: Sequence[Any] = [batch]
        if self._replicas is None:
            parts = self.divide(batch, self.threads.n)
        for i, part in enumerate(parts):
            self.compute(part, self.model, i)

    def _parts_of(self, batch: object) -> Sequence[Any]:
        n = self.threads.n
        try:
            return self.divide(batch, n)
        except ShapeError as error:
            raise ShapeError(
                f"{n} threads cannot share the batch: {error}; name the axis of its observations "
                "(axis=), or use one thread"
            ) from error

    def _series_of_parts(self, n_parts: int) -> list[slice]:
        """Return the series of each part, whose rows of the recurrent states it needs."""
        numbers = map(_n_series, self._layers)
        # before the first batch no layer has a state
        n_series = next((n for n in numbers if n is not None), 0)
        n = self.threads.n
        return [array_split_slice(n_series, n, i) for i in range(n_parts)]

    def _merge_losses(self, parts: Sequence[PartLoss]) -> BatchLoss | None:
        """Return the loss of the batch from those of its parts, None if no part has any."""
        if not parts:
            return None
        losses = [part.loss for part in parts]
        n_live = sum(loss.n_live for loss in losses)
        weight = sum(loss.weight_in_mean for loss in losses)
        divisor = 1.0 if self.reduction == "sum" else weight or 1.0
        value, gradients = sum_gradients([part.weighted for part in parts])
        by_data = all(loss.weight is None for loss in losses)
        return BatchLoss(
            loss=value / divisor,
            n_live=n_live,
            weight=None if by_data else weight,
            gradients=tuple(None if g is None else g / divisor for g in gradients),
            numbers=_mean_numbers(losses, n_live),
        )


def _mean_numbers(
    losses: Sequence[BatchLoss],
    n_live: float,
) -> list[float]:
    """Return the mean of each further number over the data of all parts."""
    # without data all shares are 0, whatever they are divided by
    shares = [loss.n_live / (n_live or 1.0) for loss in losses]
    means = []
    for column in zip(*(loss.numbers for loss in losses), strict=True):
        parts = zip(shares, column, strict=True)
        means.append(sum(share * number for share, number in parts))
    return means


def _n_series(layer: Recur) -> int | None:
    """Return the number of series that a recurrent layer has states of, None before the first."""
    state = layer.state
    if state is None:
        return None
    first = state if isinstance(state, Tensor) else state[0]
    return first.shape[layer.batch_dim]


def shares(
    shard: Callable[[Any, int, int], Any],
) -> Callable[[Any, int], list[Any]]:
    """Return a function that divides a batch by ``shard(batch, i, n)``, which returns None for an
    empty part.
    """

    def divide(
        batch: Any,
        n: int,
    ) -> list[Any]:
        parts = [shard(batch, i, n) for i in range(n)]
        return [part for part in parts if part is not None]

    return divide


def join_parts(
    parts: Sequence[Any],
    axis: int,
) -> Any:
    """Return the parts of a batch's predictions or labels, trees of tensors, as one."""

    def join(*leaves: Any) -> Any:
        # no tensor: all parts have the same
        return torch.cat(leaves, axis) if isinstance(leaves[0], Tensor) else leaves[0]

    return parts[0] if len(parts) == 1 else tree_map(join, *parts)


def detached(prediction: Any) -> Any:
    """Return a prediction, a tree, without its graph."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, prediction)


# -- windows ---------------------------------------------------------------------------------------


class WindowPart(NamedTuple):
    """The part of a window that one thread computes, and the place of its series in the window."""

    batch: Minibatch
    weights: Tensor | None
    series: slice


class WindowReplicas:
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

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        threads: Threads,
    ) -> None:
        self.model = model
        self.loss = loss
        self._threads = threads
        self._replicas = Replicas(model, threads)
        self._params = list(model.parameters())
        self._form_is_known = False

    def gradient(
        self,
        batch: Minibatch,
        ws: Tensor | None,
        scaled: Scaled | None = None,
    ) -> tuple[float, Gradients]:
        """Return the loss over a window and its gradient by parameter; advance the model's state,
        detached.

        With ``scaled``, the gradient is that of ``scaled(loss)``. For errors see
        :meth:`Replicas.map`.
        """
        if not self._form_is_known and isinstance(self.loss, SeqLoss):
            takes_windows(self.model, batch.inputs)  # otherwise all threads would try it at once
        self._form_is_known = True  # the model remembers it
        parts = self._divide(batch, ws)
        divisors = self._divisors(batch.y, ws)
        n_overlap = 0 if batch.index is None else batch.index.n_overlap

        def compute(
            i: int,
            model: nn.Module,
        ) -> tuple[float, Gradients]:
            part, w, _ = parts[i]
            factors = None if divisors is None else self._factors(parts[i], divisors)
            if factors is not None and not any(factors):  # advance the state without training
                with torch.no_grad():
                    window_loss(self.loss, model, part.x, part.y, w, n_overlap)
                return 0.0, (None,) * len(self._params)
            loss = window_loss(self.loss, model, part.x, part.y, w, n_overlap, factors)
            return value_and_gradient(loss, self._params, scaled)

        series = [part.series for part in parts]
        return sum_gradients(self._replicas.map(compute, series))

    def _divide(
        self,
        batch: Minibatch,
        ws: Tensor | None,
    ) -> list[WindowPart]:
        n_inputs = len(batch.inputs)
        n_arrays = n_inputs + len(batch.labels)
        weights = () if ws is None else (ws,)
        parts: list[WindowPart] = []
        start = 0
        arrays_of_batch = (*batch.inputs, *batch.labels, *weights)
        for arrays in dividebatch(self._threads.n, *arrays_of_batch, axis=1):
            stop = start + arrays[0].shape[1]
            part = Minibatch(arrays[:n_inputs], arrays[n_inputs:n_arrays])
            w = None if ws is None else arrays[-1]
            parts.append(WindowPart(part, w, slice(start, stop)))
            start = stop
        return parts

    def _divisors(
        self,
        ys: Any,
        ws: Tensor | None,
    ) -> list[float] | None:
        """Return what each output's loss is divided by, None if nothing, as in a sum."""
        if isinstance(self.loss, SeqLoss):
            return self.loss.divisors(ys, ws)
        return [live_steps(ys, ws)]

    def _factors(
        self,
        part: WindowPart,
        divisors: list[float],
    ) -> list[float]:
        """Return a part's share of the divisors of the whole window."""
        of_part = self._divisors(part.batch.y, part.weights)
        assert of_part is not None
        pairs = zip(of_part, divisors, strict=True)
        # 0: no step of the window counts for this output
        return [mine / whole if whole else 0.0 for mine, whole in pairs]


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
        before = _slice_steps(xs, slice(0, n_overlap))
        xs = _slice_steps(xs, slice(n_overlap, None))
        steps = (before,) if isinstance(before, Tensor) else before
        if needs_context(model, steps):
            with context_steps(model, steps):
                return window_loss(loss, model, xs, ys, ws, factors=factors)
        # its outputs are not needed: gradients flow back through the state
        run_window(model, before)
    if factors is None:
        return call_loss(loss, model, xs, ys, ws)
    if isinstance(loss, SeqLoss):
        return call_loss(partial(loss, factors=factors), model, xs, ys, ws)
    return call_loss(loss, model, xs, ys, ws) * factors[0]


def call_loss(
    loss: Loss,
    model: nn.Module,
    xs: Any,
    ys: Any,
    ws: Tensor | None,
) -> Tensor:
    """Return the loss over a window, after checking that it is a scalar tensor."""
    if ws is None:
        return as_scalar(loss(model, xs, ys))
    return as_scalar(loss(model, xs, ys, ws))


def _slice_steps(
    xs: Any,
    which: slice,
) -> Any:
    if isinstance(xs, Tensor):
        return xs[which]
    return tuple(x[which] for x in xs)


# -- replicas of a model ---------------------------------------------------------------------------

# Types of attributes that replicas copy before each batch. Tensors and modules they share.
SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})


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

    def __init__(
        self,
        model: nn.Module,
        threads: Threads,
    ) -> None:
        self.model = model
        self.threads = threads
        self._models: list[nn.Module] = []  # made for the first batch
        self._layers: list[list[Recur]] = []  # of each model
        self._modules: list[tuple[nn.Module, ...]] = []  # of each place in the model

    def map(
        self,
        compute: Callable[[int, nn.Module], T],
        parts: Sequence[slice],
    ) -> list[T]:
        """Return ``compute(i, replica)`` for each part i, which has these series; the state moves
        on, detached.

        Raises
        ------
        ValueError
            If the model computes across series (batch normalisation), or changes its buffers.
        """
        if not self._models:
            self._make_replicas()
        self._copy_settings()
        buffers = list(self._buffers())
        # Of the model itself, before its own thread changes them.
        memories = [layer.memory() for layer in self._layers[0]]

        def compute_part(i: int) -> T:
            for layer, memory in zip(self._layers[i], memories, strict=True):
                layer.take_series(memory, parts[i])
            return compute(i, self._models[i])

        try:
            results = self.threads.map(compute_part, range(len(parts)), idempotent=True)
            for buffer in buffers:
                buffer.require_unchanged()
            # With fewer parts than threads, the last replicas have not run.
            used = self._layers[: len(parts)]
            for layers in zip(*used, strict=True):
                parts_of_memory = [layer.memory() for layer in layers]
                layers[0].join_series(parts_of_memory)
        finally:
            for model in self._models[1:]:
                reset(model)  # and release the graph
        return results

    def _make_replicas(self) -> None:
        # the first thread, which calls this, works with the model itself
        copies = [replica(self.model) for _ in range(1, self.threads.n)]
        self._models = [self.model, *copies]
        self._layers = [recurrent_layers(model) for model in self._models]
        modules = [model.modules() for model in self._models]
        self._modules = list(zip(*modules, strict=True))

    def _copy_settings(self) -> None:
        """Copy the model's settings to the replicas: a hook may have changed a dropout rate, or
        frozen a layer.
        """
        require_no_batch_norm(
            self.model, "threads", "train with n_jobs=1, or use nn.LayerNorm or nn.GroupNorm"
        )
        for original, *copies in self._modules:
            attributes = vars(original).items()
            simple = {name: v for name, v in attributes if type(v) in SIMPLE_TYPES}
            for copy in copies:
                vars(copy).update(simple)
                # setattr would go through the checks of nn.Module, for every buffer of every step.
                buffers_of(copy).update(buffers_of(original))

    def _buffers(self) -> Iterator[SharedBuffer]:
        for original, *_ in self._modules:
            for name, buffer in buffers_of(original).items():
                if buffer is not None:
                    yield SharedBuffer(original, name, buffer, version_of(buffer))


class SharedBuffer(NamedTuple):
    """A buffer of a model as it was before its replicas ran."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int

    def require_unchanged(self) -> None:
        """Raise ValueError if the buffer was replaced or changed."""
        now = buffers_of(self.module)[self.name]
        if now is not self.tensor or version_of(now) != self.version:
            raise ValueError(
                f"the model changes its buffer {self.name!r} as it runs, which several threads "
                "would do at once: train it with n_jobs=1"
            )
