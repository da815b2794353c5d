"""Fit a model of fixed features: scale its inputs, learn biases, solve for the head."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fluxutils_py.auto.closed_form import (
    PENALTIES,
    ClosedFormHead,
    Rows,
    fit_closed_form,
)
from fluxutils_py.data import SequenceWindows
from fluxutils_py.data.segments import Segments, SeriesShards
from fluxutils_py.errors import DataError
from fluxutils_py.inputs.moments import Moments, WeightedBlock, moments
from fluxutils_py.nn.causal_kernels import MOST_SERIES, CausalKernels
from fluxutils_py.nn.closed_form_model import (
    ClosedFormModel,
    InputScale,
    closed_form_parts,
    is_closed_form,
    series_features,
)
from fluxutils_py.nn.states import reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.minibatch import Minibatch, TensorBatches

# of the deviation of features, whose inputs have a deviation of 1
FLOOR = 1e-3
MOST_LENGTH = 1 << 32  # of a series
FEW_ROWS = 100
MOST_STEPS = 100_000  # that are rows of a regression, taken at random from longer data
MOST_READ = 1 << 21  # steps; more are read in part
PIECE = 1 << 13  # steps of a series that are read together then
WARM_UP = 256  # steps at its beginning, for the state
STEPS_AT_ONCE = 2048  # of all series of a window
BLOCK_STEPS = 100  # of one series, which are left out together: neighbours resemble one another


@dataclass(frozen=True)
class ClosedFormTask:
    """What a model of fixed features is to predict, and which rows resemble one another.

    Attributes
    ----------
    n_classes : int or None
        If targets are labels.
    per_series : bool
        Whether each series has one target, at its last step, so that other steps are no rows.
    groups : ndarray of int, shape (N,), optional
        Of the series of all ranks, from 0: series of one group are left out together when the
        penalty is chosen. By default each series, or each 100 steps of it, is a group.
    like : ClosedFormHead, optional
        Of a fit on more of these data: penalties and features are those that it has chosen.
    """

    n_classes: int | None = None
    per_series: bool = False
    groups: np.ndarray | None = None
    like: ClosedFormHead | None = None


class CountingRows(NamedTuple):
    """The rows of a regression in each series of all ranks: steps with a weight and a target.

    What does not count, such as a tail of steps without a target, has no say in which rows are
    taken and left out together.

    Attributes
    ----------
    number, first, stop : ndarray of int, shape (N,)
        How many rows count, the first of their steps, and the step after the last.
    of_outputs : ndarray of int, shape (G,)
        How many rows have each of the targets.
    """

    number: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    of_outputs: np.ndarray

    @classmethod
    def none(cls, n_series: int, n_outputs: int) -> CountingRows:
        zeros = np.zeros(n_series, np.int64)
        of_outputs = np.zeros(n_outputs, np.int64)
        return cls(zeros, np.full(n_series, MOST_LENGTH), zeros.copy(), of_outputs)

    def add(self, steps: Tensor, weights: Tensor) -> None:
        """Count rows, which are numbered as by :func:`_numbers_of_steps`, and weights (n, G) or
        (n, 1) of their targets.
        """
        self.of_outputs[:] += (weights > 0).sum(0).cpu().numpy()
        series, step = np.divmod(steps.numpy(), MOST_LENGTH)
        self.number[:] += np.bincount(series, minlength=len(self.number))
        np.minimum.at(self.first, series, step)
        np.maximum.at(self.stop, series, step + 1)

    def merge(self, other: CountingRows) -> CountingRows:
        """Return the rows that count here or, on another rank, there."""
        return CountingRows(
            self.number + other.number,
            np.minimum(self.first, other.first),
            np.maximum(self.stop, other.stop),
            self.of_outputs + other.of_outputs,
        )

    @property
    def n_rows(self) -> int:
        return int(self.number.sum())

    @property
    def longest(self) -> int:
        """Steps from the first to the last row of a series, the most."""
        return int((self.stop - self.first).max())

    def without_empty(self, of_series: np.ndarray, present: np.ndarray) -> np.ndarray:
        """Return numbers of series, or of groups of them, anew, as if those of ``present`` in which
        no row counts were not there.
        """
        is_empty = np.zeros(of_series.max() + 1, bool)
        is_empty[of_series[present]] = True
        is_empty[of_series[self.number > 0]] = False
        renumbered: np.ndarray = (np.arange(len(is_empty)) - is_empty.cumsum())[of_series]
        return renumbered


def fit_closed_form_parts(
    model: nn.Module, batches: TensorBatches, ranks: RankGroup, task: ClosedFormTask
) -> ClosedFormHead | None:
    """Set all that a model learns in closed form, in passes over windows: scales, biases, heads.

    Of more than 2^21 steps with a target each, pieces of series that are evenly spread are read.

    Parameters
    ----------
    model : nn.Module
        Changed in place. Outputs of its :class:`ClosedFormModel` parts are then numbers, or logits
        of classes.
    batches : TensorBatches
        Windows of the training data; this rank's part of them.
    ranks : RankGroup
        Those that have the other parts; all get the same model.
    task : ClosedFormTask

    Returns
    -------
    ClosedFormHead or None
        Of the last part; None if there is none.

    Raises
    ------
    DataError
        If a target never counts, and the model has nothing but the closed form.
    """
    scales = [module for module in model.modules() if isinstance(module, InputScale)]
    if not scales:
        return None
    batches = in_long_windows(batches)
    if not task.per_series:
        batches.windows = _evenly_spread(batches.windows)
    counting = _learn_scales(scales, batches, ranks, task.per_series)
    if is_closed_form(model) and counting.n_rows and not counting.of_outputs.all():
        missing = np.flatnonzero(counting.of_outputs == 0).tolist()
        raise DataError(f"output {missing} has no target at a step that counts: leave it out of y")
    head = None
    for part in closed_form_parts(model):
        head = _fit_part(part, batches, ranks, task, counting)
    return head


def in_long_windows(batches: TensorBatches) -> TensorBatches:
    """Return all steps of this rank once, in fewer windows where there are few series: each
    window costs as much as many steps.
    """
    windows = batches.windows
    n_rows = min(windows.batchsize, len(windows.segments))
    longer = copy.copy(batches)
    seqsize = max(windows.seqsize, STEPS_AT_ONCE // n_rows)
    longer.windows = windows.changed(seqsize=seqsize, overlap=0)
    longer.rng = None
    return longer


def _evenly_spread(windows: SequenceWindows) -> SequenceWindows:
    """Return windows of up to ``MOST_READ`` of the steps, or little more: pieces of series that are
    evenly spread, of which the first steps only move the state.
    """
    rows = windows.segments
    share = MOST_READ / rows.length.sum()
    if share >= 1:
        return windows
    burn_in = windows.burn_in
    if rows.max_length > PIECE:
        burn_in += WARM_UP
        n = -(-rows.length // PIECE)
        first = np.repeat(n.cumsum() - n, n)
        row = np.repeat(np.arange(len(rows)), n)
        before = (np.arange(len(row)) - first) * PIECE
        length = np.minimum(rows.length[row] - before, PIECE)
        rows = Segments(rows.series[row], rows.start[row] + before, length)
    chosen = np.linspace(0, len(rows) - 1, math.ceil(share * len(rows))).astype(int)
    return windows.changed(segments=rows[chosen], burn_in=burn_in)


def _fit_part(
    part: ClosedFormModel,
    batches: TensorBatches,
    ranks: RankGroup,
    task: ClosedFormTask,
    counting: CountingRows,
) -> ClosedFormHead:
    for layer in part.layers:
        if isinstance(layer, CausalKernels):
            _learn_biases(part, layer, batches, ranks, counting)
    segments = batches.windows.segments
    of_outputs = torch.from_numpy(counting.of_outputs)
    share = (MOST_STEPS / of_outputs.clamp(min=1)).clamp(max=1)
    relative, penalties = part.relative, PENALTIES
    if task.like is not None:
        relative = [relative[i] for i in task.like.candidate.unique().tolist()]
        penalties = task.like.penalty.unique().tolist()
    head = fit_closed_form(
        _rows(part, batches, task, counting, share),
        (share * of_outputs).round().tolist(),
        is_classifier=task.n_classes is not None,
        relative=relative,
        floor=FLOOR,
        penalties=penalties,
        # few rows of a table, of which each matters
        fixed_penalty=segments.max_length == 1 and counting.n_rows < FEW_ROWS,
        ranks=ranks,
    )
    with torch.no_grad():
        part.head.weight.copy_(head.temperature * head.weight)
        part.head.bias.copy_(head.temperature * head.bias)
    reset(part)
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


def _learn_scales(
    scales: Sequence[InputScale], batches: TensorBatches, ranks: RankGroup, per_series: bool
) -> CountingRows:
    """Set mean and scale of the inputs over the steps that count, each as often as it occurs, and
    return the rows that count.

    With one target per series, all steps of a series count as it does.
    """
    n_features = len(scales[0].mean)
    shards = batches.windows.shards
    n_series = batches.windows.x[0].N if shards is None else len(shards.all_series)
    counting = CountingRows.none(n_series, sum(y.F for y in batches.windows.y))
    own = moments(_weighted_inputs(batches, per_series, counting), n_features)
    gathered = ranks.allgather((own, counting))
    total = functools.reduce(Moments.merge, [of_rank for of_rank, _ in gathered])
    mean = torch.from_numpy(np.asarray(total.mean, float))
    divisor = torch.from_numpy(total.scale(batches.windows.x[0].name))
    for scale in scales:
        scale.mean.copy_(mean)
        scale.scale.copy_(divisor)
    return functools.reduce(CountingRows.merge, [of_rank for _, of_rank in gathered])


def _weighted_inputs(
    batches: TensorBatches, per_series: bool, counting: CountingRows
) -> Iterator[WeightedBlock]:
    """Yield the new inputs of each window (F, B, S), NaN where there is none, and their weights;
    count the rows.
    """
    for batch in batches:
        if not batch.inputs:
            continue
        of_outputs = _weights(batch)
        weights = of_outputs.amax(2)
        places = weights.nonzero()
        numbers = _numbers_of_steps(batch, places, batches.windows.shards)
        counting.add(numbers, of_outputs[places[:, 0], places[:, 1]])
        if per_series and batch.index is not None:
            of_series = batches.windows.weights_of_targets(batch.index.segments)
            weights = _existing_steps(batch) * torch.from_numpy(of_series).to(weights)
        x = _new_inputs(batch).double().masked_fill(weights[..., None] == 0, math.nan)
        yield x.permute(2, 1, 0).cpu().numpy(), weights.T.cpu().numpy()


def _learn_biases(
    model: ClosedFormModel,
    layer: CausalKernels,
    batches: TensorBatches,
    ranks: RankGroup,
    counting: CountingRows,
) -> None:
    """Set the biases from some series of all ranks, the same everywhere."""
    windows = batches.windows
    rows = windows.segments
    rows = rows[counting.number[rows.series] > 0] or rows
    chosen = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_SERIES)).astype(int)]
    own = windows.of_rank(chosen)
    series = []
    for i in range(len(own)):
        row = own[i : i + 1]
        x = torch.from_numpy(windows.cut(row, 0, row.max_length).x[0].copy())
        with torch.no_grad():
            series.append(model.scale(x.to(layer.module.biases)).cpu())  # (T, 1, F)
    if windows.shards is not None:
        series = [s for of_rank in ranks.allgather(series) for s in of_rank]
    lengths = [len(s) for s in series]
    x = torch.zeros(series[0].shape[2], len(series), max(lengths), dtype=series[0].dtype)
    for i, s in enumerate(series):
        x[:, i, : len(s)] = s[:, 0].T
    layer.fit_biases(x, lengths)


def _rows(
    part: ClosedFormModel,
    batches: TensorBatches,
    task: ClosedFormTask,
    counting: CountingRows,
    share: Tensor,
) -> Iterator[Rows]:
    """Yield the features and targets of a share of the rows that count, window by window."""
    segments = batches.windows.segments
    numbers_of_series = np.arange(len(counting.number))
    series = torch.from_numpy(counting.without_empty(numbers_of_series, segments.series))
    groups = series
    if task.groups is not None:
        groups = torch.from_numpy(counting.without_empty(task.groups, segments.series))
    in_blocks = task.groups is None and not task.per_series
    # short series have some blocks too
    block = min(BLOCK_STEPS, max(1, min(segments.max_length, counting.longest) // 10))
    for batch in batches:
        if not batch.inputs:
            continue
        if batch.first:
            reset(part)
        x = _new_inputs(batch)
        (y,) = batch.labels
        with torch.no_grad():
            weights = _weights(batch)
            places = weights.amax(2).nonzero()  # (n, 2): step, series
            weights = weights[places[:, 0], places[:, 1]]
            numbers = _numbers_of_steps(batch, places, batches.windows.shards)
            if (share < 1).any():
                drawn = _scattered(series[numbers // MOST_LENGTH], numbers % MOST_LENGTH)
                weights = weights * (drawn[:, None] < share).to(weights)
                is_taken = weights.amax(1) > 0
                places, weights = places[is_taken], weights[is_taken]
                numbers = numbers[is_taken.cpu()]
            if task.per_series:
                features = series_features(part, x, places)
            else:
                features = part.features(x)[places[:, 0], places[:, 1]]
        targets = y[places[:, 0], places[:, 1]]
        if task.n_classes is not None:
            targets = 2.0 * one_hot(targets[:, 0].long(), task.n_classes) - 1
        weights = weights[:, 0] if weights.shape[1] == 1 else weights
        group = groups[numbers // MOST_LENGTH]
        if in_blocks:
            group = group * MOST_LENGTH + numbers % MOST_LENGTH // block
        yield Rows(features, targets, weights, group)


def _weights(batch: Minibatch) -> Tensor:
    """Return the weights of each step, (S, B, 1), or (S, B, G) where single targets are missing."""
    exists = _existing_steps(batch).double()[..., None]
    if batch.index is not None and not batch.index.has_loss:  # burn-in
        return exists * 0
    return exists if batch.weight is None else exists * batch.weight


def _numbers_of_steps(batch: Minibatch, places: Tensor, shards: SeriesShards | None) -> Tensor:
    """Return a number for each step of some series: that of the series times 2**32, plus the step.

    It is the same however the data are cut and divided.
    """
    index = batch.index
    assert index is not None
    rows = index.segments
    places = places.cpu()
    series_of_rows = np.asarray(rows.series, np.int64)
    if shards is not None:
        series_of_rows = shards.common_numbers(series_of_rows)
    series = torch.from_numpy(series_of_rows)[places[:, 1]]
    starts = torch.from_numpy(np.asarray(rows.start, np.int64))
    step = starts[places[:, 1]] + index.start + index.n_overlap + places[:, 0]
    return series * MOST_LENGTH + step


def _scattered(series: Tensor, step: Tensor) -> Tensor:
    """Return a number from 0 to 1 for each step of a series, as if drawn at random."""
    numbers = series * MOST_LENGTH + step
    mixed = (numbers ^ (numbers >> 32)) * 2654435761 % MOST_LENGTH
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % MOST_LENGTH
    return mixed / MOST_LENGTH
