"""Recompute the running statistics of BatchNorm, for parameters that no training step set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fluxutils_py.errors import DataError
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.training.dataset import Dataset, as_dataset
from fluxutils_py.training.minibatch import begins_series

__all__ = ["recompute_batch_norm"]


class _Moments:
    """Mean and variance of each channel of the inputs of a layer."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())  # sum of squared deviations from the mean

    def add(self, x: Tensor) -> None:
        x = x.detach().double()
        x = x.movedim(1, -1).reshape(-1, x.shape[1])
        self.n += len(x)
        # the update of Chan et al. (1979): a sum of squares minus a squared mean would cancel
        delta = x.mean(0) - self.mean
        self.mean = self.mean + delta * len(x) / self.n
        between = delta.square() * len(x) * (self.n - len(x)) / self.n
        self.squares = self.squares + (x - x.mean(0)).square().sum(0) + between


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
            raise DataError(
                f"dataset {data.name!r} gives a BatchNorm {moments.n} value per channel: it needs "
                "at least 2"
            )
        layer.running_mean.copy_(moments.mean)
        layer.running_var.copy_(moments.squares / (moments.n - 1))
        waiting.remove(layer)


def _collect_moments(
    model: nn.Module, data: Dataset, layers: Sequence[nn.Module]
) -> dict[nn.Module, _Moments]:
    """Return the moments of the inputs of each layer that the model calls, in calling order."""
    moments: dict[nn.Module, _Moments] = {}

    def add_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        moments.setdefault(layer, _Moments()).add(inputs[0])

    handles = [layer.register_forward_pre_hook(add_inputs) for layer in layers]
    try:
        with evaluating(model):
            n_batches = _run_over(model, data)
    finally:
        for handle in handles:
            handle.remove()
    if not n_batches:
        raise DataError(f"dataset {data.name!r} has no batches: there are no statistics")
    return moments


def _run_over(model: nn.Module, data: Dataset) -> int:
    """Call the model with each batch; return their number."""
    device = next((p.device for p in model.parameters()), None)
    n_batches = 0
    for batch in data:
        if begins_series(batch):
            reset(model)
        if device is not None:
            batch = batch.to(device)
        model(*batch.inputs)
        n_batches += 1
    data.reset()  # for the pass over the next layer
    return n_batches
