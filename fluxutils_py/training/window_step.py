"""One training step on one window: truncated backpropagation through time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fluxutils_py.data.sequence_windows import Window
from fluxutils_py.errors import LoadError
from fluxutils_py.nn.losses import Loss, SeqLoss, needs_weights, takes_weights
from fluxutils_py.nn.model_windows import run_window
from fluxutils_py.nn.recurrent import State, map_state
from fluxutils_py.nn.states import evaluating, mark, marked, recurrent_layers, reset, restore, snapshot
from fluxutils_py.nn.vectors import dense_gradients, flatten_into
from fluxutils_py.parallel import RankGroup, Threads
from fluxutils_py.parallel.rank_group import describe_by_rank
from fluxutils_py.training.loop import StepInfo
from fluxutils_py.training.pending_loss import PendingLoss
from fluxutils_py.training.replicas import Replicas, accumulate_gradients
from fluxutils_py.training.tensor_batches import Batch
from fluxutils_py.training.window_loss import require_gradient, window_loss


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
        Threads at work, over which each window's series are divided.
    comm : RankGroup, optional
        The ranks that train together, each on its part of every window; see :class:`RankGroup`. None: this process
        alone.
    late : bool, optional
        Whether losses are read one step behind, so that a GPU need not wait for Python. A loss or gradient that is not
        finite is then an error one step later; meanwhile the optimizer, which must be a fused one of torch, changes
        nothing. None: on a GPU, where that can be done: on one process, without threads, ``accumulate``, or an
        optimizer that is not fused.

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
        comm: RankGroup | None = None,
        late: bool | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.ranks = RankGroup() if comm is None else comm
        self.clip, self.accumulate = clip, accumulate
        self._replicas = None if threads is None or threads.n == 1 else Replicas(model, loss, threads)
        self.n_updates = 0
        self._params, self._layers = list(model.parameters()), recurrent_layers(model)
        self._flat = self.ranks.bind(self._params)
        self._weighted, self._always_weights = takes_weights(loss), needs_weights(loss)
        self._adds_up = isinstance(loss, SeqLoss) and loss.divisors(()) is None  # a sum over series, not a mean
        able = self.ranks.is_single and self._replicas is None and accumulate == 1 and supports_found_inf(optimizer)
        self._late = able and (self._flat.is_cuda if late is None else late)
        self._bad = torch.zeros((), dtype=torch.float32, device=self._flat.device)  # 1 once a step was not finite
        self._seen = 0.0  # steps that this rank has learnt from in this epoch
        self._waiting, self._waiting_live = 0, 0.0  # windows whose gradients have not been applied yet
        self._next_states: list[State | None] = []
        self.start_epoch()

    # -- one epoch -----------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Begin a new mean of the gradients."""
        self._gradient_sum = torch.zeros_like(self._flat)
        self._n_gradients, self._seen = 0, 0.0

    def flush(self) -> None:
        """At the end of an epoch: apply gradients that are still waiting, and make buffers alike on all ranks."""
        if self._waiting:
            self._update()
        self.ranks.average(list(self.model.buffers()), self._seen)

    def mean_gradient(self) -> Tensor:
        """Mean over the epoch's optimizer steps of the gradient, before clipping, in ``net2vec`` order."""
        return self._gradient_sum / max(self._n_gradients, 1)

    def discard(self) -> None:
        """After an error: forget states and waiting gradients, so that the model can be used."""
        reset(self.model)
        self._forget_gradients()
        self._waiting, self._waiting_live = 0, 0.0
        self._bad.zero_()

    def _scale_gradients(self, factor: float) -> None:
        for p in self._params:
            if p.grad is not None:
                p.grad.mul_(factor)

    def _forget_gradients(self) -> None:
        for p in self._params:  # a tenth of the time of optimizer.zero_grad()
            p.grad = None

    # -- going on in another process -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is carried from window to window, as plain data: recurrent state and gradients, of this rank."""
        return {
            "updates": self.n_updates,
            "gradients": (self._n_gradients, self._gradient_sum),
            "seen": self._seen,
            "waiting": (self._waiting, self._waiting_live, [p.grad for p in self._params] if self._waiting else None),
            "states": snapshot(self.model),
            "next_states": self._next_states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, with a model of the same parameters and layers."""
        n_gradients, gradient_sum = state["gradients"]
        found, own = (len(state["states"]), gradient_sum.numel()), (len(self._layers), self._flat.numel())
        if found != own:
            raise LoadError(
                f"the state is of {found[0]} recurrent layers and {found[1]} parameters, the model has {own[0]} and "
                f"{own[1]}"
            )
        to = self._flat.device
        states, self._next_states = (
            [None if s is None else map_state(lambda t: t.to(to), s) for s in state[name]]
            for name in ("states", "next_states")
        )
        restore(self.model, states)
        self.n_updates, self._seen, self._n_gradients = state["updates"], state["seen"], n_gradients
        self._gradient_sum = gradient_sum.to(to, copy=True)
        self._waiting, self._waiting_live, grads = state["waiting"]
        for p, g in zip(self._params, grads or [None] * len(self._params), strict=True):
            p.grad = None if g is None else g.to(p.device, copy=True)

    # -- one window ----------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> StepInfo | None:
        """Learn from one window, or this rank's part of it. None: ranks agreed to stop, this window does not count."""
        if not self.ranks.is_single:
            return self._run_collective(batch)
        value = self._run_window(batch)
        return StepInfo(None, 0) if value is None else self._apply_update(value, batch.window.n_live, batch.window)

    def _run_collective(self, batch: Batch) -> StepInfo | None:
        """The collective of this step: every rank comes here, also one that failed or has no data."""
        ranks, waiting = self.ranks, [p.grad for p in self._params] if self._waiting else None
        if waiting:
            self._forget_gradients()
        value, share, n_live = (
            (0.0, 0.0, 0) if ranks.is_leaving else ranks.guard(self._run_shard, batch) or (0.0, 0.0, 0)
        )
        shares, weighted, live = ranks.reduce(share, value, n_live, packed=self.accumulate == 1)
        if ranks.stopped or live == 0:  # what this window gave is not wanted, or nothing
            for p, grad in zip(self._params, waiting or [None] * len(self._params), strict=True):
                p.grad = grad
            return None if ranks.stopped else StepInfo(None, 0)
        divisor = 1.0 if self._adds_up else shares or 1.0
        self._seen += n_live
        if self.accumulate == 1:
            self._flat.div_(divisor)
        elif n_live and (factor := share / n_live * live / divisor) != 1:  # as if one rank had weighed all
            self._scale_gradients(factor)
        if waiting:
            accumulate_gradients(self._params, tuple(waiting))
        return self._apply_update(weighted / divisor, live, batch.window)

    def _run_shard(self, batch: Batch) -> tuple[float, float, float]:
        """Loss, what it weighs among those of all ranks, and live steps."""
        value = self._run_window(batch) if len(batch.window.index.segments) else None
        if value is None:
            return 0.0, 0.0, 0
        n_live = batch.window.n_live
        return value, 1.0 if self._adds_up else loss_weight(self.loss, batch, n_live), n_live

    def _run_window(self, batch: Batch) -> Any:
        """Go through a window; the loss, if there is one, its gradient being on the parameters."""
        w, model = batch.window, self.model
        if w.index.first:
            reset(model)
        elif w.index.n_overlap:  # from the state that its first step had when it was last computed
            restore(model, self._next_states)
        if w.index.next_start is not None:
            mark(model, w.index.next_start - w.index.start)
        if not w.index.has_loss or w.n_live == 0:  # the state moves on, nothing is learnt
            with torch.no_grad():
                run_window(model, batch.x)
            value = None
        else:
            value = self._backward(batch)
        if w.index.next_start is not None:
            self._next_states = marked(model)
        for layer in self._layers:
            layer.truncate()
        return value

    def _apply_update(self, value: Any, n_live: float, window: Window) -> StepInfo:
        if isinstance(value, Tensor):
            return self._apply_pending(value, n_live, window)
        self._waiting += 1
        self._waiting_live += n_live
        if self._waiting == self.accumulate:
            self._update(window)
        return StepInfo(value, n_live)

    def _apply_pending(self, loss: Tensor, n_live: float, window: Window) -> StepInfo:
        """The same as an update that knows its numbers, without knowing them."""
        flat = flatten_into(dense_gradients(self._params), self._flat)
        norm = torch.linalg.vector_norm(flat)
        self._bad = torch.maximum(self._bad, (~(norm.isfinite() & loss.isfinite())).float())
        self._gradient_sum += flat
        self._n_gradients += 1
        if self.clip is not None:
            factor = (self.clip / (norm.double() + 1e-6)).clamp(max=1.0)
            for p in self._params:
                if p.grad is not None:
                    p.grad.mul_(factor)
        optimizer: Any = self.optimizer
        optimizer.found_inf = self._bad  # what torch's gradient scaler would set: a fused optimizer then does nothing
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
        made = self.n_updates
        self.n_updates += 1
        self._forget_gradients()

        def check(loss: float, norm: float) -> None:
            for what, number in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(number):
                    self.n_updates = made  # nor did later ones change anything
                    raise self._not_finite(what, number, window)

        return StepInfo(PendingLoss((loss, norm), check), n_live)

    def _backward(self, batch: Batch) -> Any:
        """The loss, as a number; as a tensor, if it is to be read late."""
        w, ws = batch.window, self._weights(batch)
        if self._replicas is None:
            loss = window_loss(self.loss, self.model, batch.x, batch.y, ws, w.index.n_overlap)
            if self._late:
                require_gradient(loss)
                loss.backward()
                return loss.detach()
            value = loss.item()
        else:
            value, grads = self._replicas.gradient(batch, ws)
        if not math.isfinite(value):
            raise self._not_finite("loss", value, w)
        if self._replicas is None:
            require_gradient(loss)
            (loss if self.accumulate == 1 else loss * w.n_live).backward()
        else:
            accumulate_gradients(self._params, grads, 1 if self.accumulate == 1 else w.n_live)
        return value

    def _weights(self, batch: Batch) -> Tensor | None:
        if batch.w is not None and not self._weighted:
            raise ValueError(
                "y has NaN (steps without a target), but the loss takes no weights: give it a fourth argument, "
                "loss(model, xs, ys, ws), or use seqloss"
            )
        return ones_like_steps(batch, self._flat) if batch.w is None and self._always_weights else batch.w

    def _update(self, window: Window | None = None) -> None:
        flat = self._mean_over_all()
        norm = torch.linalg.vector_norm(flat).item()
        if not math.isfinite(norm):
            self._raise_not_finite(norm, window)
        self._gradient_sum += flat
        self._n_gradients += 1
        self.ranks.guard(self._apply, norm)
        self._forget_gradients()
        self._waiting, self._waiting_live = 0, 0.0

    def _mean_over_all(self) -> Tensor:
        """The gradient as a vector, over the windows that are waiting, and over all ranks."""
        if self.ranks.is_single:
            if self.accumulate > 1:
                self._scale_gradients(1 / self._waiting_live)
            return flatten_into(dense_gradients(self._params), self._flat)
        if self.accumulate > 1:  # else the loss was reduced together with it
            self.ranks.reduce(1.0, 0.0, 1, packed=True)
            self._flat.div_(self._waiting_live)
        return self._flat

    def _apply(self, norm: float) -> None:
        self.ranks.assign_gradients()
        if self.clip is not None and norm > self.clip:
            self._scale_gradients(self.clip / (norm + 1e-6))
        self.optimizer.step()
        self.n_updates += 1

    def _raise_not_finite(self, norm: float, window: Window | None) -> NoReturn:
        if self.ranks.is_single:
            raise self._not_finite("gradient norm", norm, window)
        told = self.ranks.allgather(not all(g.isfinite().all() for g in dense_gradients(self._params)))
        ranks = describe_by_rank(told).partition("True on ")[2].partition(",")[0] if any(told) else "no rank by itself"
        self.ranks.raise_on_all(self._not_finite(f"gradient norm on {ranks}", norm, None))

    def _not_finite(self, what: str, value: float, w: Window | None) -> FloatingPointError:
        place = ""
        if w is not None:
            where = f"series {w.index.segments.series.min()} to {w.index.segments.series.max()}"
            place = f" at steps {w.index.start + w.index.n_overlap} to {w.index.start + w.x[0].shape[0]} of {where}"
        return FloatingPointError(
            f"{what} is {value}{place}; the parameters are as before this window. "
            "Lower the learning rate, set clip in the spec, or look for extreme values in the data"
        )


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer does nothing in a step that is told, on the device, that something is not finite."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def ones_like_steps(batch: Batch, like: Tensor) -> Tensor:
    """Ones (S, B, 1), for a loss that must be given weights; of the type and device of ``like``."""
    y = batch.y if isinstance(batch.y, Tensor) else batch.y[0]
    return like.new_ones(*y.shape[:2], 1, requires_grad=False)


def loss_weight(loss: Loss, batch: Batch, n_live: float) -> float:
    """What the loss of some series of a window weighs among those of the others: as a rule, their live steps.

    Of several cross-entropies, which divide by numbers of their own, it is the live steps too.
    """
    divisors = loss.divisors(batch.y, batch.w) if isinstance(loss, SeqLoss) and not loss.is_mean else None
    return divisors[0] if divisors is not None and len(divisors) == 1 else float(n_live)


def mean_loss(model: nn.Module, loss: Loss, batches: Iterable[Batch], comm: RankGroup | None = None) -> float:
    """The loss of a model on other data, over all live steps of all ranks; in evaluation mode, without a trace.

    The training state, the mode, and the gradients of the model are as before.
    """
    found: list[tuple[float, float, float]] = []  # of each window: loss, share among the ranks, live steps
    like, always = next(model.parameters()), needs_weights(loss)
    with evaluating(model):
        for batch in batches:
            w = batch.window
            found.append((0.0, 0.0, 0))
            if not len(w.index.segments):
                continue
            if w.index.first:
                reset(model)
            if w.n_live == 0 or not w.index.has_loss:
                run_window(model, batch.x)
                continue
            ws = ones_like_steps(batch, like) if batch.w is None and always else batch.w
            value = window_loss(loss, model, batch.x, batch.y, ws, w.index.n_overlap).item()
            found[-1] = value, loss_weight(loss, batch, w.n_live), w.n_live
    adds_up = isinstance(loss, SeqLoss) and loss.divisors(()) is None
    total, n_live = 0.0, 0.0
    for parts in zip(*(RankGroup() if comm is None else comm).allgather(found), strict=True):
        live, shares = sum(n for *_, n in parts), sum(share for _, share, _ in parts)
        one = len(parts) == 1 or adds_up
        value = sum(v for v, *_ in parts) if one else sum(v * share for v, share, _ in parts) / (shares or 1.0)
        total += value * live
        n_live += live
    return total / n_live if n_live else math.nan
