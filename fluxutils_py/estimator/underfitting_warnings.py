"""Warn about a fit that is too short to learn, or that has learnt nothing."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import pad

from fluxutils_py.errors import warn
from fluxutils_py.estimator.assembled_fit import FitPlan, Training
from fluxutils_py.estimator.data_warnings import in_model_selection
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.ready_made import is_closed_form
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.minibatch import Minibatch

ENOUGH = 50  # updates; from fewer, a network seldom learns
WORSE = 1.1  # of the loss of a constant; while it learns from pure noise, a network is about there
UNVARYING = 1e-9  # loss of a constant, below which there is nothing to learn


def warn_few_updates(plan: FitPlan, accumulate: int) -> None:
    """Warn if a fit plans fewer than ``ENOUGH`` updates, but some."""
    if not 0 < plan.updates < ENOUGH:
        return
    plural = "s" if plan.updates > 1 else ""
    over = "" if accumulate == 1 else f", accumulate={accumulate}"
    warn(
        f"this fit makes {plan.updates} update{plural} in all (epochs={plan.epochs}, minibatches "
        f"per epoch: {plan.windows}{over}); fewer than {ENOUGH} are seldom enough to learn from: "
        "set more epochs, or a smaller batchsize or seqsize"
    )


class TargetSums:
    """Sums of targets while the first epoch reads them: the loss of the best constant output."""

    def __init__(self, loss: SeqLoss) -> None:
        self.loss = loss
        self._sums: list[Tensor] = []  # of each output

    def add(self, batch: Minibatch) -> None:
        """Add the targets of a window."""
        if batch.n_live != 0 and batch.index is not None and batch.index.has_loss:
            self._sums = _added(self._sums, self.loss.target_sums(batch.labels, batch.weight))

    def loss_of_constant(self, ranks: RankGroup) -> float:
        """Return the loss of a constant on the targets of all ranks, on every rank; NaN if a
        checkpoint left no whole epoch.
        """
        sums: list[Tensor] = []
        for of_rank in ranks.allgather([each.cpu() for each in self._sums]):
            sums = _added(sums, of_rank)
        return self.loss.loss_of_constant(sums) if sums else math.nan


def _added(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Add sums of each output; those of no data are empty, and fewer classes a shorter tensor."""
    if not sums or not more:
        return sums or more
    together = []
    for a, b in zip(sums, more, strict=True):
        n = max(a.shape[-1], b.shape[-1])
        together.append(pad(a, (0, n - a.shape[-1])) + pad(b, (0, n - b.shape[-1])))
    return together


def watch_targets(training: Training) -> TargetSums | None:
    """Have the first epoch sum its targets, if what a fit has learnt can be told from its losses.

    Left out are fits of one epoch, whose loss is that of a model which begins to learn, fits that
    are too short, and losses of which the best constant is not known.
    """
    loss = training.data.loss
    plan = training.plan
    if plan.epochs < 2 or plan.updates < ENOUGH:
        return None
    if not isinstance(loss, SeqLoss) or not loss.knows_constants:
        return None
    if is_closed_form(training.step.model):
        return None
    targets = TargetSums(loss)
    training.batches.observe = targets.add
    return targets


def warn_nothing_learnt(training: Training, targets: TargetSums | None) -> None:
    """Warn on rank 0 if the losses of the last two epochs are above that of a constant output.

    Left out are searches, whose scores tell.
    """
    loop = training.loop
    n_updates = training.step.n_updates
    # a checkpoint may end the fit, or begin it within an epoch
    is_short = n_updates < ENOUGH or loop.epoch - loop.start_epoch < 2
    if targets is None or is_short:
        return
    of_constant = targets.loss_of_constant(loop.ranks)
    losses = [record["loss"] for record in loop.history[-2:] if record["loss"] is not None]
    is_worse = bool(losses) and min(losses) > WORSE * of_constant > UNVARYING
    if is_worse and loop.ranks.rank == 0 and not in_model_selection():
        warn(
            f"after {n_updates} updates the loss on the training data is {min(losses):.4g}, above "
            f"the {of_constant:.4g} of a constant output: the model has learnt nothing yet. Set "
            "more epochs, a smaller batchsize or seqsize, or another learning rate, or scale "
            "inputs and targets"
        )
