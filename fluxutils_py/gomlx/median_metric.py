"""The median of numbers over steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxutils_py.errors import DataError
from fluxutils_py.nn.losses import require_equal_shapes
from fluxutils_py.training.running_metrics import MeanMetric, Measure
from fluxutils_py.validation import check_integer

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
    sample_size : int
        Largest number of values to keep. Of more, it is the median of a random sample of this size.

    Notes
    -----
    Source: ``NewMedianMetric`` of gomlx.

    Examples
    --------
    >>> error = MedianMetric(torch.nn.L1Loss(reduction="none"), "error")
    >>> error.update(torch.tensor([1.0, 5.0, 90.0]), torch.zeros(3))
    >>> error.compute()
    5.0
    """

    def __init__(
        self,
        measure: Measure | None = None,
        name: str | None = None,
        short_name: str | None = None,
        *,
        sample_size: int = 10_001,
        metric_type: str = "metric",
    ) -> None:
        self.sample_size = check_integer("sample_size", sample_size, 1)
        super().__init__(measure, name, short_name, metric_type=metric_type)

    def reset(self) -> None:
        """Forget all steps."""
        self.values: list[float] = []
        self.count = 0
        self._random = random.Random(0)  # a fixed seed: the same steps give the same median

    @torch.no_grad()
    def update(self, *values: Any, weight: float | Tensor = 1.0) -> None:
        """Add the values of one step. A step of weight 0 adds none."""
        if not isinstance(weight, Tensor) and not weight:
            return
        if len(values) == 2:
            values, weight = self.without_extras(values, weight)
        if self.measure is not None:
            require_equal_shapes(self.measure, *values[:2])
        measured = values[0] if self.measure is None else self.measure(*values)
        each = torch.as_tensor(measured).double()
        if isinstance(weight, Tensor):
            each = self._without_weight_0(each, weight)
        for value in each.reshape(-1).tolist():
            self.add(value, 1.0)

    def _without_weight_0(self, each: Tensor, weight: Tensor) -> Tensor:
        if each.ndim:
            return each[weight.expand_as(each) != 0]
        # one number for the whole batch cannot leave out elements
        if bool((weight == 0).any()):
            raise DataError(
                f"the batch has weights of 0, but metric {self.name!r} is one number for the "
                "batch: give it a measure that is not reduced, such as "
                'nn.L1Loss(reduction="none")'
            )
        return each

    def add(self, value: float, weight: float) -> None:
        self.count += 1
        if len(self.values) < self.sample_size:
            self.values.append(value)
            return
        # reservoir sampling: each value so far has the same chance to be kept
        place = self._random.randrange(self.count)
        if place < self.sample_size:
            self.values[place] = value

    def compute(self) -> float | None:
        """Return the value so far; None before the first step."""
        return sorted(self.values)[len(self.values) // 2] if self.values else None

    def state_dict(self) -> dict[str, Any]:
        """Return the values as plain data."""
        return {"values": list(self.values), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.values = list(state["values"])
        self.count = state["count"]
        # the generator has no place in plain data; seeding by count keeps a resumed run determined
        self._random = random.Random(self.count)
