"""Turn the loss of a batch into an update, for every way to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fluxutils_py.errors import RankError
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.nn.vectors import dense_gradients
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank
from fluxutils_py.parallel.gradient_vector import GradientVector
from fluxutils_py.parallel.gradients import Gradients, as_scalar, require_gradient, require_no_batch_norm
from fluxutils_py.training.minibatch import begins_series
from fluxutils_py.training.pending_loss import PendingLoss, supports_found_inf
from fluxutils_py.training.sharding import digest, shard
from fluxutils_py.training.step_info import StepInfo

__all__ = ["BatchLoss", "GradientStep"]


class BatchLoss(NamedTuple):
    """The loss of a batch, or of this rank's part of it.

    Attributes
    ----------
    loss : Tensor or float
        A scalar tensor, whose gradient is taken; a number if ``gradients`` are given.
    n_live : float
        How many data it is a mean over: its weight in means over batches and ranks.
    weight : float, optional
        Its weight among the ranks, if that is not ``n_live``.
    gradients : tuple, optional
        One per parameter, None for those without, if threads have computed them.
    numbers : sequence of float
        Further means over the same data, to be joined with those of the other ranks.
    """

    loss: Any
    n_live: float = 1.0
    weight: float | None = None
    gradients: Gradients | None = None
    numbers: Sequence[float] = ()


class GradientStep:
    """Turn the losses of batches into steps of an optimizer, the same for every way to train.

    The order within a step: forward, check that the loss is finite, backward, sum over ranks, check that the gradient
    is finite, clip, optimizer. With ``accumulate`` the optimizer steps after so many batches, on the mean of their
    gradients weighted by ``n_live``, and at :meth:`flush`.

    Parameters
    ----------
    compute : callable
        ``compute(batch)`` returns a :class:`BatchLoss`, or None if there is nothing to learn from the batch.
    optimizer : torch.optim.Optimizer or None
        None: gradients are computed and observed, nothing is updated.
    model : nn.Module, optional
        Its recurrent layers are reset and truncated, and its buffers start as on rank 0.
    params : iterable of Tensor, optional
        Whose gradients are taken; by default those of the optimizer.
    comm : "auto", None, communicator or RankGroup
        The ranks that train together; ``"auto"``: those of the launcher (``mpirun``, ``srun``, ``torchrun``).
    batches : {"same", "per_rank"}
        The batches of several ranks. ``"same"``: all get the same batches, and each takes its part of the observations.
        ``"per_rank"``: each has separate batches, possibly unequally many, which together make up the batch of a step.
    shard : callable, optional
        ``shard(batch, rank, size)`` gives a rank's share of a batch, None if that is empty. By default all arrays of
        the batch are cut along their first axis.
    clip : float, optional
        Largest norm of the gradient of all parameters together; a larger one is scaled down to it.
    accumulate : int
        Batches per step of the optimizer.
    reduction : {"mean", "sum"}
        Whether the loss of a batch is the mean of those of the ranks, by their weights, or their sum.
    n_numbers : int
        How many ``numbers`` each :class:`BatchLoss` has.
    stateful : bool
        Whether recurrent layers go on from the batch before if a batch does not say, by an attribute ``first``, whether
        it begins a series. By default such a batch begins anew. After each batch states are detached.
    defer : bool, optional
        Whether losses are read one step late, so that a GPU need not wait for Python. A loss or gradient that is not
        finite is then an error one step later; meanwhile the optimizer, which must be a fused one of torch, changes
        nothing. None: on a GPU, where that is possible: on one process, with ``accumulate=1``.
    describe : callable, optional
        ``describe(batch)`` says where in the data a batch is, for errors: ``" at step 3"``.
    observe : callable, optional
        Called with the gradient of each update as a vector, before clipping.

    Attributes
    ----------
    ranks : RankGroup
    n_updates : int
        Steps of the optimizer so far.
    numbers : list of float
        Of the last batch, joined over ranks.

    Raises
    ------
    FloatingPointError
        In a step, if the loss or the gradient is NaN or infinite; on every rank. The parameters are as before it.
    RankError
        In a step, on every rank, if parameters differ in shape, or batches that must be the same are not.
    TypeError, ValueError
        If the loss is no scalar tensor, or does not depend on the parameters.
    """

    ends_together = True  # see Loop: a rank without a batch goes on calling it

    def __init__(
        self,
        compute: Callable[[Any], BatchLoss | None],
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module | None = None,
        params: Iterable[Tensor] | None = None,
        *,
        comm: Any = "auto",
        batches: str = "same",
        shard: Callable[[Any, int, int], Any] = shard,
        clip: float | None = None,
        accumulate: int = 1,
        reduction: str = "mean",
        n_numbers: int = 0,
        stateful: bool = False,
        defer: bool | None = None,
        describe: Callable[[Any], str] | None = None,
        observe: Callable[[Tensor], Any] | None = None,
    ) -> None:
        if batches not in ("same", "per_rank"):
            raise ValueError(f"batches must be 'same' or 'per_rank', got {batches!r}")
        if params is None:
            params = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
        self.optimizer, self.model = optimizer, model
        self.params: list[Any] = list(params)
        self.ranks = RankGroup.from_comm(comm, "training")
        self.clip, self.accumulate, self.reduction, self.stateful = clip, accumulate, reduction, stateful
        self.n_updates, self.numbers = 0, [0.0] * n_numbers
        self._compute, self._describe, self._observe = compute, describe, observe
        self._shard = shard if batches == "same" else None
        self._layers = [] if model is None else recurrent_layers(model)
        self._defer = defer
        self._n_waiting, self._live_waiting = 0, 0.0
        self.bind()

    def bind(self) -> None:
        """Take the parameters as they are now: again, if they were moved to another device."""
        self.vector = GradientVector(self.params, self.ranks, len(self.numbers))
        values, self._synchronized = self.vector.values, self.ranks.is_single
        possible = self.ranks.is_single and self.accumulate == 1 and supports_found_inf(self.optimizer)
        self.defer = possible and (values.is_cuda if self._defer is None else self._defer)
        self._not_finite = torch.zeros((), dtype=torch.float32, device=values.device)  # 1 after a step that was not
        self._sum = torch.zeros_like(values) if self.accumulate > 1 else values  # of gradients that are waiting
        self._layouts = [0] * len(self.params)

    # -- one batch -----------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> StepInfo | None:
        """Learn from a batch; None for a rank that has no more of them.

        Returns the loss of the whole batch, over all ranks (a loss of None: there was nothing to learn); or None, if
        ranks agreed to stop or none of them has a batch: then the step does not count.
        """
        self._clear_gradients()
        if self._layers and batch is not None and begins_series(batch, self.stateful):
            for layer in self._layers:
                layer.reset()
        try:
            if self.ranks.is_single:
                return self._learn(batch, self._alone(batch))
            with self.ranks.step(lambda: self(None)):
                return self._learn(batch, self._with_ranks(batch))
        finally:
            self._clear_gradients()
            for layer in self._layers:
                layer.truncate()

    def flush(self) -> None:
        """Update with the gradients that are waiting for more batches; at the end of a pass over the data."""
        if self._n_waiting:
            self._update(None)
            self._clear_gradients()

    def finish_epoch(self) -> None:
        """At the end of a pass over the data: :meth:`flush`; the next pass begins with a state of zero."""
        self.flush()
        for layer in self._layers:
            layer.reset()

    def discard(self) -> None:
        """After an error: forget gradients that are waiting."""
        self._n_waiting, self._live_waiting = 0, 0.0
        self._not_finite.zero_()
        self._clear_gradients()

    def _learn(self, batch: Any, found: tuple[Any, float] | None) -> StepInfo | None:
        """The update, once loss and gradient of the whole batch are there."""
        if found is None:
            return None
        loss, n_live = found
        if not n_live:
            return StepInfo(None, 0)
        if self.accumulate > 1:
            self._norm(batch, loss)
            self._accumulate(n_live)
            if self._n_waiting < self.accumulate:
                return StepInfo(loss, n_live)
        norm = self._update(batch, loss)
        return StepInfo(self._pending(loss, norm, batch) if self.defer else loss, n_live)

    def _alone(self, batch: Any) -> tuple[Any, float] | None:
        """Loss and number of data; the gradient is then in the vector."""
        if batch is None:
            return None
        loss, part = self._backward(batch)
        if part is None:
            return None, 0
        self.vector.pack()
        self.numbers = list(part.numbers)
        return loss, part.n_live

    def _with_ranks(self, batch: Any) -> tuple[Any, float] | None:
        """The same over all ranks. Every one comes here, also one that failed or has no batch."""
        ranks, vector = self.ranks, self.vector
        if not self._synchronized:
            self._synchronize()
        code, loss, part = (None if ranks.is_leaving else ranks.guard(self._own_part, batch)) or (0, 0.0, None)
        part = part or BatchLoss(None, 0)
        weight = part.n_live if part.weight is None else part.weight
        totals = vector.reduce(weight, loss, part.n_live, part.numbers, has_batch=batch is not None, digest=code)
        if ranks.stopped or not totals.n_batches:
            return None
        if self._shard is not None and not totals.same_batches:
            ranks.raise_on_all(
                RankError(
                    "ranks were given different batches, or unequally many: give every rank the same ones (seed alike "
                    "what draws or shuffles them), of which each takes its share; or set batches='per_rank', if each "
                    "rank has batches of its own"
                )
            )
        divisor = 1.0 if self.reduction == "sum" else totals.weight or 1.0
        vector.values.div_(divisor)
        self.numbers = [number / (totals.n_live or 1.0) for number in totals.numbers]
        return totals.loss / divisor, totals.n_live

    def _own_part(self, batch: Any) -> tuple[int, float, BatchLoss | None]:
        """The digest of the batch, and what :meth:`_backward` gives for this rank's part of it."""
        if batch is None or self._shard is None:
            return 0, *((0.0, None) if batch is None else self._backward(batch))
        part = self._shard(batch, self.ranks.rank, self.ranks.size)
        return digest(batch), *((0.0, None) if part is None else self._backward(part))

    def _backward(self, batch: Any) -> tuple[Any, BatchLoss | None]:
        """The loss, as a number unless it is read late, and what else is known; gradients are on the parameters."""
        # mixed precision: torch.autocast around compute, GradScaler.scale around the loss, its unscale_ before the norm
        part = self._compute(batch)
        if part is None:
            return 0.0, None
        if part.gradients is not None:
            self._require_finite("loss", part.loss, batch)
            for p, g in zip(self.params, part.gradients, strict=True):
                p.grad = g
            return part.loss, part
        loss = as_scalar(part.loss)
        value = loss.detach() if self.defer else loss.item()
        if not self.defer:
            self._require_finite("loss", value, batch)
        require_gradient(loss)
        loss.backward()
        return value, part

    # -- the update ----------------------------------------------------------------------------------

    def _accumulate(self, n_live: float) -> None:
        values, layouts = self.vector.values, self.vector.layouts()
        if self._n_waiting:
            self._sum.add_(values, alpha=n_live)
            self._layouts = list(map(max, self._layouts, layouts))
        else:
            torch.mul(values, n_live, out=self._sum)
            self._layouts = layouts
        self._n_waiting += 1
        self._live_waiting += n_live

    def _update(self, batch: Any, loss: Any = None) -> Any:
        """Change the parameters by the gradient in the vector, or the mean of those waiting; its norm."""
        values = self.vector.values
        if self._n_waiting:
            torch.div(self._sum, self._live_waiting, out=values)
            self._n_waiting, self._live_waiting = 0, 0.0
        norm = self._norm(batch, loss)
        if self._observe is not None:
            self._observe(values)
        if self.optimizer is not None:
            self.ranks.guard(self._apply, norm)
        return norm

    def _norm(self, batch: Any, loss: Any) -> Any:
        """The norm of the vector: a number known to be finite, or a tensor if it is read late."""
        norm: Any = torch.linalg.vector_norm(self.vector.values)
        if self.defer:
            bad = ~(norm.isfinite() & loss.isfinite())
            self._not_finite = torch.maximum(self._not_finite, bad.float())
            return norm
        norm = norm.item()
        if not math.isfinite(norm):
            self._raise_not_finite(norm, batch)
        return norm

    def _apply(self, norm: Any) -> None:
        optimizer: Any = self.optimizer
        if self.accumulate > 1:
            self.vector.assign(self._layouts)
        elif not self.ranks.is_single:
            self.vector.assign(self.vector.layouts())
        if self.clip is not None and (self.defer or norm > self.clip):
            factor = (self.clip / (norm.double() + 1e-6)).clamp(max=1) if self.defer else self.clip / (norm + 1e-6)
            for p in self.params:
                if p.grad is not None:
                    p.grad.mul_(factor)
        if self.defer:
            optimizer.found_inf = self._not_finite  # as torch's GradScaler sets it: a fused optimizer then does nothing
        try:
            optimizer.step()
        finally:
            if self.defer:
                del optimizer.found_inf
        self.n_updates += 1

    def _pending(self, loss: Tensor, norm: Tensor, batch: Any) -> PendingLoss:
        before = self.n_updates - 1

        def check(loss: float, norm: float) -> None:
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.n_updates = before  # nor did later steps change anything
                self._require_finite("loss", loss, batch)
                self._require_finite("gradient norm", norm, batch)

        return PendingLoss((loss, norm), check)

    def _clear_gradients(self) -> None:
        for p in self.params:  # ten times faster than optimizer.zero_grad()
            p.grad = None

    # -- errors --------------------------------------------------------------------------------------

    def _require_finite(self, what: str, value: Any, batch: Any) -> None:
        if not math.isfinite(value):
            raise not_finite(what, value, "" if batch is None or self._describe is None else self._describe(batch))

    def _raise_not_finite(self, norm: float, batch: Any) -> NoReturn:
        if self.ranks.is_single:
            self._require_finite("gradient norm", norm, batch)
        bad = self.ranks.allgather(not all(g.isfinite().all() for g in dense_gradients(self.params)))
        where = describe_by_rank(bad).partition("True on ")[2].partition(",")[0] if any(bad) else "no rank by itself"
        self.ranks.raise_on_all(not_finite(f"gradient norm on {where}", norm))

    # -- ranks, and going on in another process ------------------------------------------------------

    def _synchronize(self) -> None:
        """Begin with the parameters and buffers of rank 0."""
        self._synchronized = True
        named = {f"parameter {i}": p for i, p in enumerate(self.params)}
        if self.model is not None:
            named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            if self._shard is not None:
                self.ranks.guard(
                    require_no_batch_norm, self.model, "ranks", "set batches='per_rank', or take nn.LayerNorm"
                )
        self.ranks.broadcast_parameters({name: t.detach() for name, t in named.items()})

    def state_dict(self) -> dict[str, Any]:
        """The gradients that are waiting, and the number of updates, as plain data."""
        waiting = (self._n_waiting, self._live_waiting, self._sum, self._layouts) if self._n_waiting else None
        return {"n_updates": self.n_updates, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.n_updates = state["n_updates"]
        self._synchronized = True  # buffers of ranks differ until they are averaged
        self._n_waiting = 0
        if state["waiting"] is not None:
            self._n_waiting, self._live_waiting, total, layouts = state["waiting"]
            self._sum.copy_(total)
            self._layouts = list(layouts)


def not_finite(what: str, value: float, where: str = "") -> FloatingPointError:
    """The error of a loss or gradient that is NaN or infinite."""
    return FloatingPointError(
        f"{what} is {value}{where}; the parameters are as before this step. Lower the learning rate, set clip, or look "
        "for extreme values in the data"
    )
