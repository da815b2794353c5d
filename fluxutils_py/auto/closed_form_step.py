"""A step of the training loop that fits a model of fixed features in one pass over all windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fluxutils_py.auto.closed_form import ClosedFormHead
from fluxutils_py.auto.closed_form_fit import FixedTask, fit_fixed_parts
from fluxutils_py.nn.losses import Loss
from fluxutils_py.nn.states import reset
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.window_step import WindowStep


class ClosedFormStep(WindowStep):
    """Fit a model in closed form; a batch of this step is a whole pass, :class:`TensorBatches`.

    The loss of the step is that of rows that were left out.

    Parameters
    ----------
    model : nn.Module
        One of which :func:`is_closed_form` is true.
    loss : callable
        For validation.
    optimizer : torch.optim.Optimizer
        Not used.
    comm : RankGroup
    task : FixedTask
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        comm: RankGroup,
        task: FixedTask,
    ) -> None:
        super().__init__(model, loss, optimizer, comm=comm)
        self.task = task

    def __call__(self, batch: Any) -> StepInfo | None:
        if batch is None:
            return None
        reset(self.model)
        head = fit_fixed_parts(self.model, batch, self.ranks, self.task)
        assert head is not None
        self.n_updates += 1
        is_classifier = self.task.n_classes is not None
        loss = classes_loss(head) if is_classifier else head.squared_error
        # to seven digits, as linear algebra rounds by the number of threads
        rounded = float(torch.tensor(float(loss), dtype=torch.float32))
        return StepInfo(rounded, len(head.left_out), {"alpha": float(head.alpha.mean())})

    def flush(self) -> None:
        """Do nothing: no gradient waits, and all ranks have the same buffers."""


def classes_loss(head: ClosedFormHead) -> Tensor:
    """Return the mean cross-entropy of the rows that were left out."""
    labels = head.targets.argmax(1)
    weights = head.weights[:, 0]
    each = cross_entropy(head.temperature * head.left_out, labels, reduction="none")
    return (weights * each).sum() / weights.sum()
