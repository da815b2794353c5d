"""Means and deviations over a dataset: of inputs, and the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fluxutils_py.errors import DataError
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.minibatch import begins_series

__all__ = ["normalization", "recompute_batch_norm"]


class _Moments:
    """Mean and variance of each column of rows that come in parts."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())  # sum of squared deviations from the mean

    def add(self, rows: Tensor) -> None:
        x = rows.double()  # sums in float32 would lose digits over many examples
        self.n += len(x)
        # the update of Chan et al. (1979): a sum of squares minus a squared mean would cancel
        delta = x.mean(0) - self.mean
        self.mean = self.mean + delta * len(x) / self.n
        between = delta.square() * len(x) * (self.n - len(x)) / self.n
        self.squares = self.squares + (x - x.mean(0)).square().sum(0) + between


def normalization(
    dataset: Iterable[Any], index: int = 0, independent_axes: Sequence[int] = (-1,)
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of each feature of an input over a finite dataset.

    Parameters
    ----------
    dataset : iterable of batches
        Anything that ``as_dataset`` takes; it is read once.
    index : int
        Index of the input.
    independent_axes : sequence of int
        Axes that have a separate mean at each place: by default the last, of features. ``()``:
        one mean for all.

    Returns
    -------
    mean, std : Tensor, float64
        Of the sizes of the independent axes, in the order of the axes. The standard deviation of a
        constant feature is set to 1, so you can divide by it.

    Notes
    -----
    Source: ``Normalization`` of gomlx ``data``, which keeps the other axes with size 1, and a
    deviation of 0.

    Examples
    --------
    >>> from fluxutils_py.training import InMemory
    >>> normalization(InMemory(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), batchsize=1))
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    data = as_dataset(dataset)
    moments = _Moments()
    for batch in data:
        x = torch.as_tensor(batch.inputs[index])
        # the range counts negative axes from the end, and refuses those that are not there
        kept = sorted(range(x.dim())[axis] for axis in independent_axes)
        sizes = [x.shape[axis] for axis in kept]
        moments.add(x.movedim(kept, list(range(-len(kept), 0))).reshape(-1, *sizes))
    data.reset()
    if not moments.n:
        raise DataError(f"dataset {data.name!r} has no batches: there is no mean")
    std = (moments.squares / moments.n).sqrt()
    return moments.mean, torch.where(std > 0, std, 1.0)


def recompute_batch_norm(model: nn.Module, dataset: Iterable[Any]) -> None:
    """Set the running mean and variance of each BatchNorm layer to those of its inputs over a
    finite dataset.

    Means of parameters (``Checkpointer(take_mean=...)``) do not belong to the statistics that were
    saved with them. The model runs in evaluation mode, once over the data for each such layer, in
    the order in which they are called, so the result does not depend on the batches. Parameters,
    modes and states stay as they are.

    Parameters
    ----------
    model : nn.Module
        Called ``model(*inputs)``.
    dataset : iterable of batches
        Anything that ``as_dataset`` accepts.

    Raises
    ------
    DataError
        If the dataset has no batches, or fewer than two values for a layer. That layer then keeps
        its statistics.

    Notes
    -----
    Source: ``UpdateBatchNormAverages`` of gomlx.

    Examples
    --------
    >>> model = nn.BatchNorm1d(1)
    >>> recompute_batch_norm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])])
    >>> model.running_mean, model.running_var
    (tensor([3.]), tensor([4.]))
    """
    data = as_dataset(dataset)
    waiting = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    while waiting:
        moments_of = _collect_moments(model, data, waiting)
        if not moments_of:  # layers that the model does not call keep their statistics
            return
        # The first layer alone: its new statistics change the inputs of those after it.
        layer: Any = next(iter(moments_of))
        moments = moments_of[layer]
        if moments.n < 2:
            raise DataError(f"dataset {data.name!r} gives a BatchNorm 1 value per channel, not 2")
        layer.running_mean.copy_(moments.mean)
        layer.running_var.copy_(moments.squares / (moments.n - 1))
        waiting.remove(layer)


def _collect_moments(
    model: nn.Module, data: Any, layers: Sequence[nn.Module]
) -> dict[nn.Module, _Moments]:
    """Return the moments of the inputs of each layer that the model calls, in calling order."""
    moments: dict[nn.Module, _Moments] = {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    n_batches = 0

    def add_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().movedim(1, -1).flatten(0, -2)  # of channels
        moments.setdefault(layer, _Moments()).add(rows)

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(add_inputs).remove)
        for batch in data:
            if begins_series(batch):
                reset(model)
            model(*batch.to(device).inputs)
            n_batches += 1
    data.reset()  # for the pass over the next layer
    if not n_batches:
        raise DataError(f"dataset {data.name!r} has no batches: there are no statistics")
    return moments
