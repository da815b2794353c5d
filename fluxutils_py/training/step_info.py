"""The loss of a batch, and the result of one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BatchLoss(NamedTuple):
    """Loss of a batch, or of this rank's part of it.

    Attributes
    ----------
    loss : Tensor or float
        Scalar tensor to differentiate; a number once it was read.
    n_live : float
        Amount of data that the loss is a mean over: its weight in means over batches and ranks.
    weight : float, optional
        Weight of the loss among the ranks, if it differs from ``n_live``.
    """

    loss: Any
    n_live: float = 1.0
    weight: float | None = None

    @property
    def weight_in_mean(self) -> float:
        """Weight of the loss among the parts of a batch on the ranks."""
        return self.n_live if self.weight is None else self.weight


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Result of one training step.

    Attributes
    ----------
    batch_loss : float or None
        Loss of the batch; None if the step computed none. Alias ``loss``, as in bobbin.
    n_live : float
        Number of data that the loss averages: its weight in the mean over an epoch.
    metrics : mapping
        Other values, by name. Alias ``loss_aux_out``, as in bobbin.
    """

    batch_loss: Any
    n_live: float = 1
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> Any:
        return self.batch_loss

    @property
    def loss_aux_out(self) -> Mapping[str, Any]:
        return self.metrics


class PendingLoss:
    """Loss of a step that may not be computed yet; ``float`` waits for it.

    Reading a number from a GPU in every step leaves it idle until Python has prepared the next
    step. This class queues the copy to main memory behind the work of the step, and waits only when
    the number is needed.

    Parameters
    ----------
    numbers : sequence of Tensor
        Scalars on one device, the loss first.
    check : callable
        Called with the numbers once they are computed; raises if they are invalid.
    """

    def __init__(self, numbers: Sequence[Tensor], check: Callable[..., None]) -> None:
        # one copy for all of them
        values = torch.stack([n.detach().to(numbers[0].dtype) for n in numbers])
        self._check: Callable[..., None] | None = check
        self._copied: torch.cuda.Event | None = None
        self._value = 0.0
        if values.is_cuda:
            # Only pinned memory is copied to without waiting.
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = values  # in main memory already: reading does not wait

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
    if optimizer is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # Only the fused kernels read the flag; the attribute alone says what a class can do.
    return all(group.get("fused") for group in optimizer.param_groups)
