"""Losses that a GPU is still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class PendingLoss:
    """Loss of a step that may not be computed yet; ``float`` waits for it.

    Reading a number from a GPU in every step leaves it idle until Python has prepared the next step. This class queues
    the copy to main memory behind the work of the step, and waits only when the number is needed.

    Parameters
    ----------
    numbers : sequence of Tensor
        Scalars on one device, the loss first.
    check : callable
        Called with the numbers once they are computed; raises if they are invalid.
    """

    def __init__(self, numbers: Sequence[Tensor], check: Callable[..., None]) -> None:
        values = torch.stack([n.detach().double() for n in numbers])
        self._check: Callable[..., None] | None = check
        self._copied: torch.cuda.Event | None = None
        self._value = 0.0
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = values

    def __float__(self) -> float:
        if self._check is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self._value, *others = self._host.tolist()
            self._check(self._value, *others)
            self._check = None
        return self._value


def supports_found_inf(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer skips a step if ``found_inf``, a flag on the device, is set."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused")
        for group in optimizer.param_groups  # type: ignore[union-attr]  # None has no attribute
    )
