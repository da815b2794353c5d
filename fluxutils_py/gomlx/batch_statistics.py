"""Compute the running statistics of BatchNorm anew, for parameters that did not come from training
steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fluxutils_py.errors import DataError
from fluxutils_py.nn.states import evaluating, reset
from fluxutils_py.training.dataset import as_dataset
from fluxutils_py.training.minibatch import begins_series

__all__ = ["recompute_batch_norm"]


class _Moments:
    """Mean and variance of each channel of the inputs of a layer."""

    def __init__(self) -> None:
        self.n, self.mean, self.square = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        x = x.detach().double()
        x = x.movedim(1, -1).reshape(-1, x.shape[1])
        self.n += len(x)
        delta = x.mean(0) - self.mean
        self.mean = self.mean + delta * len(x) / self.n  # Chan et al. (1979)
        between = delta.square() * len(x) * (self.n - len(x)) / self.n
        self.square = self.square + (x - x.mean(0)).square().sum(0) + between


class _Collector:
    """Hook that takes the moments of the inputs of several layers, in the order in which these are
    called.
    """

    def __init__(self) -> None:
        self.found: dict[nn.Module, _Moments] = {}

    def __call__(self, layer: nn.Module, inputs: Any) -> None:
        self.found.setdefault(layer, _Moments()).add(inputs[0])


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
        Anything that ``as_dataset`` takes.

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
        collector = _Collector()
        handles = [layer.register_forward_pre_hook(collector) for layer in waiting]
        try:
            with evaluating(model):
                n_batches = _run_over(model, data)
        finally:
            for handle in handles:
                handle.remove()
        if not n_batches:
            raise DataError(f"dataset {data.name!r} has no batches: there are no statistics")
        if not collector.found:  # layers that the model does not call keep theirs
            return
        first: Any = next(iter(collector.found))
        found = collector.found[first]
        if found.n < 2:
            raise DataError(
                f"dataset {data.name!r} gives a BatchNorm {found.n} value per channel: it needs 2 "
                "at least"
            )
        first.running_mean.copy_(found.mean)
        first.running_var.copy_(found.square / (found.n - 1))
        waiting.remove(first)


def _run_over(model: nn.Module, data: Any) -> int:
    device, n_batches = next((p.device for p in model.parameters()), None), 0
    for batch in data:
        if begins_series(batch):
            reset(model)
        model(*(batch if device is None else batch.to(device)).inputs)
        n_batches += 1
    data.reset()
    return n_batches
