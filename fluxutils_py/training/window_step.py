"""Training on one window after another: truncated backpropagation through time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.errors import LoadError
from fluxutils_py.nn.first_nonfinite import is_finite
from fluxutils_py.nn.losses import Loss, SeqLoss, needs_weights, takes_weights
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.nn.recurrent import State, map_state
from fluxutils_py.nn.states import (
    evaluating,
    mark,
    marked,
    recurrent_layers,
    reset,
    restore,
    snapshot,
)
from fluxutils_py.parallel import Threads
from fluxutils_py.training.gradient_step import BatchLoss, GradientStep
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.resharding import mean_of_buffers, reshard_rows
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.threaded_loss import WindowReplicas, window_loss


class WindowStep:
    """Train a model on one window after another, carrying its state from each window to the next.

    A step forgets the state if a group of series begins, then does what :class:`GradientStep` does,
    and then detaches the state.

    Parameters
    ----------
    model : nn.Module
    loss : callable
        ``loss(model, xs, ys)`` or ``loss(model, xs, ys, ws)``, returning a scalar.
    optimizer : torch.optim.Optimizer or None
        None: only compute gradients, see :meth:`mean_gradient`.
    threads : Threads, optional
        Running threads, over which to divide the series of each window.
    comm, clip, accumulate, precision, defer
        See :class:`GradientStep`. Each rank gets its part of every window from
        :class:`TensorBatches`.

    Attributes
    ----------
    n_updates : int
        Number of optimizer steps so far.

    Raises
    ------
    FloatingPointError
        If a loss or a gradient is NaN or infinite. That window leaves the parameters unchanged.
    TypeError, ValueError
        If the loss is not a scalar tensor, or does not depend on the parameters.
    """

    ends_together = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        *,
        comm: Any = "auto",
        clip: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
        threads: Threads | None = None,
        defer: bool | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self._replicas = (
            None if threads is None or threads.n == 1 else WindowReplicas(model, loss, threads)
        )
        self._takes_weights, self._needs_weights = takes_weights(loss), needs_weights(loss)
        self._loss_is_sum = is_sum(loss)
        self._step = GradientStep(
            self.run_window,
            optimizer,
            model,
            model.parameters(),
            comm=comm,
            batches="per_rank",
            clip=clip,
            accumulate=accumulate,
            precision=precision,
            reduction="sum" if self._loss_is_sum else "mean",
            defer=defer if self._replicas is None else False,
            describe=describe_window,
            run_again=self._run_again,
            observe=self._add_gradient,
        )
        self.ranks, self.autocast = self._step.ranks, self._step.autocast
        self._n_layers, self._n_live = (
            len(recurrent_layers(model)),
            0.0,
        )  # live steps of this rank in this epoch
        self._next_states: list[State | None] = []
        self._overlap_states: list[
            State | None
        ] = []  # with which the last window with an overlap began
        self.start_epoch()

    def __call__(self, batch: Minibatch | None) -> StepInfo | None:
        """Train on one window, or this rank's part of it. Return None, without counting it, if
        ranks agreed to stop.
        """
        self._live_part = 0.0
        info = self._step(batch)
        if info is not None:
            self._n_live += self._live_part
        return info

    @property
    def n_updates(self) -> int:
        return self._step.n_updates

    @n_updates.setter
    def n_updates(self, n: int) -> None:
        self._step.n_updates = n

    # -- one epoch -----------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Start a new mean of gradients."""
        self._gradient_sum = torch.zeros_like(self._step.vector.values)
        self._n_gradients, self._n_live, self._live_part = 0, 0.0, 0.0

    def flush(self) -> None:
        """Finish an epoch: apply waiting gradients, and make buffers equal on all ranks."""
        self._step.flush()
        self.ranks.average(list(self.model.buffers()), self._n_live)

    def mean_gradient(self) -> Tensor:
        """Return the mean gradient over the epoch's optimizer steps, before clipping, in
        ``net2vec`` order.
        """
        return self._gradient_sum / max(self._n_gradients, 1)

    def discard(self) -> None:
        """Forget states and waiting gradients, so that the model can be used after an error."""
        reset(self.model)
        self._step.discard()

    def _add_gradient(self, gradient: Tensor) -> None:
        self._gradient_sum += gradient
        self._n_gradients += 1

    # -- resuming in another process -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's recurrent state and gradients, which pass from window to window, as
        plain data.
        """
        return {
            "step": self._step.state_dict(),
            "gradients": (self._n_gradients, self._gradient_sum),
            "n_live": self._n_live,
            "states": snapshot(self.model),
            "next_states": self._next_states,
            "buffers": dict(self.model.named_buffers()),  # differ between ranks within an epoch
        }

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        per_rank = {
            name: [state[name] for state in states]
            for name in ("states", "next_states", "buffers", "n_live")
        }
        n_live = per_rank["n_live"]
        return {
            **states[0],
            "step": self._step.reshard_state_dict([state["step"] for state in states], rank, size),
            "states": reshard_rows(self.model, per_rank["states"], rank, size),
            "next_states": reshard_rows(self.model, per_rank["next_states"], rank, size),
            "buffers": mean_of_buffers(per_rank["buffers"], n_live),
            "n_live": sum(n_live) / size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, for a model with the same parameters
        and layers.
        """
        n_gradients, gradient_sum = state["gradients"]
        saved = len(state["states"]), gradient_sum.numel()
        expected = self._n_layers, self._gradient_sum.numel()
        if saved != expected:
            raise LoadError(
                f"the state is of {saved[0]} recurrent layers and {saved[1]} parameters, the model "
                f"has {expected[0]} and {expected[1]}"
            )
        device = self._gradient_sum.device
        states, self._next_states = (
            [None if s is None else map_state(lambda t: t.to(device), s) for s in state[name]]
            for name in ("states", "next_states")
        )
        restore(self.model, states)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        self._step.load_state_dict(state["step"])
        self._n_live, self._n_gradients = state["n_live"], n_gradients
        self._gradient_sum = gradient_sum.to(device, copy=True)

    # -- one window ----------------------------------------------------------------------------------

    def run_window(self, batch: Minibatch) -> BatchLoss | None:
        """Run the model over a window; return the loss, or None if no step of the window has one."""
        index, model = batch.index, self.model
        assert index is not None
        if not len(index.segments):  # this rank has no series
            self._next_states = []
            return None
        if (
            index.n_overlap and not index.first
        ):  # start from the last computed state of its first step
            self._overlap_states = self._next_states
            restore(model, self._overlap_states)
        if index.next_start is not None:
            mark(model, index.next_start - index.start)
        if not index.has_loss or batch.n_live == 0:  # advance the state without training
            with torch.no_grad():
                run_window(model, batch.x)
            found = None
        else:
            found = self._window_loss(batch, index.n_overlap)
        if index.next_start is not None:
            self._next_states = marked(model)
        return found

    def _window_loss(self, batch: Minibatch, n_overlap: int) -> BatchLoss:
        n_live, ws = batch.n_live, self._window_weights(batch)
        weight = None
        if not self.ranks.is_single:
            weight = 1.0 if self._loss_is_sum else loss_weight(self.loss, batch, n_live)
            self._live_part = n_live
        if self._replicas is not None:
            value, gradients = self._replicas.gradient(batch, ws, self._step.scaled)
            return BatchLoss(value, n_live, weight, gradients)
        loss = window_loss(self.loss, self.model, batch.x, batch.y, ws, n_overlap)
        return BatchLoss(loss, n_live, weight)

    def _run_again(self, batch: Minibatch) -> None:
        index = batch.index
        assert index is not None
        if index.n_overlap and not index.first:
            if not is_finite(
                self._overlap_states
            ):  # those of a later window, if losses are read late
                return
            restore(self.model, self._overlap_states)
        window_loss(
            self.loss, self.model, batch.x, batch.y, self._window_weights(batch), index.n_overlap
        )

    def _window_weights(self, batch: Minibatch) -> Tensor | None:
        if batch.weight is not None and not self._takes_weights:
            raise ValueError(
                "y has NaN (steps without a target), but the loss takes no weights: give it a "
                "fourth argument, loss(model, xs, ys, ws), or use seqloss"
            )
        if batch.weight is None and self._needs_weights:
            return self._gradient_sum.new_ones(*batch.labels[0].shape[:2], 1)
        return batch.weight


def is_sum(loss: Loss) -> bool:
    """Return whether the loss of a window is a sum over its series, not a mean."""
    return isinstance(loss, SeqLoss) and loss.divisors(()) is None


def describe_window(batch: Minibatch) -> str:
    """Describe the place of a window in the data, for error messages."""
    index = batch.index
    if index is None or not len(index.segments):
        return ""
    steps, segments = f"steps {index.start + index.n_overlap} to {index.stop}", index.segments
    return f" at {steps} of series {segments.series.min()} to {segments.series.max()}"


def loss_weight(loss: Loss, batch: Minibatch, n_live: float) -> float:
    """Return the weight of the loss of some series of a window among the other series: usually
    their live steps.

    Several cross-entropies, which divide by different numbers, also get the live steps.
    """
    divisors = (
        loss.divisors(batch.y, batch.weight)
        if isinstance(loss, SeqLoss) and not loss.is_mean
        else None
    )
    return divisors[0] if divisors is not None and len(divisors) == 1 else float(n_live)


def as_numbers(values: list[Any]) -> list[float]:
    """Return scalar tensors and numbers as numbers, reading a GPU once."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(v, Tensor) else v for v in values]


def evaluate_windows(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Minibatch],
    comm: Any = None,
    *,
    gradient: bool = False,
    precision: str = "float32",
) -> tuple[float, Tensor | None]:
    """Compute the loss of a model in evaluation mode, without training on the data.

    The training state, the mode and the gradients of the model stay unchanged.

    Parameters
    ----------
    model : nn.Module
    loss : callable
    batches : iterable of Minibatch
        This rank's part of each window.
    comm : None, communicator or RankGroup
    gradient : bool
        Whether to compute the gradient too.
    precision : {"float32", "bfloat16", "float16"}

    Returns
    -------
    loss : float
        Mean over the live steps of all ranks; NaN if there are none.
    gradient : Tensor or None
        Mean gradient over the windows, as in :meth:`WindowStep.mean_gradient`.
    """
    step = WindowStep(model, loss, None, comm=comm, precision=precision)
    found: list[
        tuple[Any, float, float]
    ] = []  # per window: loss, weight among the ranks, live steps
    kept = [p.grad for p in model.parameters()]
    with evaluating(model), torch.set_grad_enabled(gradient):
        for batch in batches:
            if gradient:
                info = step(batch)
                trained = info is not None and info.batch_loss is not None
                found.append(
                    (info.batch_loss, 1.0, info.n_live) if trained and info else (0.0, 0.0, 0)
                )
                continue
            if batch.first:
                reset(model)
            with step.autocast:
                part = step.run_window(batch)
            found.append(
                (part.loss, part.weight or part.n_live, part.n_live) if part else (0.0, 0.0, 0)
            )
        losses = [
            (value, *rest)
            for value, (_, *rest) in zip(as_numbers([v for v, *_ in found]), found, strict=True)
        ]
    for p, grad in zip(model.parameters(), kept, strict=True):
        p.grad = grad
    total, n_live = 0.0, 0.0
    for parts in zip(*([losses] if gradient else step.ranks.allgather(losses)), strict=True):
        live, weight = sum(n for *_, n in parts), sum(weight for _, weight, _ in parts)
        one = len(parts) == 1 or is_sum(loss)
        value = (
            sum(v for v, *_ in parts) if one else sum(v * w for v, w, _ in parts) / (weight or 1.0)
        )
        total += value * live
        n_live += live
    return total / n_live if n_live else math.nan, step.mean_gradient() if gradient else None
