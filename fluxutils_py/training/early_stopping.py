"""Learning-rate schedule and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fluxutils_py.torch_private import note_optimizer_call
from fluxutils_py.training.best_model import BestModel, copy_state
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.make_optimizer import begin_schedule


def monitored_loss(record: dict[str, Any]) -> float | None:
    """Return the validation loss if there is one, else the training loss."""
    value = record.get("validation_loss")
    return record["loss"] if value is None else value


class Schedule:
    """Step a torch learning-rate scheduler.

    Parameters
    ----------
    scheduler : torch.optim.lr_scheduler.LRScheduler
        ``ReduceLROnPlateau`` receives the monitored loss.
    every : "epoch" or "step"
        When to step it. A step is an optimizer step: with ``accumulate``, several minibatches.
    updates : callable, optional
        Returns the number of optimizer steps so far; by default ``loop.step``.
    accumulate : int
        Minibatches of an optimizer step.
    planned : int, optional
        Optimizer steps of the run; by default as many as its batches give.
    """

    name = "learning-rate schedule"
    priority = -20

    def __init__(
        self,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        every: str = "epoch",
        updates: Callable[[], int] | None = None,
        accumulate: int = 1,
        planned: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.every = every
        self.updates = updates
        self.accumulate = accumulate
        self.planned = planned
        self._followed = 0  # number of updates at the scheduler's last step

    def on_start(self, loop: Loop) -> None:
        """Tell a schedule that depends on it the length of the run."""
        n_left = None
        if self.every == "step" and loop.end_step is not None:
            # rounded up: the last minibatches make an update too
            n_left = -(-(loop.end_step - loop.step) // self.accumulate)
            if self.planned is not None:
                n_left = self.planned - self._n_updates(loop)
        elif self.every == "epoch" and loop.n_epochs is not None:
            n_left = loop.start_epoch + loop.n_epochs - loop.epoch
        begin_schedule(self.scheduler, n_left)

    def _n_updates(self, loop: Loop) -> int:
        return loop.step if self.updates is None else self.updates()

    def on_step(self, loop: Loop) -> None:
        n_updates = self._n_updates(loop)
        if self.every == "step" and self._followed < n_updates:
            self.scheduler.step()
            self._followed = n_updates

    def on_epoch(self, loop: Loop) -> None:
        loop.record["lr"] = self.scheduler.optimizer.param_groups[0]["lr"]
        self.on_step(loop)  # accumulated gradients may be applied at the end of the epoch
        if self.every == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                value = monitored_loss(loop.record)
                self.scheduler.step(math.nan if value is None else value)
            else:
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and the scheduler's state; the optimizer saves its rates."""
        return {"followed": self._followed, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, for a scheduler of the same class."""
        self._followed = state["followed"]
        self.scheduler.load_state_dict(state["scheduler"])
        note_optimizer_call(self.scheduler.optimizer)  # in a new process it was not called yet


class EarlyStopping:
    """Stop when the monitored loss has not fallen for ``patience`` epochs in a row; restore the
    best weights.

    The best parameters and buffers are restored at the end of the run, unless it fails.

    Attributes
    ----------
    best : BestModel
    best_epoch : int
    """

    name = "early stopping"
    priority = -10

    def __init__(self, model: nn.Module, patience: int) -> None:
        self.model = model
        self.patience = patience
        self.best = BestModel(model)
        self.best_epoch = 0
        # The final weights of the run, before restoring the best.
        self._last: dict[str, Any] | None = None
        self._n_worse = 0

    def on_start(self, loop: Loop) -> None:
        if self._last is not None and loop.step > loop.start_step:  # the finished run continues
            self.model.load_state_dict(self._last)
        self._last = None

    def on_epoch(self, loop: Loop) -> None:
        if self.best.update(monitored_loss(loop.record)):
            self.best_epoch = loop.record["epoch"]
            self._n_worse = 0
        else:
            self._n_worse += 1
            if self._n_worse >= self.patience:
                loop.stop()

    def on_end(self, loop: Loop) -> None:
        # Only at the end: training goes back to the final weights if the run continues.
        if self.best.parameters is not None:
            self._last = copy_state(self.model)
            self.best.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the best model so far, the number of epochs since then, and the final weights of
        the last run.
        """
        return {
            "best": self.best.state_dict(),
            "epoch": self.best_epoch,
            "n_worse": self._n_worse,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.best.load_state_dict(state["best"])
        self.best_epoch = state["epoch"]
        self._n_worse = state["n_worse"]
        self._last = state["last"]
