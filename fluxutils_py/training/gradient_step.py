"""Turn the loss of a batch into an update, for every way to train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fluxutils_py.errors import RankError
from fluxutils_py.nn.parameters import dense_gradients
from fluxutils_py.nn.precision import as_float32, autocast, check_precision, require_float32
from fluxutils_py.nn.recurrent import State
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.parallel.gradient_vector import GradientVector, Totals
from fluxutils_py.torch_private import note_nonfinite, step_fused_adamw
from fluxutils_py.training.added_losses import collected_losses
from fluxutils_py.training.loss_checks import (
    OWN_BATCHES,
    call_without_batch_norm,
    require_no_batch_norm,
)
from fluxutils_py.training.minibatch import begins_series
from fluxutils_py.training.nonfinite_batch import find_nonfinite, find_nonfinite_gradient
from fluxutils_py.training.sharding import digest
from fluxutils_py.training.step_info import BatchLoss, PendingLoss, StepInfo, supports_found_inf

__all__ = ["BatchLoss", "GradientStep"]

# A loss or a norm: a number that was read, or a tensor on the device if reading is deferred.
Number = float | Tensor


class GradientStep:
    """Turn the losses of batches into optimizer steps; all training functions and classes use it.

    The order within a step: forward, check that the loss is finite, backward, sum over ranks, check
    that the gradient is finite, clip, optimizer. With ``accumulate > 1`` the optimizer steps after
    every ``accumulate`` batches and at :meth:`flush`, on the mean of their gradients weighted by
    ``n_live``.

    A subclass gives :meth:`compute_loss`, for batches that ranks share :meth:`shard`, and where it
    knows more than the defaults :meth:`compute_again`, :meth:`describe` and :meth:`observe`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or None
        None: compute and observe gradients without updating.
    model : nn.Module, optional
        Model whose recurrent layers to reset and truncate. Its buffers start with the values of
        rank 0.
    params : iterable of Tensor, optional
        Parameters to differentiate, beside the parameters of the optimizer.
    comm : "auto", None, communicator or RankGroup
        Ranks that train together. ``"auto"``: all ranks of the launcher (``mpirun``, ``srun``,
        ``torchrun``).
    batches : {"same", "per_rank"}
        Batches of several ranks. ``"same"``: all get the same batches, and each computes its
        :meth:`shard` of the observations. ``"per_rank"``: each has separate batches, possibly of
        unequal number, which together form the batch of a step.
    clip : float, optional
        Largest norm of the gradient of all parameters together; larger gradients are scaled down to
        it.
    accumulate : int
        Number of batches per optimizer step.
    clip_nan : bool
        Whether to go on where the loss is finite and the gradient is not, as gomlx does: the
        gradient of a parameter becomes zero if any of its elements is NaN or infinite (with SGD,
        only these elements), and an element whose update would not be finite keeps its value.
    precision : {"float32", "bfloat16"}
        Type of the products in :meth:`compute_loss`, by torch's autocast; parameters, gradients and
        losses stay float32.
    reduction : {"mean", "sum"}
        How to combine the losses of ranks: mean by their weights, or sum.
    stateful : bool
        Whether recurrent layers continue from the state of the previous batch when a batch has no
        attribute ``first``. By default they then start from zero. States are detached after each
        batch.
    defer : bool, optional
        Whether to read losses one step late, so that a GPU need not wait for Python. What is not
        finite then raises one step later; the optimizer, a fused one of torch, changes nothing.
        None: on a GPU, in a single process.

    Attributes
    ----------
    ranks : RankGroup
    n_updates : int
        Number of optimizer steps so far.
    gradient_norm : float or Tensor
        Norm of the gradient of the last update, before clipping; NaN before the first. A tensor
        where reading is deferred.

    Raises
    ------
    FloatingPointError
        In a step, on every rank, if the loss or the gradient is NaN or infinite. The parameters
        stay unchanged. The message names the first module of ``model`` whose output is not finite,
        or the parameter that is not finite, or whose gradient is not.
    RankError
        In a step, on every rank, if settings differ, parameters differ in shape, or batches that
        must be the same do.
    TypeError, ValueError
        If the loss is no scalar tensor that depends on the parameters. At once, if the optimizer
        has none of ``params``, or of the parameters of ``model``.
    """

    ends_together = True  # see Loop: a rank without a batch still calls it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module | None = None,
        params: Iterable[Tensor] | None = None,
        *,
        comm: object = "auto",
        batches: str = "same",
        clip: float | None = None,
        accumulate: int = 1,
        clip_nan: bool = False,
        precision: str = "float32",
        reduction: str = "mean",
        stateful: bool = False,
        defer: bool | None = None,
    ) -> None:
        if batches not in ("same", "per_rank"):
            raise ValueError(f"batches must be 'same' or 'per_rank', got {batches!r}")
        check_precision(precision)
        self.optimizer = optimizer
        self.model = model
        self.params: list[Any] = parameters_of_step(params, model, optimizer)
        self.ranks = RankGroup.from_comm(comm, "training")
        self.shares_batches = batches == "same"  # whether all ranks need the same batches
        self.clip = clip
        self.accumulate = accumulate
        self.clip_nan = clip_nan
        self.precision = precision
        self.reduction = reduction
        self.stateful = stateful
        self.n_updates = 0
        self.gradient_norm: Number = math.nan
        self._settings = {
            "batches": batches,
            "clip": clip,
            "accumulate": accumulate,
            "clip_nan": clip_nan,
            "precision": precision,
            "reduction": reduction,
            "stateful": stateful,
        }
        self._settings_compared = False  # between ranks
        self._layers = [] if model is None else recurrent_layers(model)
        self._begun_with: list[State | None] | None = None  # the layers' states before the step
        self._defer = defer
        require_float32(self.params, precision)
        self.bind()

    def bind(self) -> None:
        """Build the vector for the current parameters. Call it again after moving them to another
        device.
        """
        self.vector = GradientVector(self.params, self.ranks)
        values = self.vector.values
        self._synchronized = self.ranks.is_single
        defer = values.is_cuda if self._defer is None else self._defer
        self.defer = defer and self.ranks.is_single and supports_found_inf(self.optimizer)
        # Deferred: 1 once a step has failed whose loss nobody has read yet.
        self._failed = torch.zeros((), device=values.device)
        self._one = torch.ones((), device=values.device)
        self.autocast = autocast(self.precision, values.device)
        in_float32 = self.precision == "float32"
        self._compute = self.compute_loss if in_float32 else self.autocast(self.compute_loss)
        self._waiting = WaitingGradients(self.vector) if self.accumulate > 1 else None

    # -- what a subclass gives ---------------------------------------------------------------------

    def compute_loss(self, batch: Any) -> BatchLoss | None:
        """Return the loss of a batch, or None if there is nothing to learn from it."""
        raise NotImplementedError

    def compute_again(self, batch: Any) -> None:
        """Call the model as :meth:`compute_loss` does, in this thread.

        A step that fails calls it once, without gradients, to name the module that first gave a
        number that is not finite.
        """
        self.compute_loss(batch)

    def shard(self, batch: Any, rank: int, size: int) -> Any:
        """Return a rank's share of a batch, None if it is empty."""
        raise NotImplementedError

    def describe(self, batch: Any) -> str:
        """Return the place of a batch in the data for error messages, such as ``" at step 3"``."""
        return ""

    def observe(self, gradient: Tensor) -> None:
        """Look at the gradient vector of an update, before clipping."""

    def count(self) -> None:
        """Count a batch, once it is known that its step counts on all ranks."""

    # -- one batch ---------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> StepInfo | None:
        """Train on one batch; pass None on a rank that has no more batches.

        Returns the loss of the whole batch over all ranks; its loss is None if there was nothing to
        learn. Returns None if ranks agreed to stop or no rank has a batch: then the step does not
        count.
        """
        self._clear_gradients()
        if self._layers and batch is not None and begins_series(batch, self.stateful):
            for layer in self._layers:
                layer.reset()
        self._begun_with = [layer.state for layer in self._layers]
        try:
            if self.ranks.is_single:
                return self._accumulate_or_update(batch, self._loss_of_single_process(batch))
            with self.ranks.step(lambda: self(None)):
                return self._accumulate_or_update(batch, self._loss_over_ranks(batch))
        finally:
            self._begun_with = None
            self._clear_gradients()
            for layer in self._layers:
                layer.truncate()

    def flush(self) -> None:
        """Update with the gradients that wait for more batches. Call it at the end of a pass over
        the data.
        """
        if self._waiting is None:
            return
        self.ranks.allgather()  # the sum of waiting gradients over ranks is outside of a step
        if self._waiting.n:
            n_updates = self.n_updates
            norm = self._update_parameters(None)
            if isinstance(norm, Tensor):  # deferred
                float(self._pending_loss(torch.zeros_like(norm), norm, None, n_updates))
            self._clear_gradients()

    def finish_epoch(self) -> None:
        """Finish a pass over the data: :meth:`flush`, and let the next pass begin with a zero
        state.
        """
        self.flush()
        for layer in self._layers:
            layer.reset()

    def discard(self) -> None:
        """Forget waiting gradients, after an error."""
        if self._waiting is not None:
            self._waiting.clear()
        self._failed.zero_()
        self._clear_gradients()

    def _accumulate_or_update(self, batch: object, info: StepInfo | None) -> StepInfo | None:
        """Accumulate the gradient of the whole batch; update the parameters when it is time to."""
        if info is None:
            return None
        self.count()
        loss = info.batch_loss
        if loss is None or not info.n_live:
            return StepInfo(None, 0)
        n_updates = self.n_updates
        norm = loss
        # Several ranks have added theirs already: they need the sums that came with the loss.
        if self._waiting is not None and self.ranks.is_single:
            if not self.clip_nan:
                norm = self._gradient_norm(batch)
            self._waiting.add(info.n_live, info.n_live)
        if self._waiting is None or self._waiting.n == self.accumulate:
            norm = self._update_parameters(batch)
        if isinstance(loss, Tensor) and isinstance(norm, Tensor):
            return StepInfo(self._pending_loss(loss, norm, batch, n_updates), info.n_live)
        return info

    def _loss_of_single_process(self, batch: object) -> StepInfo | None:
        """Return the loss of a batch; write the gradient into the vector."""
        if batch is None:
            return None
        part = self._run_backward(batch)
        if part is None:
            return StepInfo(None, 0)
        self.vector.pack()
        return StepInfo(part.loss, part.n_live)

    def _loss_over_ranks(self, batch: object) -> StepInfo | None:
        """Return the loss of a batch over all ranks; add up their gradients.

        Every rank calls it, even if it failed or has no batch.
        """
        ranks = self.ranks
        self._agree_with_ranks()
        code = self._digest_of(batch)  # before the loss runs, which may change it in place
        # one that has no data takes part
        part = ranks.guard(self._loss_of_own_part, batch) or BatchLoss(0.0, 0)
        # One collective for everything: its latency dominates in small models.
        totals = self.vector.reduce(
            part.weight_in_mean,
            float(part.loss),
            part.n_live,
            has_batch=batch is not None,
            digest=code,
            with_vector=self._waiting is None,
        )
        if ranks.stopped or not totals.n_batches:
            return None
        if self.shares_batches and not totals.same_batches:
            ranks.raise_on_all(_different_batches())
        divisor = 1.0 if self.reduction == "sum" else totals.weight or 1.0
        self._keep_sum_of_ranks(batch, part, totals, divisor)
        return StepInfo(totals.loss / divisor, totals.n_live)

    def _agree_with_ranks(self) -> None:
        """Compare settings and copy parameters, once."""
        if not self._settings_compared:  # what differs may make ranks wait for different sums
            self._settings_compared = True
            of_optimizer = _describe_optimizer(self.optimizer)
            self.ranks.require_equal({**self._settings, **of_optimizer})
        if not self._synchronized:
            self._synchronize_parameters()

    def _keep_sum_of_ranks(
        self, batch: object, part: BatchLoss, totals: Totals, divisor: float
    ) -> None:
        """Turn the summed gradient into a mean, or let this rank's part of it wait."""
        if self._waiting is None:
            self.vector.values.div_(divisor)
        elif totals.bad_norm and not self.clip_nan:
            self._raise_not_finite("gradient norm", totals.bad_norm, batch)
        elif totals.n_live:
            factor = totals.n_live * part.weight_in_mean / divisor if part.n_live else None
            self._waiting.add(totals.n_live, factor)

    def _digest_of(self, batch: object) -> int:
        """Return the digest of a batch that all ranks must have alike, else 0."""
        if not self.shares_batches or batch is None or self.ranks.is_leaving:
            return 0
        return self.ranks.guard(digest, batch) or 0

    def _loss_of_own_part(self, batch: object) -> BatchLoss | None:
        """Return the loss of this rank's part of a batch."""
        if batch is None or self.ranks.is_leaving:
            return None
        if self.shares_batches:
            batch = self.shard(batch, self.ranks.rank, self.ranks.size)
        return None if batch is None else self._run_backward(batch)

    def _run_backward(self, batch: object) -> BatchLoss | None:
        """Compute the parameters' gradients; return the loss, read and finite, or None if there is
        nothing to learn.
        """
        if self.ranks.is_single or self.model is not None or not self.shares_batches:
            part = self._compute(batch)
        else:
            part = call_without_batch_norm(self._compute, batch, "ranks", OWN_BATCHES)
        if part is None:
            return None
        loss = as_float32(as_scalar(part.loss))
        value = self._read_number("loss", loss.detach(), batch)
        require_gradient(loss)
        loss.backward()
        return BatchLoss(value, part.n_live, part.weight)

    # -- the update --------------------------------------------------------------------------------

    def _update_parameters(self, batch: object) -> Number:
        """Update with the gradient in the vector, or the mean of waiting gradients; return its
        norm.
        """
        layouts = None
        if self._waiting is not None and self._waiting.n:
            layouts = self._waiting.take_mean()
        if self.clip_nan:
            self.vector.drop_nonfinite(by_element=isinstance(self.optimizer, torch.optim.SGD))
        norm = self.gradient_norm = self._gradient_norm(batch)
        self.observe(self.vector.values)
        if self.optimizer is not None:
            if self.ranks.is_single:  # the way that a reader of a traceback follows
                self._apply(self.optimizer, norm, layouts)
            else:
                self.ranks.guard(self._apply, self.optimizer, norm, layouts)
        return norm

    def _gradient_norm(self, batch: object) -> Number:
        norm = torch.linalg.vector_norm(self.vector.values)
        return self._read_number("gradient norm", norm, batch)

    def _apply(
        self,
        optimizer: torch.optim.Optimizer,
        norm: Number,
        layouts: Sequence[int] | None,
    ) -> None:
        """Clip the gradient and step the optimizer."""
        if layouts is not None:
            self.vector.assign(layouts)
        elif self.clip_nan or not self.ranks.is_single:
            # Else the parameters still hold the gradients that the vector was filled from.
            self.vector.assign(self.vector.layouts())
        if self.clip is not None:
            self._clip_gradients(self.clip, norm)
        before = [p.detach().clone() for p in self.params] if self.clip_nan else []
        if self.defer:
            self._step_unless_failed(optimizer)
        elif not step_fused_adamw(optimizer):
            optimizer.step()
        if before:
            self._keep_finite(before)
        self.n_updates += 1

    @torch.no_grad()
    def _keep_finite(self, before: list[Tensor]) -> None:
        """Undo the update of single parameters that are not finite after it."""
        for p, value in zip(self.params, before, strict=True):
            p.copy_(torch.where(p.isfinite(), p, value))

    def _clip_gradients(self, clip: float, norm: Number) -> None:
        if isinstance(norm, Tensor):  # deferred: whether it is too large is not known here
            factor: Number = (clip / (norm.double() + 1e-6)).clamp(max=1)
        elif norm > clip:
            factor = clip / (norm + 1e-6)
        else:
            return
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(factor)

    def _step_unless_failed(self, optimizer: Any) -> None:
        """Step a fused optimizer as GradScaler does: it does nothing if ``found_inf`` is set."""
        optimizer.found_inf = self._failed
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf

    def _clear_gradients(self) -> None:
        for p in self.params:  # ten times faster than optimizer.zero_grad()
            p.grad = None

    # -- reading numbers ---------------------------------------------------------------------------

    def _read_number(self, name: str, value: Any, batch: object) -> Number:
        """Return a loss or norm as a number, which must be finite; deferred, as the tensor, and
        note whether it is.
        """
        if self.defer:
            value = value.detach().clone()
            note_nonfinite(value, self._failed, self._one)
            return value
        number = float(value)
        if not math.isfinite(number):
            self._raise_not_finite(name, number, batch)
        return number

    def _pending_loss(
        self, loss: Tensor, norm: Tensor, batch: object, n_updates: int
    ) -> PendingLoss:
        """Return the loss of a step that began after ``n_updates``, which raises when it is read if
        the step failed.
        """

        def check(loss: float, norm: float) -> None:
            for name, number in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(number):
                    self.n_updates = n_updates  # later steps changed nothing either
                    self._raise_not_finite(name, number, batch)

        return PendingLoss((loss, norm), check)

    # -- errors ------------------------------------------------------------------------------------

    def _raise_not_finite(self, name: str, number: float, batch: object) -> NoReturn:
        if name == "loss" or self.ranks.is_single:
            place = "" if batch is None else self.describe(batch)
            raise not_finite(name, number, place + self._find_source(name, batch))
        gradients = dense_gradients(self.params)
        is_bad = not all(g.isfinite().all() for g in gradients)
        source = self._find_source(name, None) if is_bad else ""
        answers = self.ranks.allgather((is_bad, source))
        bad_by_rank, sources = zip(*answers, strict=True)
        where = "no rank by itself"  # finite gradients may still have an infinite sum
        if any(bad_by_rank):
            text = describe_by_rank(list(bad_by_rank))  # "False on ..., True on rank 1, ..."
            where = text.partition("True on ")[2].partition(",")[0]
        source = next((text for text in sources if text), "")
        self.ranks.raise_on_all(not_finite(f"{name} on {where}", number, source))

    def _find_source(self, name: str, batch: object) -> str:
        """Return the module or the parameter where a number first was not finite, as the end of a
        clause.
        """
        if self.model is None:
            return ""

        def run(batch: object) -> None:
            with collected_losses(), self.autocast:
                self.compute_again(batch)

        # A loss that is read one step late meets the states of the next step: start from zero.
        states = self._begun_with
        if states is None:
            states = [None] * len(self._layers)
        source = "" if batch is None else find_nonfinite(self.model, batch, run, states)
        if source or name == "loss" or self.defer:  # gradients are by then those of the next step
            return source
        return find_nonfinite_gradient(self.model)

    # -- ranks, and resuming in another process ----------------------------------------------------

    def _synchronize_parameters(self) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks."""
        self._synchronized = True
        named = {f"parameter {i}": p for i, p in enumerate(self.params)}
        if self.model is not None:
            named = dict(self.model.named_parameters())
            named |= dict(self.model.named_buffers())
            if self.shares_batches:
                self.ranks.guard(require_no_batch_norm, self.model, "ranks", OWN_BATCHES)
        self.ranks.broadcast_parameters({name: t.detach() for name, t in named.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the waiting gradients and the number of updates as plain data."""
        waiting = None if self._waiting is None else self._waiting.state_dict()
        return {"n_updates": self.n_updates, "waiting": waiting}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        """Return the state for one of ``size`` ranks, from those of the ranks that saved them."""
        waiting = WaitingGradients.reshard([state["waiting"] for state in states], rank)
        return {**states[0], "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.n_updates = state["n_updates"]
        self._synchronized = True  # buffers of ranks differ until they are averaged
        if self._waiting is not None:
            self._waiting.load_state_dict(state["waiting"])


def _trained_by(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    if optimizer is None:
        return []
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameters_of_step(
    params: Iterable[Tensor] | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> list[Tensor]:
    """Return the given parameters and those of the optimizer, such as of a loss.

    Raises
    ------
    ValueError
        If none of those of the optimizer is given, or of the model.
    """
    trained = _trained_by(optimizer)
    given = None if params is None else list(params)
    expected = given
    if given is None and model is not None:
        expected = list(model.parameters())
    if trained and expected is not None and {*map(id, trained)}.isdisjoint(map(id, expected)):
        raise ValueError(
            f"the optimizer has {_describe_parameters(trained)}, none of which is among the "
            f"{_describe_parameters(expected)} to train, so none would be: make it from the "
            "parameters of this model, torch.optim.AdamW(model.parameters()), or give its class"
        )
    known = {id(p) for p in given or ()}
    return [*(given or ()), *(p for p in trained if id(p) not in known)]


def _describe_parameters(params: Sequence[Tensor]) -> str:
    shapes = ", ".join(str(tuple(p.shape)) for p in params[:3])
    return f"{len(params)} parameters ({shapes}{', ...' if len(params) > 3 else ''})"


def _describe_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Describe what makes the updates of ranks, which would drift apart if it differed."""
    if optimizer is None:
        return {"the optimizer": None}
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return {"the optimizer": type(optimizer).__name__, "the learning rates": rates}


def not_finite(name: str, value: float, where: str = "") -> FloatingPointError:
    """Return the error for a loss or gradient that is NaN or infinite."""
    return FloatingPointError(
        f"{name} is {value}{where}; the parameters are as before this step. Lower the learning "
        "rate, set clip, or look for extreme values in the data"
    )


def _different_batches() -> RankError:
    return RankError(
        "ranks were given different batches, or unequally many: give every rank the same ones "
        "(draw or shuffle them with one seed), of which each computes its share; or set "
        "batches='per_rank', if each rank has separate batches"
    )


def as_scalar(loss: object) -> Tensor:
    """Return a loss as a tensor without axes.

    Raises
    ------
    TypeError, ValueError
        If it is not a tensor, or has several elements.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must return a scalar, got a tensor of shape {tuple(loss.shape)}; average it "
            "with .mean()"
        )
    # a loss may be of shape (1,)
    return loss.reshape(()) if loss.dim() else loss


def require_gradient(loss: Tensor) -> None:
    """Raise ValueError unless a loss depends on a trained parameter."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on the model's parameters: compute it from the model's "
            "output, without detach, item or numpy"
        )


# -- gradients that wait for more batches ----------------------------------------------------------


class WaitingGradients:
    """The sum of the gradients since the last update, which ranks sum once per update and not in
    every batch.

    Parameters
    ----------
    vector : GradientVector
        Holds the gradient of a batch before :meth:`add`, and the mean of all of them after
        :meth:`take_mean`.

    Attributes
    ----------
    n : int
        Number of batches that wait; the same on all ranks.
    """

    def __init__(self, vector: GradientVector) -> None:
        self.n = 0
        self._n_live = 0.0
        self._vector = vector
        # The sum of this rank only: ranks sum theirs once per update, in take_mean.
        self._sum = torch.zeros_like(vector.values)
        self._layouts = [0] * len(vector.params)

    def add(self, n_live: float, factor: float | None) -> None:
        """Add this rank's gradient times a factor, None if it has no gradient; ``n_live`` is the
        amount of data of all ranks.
        """
        if not self.n:
            self._sum.zero_()
            self._layouts = [0] * len(self._layouts)
        if factor is not None:
            self._sum.add_(self._vector.values, alpha=factor)
            # A parameter with a gradient in any batch takes part in the update.
            self._layouts = list(map(max, self._layouts, self._vector.own_layouts()))
        self.n += 1
        self._n_live += n_live

    def take_mean(self) -> Sequence[int]:
        """Write the mean over batches and ranks into the vector, and forget the sum; return the
        layouts.
        """
        torch.div(self._sum, self._n_live, out=self._vector.values)
        self.clear()
        if self._vector.ranks.is_single:
            return self._layouts
        self._vector.sum_up(self._layouts)
        return self._vector.layouts()

    def clear(self) -> None:
        """Forget the sum."""
        self.n = 0
        self._n_live = 0.0

    def state_dict(self) -> Any:
        """Return this rank's sum as plain data; None if nothing waits."""
        if not self.n:
            return None
        return self.n, self._n_live, self._sum, self._layouts

    def load_state_dict(self, state: Any) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.clear()
        if state is not None:
            self.n, self._n_live, gradient_sum, layouts = state
            self._sum.copy_(gradient_sum)
            self._layouts = list(layouts)

    @staticmethod
    def reshard(states: Sequence[Any], rank: int) -> Any:
        """Return the state for a rank among another number of ranks, from those of all ranks: rank
        0 gets the sum.
        """
        if states[0] is None:
            return None
        # All ranks wait for the same number of batches, with the same amount of data.
        n, n_live, first_sum, first_layouts = states[0]
        if rank:
            return n, n_live, torch.zeros_like(first_sum), [0] * len(first_layouts)
        _, _, sums, layouts = zip(*states, strict=True)
        total = sum(sums[1:], first_sum)
        return n, n_live, total, [max(each) for each in zip(*layouts, strict=True)]
