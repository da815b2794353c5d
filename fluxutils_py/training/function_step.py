"""A gradient step whose loss is a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.states import restore, snapshot
from fluxutils_py.training.gradient_step import GradientStep
from fluxutils_py.training.resharding import require_shared_batches, reshard_rows
from fluxutils_py.training.sharding import shard as slice_of_rank
from fluxutils_py.training.step_info import BatchLoss

Compute = Callable[[Any], BatchLoss | None]


class FunctionStep(GradientStep):
    """The step of a trainer, a task or a training function, which compute the loss themselves.

    Parameters
    ----------
    compute : callable
        ``compute(batch)`` returns a :class:`BatchLoss`, or None if there is nothing to learn from
        the batch.
    optimizer, model, params, **settings
        See :class:`GradientStep`.
    shard : callable, optional
        ``shard(batch, rank, size)``, see :meth:`GradientStep.shard`.
    compute_again : callable, optional
        See :meth:`GradientStep.compute_again`.
    describe : callable, optional
        See :meth:`GradientStep.describe`.
    """

    def __init__(
        self,
        compute: Compute,
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module | None = None,
        params: Iterable[Tensor] | None = None,
        *,
        shard: Callable[[Any, int, int], Any] = slice_of_rank,
        compute_again: Callable[[Any], object] | None = None,
        describe: Callable[[Any], str] | None = None,
        **settings: Any,
    ) -> None:
        self._function = compute
        self._shard = shard
        self._function_again = compute_again
        self._place_of = describe
        super().__init__(optimizer, model, params, **settings)

    def compute_loss(self, batch: Any) -> BatchLoss | None:
        return self._function(batch)

    def compute_again(self, batch: Any) -> None:
        (self._function_again or self._function)(batch)

    def shard(self, batch: Any, rank: int, size: int) -> Any:
        return self._shard(batch, rank, size)

    def describe(self, batch: Any) -> str:
        return "" if self._place_of is None else self._place_of(batch)

    # -- checkpoints: with the recurrent states, which the next batch may continue -----------------

    def state_dict(self) -> dict[str, Any]:
        """Return recurrent states and waiting gradients, without model and optimizer."""
        states = [] if self.model is None else snapshot(self.model)
        return {"states": states, "step": super().state_dict()}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        batches = "same" if self.shares_batches else "per_rank"
        require_shared_batches(batches, len(states), size)
        step = super().reshard_state_dict([state["step"] for state in states], rank, size)
        rows = [state["states"] for state in states]
        if self.model is not None:
            rows = reshard_rows(self.model, rows, rank, size)
        return {"states": rows, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        if self.model is not None:
            restore(self.model, state["states"])
        super().load_state_dict(state["step"])
