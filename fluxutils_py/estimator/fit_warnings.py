"""Warn about a fit that will learn little, by what it has in hand anyway: shapes, the values of its
first minibatch, and the losses of its epochs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from fluxutils_py.errors import SingleStepWarning, warn
from fluxutils_py.estimator.building import NotStored, build_optimizer
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.nn import Recur
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.nn.states import carries, recurrent_layers, truncated_layers
from fluxutils_py.training.minibatch import Minibatch, TensorBatches

ENOUGH = 50  # updates; from fewer, a network seldom learns
WORSE = 1.1  # of the loss of a constant; while it learns from pure noise, a network is about there
UNVARYING = 1e-9  # loss of a constant, below which there is nothing to learn
LARGE = 1000  # root mean square of a feature, from which it should have been scaled

NORMALIZE = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.Embedding),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def warn_single_steps(inputs: Inputs, model: nn.Module) -> None:
    """Warn if a recurrent model is fitted on a matrix, whose rows are series of a single step."""
    if inputs.form != "rows" or inputs.T > 1:
        return
    if not any(isinstance(m, Recur) for m in model.modules()):
        return
    warn(
        f"{inputs.series[0].name} is a matrix, each of whose rows is taken for a series of one "
        "step: nothing is carried from row to row. If the rows are the steps of one series, fit on "
        "timesteps(x.T[:, None]), or make series of a data frame with fluxutils_py.from_frame; if "
        "the columns are features at T steps, as StandardScaler makes of samples(x), set "
        "n_timesteps=T, or scale with SequenceScaler; if rows are independent, a model without "
        "recurrent layers learns the same",
        SingleStepWarning,
    )


def warn_one_class(classes: np.ndarray | None) -> None:
    """Warn if there is one class only, as found in the labels: all predictions are then equal."""
    if classes is not None and len(classes) == 1:
        warn(
            f"all labels of y are {classes.tolist()[0]!r}: the classifier knows no other class, "
            "and always predicts this one. Give data with all classes, or declare them in the "
            "first call of partial_fit, with classes=[...]"
        )


def warn_unscaled(batch: Minibatch, model: nn.Module) -> None:
    """Warn if a feature or target of a minibatch is too large to learn from.

    Models that begin by normalizing or embedding may have inputs of any size. Models of this
    package, such as those of a Forecaster, are made for the features that they get.
    """
    if type(model).__module__.startswith("fluxutils_py."):
        return
    if not any(isinstance(m, NORMALIZE) for m in model.modules()):
        remedy = "make_pipeline(SequenceScaler(), estimator)"
        _warn_large("x", batch.inputs, [None] * len(batch.inputs), remedy)
    remedy = "SequenceRegressor, which has scale_target=True, or TransformedTargetRegressor"
    _warn_large("y", batch.labels, _weight_of_each(batch), remedy)


def _warn_large(
    name: str, arrays: tuple[Tensor, ...], weights: list[Tensor | None], remedy: str
) -> None:
    for values, weight in zip(arrays, weights, strict=True):
        if not values.is_floating_point() or not values.numel():
            continue
        values = values.detach().double().nan_to_num()
        if weight is not None:  # what does not count may be anything
            values = values.where(weight > 0, 0)
        size = values.square().mean((0, 1)).sqrt()
        if size.max() >= LARGE:
            feature = int(size.argmax())
            warn(
                f"feature {feature} of {name} has values of about {size[feature]:.0g}: networks "
                f"train poorly on such values, or not at all. Unless the model scales them, scale "
                f"them, as with {remedy}"
            )


def _weight_of_each(batch: Minibatch) -> list[Tensor | None]:
    """Return the weights of the steps of each array of labels."""
    if batch.weight is None:
        return [None] * len(batch.labels)
    if batch.weight.shape[2] == 1:  # one weight for all outputs of a step
        return [batch.weight] * len(batch.labels)
    return list(batch.weight.split([y.shape[2] for y in batch.labels], 2))


def warn_other_optimizer(loop: FitLoop) -> None:
    """Warn that a fit that continues keeps its optimizer, where ``opt`` would now make another."""
    opt = loop.data.settings.opt
    if isinstance(opt, Optimizer | NotStored):  # given as one, or lost in a file
        return
    mine = loop.optimizer
    other = build_optimizer(opt, loop.data.settings.model, loop.model)
    names = [name for name, value in mine.defaults.items() if other.defaults.get(name) != value]
    if type(mine) is not type(other):
        changed = f"{type(mine).__name__}, not {type(other).__name__}"
    elif names:
        changed = ", ".join(f"{k}={mine.defaults[k]}, not {other.defaults.get(k)}" for k in names)
    else:
        return
    warn(
        f"this fit continues with the optimizer of the previous fit: {changed}; change "
        "optimizer_.param_groups, or fit anew"
    )


def warn_truncated_layers(model: nn.Module) -> None:
    """Warn about layers that ``gradient="exact"`` does not help to learn from steps before a
    window.
    """
    names = truncated_layers(model)
    if names:
        warn(
            f"spec.gradient='exact': {', '.join(names)} stay{'s' * (len(names) == 1)} truncated at "
            "windows; only LRU, MinGRU and MinLSTM carry their gradients on"
        )
    elif not any(map(carries, recurrent_layers(model))):
        warn(
            "spec.gradient='exact' does nothing: the model has no recurrent layer with parameters "
            "to train; use LRU, MinGRU or MinLSTM"
        )


# -- updates, and what they have learnt ------------------------------------------------------------


def warn_few_updates(loop: FitLoop) -> None:
    """Warn if a fit plans fewer than ``ENOUGH`` updates, but some."""
    n = loop.n_updates
    if not 0 < n < ENOUGH:
        return
    spec = loop.data.spec
    accumulate = spec.accumulate
    remedy = "set more epochs, or a smaller batchsize or seqsize"
    if n == spec.max_updates:
        remedy = "raise max_updates"
    over = "" if accumulate == 1 else f", accumulate={accumulate}"
    warn(
        f"this fit makes {n} update{'s' * (n > 1)} in all (epochs={loop.epochs}, minibatches "
        f"per epoch: {loop.n_windows}{over}); fewer than {ENOUGH} are seldom enough to learn "
        f"from: {remedy}"
    )


def watch_scales(windows: TensorBatches, model: nn.Module) -> None:
    """Have the first minibatch with a loss warn of values that are too large."""
    unseen = [model]

    def look(batch: Minibatch) -> None:
        has_loss = batch.index is not None and batch.index.has_loss and batch.n_live != 0
        if unseen and has_loss:
            warn_unscaled(batch, unseen.pop())

    windows.observers.append(look)


def watch_targets(loop: FitLoop) -> list[list[Tensor]]:
    """Have the first epoch sum its targets, if what a fit has learnt can be told from its losses.

    Return the list that receives the sums of each output. It stays empty for fits of one epoch,
    whose loss is that of a model which begins to learn, for fits that are too short, and for losses
    of which the best constant is not known.
    """
    loss = loop.data.loss
    sums: list[list[Tensor]] = []
    is_short = loop.epochs < 2 or loop.n_updates < ENOUGH
    if is_short or not isinstance(loss, SeqLoss) or not loss.knows_constants:
        return sums

    def add(batch: Minibatch) -> None:
        if batch.n_live != 0 and batch.index is not None and batch.index.has_loss:
            sums[:] = [_added([*sums, loss.target_sums(batch.labels, batch.weight)])]

    loop.windows.observers.append(add)
    return sums


def warn_nothing_learnt(loop: FitLoop, sums: list[list[Tensor]]) -> None:
    """Warn on rank 0 if the losses of the last two epochs are above that of a constant output."""
    n_updates = loop.trainer.n_updates
    of_ranks = loop.ranks.allgather(sums)
    if loop.ranks.rank > 0 or n_updates < ENOUGH or loop.epoch - loop.start_epoch < 2:
        return
    total = _added([of_outputs for of_rank in of_ranks for of_outputs in of_rank])
    losses = [record["loss"] for record in loop.history[-2:] if record["loss"] is not None]
    if not total or not losses:
        return
    assert isinstance(loop.data.loss, SeqLoss)  # or there were no sums
    of_constant = loop.data.loss.loss_of_constant(total)
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
