"""The result of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one training step returns.

    Attributes
    ----------
    batch_loss : float or None
        The loss of the batch; None if the step computed none. ``loss`` is bobbin's name for it.
    n_live : float
        How many data the loss is a mean over: its weight in the mean over an epoch.
    metrics : mapping
        Anything else, by name. ``loss_aux_out`` is bobbin's name for it.
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
