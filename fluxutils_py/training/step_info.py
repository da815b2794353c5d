"""The result of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
