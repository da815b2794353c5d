"""Warn about a fit that is too short to learn, or that has learnt nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fluxutils_py.errors import warn
from fluxutils_py.estimator.assembled_fit import FitPlan, Training
from fluxutils_py.estimator.data_warnings import warn_unscaled
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.ready_made import is_closed_form
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


def watch_scales(training: Training) -> None:
    """Have the first minibatch of the first epoch warn of values that are too large."""
    unseen = [training.step.model]

    def look(batch: Minibatch) -> None:
        if unseen and batch.inputs:
            warn_unscaled(batch, unseen.pop())

    training.batches.observers.append(look)


def watch_targets(training: Training) -> list[list[Tensor]]:
    """Have the first epoch sum its targets, if what a fit has learnt can be told from its losses.

    Return the list that receives the sums of each output. It stays empty for fits of one epoch,
    whose loss is that of a model which begins to learn, for fits that are too short, and for losses
    of which the best constant is not known.
    """
    loss = training.data.loss
    plan = training.plan
    sums: list[list[Tensor]] = []
    is_short = plan.epochs < 2 or plan.updates < ENOUGH or is_closed_form(training.step.model)
    if is_short or not isinstance(loss, SeqLoss) or not loss.knows_constants:
        return sums

    def add(batch: Minibatch) -> None:
        if batch.n_live != 0 and batch.index is not None and batch.index.has_loss:
            sums[:] = [_added([*sums, loss.target_sums(batch.labels, batch.weight)])]

    training.batches.observers.append(add)
    return sums


def warn_nothing_learnt(training: Training, sums: list[list[Tensor]]) -> None:
    """Warn on rank 0 if the losses of the last two epochs are above that of a constant output."""
    loop = training.loop
    n_updates = training.step.n_updates
    of_ranks = loop.ranks.allgather(sums)
    if loop.ranks.rank > 0 or n_updates < ENOUGH or loop.epoch - loop.start_epoch < 2:
        return
    total = _added([of_outputs for of_rank in of_ranks for of_outputs in of_rank])
    losses = [record["loss"] for record in loop.history[-2:] if record["loss"] is not None]
    if not total or not losses:
        return
    assert isinstance(training.data.loss, SeqLoss)  # or there were no sums
    of_constant = training.data.loss.loss_of_constant(total)
    if min(losses) > WORSE * of_constant > UNVARYING:
        warn(
            f"after {n_updates} updates the loss on the training data is {min(losses):.4g}, above "
            f"the {of_constant:.4g} of a constant output: the model has learnt nothing yet. Set "
            "more epochs, a smaller batchsize or seqsize, or another learning rate, or scale "
            "inputs and targets"
        )


def _added(parts: list[list[Tensor]]) -> list[Tensor]:
    """Add up the sums of each output; a part that has not met the last classes has fewer."""
    totals = []
    for sums in zip(*parts, strict=True):
        n = max(each.shape[-1] for each in sums)
        totals.append(torch.stack([pad(each, (0, n - each.shape[-1])) for each in sums]).sum(0))
    return totals
