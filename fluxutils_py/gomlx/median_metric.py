"""The median of numbers over steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx.running_metrics import MeanMetric
from fluxutils_py.nn.losses import require_equal_shapes

__all__ = ["MedianMetric"]


class MedianMetric(MeanMetric):
    """Median of the numbers of all steps: of one per step, or of each element that the measure
    returns.

    Of an even number it is the larger one in the middle. Elements of weight 0 do not count; other
    weights are ignored.

    Parameters
    ----------
    measure, name, short_name, metric_type
        See :class:`MeanMetric`.

    Notes
    -----
    It keeps all values; gomlx takes the median of a random sample of many. Source:
    ``NewMedianMetric`` of gomlx.

    Examples
    --------
    >>> error = MedianMetric(torch.nn.L1Loss(reduction="none"), "error")
    >>> error.update(torch.tensor([1.0, 5.0, 90.0]), torch.zeros(3))
    >>> error.compute()
    5.0
    """

    memory = ("values",)

    def reset(self) -> None:
        """Forget all steps."""
        self.values: list[float] = []

    @torch.no_grad()
    def update(self, *values: Any, weight: float | Tensor = 1.0) -> None:
        """Add the values of one step. A step of weight 0 adds none."""
        values, weight = self.without_extras(values, weight)
        measured = values[0]
        if self.measure is not None:
            require_equal_shapes(self.measure, *values[:2])
            measured = self.measure(*values)
        each = torch.as_tensor(measured, dtype=torch.float64)
        counts = torch.as_tensor(weight) != 0
        if not each.ndim and not counts.all() and counts.ndim:
            raise DataError(
                f"the batch has weights of 0, but metric {self.name!r} is one number for the "
                'batch: give it a measure that is not reduced, such as nn.L1Loss(reduction="none")'
            )
        self.values = [*self.values, *each[counts.expand_as(each)].tolist()]

    def compute(self) -> float | None:
        """Return the value so far; None before the first step."""
        return sorted(self.values)[len(self.values) // 2] if self.values else None
