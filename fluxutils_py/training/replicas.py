"""Run a model in several threads, each with a replica, and compute gradients of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.data.parts import dividebatch
from fluxutils_py.nn.losses import Loss, SeqLoss, live_steps
from fluxutils_py.nn.model_windows import replica, takes_windows
from fluxutils_py.nn.states import recurrent_layers, reset
from fluxutils_py.parallel import Threads
from fluxutils_py.training.gradients import Gradients, require_no_batch_norm, sum_gradients, value_and_gradient
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.window_loss import window_loss

SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})
T = TypeVar("T")


class Replicas:
    """Run parts of a batch in threads.

    Each thread has a replica of the model that shares its parameters and buffers; the first thread has the model
    itself. Before a batch, each replica copies the state of its series and the numbers, flags and strings of the
    model. Afterwards the model gets the state of all series, so that between batches it is as after a run in one
    thread. There may be fewer parts than threads.

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
        """Return ``compute(i, replica)`` for each part i, which has these series; the state moves on, detached.

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
                (name, module._buffers[name] is b and b._version == v) for module, name, b, v in buffers
            ):
                if not same:
                    raise ValueError(
                        f"the model changes its buffer {name!r} as it runs, which several threads would do at once: "
                        "train it with n_jobs=1"
                    )
            for layers in zip(*self._layers[: len(parts)], strict=True):
                layers[0].join_series([layer.memory() for layer in layers])
        finally:
            for model in self._models[1:]:
                reset(model)  # and release the graph
        return found

    def _copy_settings(self) -> None:
        """Copy the model's settings to the replicas: a hook may have changed a dropout rate, or frozen a layer."""
        require_no_batch_norm(self.model, "threads", "train with n_jobs=1, or take nn.LayerNorm or nn.GroupNorm")
        for original, *copies in self._modules:
            plain = {name: value for name, value in vars(original).items() if type(value) in SIMPLE_TYPES}
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

    The loss must be a mean over the live steps of its window. Losses of :func:`fluxutils_py.seqloss` that are not means
    (sums, class weights) are rescaled. The sum of the parts, weighted by live steps and added in a fixed order, is the
    loss and gradient of the whole window, bit-identical from run to run.

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
        """Return the loss over a window and its gradient by parameter; advance the model's state, detached.

        With ``scaled``, the gradient is that of ``scaled(loss)``. For errors see :meth:`Replicas.map`.
        """
        xs, ys = (v if isinstance(v, tuple) else (v,) for v in (batch.x, batch.y))
        if not self._models and isinstance(self.loss, SeqLoss):  # otherwise all threads would try it at once
            takes_windows(self.model, xs)
        chunks = dividebatch(self.threads.n, *xs, *ys, *(() if ws is None else (ws,)), axis=1)
        divisors, n_overlap = self._divisors(batch.y, ws), 0 if batch.index is None else batch.index.n_overlap
        series, begin = [], 0
        for chunk in chunks:
            series.append(slice(begin, begin := begin + chunk[0].shape[1]))

        def compute(i: int, model: nn.Module) -> tuple[float, Gradients]:
            x, y = chunks[i][: len(xs)], chunks[i][len(xs) : len(xs) + len(ys)]
            x, y = (own if isinstance(v, tuple) else own[0] for own, v in ((x, batch.x), (y, batch.y)))
            w, factors = None if ws is None else chunks[i][-1], None
            if divisors is not None:
                own = self._divisors(y, w)
                assert own is not None
                factors = [mine / all_ if all_ else 0.0 for mine, all_ in zip(own, divisors, strict=True)]
            if factors is not None and not any(factors):  # advance the state without training
                with torch.no_grad():
                    window_loss(self.loss, model, x, y, w, n_overlap)
                return 0.0, (None,) * len(self._params)
            loss = window_loss(self.loss, model, x, y, w, n_overlap, factors)
            return value_and_gradient(loss, self._params, scaled)

        return sum_gradients(self.map(compute, series))

    def _divisors(self, ys: Any, ws: Tensor | None) -> list[float] | None:
        return self.loss.divisors(ys, ws) if isinstance(self.loss, SeqLoss) else [live_steps(ys, ws)]
