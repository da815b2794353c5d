"""Warn about a fit that is too short to learn, or that has learnt nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fluxutils_py.errors import warn
from fluxutils_py.estimator.assembled_fit import FitPlan, Training
from fluxutils_py.estimator.data_warnings import in_model_selection
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.model_windows import trial_outputs
from fluxutils_py.nn.seeding import seeded
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Loop
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.tensor_batches import TensorBatches, first_steps
from fluxutils_py.training.window_step import evaluate_windows

ENOUGH = 50  # updates; from fewer, a network seldom learns
WORSE = 1.02  # of the loss of a constant; the outputs for pure noise are near a constant
FIRST_LOOK = 8  # windows, whose best constant most fits are ahead of
TINY = 1e-12  # weight, above 0
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


def warn_nothing_learnt(training: Training) -> None:
    """Warn on rank 0 if a fitted model has a larger loss on its training data than a constant.

    This costs no more than a pass without training, and reads a few windows where the loss of the
    last epoch leaves no doubt. Left out are fits of less than a pass, losses of which the best
    constant is not known, data that are divided over ranks, and searches, whose scores tell.
    """
    data = training.data
    loss = data.loss
    plan = training.plan
    n_updates = training.step.n_updates
    is_short = n_updates < max(ENOUGH, plan.windows // data.spec.accumulate)
    is_elsewhere = training.loop.ranks.rank > 0 or data.windows.shards is not None
    if is_short or is_elsewhere or not isinstance(loss, SeqLoss) or in_model_selection():
        return
    model = training.step.model
    batches = TensorBatches(data.windows, training.batches.dtype, training.batches.device)
    constants = _Constants(loss, _count_scores(training) if loss.classes else [])
    few = partial(batches.sample, -(-plan.windows // FIRST_LOOK))
    of_few = constants.least_loss(few)
    if of_few is None or _last_loss(training.loop) <= of_few:
        return
    of_constant = constants.least_loss(partial(iter, batches))
    of_model = evaluate_windows(model, loss, batches, RankGroup(), data.spec.precision)
    if of_constant is not None and of_model > WORSE * of_constant > UNVARYING:
        warn(
            f"after {n_updates} updates the loss on the training data is "
            f"{of_model:.4g}, above the {of_constant:.4g} of a constant output: the model has "
            "learnt nothing yet. Set more epochs, a smaller batchsize or seqsize, or another "
            "learning rate, or scale inputs and targets"
        )


def _last_loss(loop: Loop) -> float:
    """Return the loss of the last epoch; infinity if no step of it had one."""
    loss = loop.history[-1]["loss"] if loop.history else None
    return math.inf if loss is None else float(loss)


def _count_scores(training: Training) -> list[int]:
    """Return the number of classes of each output, as a model of one's own gives scores."""
    model = training.step.model
    with seeded(0):  # as each trial of a model
        steps = first_steps(training.data.windows, next(model.parameters()))
        return [out.shape[-1] for out in trial_outputs(model, steps)]


@dataclass(frozen=True)
class _Constants:
    """Constant outputs, to compare a model with."""

    loss: SeqLoss
    n_scores: Sequence[int]  # of each output, if targets are labels

    def least_loss(self, read: Callable[[], Iterable[Minibatch]]) -> float | None:
        """Return about the least loss on these windows; None if its constant is not known."""
        sums: list[Tensor] = []
        for batch in read():
            if batch.n_live:
                of_batch = self.loss.target_sums(batch.labels, batch.weight, self.n_scores)
                sums = [a + b for a, b in zip(sums, of_batch, strict=True)] if sums else of_batch
        means = [total / weight.clamp(min=TINY) for total, weight in sums]
        outputs = [self.loss.output_of_mean(mean) for mean in means]
        known = [out for out in outputs if out is not None]
        if not known or len(known) < len(outputs):
            return None
        return evaluate_windows(_Constant(known), self.loss, read(), RankGroup())


class _Constant(nn.Module):
    """A model that gives the same outputs at each step."""

    takes_windows = True

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = nn.ParameterList(out.float() for out in outputs)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return tuple(out.expand(*x.shape[:2], -1) for out in self.outputs)
