"""A gradient step on batches of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fluxutils_py.nn.states import restore, snapshot
from fluxutils_py.training.gradient_step import GradientStep
from fluxutils_py.training.make_optimizer import make_optimizer
from fluxutils_py.training.minibatch import Minibatch, detached
from fluxutils_py.training.resharding import require_shared_batches, reshard_rows
from fluxutils_py.training.sharding import n_observations, shard
from fluxutils_py.training.step_info import BatchLoss, StepInfo

Loss = Callable[[Any, Any], Any]


class BatchStep(GradientStep):
    """Training step on batches of any kind, for a :class:`Loop`: ``Loop(BatchStep(loss, model))``.

    Parameters
    ----------
    loss : callable
        ``loss(model, batch)`` returns a scalar tensor, the mean over the observations of the batch;
        or a pair of it and a mapping of other values, which become ``loop.metrics``; or None if
        there is nothing to learn from the batch.
    model : nn.Module, optional
    opt : torch.optim.Optimizer, or a class or callable that makes one from the parameters, optional
        None: compute gradients without updating.
    params : iterable of Tensor, optional
        Parameters to train, also ones outside the model.
    axis : int
        Axis of the observations in the arrays of a batch.
    weigh : callable, optional
        ``weigh(batch)`` returns the number of data that the loss is a mean over; 0 skips the batch.
        By default, the number of observations; 1 without arrays.
    shard : callable, optional
        ``shard(batch, rank, size)`` returns a rank's part of a batch. By default, its share of the
        observations; of windows, its series.
    compute_again, describe : callable, optional
        For the error of a loss that is not finite: see :meth:`GradientStep.compute_again` and
        :meth:`GradientStep.describe`.
    **settings
        ``comm``, ``batches``, ``clip``, ``accumulate``, ``precision``, ``stateful`` and others of
        :class:`GradientStep`.

    Attributes
    ----------
    metrics : mapping
        The other values of the last batch on this rank.
    weight : float
        The number of data of the last batch on this rank.

    Notes
    -----
    ``Checkpointer(dir).track(model=model, optimizer=step.optimizer, loop=loop, data=data)`` holds
    all that a later process needs to continue exactly: the loop's part includes the step.

    Examples
    --------
    >>> from fluxutils_py.training import InMemory, Loop
    >>> def loss(model, batch):
    ...     return (model(batch.x) - batch.y).square().mean()
    >>> x = torch.randn(50, 3)
    >>> loop = Loop(BatchStep(loss, nn.Linear(3, 1), torch.optim.Adam))
    >>> _ = loop.run_epochs(InMemory(x, x.sum(1, keepdim=True), batchsize=8), 20)
    >>> loop.history[-1]["loss"] < loop.history[0]["loss"]
    True
    """

    name = "step"
    priority = -math.inf  # before all other hooks
    collective = True

    def __init__(
        self,
        loss: Loss,
        model: nn.Module | None = None,
        opt: Any = None,
        *,
        params: Iterable[Tensor] | None = None,
        axis: int = 0,
        weigh: Callable[[Any], float] | None = None,
        shard: Callable[[Any, int, int], Any] | None = None,
        compute_again: Callable[[Any], object] | None = None,
        describe: Callable[[Any], str] | None = None,
        **settings: Any,
    ) -> None:
        self._loss = loss
        self._axis = axis
        self._weigh = weigh
        self._shard = shard
        self._again = compute_again
        self._place_of = describe
        self.metrics: Mapping[str, Any] = {}
        self.weight = 0.0
        if not (opt is None or isinstance(opt, torch.optim.Optimizer)):
            given = model.parameters() if params is None and model is not None else params
            params = list(given or ())
            opt = make_optimizer(opt, [p for p in params if p.requires_grad])
        super().__init__(opt, model, params, **settings)

    def train_step(self, batch: object) -> StepInfo | None:
        """Train on one batch; pass None on a rank that has no more batches.

        Returns
        -------
        StepInfo or None
            None if ranks agreed to stop or no rank has a batch; such a step does not count.
        """
        self.metrics = {}
        self.weight = 0.0
        info = self(batch)
        return info if info is None else replace(info, metrics=self.metrics)

    def compute_loss(self, batch: Any) -> BatchLoss | None:
        self.weight = 1.0 if self._weigh is None else self._weigh(batch)
        if not self.weight:  # a mean over no data would be NaN
            return None
        result = self._loss(self.model, batch)
        if result is None or isinstance(result, BatchLoss):
            return result
        if isinstance(result, tuple):
            result, metrics = result
            self.metrics = detached(dict(metrics))
        if self._weigh is None:
            self.weight = n_observations(batch, self._axis) or 1.0
        return BatchLoss(result, self.weight)

    def compute_again(self, batch: Any) -> None:
        if self._again is None:
            self._loss(self.model, batch)
        else:
            self._again(batch)

    def shard(self, batch: Any, rank: int, size: int) -> Any:
        if self._shard is None:
            return shard_batch(batch, rank, size, self._axis)
        return self._shard(batch, rank, size)

    def describe(self, batch: Any) -> str:
        return "" if self._place_of is None else self._place_of(batch)

    def on_epoch(self, loop: object) -> None:
        """Finish a pass over the data."""
        self.finish_epoch()

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


def shard_batch(batch: Any, rank: int, size: int, axis: int = 0) -> Any:
    """Return a rank's share of the observations of a batch, of windows its series; None if it is
    empty.
    """
    if isinstance(batch, Minibatch):  # its arrays have series on different axes
        return batch.shard(rank, size, axis)
    return shard(batch, rank, size, axis)
