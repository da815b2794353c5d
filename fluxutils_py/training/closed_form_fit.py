"""Fit a model of fixed features: scale its inputs, learn biases, solve for the head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fluxutils_py.nn.causal_kernels import MOST_SERIES, CausalKernels
from fluxutils_py.nn.closed_form_model import ClosedFormModel, series_features
from fluxutils_py.nn.states import reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.closed_form import ClosedFormHead, Rows, fit_closed_form
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.tensor_batches import TensorBatches

# of the deviation of features, whose inputs have a deviation of 1
FLOOR = 1e-3
MOST_BLOCKS = 1 << 32  # of a series
BLOCK_STEPS = 100  # of one series, which are left out together: neighbours resemble one another


def fit_fixed_model(
    model: ClosedFormModel,
    batches: TensorBatches,
    ranks: RankGroup,
    *,
    n_classes: int | None = None,
    per_series: bool = False,
    groups: np.ndarray | None = None,
) -> ClosedFormHead:
    """Set all that a model of fixed features learns, in passes over windows.

    Parameters
    ----------
    model : ClosedFormModel
        Changed in place. Its outputs are then numbers, or logits of classes.
    batches : TensorBatches
        Windows of the training data; this rank's part of them.
    ranks : RankGroup
        Those that have the other parts; all get the same model.
    n_classes : int, optional
        If targets are labels.
    per_series : bool
        Whether each series has one target, at its last step, so that other steps are no rows.
    groups : ndarray of shape (N,), optional
        An integer for each series of all ranks: series of one group are left out together when the
        penalty is chosen. By default each series, or each 100 steps of it, is a group.
    """
    _learn_scale(model, batches, ranks)
    for layer in model.layers:
        if isinstance(layer, CausalKernels):
            _learn_biases(model, layer, batches, ranks)
    segments = batches.windows.segments
    n_rows = len(segments) if per_series else int(segments.length.sum())
    head = fit_closed_form(
        _rows(model, batches, n_classes, per_series, groups),
        n_rows,
        is_classifier=n_classes is not None,
        relative=model.relative_factors(),
        floor=FLOOR,
        ranks=ranks,
    )
    with torch.no_grad():
        model.head.weight.copy_(head.temperature * head.weight)
        model.head.bias.copy_(head.temperature * head.bias)
    reset(model)
    return head


def _new_inputs(batch: Minibatch) -> Tensor:
    """Return the inputs of a window without those that the one before had, (S, B, F)."""
    (x,) = batch.inputs
    assert batch.index is not None
    new: Tensor = x[batch.index.n_overlap :]
    return new


def _existing_steps(batch: Minibatch) -> Tensor:
    """Return which of the new steps are of series that have not ended, (S, B)."""
    x = _new_inputs(batch)
    index = batch.index
    assert index is not None
    mask = index.segments.step_mask(index.start + index.n_overlap, index.stop)
    if mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return torch.from_numpy(mask).to(x.device)


def _learn_scale(model: ClosedFormModel, batches: TensorBatches, ranks: RankGroup) -> None:
    """Set mean and scale of the inputs over all steps, each as often as it occurs."""
    moments = _Moments.none(len(model.scale.mean))
    for batch in batches:
        if batch.inputs:
            x = _new_inputs(batch)
            moments = moments.merge(_Moments.of(x[_existing_steps(batch)].double().cpu()))
    every: list[_Moments] = ranks.allgather(moments)
    total = _Moments.none(len(model.scale.mean))
    for of_rank in every:
        total = total.merge(of_rank)
    deviation = (total.squares / max(total.count, 1)).sqrt()
    # what is constant up to rounding is not blown up
    is_constant = deviation <= 1e-6 * total.mean.abs()
    model.scale.mean.copy_(total.mean)
    model.scale.scale.copy_(deviation.masked_fill(is_constant | (deviation == 0), 1))


class _Moments:
    """Number of steps, mean of each feature, and sum of squared distances from it."""

    def __init__(self, count: int, mean: Tensor, squares: Tensor) -> None:
        self.count = count
        self.mean = mean
        self.squares = squares

    @classmethod
    def none(cls, n: int) -> _Moments:
        zeros = torch.zeros(n, dtype=torch.float64)
        return cls(0, zeros, zeros)

    @classmethod
    def of(cls, x: Tensor) -> _Moments:
        if not len(x):
            return cls.none(x.shape[1])
        mean = x.mean(0)
        return cls(len(x), mean, (x - mean).square().sum(0))

    def merge(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        between = distance.square() * (self.count * other.count / count)
        mean = self.mean + distance * (other.count / count)
        return _Moments(count, mean, self.squares + other.squares + between)


def _learn_biases(
    model: ClosedFormModel, layer: CausalKernels, batches: TensorBatches, ranks: RankGroup
) -> None:
    """Set the biases from some series of all ranks, the same everywhere."""
    windows = batches.windows
    rows = windows.segments
    chosen = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_SERIES)).astype(int)]
    own = windows.own(chosen)
    series = []
    for i in range(len(own)):
        row = own[i : i + 1]
        x = torch.from_numpy(windows.cut(row, 0, row.max_length).x[0].copy())
        with torch.no_grad():
            series.append(model.scale(x.to(layer.module.biases.dtype)))  # (T, 1, F)
    if windows.shards is not None:
        series = [s for of_rank in ranks.allgather(series) for s in of_rank]
    lengths = [len(s) for s in series]
    x = torch.zeros(series[0].shape[2], len(series), max(lengths), dtype=series[0].dtype)
    for i, s in enumerate(series):
        x[:, i, : len(s)] = s[:, 0].T
    layer.fit_biases(x, lengths)


def _rows(
    model: ClosedFormModel,
    batches: TensorBatches,
    n_classes: int | None,
    per_series: bool,
    groups: np.ndarray | None,
) -> Iterator[Rows]:
    """Yield the features and targets of all rows that count, window by window."""
    for batch in batches:
        if not batch.inputs:
            continue
        if batch.first:
            reset(model)
        x = _new_inputs(batch)
        (y,) = batch.labels
        with torch.no_grad():
            weights = _weights(batch)
            live = weights > 0
            places = live.nonzero()  # (n, 2): step, series
            if per_series:
                features = series_features(model, x, places)
            else:
                features = model.features(x)[live]
        targets = y[live]
        if n_classes is not None:
            targets = 2.0 * one_hot(targets[:, 0].long(), n_classes) - 1
        yield Rows(
            features, targets, weights[live], _group_of_rows(batch, places, per_series, groups)
        )


def _weights(batch: Minibatch) -> Tensor:
    """Return the weight of each step, (S, B), 0 where one of several targets is missing."""
    exists = _existing_steps(batch).double()
    if batch.index is not None and not batch.index.has_loss:  # burn-in
        return exists * 0
    return exists if batch.weight is None else exists * batch.weight.amin(2)


def _group_of_rows(
    batch: Minibatch, places: Tensor, per_series: bool, groups: np.ndarray | None
) -> Tensor:
    """Return a number for each row; rows with the same number are left out together."""
    index = batch.index
    assert index is not None
    rows = index.segments
    places = places.cpu()
    series = torch.from_numpy(np.asarray(rows.series))[places[:, 1]]
    if groups is not None:
        return torch.from_numpy(np.asarray(groups, dtype=np.int64))[series]
    if per_series:
        return series
    starts = torch.from_numpy(np.asarray(rows.start))
    step = starts[places[:, 1]] + index.start + index.n_overlap + places[:, 0]
    return series * MOST_BLOCKS + step // BLOCK_STEPS
