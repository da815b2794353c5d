"""Losses that a GPU is still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class PendingLoss:
    """The loss of a step that may not be computed yet; ``float`` waits for it.

    Reading a number from a GPU at every step would let it stand still until the next step has been prepared. This takes
    the copy to main memory in line behind the step's work, and lets whoever needs the number wait.

    Parameters
    ----------
    numbers : sequence of Tensor
        Scalars on one device, the loss first.
    check : callable
        Is given the numbers when they are there; raises if they are not as they should be.
    """

    def __init__(self, numbers: Sequence[Tensor], check: Callable[..., None]) -> None:
        found = torch.stack([n.detach().double() for n in numbers])
        self._check: Callable[..., None] | None = check
        self._there: torch.cuda.Event | None = None
        self._value = 0.0
        if found.is_cuda:
            self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()
        else:
            self._host = found

    def __float__(self) -> float:
        if self._check is not None:
            if self._there is not None:
                self._there.synchronize()
            self._value, *others = self._host.tolist()
            self._check(self._value, *others)
            self._check = None
        return self._value


def supports_found_inf(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer does nothing in a step that is told, on the device, that something is not finite."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused")
        for group in optimizer.param_groups  # type: ignore[union-attr]  # None has no attribute
    )
