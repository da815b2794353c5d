"""One training step on one window: truncated backpropagation through time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fluxutils_py.data import Window
from fluxutils_py.nn import (
    gradients,
    mark,
    marked,
    needs_weights,
    pack,
    recurs,
    reset,
    restore,
    run_window,
    snapshot,
    takes_weights,
)
from fluxutils_py.nn.losses import Loss
from fluxutils_py.nn.recurrent import State
from fluxutils_py.parallel import Threads
from fluxutils_py.training.batches import Batch
from fluxutils_py.training.loop import StepInfo
from fluxutils_py.training.replicas import Replicas, add_to
from fluxutils_py.training.windowloss import call_loss, require_dependence, window_loss


class WindowStep:
    """Train a model on one window after another, its state carried from each to the next.

    The order within a step: the state is forgotten if a group begins; forward, check that the loss is finite, gradient,
    check that it is finite, clip, optimizer; then the state is detached. With ``accumulate`` the optimizer steps
    after so many windows, on their gradients weighted by live steps, and at the end of an epoch (:meth:`flush`).

    Parameters
    ----------
    model : nn.Module
    loss : callable
        ``loss(model, xs, ys)`` or ``loss(model, xs, ys, ws)``, returning a scalar.
    optimizer : torch.optim.Optimizer
    clip : float, optional
        Largest global norm of the gradient; larger ones are scaled down to it.
    accumulate : int
        Windows per step of the optimizer.
    threads : Threads, optional
        Threads at work, over which each window's series are divided; see :class:`Replicas`.

    Attributes
    ----------
    updates : int
        Steps of the optimizer so far.

    Raises
    ------
    FloatingPointError
        If a loss or a gradient is NaN or infinite. The parameters are then as before the window.
    TypeError, ValueError
        If the loss is not a scalar tensor, or does not depend on the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        threads: Threads | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip, self.accumulate = clip, accumulate
        self._replicas = None if threads is None or threads.n == 1 else Replicas(model, loss, threads)
        self.updates = 0
        self._params, self._layers = list(model.parameters()), recurs(model)
        first = next((p for p in self._params if p.is_floating_point()), torch.empty(0))
        self._flat = first.new_empty(sum(p.numel() for p in self._params), requires_grad=False)
        self._weighted, self._always_weights = takes_weights(loss), needs_weights(loss)
        self._waiting = self._waiting_live = 0  # windows whose gradients have not been applied yet
        self._next_states: list[State | None] = []
        self.start_epoch()

    # -- one epoch -----------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Begin a new mean of the gradients."""
        self._gradient_sum = torch.zeros_like(self._flat)
        self._n_gradients = 0

    def flush(self) -> None:
        """Apply gradients that are still waiting: nothing is dropped at the end of an epoch."""
        if self._waiting:
            self._update()

    def mean_gradient(self) -> Tensor:
        """Mean over the epoch's optimizer steps of the gradient, before clipping, in ``net2vec`` order."""
        return self._gradient_sum / max(self._n_gradients, 1)

    def abandon(self) -> None:
        """After an error: forget states and waiting gradients, so that the model can be used."""
        reset(self.model)
        self._forget_gradients()
        self._waiting = self._waiting_live = 0

    def _scale_gradients(self, factor: float) -> None:
        for p in self._params:
            if p.grad is not None:
                p.grad.mul_(factor)

    def _forget_gradients(self) -> None:
        for p in self._params:  # a tenth of the time of optimizer.zero_grad()
            p.grad = None

    # -- one window ----------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> StepInfo:
        w, model = batch.window, self.model
        if w.place.first:
            reset(model)
        elif w.place.lead:  # from the state that its first step had when it was last computed
            restore(model, self._next_states)
        if w.place.next_start is not None:
            mark(model, w.place.next_start - w.place.start)
        if not w.place.counts or w.n_live == 0:  # the state moves on, nothing is learnt
            with torch.no_grad():
                run_window(model, batch.x)
            value = None
        else:
            value = self._learn(batch)
        if w.place.next_start is not None:
            self._next_states = marked(model)
        for layer in self._layers:
            layer.truncate()
        return StepInfo(value, w.n_live if value is not None else 0)

    def _learn(self, batch: Batch) -> float:
        w, ws = batch.window, self._weights(batch)
        if self._replicas is None:
            loss = window_loss(self.loss, self.model, batch.x, batch.y, ws, w.place.lead)
            value = loss.item()
        else:
            value, grads = self._replicas.gradient(batch, ws)
        if not math.isfinite(value):
            self._fail("loss", value, w)
        if self._replicas is None:
            require_dependence(loss)
            (loss if self.accumulate == 1 else loss * w.n_live).backward()
        else:
            add_to(self._params, grads, 1 if self.accumulate == 1 else w.n_live)
        self._waiting += 1
        self._waiting_live += w.n_live
        if self._waiting == self.accumulate:
            self._update(w)
        return value

    def _weights(self, batch: Batch) -> Tensor | None:
        if batch.w is not None and not self._weighted:
            raise ValueError(
                "y has NaN (steps without a target), but the loss takes no weights: give it a fourth argument, "
                "loss(model, xs, ys, ws), or use seqloss"
            )
        return unit_weights(batch, self._flat) if batch.w is None and self._always_weights else batch.w

    def _update(self, window: Window | None = None) -> None:
        if self.accumulate > 1:
            self._scale_gradients(1 / self._waiting_live)
        flat = pack(gradients(self._params), self._flat)
        norm = torch.linalg.vector_norm(flat).item()
        if not math.isfinite(norm):
            self._fail("gradient norm", norm, window)
        self._gradient_sum += flat
        self._n_gradients += 1
        if self.clip is not None and norm > self.clip:
            self._scale_gradients(self.clip / (norm + 1e-6))
        self.optimizer.step()
        self._forget_gradients()
        self.updates += 1
        self._waiting = self._waiting_live = 0

    def _fail(self, what: str, value: float, w: Window | None) -> None:
        place = ""
        if w is not None:
            where = f"series {w.place.rows.series.min()} to {w.place.rows.series.max()}"
            place = f" at steps {w.place.start + w.place.lead} to {w.place.start + w.x[0].shape[0]} of {where}"
        raise FloatingPointError(
            f"{what} is {value}{place}; the parameters are as before this window. "
            "Lower the learning rate, set clip in the spec, or look for extreme values in the data"
        )


def unit_weights(batch: Batch, like: Tensor) -> Tensor:
    """Ones (S, B, 1), for a loss that must be given weights; of the type and device of ``like``."""
    y = batch.y if isinstance(batch.y, Tensor) else batch.y[0]
    return like.new_ones(*y.shape[:2], 1, requires_grad=False)


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> float:
    """The loss of a model on other data, over all live steps; in evaluation mode, without a trace.

    The training state, the mode, and the gradients of the model are as before.
    """
    kept, modes = snapshot(model), [(m, m.training) for m in model.modules()]
    total, n_live = 0.0, 0
    like, always = next(model.parameters()), needs_weights(loss)
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                w = batch.window
                if w.place.first:
                    reset(model)
                if w.n_live == 0 or not w.place.counts:
                    run_window(model, batch.x)
                    continue
                ws = unit_weights(batch, like) if batch.w is None and always else batch.w
                total += call_loss(loss, model, batch.x, batch.y, ws).item() * w.n_live
                n_live += w.n_live
    finally:
        for m, mode in modes:
            m.training = mode
        restore(model, kept)
    return total / n_live if n_live else math.nan
