"""Compute the loss and gradient of a batch in several threads, each with its share of the observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.parallel import Threads
from fluxutils_py.training.gradients import (
    Gradients,
    require_thread_safe,
    sum_gradients,
    value_and_gradient,
    watching_modules,
)
from fluxutils_py.training.replicas import Replicas
from fluxutils_py.training.step_info import BatchLoss
from fluxutils_py.tree import tree_map


class ThreadedLoss:
    """Divide each batch over threads as over ranks; the losses of the parts add up to that of the batch.

    The sum, weighted by ``n_live`` and added in a fixed order, is bit-identical from run to run.

    Parameters
    ----------
    compute : callable
        ``compute(part, model, i)`` returns the :class:`BatchLoss` of part ``i``, or None, computed by this replica of
        the model. It must be thread-safe.
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
            raise ShapeError(f"n_jobs={n} threads cannot share the batch, train with n_jobs=1: {error}") from error

        def compute_part(i: int, model: Any) -> tuple[BatchLoss, tuple[float, Gradients]] | None:
            found = self.compute(parts[i], model, i)
            if found is None:
                return None
            weight = 1.0 if self.reduction == "sum" else found.n_live if found.weight is None else found.weight
            value, gradients = value_and_gradient(found.loss, self.params, self.scaled)
            return found, (value * weight, tuple(g if g is None else g * weight for g in gradients))

        if self._replicas is not None:
            n_series = next((s.shape[d] for s, d in map(_first_state, self._layers) if s is not None), 0)
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
        """Compute the parts; raise ValueError before a module runs that several threads would change at once."""
        if n_parts == 1:
            return self.threads.map(lambda i: compute_part(i, self.model), range(1), idempotent=True)

        def watched_part(i: int) -> Any:
            watch()
            return compute_part(i, self.model)

        with watching_modules(require_thread_safe) as watch:
            return self.threads.map(watched_part, range(n_parts), idempotent=True)

    def _merge_losses(self, found: Sequence[tuple[BatchLoss, tuple[float, Gradients]]]) -> BatchLoss | None:
        if not found:
            return None
        losses = [loss for loss, _ in found]
        n_live = sum(loss.n_live for loss in losses)
        weight = sum(loss.n_live if loss.weight is None else loss.weight for loss in losses)
        divisor = 1.0 if self.reduction == "sum" else weight or 1.0
        value, gradients = sum_gradients([part for _, part in found])
        columns = zip(*(loss.numbers for loss in losses), strict=True)
        shares = [loss.n_live / (n_live or 1.0) for loss in losses]
        numbers = [sum(share * v for share, v in zip(shares, column, strict=True)) for column in columns]
        divided = tuple(g if g is None else g / divisor for g in gradients)
        own = None if all(loss.weight is None for loss in losses) else weight
        return BatchLoss(value / divisor, n_live, own, divided, numbers)


def _first_state(layer: Any) -> tuple[Tensor | None, int]:
    state = layer.state
    return (state if state is None or isinstance(state, Tensor) else state[0]), layer.batch_dim


def shares(shard: Callable[[Any, int, int], Any]) -> Callable[[Any, int], list[Any]]:
    """Return a function that divides a batch by ``shard(batch, i, n)``, which returns None for an empty part."""
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
