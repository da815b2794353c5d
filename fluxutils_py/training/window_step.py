"""Training on one window after another: truncated backpropagation through time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.errors import LoadError
from fluxutils_py.nn.first_nonfinite import is_finite
from fluxutils_py.nn.kernels.modules import is_intercepted
from fluxutils_py.nn.kernels.recurrence import Recorded, recurrence_backward
from fluxutils_py.nn.losses import Loss, SeqLoss, needs_weights, takes_weights
from fluxutils_py.nn.model_windows import context_steps, needs_context, run_window
from fluxutils_py.nn.recurrent import Recur, State, map_state
from fluxutils_py.nn.states import (
    carrying_sensitivities,
    evaluating,
    mark,
    marked,
    recurrent_layers,
    reset,
    restore,
    sensitivities,
    snapshot,
)
from fluxutils_py.parallel import RankGroup
from fluxutils_py.torch_private import gradient_hooks_of
from fluxutils_py.training.gradient_step import BatchLoss, GradientStep, as_scalar
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.resharding import mean_of_buffers, reshard_rows
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.window_graph import WindowGraph, kind_of_window

# The environment variable that lets a GPU repeat windows as graphs, if it is 1.
GRAPHS = "FLUXUTILS_CUDA_GRAPHS"


class WindowStep(GradientStep):
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
    gradient : {"truncated", "exact"}
        "exact": diagonal layers carry the sensitivity of their state to their parameters from
        window to window, see ``nn/states.py``. Windows must not overlap.
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

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        *,
        comm: object = "auto",
        clip: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
        gradient: str = "truncated",
        defer: bool | None = None,
    ) -> None:
        self.loss = loss
        self._is_exact = gradient == "exact"
        self._takes_weights = takes_weights(loss)
        self._needs_weights = needs_weights(loss)
        self._loss_is_sum = is_sum(loss)
        super().__init__(
            optimizer,
            model,
            model.parameters(),
            comm=comm,
            batches="per_rank",  # TensorBatches has cut this rank's part of each window already
            clip=clip,
            accumulate=accumulate,
            precision=precision,
            reduction="sum" if self._loss_is_sum else "mean",
            defer=defer,
        )
        self._settings["gradient"] = gradient
        self._n_layers = len(recurrent_layers(model))
        self._next_states: list[State | None] = []  # at the first step of the next window
        self._overlap_states: list[State | None] = []  # with which the last overlap began
        self.start_epoch()

    def bind(self) -> None:
        super().bind()
        wanted = os.environ.get(GRAPHS) == "1"
        self._is_graphed = wanted and self.defer and not self._is_exact
        self._graph: WindowGraph | None = None

    # -- one epoch ---------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Start a new mean of gradients."""
        self._gradient_sum = torch.zeros_like(self.vector.values)
        self._n_gradients = 0
        # Steps with a loss on this rank: the weight of its buffers when ranks average them.
        self._n_live = 0.0
        self._live_part = 0.0  # those of the window in progress, which may not count

    def flush(self) -> None:
        """Finish an epoch: apply waiting gradients, and make buffers equal on all ranks."""
        super().flush()
        self.ranks.average(list(self.model.buffers()), self._n_live)

    def mean_gradient(self) -> Tensor:
        """Return the mean gradient over the epoch's optimizer steps, before clipping, in
        ``net2vec`` order.
        """
        return self._gradient_sum / max(self._n_gradients, 1)

    def discard(self) -> None:
        """Forget states and waiting gradients, so that the model can be used after an error."""
        reset(self.model)
        super().discard()

    def count(self) -> None:
        self._n_live += self._live_part
        self._live_part = 0.0

    def observe(self, gradient: Tensor) -> None:
        self._gradient_sum += gradient
        self._n_gradients += 1

    # -- resuming in another process ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's recurrent state and gradients, which pass from window to window, as
        plain data.
        """
        return {
            "step": super().state_dict(),
            "gradients": (self._n_gradients, self._gradient_sum),
            "n_live": self._n_live,
            "states": snapshot(self.model),
            "sensitivities": sensitivities(self.model),
            "next_states": self._next_states,
            "buffers": dict(self.model.named_buffers()),  # differ between ranks within an epoch
        }

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        names = ("step", "states", "sensitivities", "next_states", "buffers", "n_live")
        per_rank: dict[str, Any] = {}
        for name in names:
            per_rank[name] = [state[name] for state in states]
        n_live = per_rank["n_live"]
        return {
            **states[0],
            "step": super().reshard_state_dict(per_rank["step"], rank, size),
            "states": reshard_rows(self.model, per_rank["states"], rank, size),
            "sensitivities": reshard_rows(self.model, per_rank["sensitivities"], rank, size),
            "next_states": reshard_rows(self.model, per_rank["next_states"], rank, size),
            "buffers": mean_of_buffers(per_rank["buffers"], n_live),
            "n_live": sum(n_live) / size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, for a model with the same parameters
        and layers.
        """
        n_gradients, gradient_sum = state["gradients"]
        n_layers = len(state["states"])
        n_params = gradient_sum.numel()
        expected = self._gradient_sum.numel()
        if n_layers != self._n_layers or n_params != expected:
            raise LoadError(
                f"the state is of {n_layers} recurrent layers and {n_params} parameters, the model "
                f"has {self._n_layers} and {expected}"
            )
        device = self._gradient_sum.device
        carried: Any = _states_on(device, state["sensitivities"])
        restore(self.model, _states_on(device, state["states"]), carried)
        self._next_states = _states_on(device, state["next_states"])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        super().load_state_dict(state["step"])
        self._n_live = state["n_live"]
        self._n_gradients = n_gradients
        self._gradient_sum = gradient_sum.to(device, copy=True)

    # -- one window --------------------------------------------------------------------------------

    def _loss_of_single_process(self, batch: Any) -> StepInfo | None:
        if batch is not None and self._is_graphed and self._is_whole(batch):
            return self._graphed_loss(batch)
        if batch is not None and self._is_plain(batch):
            grads = self.vector.views
            loss = recorded_squared_error(self.model, batch.x, batch.y, self.params, grads)
            if loss is not None:
                for p, grad in zip(self.params, grads, strict=True):
                    p.grad = grad
                return StepInfo(loss, batch.n_live)
        return super()._loss_of_single_process(batch)

    def _graphed_loss(self, batch: Minibatch) -> StepInfo | None:
        """Return the loss of a whole window by a CUDA graph, if it is of the kind of the first that
        could be.
        """
        compute = super()._loss_of_single_process
        if not batch.n_live or any(layer.state is None for layer in self._layers):
            return compute(batch)
        if self._graph is None:
            self._graph = WindowGraph(compute, batch, self.model, self.vector)
        if kind_of_window(batch, self.model) != self._graph.kind:
            return compute(batch)
        return self._graph(batch)

    def _is_whole(self, batch: Minibatch) -> bool:
        """Return whether all steps of a window have a loss, and nothing else is wanted of them."""
        index = batch.index
        assert index is not None
        return bool(
            batch.weight is None
            and index.has_loss
            and not index.n_overlap
            and index.next_start is None
        )

    def _is_plain(self, batch: Minibatch) -> bool:
        """Return whether the loss is a mean squared error over a whole window."""
        return bool(
            self._is_whole(batch)
            and len(batch.inputs) == len(batch.labels) == 1
            and isinstance(self.loss, SeqLoss)
            and self.loss.is_mean_squared_error
            and self.precision == "float32"
            and not self.defer
        )

    def compute_loss(self, batch: Minibatch) -> BatchLoss | None:
        """Run the model over a window; return the loss, None if no step of the window has one."""
        self._live_part = 0.0
        index = batch.index
        assert index is not None
        if not len(index.segments):  # this rank has no series
            self._next_states = []
            return None
        if index.n_overlap and not index.first:
            # The last window has already run through the overlap: go back to its first step.
            self._overlap_states = self._next_states
            restore(self.model, self._overlap_states)
        if index.next_start is not None:
            mark(self.model, index.next_start - index.start)
        loss = None
        # nothing is learnt from steps of the burn-in
        is_exact = self._is_exact and index.has_loss
        with carrying_sensitivities(self.model) if is_exact else nullcontext():
            if index.has_loss and batch.n_live != 0:
                loss = self._window_loss(batch, index.n_overlap)
            else:  # advance the state without training
                with torch.no_grad():
                    run_window(self.model, batch.x)
        if index.next_start is not None:
            self._next_states = marked(self.model)
        return loss

    def _window_loss(self, batch: Minibatch, n_overlap: int) -> BatchLoss:
        n_live = batch.n_live
        ws = self._window_weights(batch)
        weight = None
        if not self.ranks.is_single:
            weight = 1.0 if self._loss_is_sum else loss_weight(self.loss, batch, n_live)
            self._live_part = n_live
        loss = window_loss(self.loss, self.model, batch.x, batch.y, ws, n_overlap)
        return BatchLoss(loss, n_live, weight)

    def compute_again(self, batch: Minibatch) -> None:
        index = batch.index
        assert index is not None
        if index.n_overlap and not index.first:
            if not is_finite(self._overlap_states):
                return  # those of a later window, if losses are read late
            restore(self.model, self._overlap_states)
        ws = self._window_weights(batch)
        window_loss(self.loss, self.model, batch.x, batch.y, ws, index.n_overlap)

    def describe(self, batch: Minibatch) -> str:
        """Return the steps and series of a window."""
        index = batch.index
        if index is None or not len(index.segments):
            return ""
        first_step = index.start + index.n_overlap
        series = index.segments.series
        return f" at steps {first_step} to {index.stop} of series {series.min()} to {series.max()}"

    def _window_weights(self, batch: Minibatch) -> Tensor | None:
        if batch.weight is not None and not self._takes_weights:
            raise ValueError(
                "y has NaN (steps without a target), but the loss takes no weights: give it a "
                "fourth argument, loss(model, xs, ys, ws), or use seqloss"
            )
        if batch.weight is None and self._needs_weights:
            return self._gradient_sum.new_ones(*batch.labels[0].shape[:2], 1)
        return batch.weight


def window_loss(
    loss: Loss, model: nn.Module, xs: Any, ys: Any, ws: Tensor | None, n_overlap: int = 0
) -> Tensor:
    """Return the loss over a window without its first ``n_overlap`` steps, through which gradients
    still flow.

    A recurrent model runs through these steps before the loss is called. For a model that needs its
    context in the same call, they are put before each window that the loss passes to it, and cut
    off from its outputs. So a user's loss always gets the window without them.
    """
    if n_overlap:
        before = _slice_steps(xs, slice(0, n_overlap))
        xs = _slice_steps(xs, slice(n_overlap, None))
        steps = (before,) if isinstance(before, Tensor) else before
        if needs_context(model, steps):
            with context_steps(model, steps):
                return window_loss(loss, model, xs, ys, ws)
        # its outputs are not needed: gradients flow back through the state
        run_window(model, before)
    return as_scalar(loss(model, xs, ys) if ws is None else loss(model, xs, ys, ws))


def recorded_squared_error(
    model: nn.Module, x: Tensor, y: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor]
) -> float | None:
    """Return the mean squared error over a window, and write its gradient.

    The model is a stack of recurrent layers that the native kernels compute, with a linear head. As
    the order of its operations is known, they need no graph, which takes most of the time of a
    small window; they are those that torch would call, with its results to rounding. The states
    move on.

    Parameters
    ----------
    model : nn.Module
    x, y : Tensor of shapes (S, B, F) and (S, B, G)
    params : sequence of Tensor
    grads : sequence of Tensor
        Get the gradients of the parameters.

    Returns
    -------
    float or None
        None if torch has to compute it: nothing has changed then.
    """
    layers = _layers_of_stack(model)
    if layers is None:
        return None
    head = layers.pop()
    tape: list[Recorded] = []
    with torch.no_grad():
        z, states = _run_recorded(layers, x, tape)
        if z is None:
            return None
        weights = [w for recorded in tape for w in recorded[2][3:] if w is not None]
        weights += head.parameters()
        # each once, and all of them, so that none has a gradient that is not written here
        if [*map(id, weights)] != [*map(id, params)] or any(map(_is_watched, params)):
            return None
        out = F.linear(z, head.weight, head.bias)
        if out.shape != y.shape or out.dtype != y.dtype:
            return None
        loss = F.mse_loss(out, y)
        value = float(loss)
        if not math.isfinite(value):  # computed again, for its error
            return None
        slope = torch.ops.aten.mse_loss_backward(torch.ones_like(loss), out, y, 1)
        _write_gradients(tape, head, z, slope, dict(zip(map(id, params), grads, strict=True)))
    for layer, state in zip(layers, states, strict=True):
        layer.state = state
    return value


def _layers_of_stack(model: nn.Module) -> list[Any] | None:
    """Return the layers of a model if they are a stack with a linear head, and nothing looks on."""
    if type(model) is not nn.Sequential or is_intercepted(model) or not len(model):
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_anomaly_enabled():
        return None
    layers = list(model)
    head = layers[-1]
    return None if type(head) is not nn.Linear or is_intercepted(head) else layers


def _run_recorded(
    layers: list[Any], x: Tensor, tape: list[Recorded]
) -> tuple[Tensor | None, list[State]]:
    """Return the outputs of recurrent layers and their next states; None in place of outputs if the
    native kernels do not compute one.
    """
    states: list[State] = []
    for layer in layers:
        # a class derived from it may compute something else
        is_plain = isinstance(layer, Recur) and type(layer).forward is Recur.forward
        result = layer.run_recorded(x, tape) if is_plain else None
        if result is None:
            return None, states
        x, state = result
        states.append(state)
    return x, states


def _is_watched(p: Tensor) -> bool:
    """Return whether a parameter does not learn, or functions wait for its gradient."""
    return not p.requires_grad or any(gradient_hooks_of(p))


def _write_gradients(
    tape: list[Recorded], head: nn.Linear, z: Tensor, slope: Tensor, grad_of: dict[int, Tensor]
) -> None:
    """Write the gradients of a head and of recorded layers, from the slope of the outputs; ``z``
    are the inputs of the head.
    """
    rows = slope.flatten(0, 1)
    torch.mm(rows.t(), z.flatten(0, 1), out=grad_of[id(head.weight)])
    if head.bias is not None:
        torch.sum(rows, 0, out=grad_of[id(head.bias)])
    of_output: Tensor | None = torch.mm(rows, head.weight).view_as(z)
    for recorded in reversed(tape):
        x, _, _, *weights = recorded[2]
        of_input = None if recorded is tape[0] or x is None else torch.empty_like(x)
        of_weights = [None if w is None else grad_of[id(w)] for w in weights]
        gradients = (of_input, None, None, *of_weights)
        recurrence_backward(recorded, (of_output, None, None), gradients)
        of_output = of_input


def _slice_steps(xs: Any, which: slice) -> Any:
    if isinstance(xs, Tensor):
        return xs[which]
    return tuple(x[which] for x in xs)


def is_sum(loss: Loss) -> bool:
    """Return whether the loss of a window is a sum over its series, not a mean."""
    return isinstance(loss, SeqLoss) and loss.divisors(()) is None


def _states_on(device: torch.device, states: Iterable[State | None]) -> list[State | None]:
    return [None if s is None else map_state(lambda t: t.to(device), s) for s in states]


def loss_weight(loss: Loss, batch: Minibatch, n_live: float) -> float:
    """Return the weight of the loss of some series of a window among the other series: usually
    their live steps.

    Several cross-entropies, which divide by different numbers, also get the live steps.
    """
    if not isinstance(loss, SeqLoss) or loss.is_mean:
        return float(n_live)
    divisors = loss.divisors(batch.y, batch.weight)
    if divisors is None or len(divisors) != 1:
        return float(n_live)
    return divisors[0]


# -- without training ------------------------------------------------------------------------------


def evaluate_windows(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Minibatch],
    comm: RankGroup | None = None,
    precision: str = "float32",
) -> float:
    """Compute the loss of a model in evaluation mode, without training on the data.

    The training state and the mode of the model stay unchanged.

    Parameters
    ----------
    model : nn.Module
    loss : callable
    batches : iterable of Minibatch
        This rank's part of each window.
    comm : None or RankGroup
    precision : {"float32", "bfloat16"}

    Returns
    -------
    float
        Mean over the live steps of all ranks; NaN if there are none.
    """
    step = WindowStep(model, loss, None, comm=comm, precision=precision)
    windows: list[BatchLoss] = []
    with evaluating(model), torch.no_grad():
        for batch in batches:
            if batch.first:
                reset(model)
            with step.autocast:
                part = step.compute_loss(batch)
            windows.append(BatchLoss(0.0, 0) if part is None else part)
        numbers = as_numbers([window.loss for window in windows])
    pairs = zip(numbers, windows, strict=True)
    windows = [BatchLoss(number, window.n_live, window.weight) for number, window in pairs]
    weighted = 0.0
    n_live = 0.0
    for parts in zip(*step.ranks.allgather(windows), strict=True):  # the same window on all ranks
        live = sum(part.n_live for part in parts)
        weighted += _loss_over_ranks(parts, is_sum(loss)) * live
        n_live += live
    return weighted / n_live if n_live else math.nan


def differentiate_windows(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Minibatch],
    comm: RankGroup | None = None,
    precision: str = "float32",
    gradient: str = "truncated",
) -> tuple[float, Tensor]:
    """Compute what :func:`evaluate_windows` does, and the mean gradient over the windows.

    The gradient is that of :meth:`WindowStep.mean_gradient`, truncated or exact. The training
    state, the mode and the gradients of the model stay unchanged.
    """
    step = WindowStep(model, loss, None, comm=comm, precision=precision, gradient=gradient)
    # A user may be accumulating gradients: steps clear them.
    earlier = [p.grad for p in model.parameters()]
    weighted = 0.0
    n_live = 0.0
    with evaluating(model), torch.enable_grad():
        for batch in batches:
            info = step(batch)
            if info is not None and info.batch_loss is not None:
                weighted += info.batch_loss * info.n_live
                n_live += info.n_live
    for p, grad in zip(model.parameters(), earlier, strict=True):
        p.grad = grad
    return weighted / n_live if n_live else math.nan, step.mean_gradient()


def _loss_over_ranks(parts: Sequence[BatchLoss], loss_is_sum: bool) -> float:
    """Return the loss of a window from the losses of its parts on the ranks."""
    if len(parts) == 1 or loss_is_sum:
        return sum(part.loss for part in parts)
    weights = [part.weight or part.n_live for part in parts]
    weighted = zip(weights, parts, strict=True)
    return sum(part.loss * weight for weight, part in weighted) / (sum(weights) or 1.0)


def as_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalar tensors and numbers as numbers, reading a GPU once."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(v, Tensor) else v for v in values]
