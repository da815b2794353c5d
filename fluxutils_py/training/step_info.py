"""The loss of a batch, and the result of one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluxutils_py.training.gradients import Gradients


class BatchLoss(NamedTuple):
    """Loss of a batch, or of this rank's part of it.

    Attributes
    ----------
    loss : Tensor or float
        Scalar tensor to differentiate; a number if ``gradients`` are given.
    n_live : float
        Amount of data that the loss is a mean over: its weight in means over batches and ranks.
    weight : float, optional
        Weight of the loss among the ranks, if it differs from ``n_live``.
    gradients : tuple, optional
        Gradients that threads have computed, one per parameter; None for parameters without a gradient.
    numbers : sequence of float
        Further means over the same data, to average over ranks.
    """

    loss: Any
    n_live: float = 1.0
    weight: float | None = None
    gradients: Gradients | None = None
    numbers: Sequence[float] = ()


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
