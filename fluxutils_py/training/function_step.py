"""A gradient step whose loss is a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.training.gradient_step import GradientStep
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
