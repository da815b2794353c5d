"""The components of a fit that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.optim import Optimizer

from fluxutils_py.data import SequenceWindows
from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.estimator.minibatch_size import MinibatchSize
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.training import Loop
from fluxutils_py.training.closed_form_fit import FixedTask
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.window_step import WindowStep


@dataclass(frozen=True)
class FitPlan:
    """The length of a fit.

    Attributes
    ----------
    epochs : int
    windows : int
        With a loss, in an epoch.
    updates : int
        In all, if every window has a live step.
    """

    epochs: int
    windows: int
    updates: int

    @classmethod
    def of(cls, spec: Spec, windows: SequenceWindows) -> FitPlan:
        n_windows = sum(1 for _ in windows.indices_with_loss())
        per_epoch = -(-n_windows // spec.accumulate)
        epochs = spec.planned_epochs(per_epoch)
        updates = epochs * per_epoch
        if spec.max_updates is not None:
            updates = min(updates, spec.max_updates)
        return cls(epochs, n_windows, updates)


@dataclass(frozen=True)
class Training:
    """Components of a fit that is ready to run.

    Attributes
    ----------
    data : FitData
    size : MinibatchSize
    rng : numpy.random.Generator
        Source of all randomness, equal on all ranks.
    resume : bool
        Whether model and optimizer come from an earlier fit.
    optimizer : torch.optim.Optimizer
    groups : list of dict
        Parameter groups of the optimizer before a new scheduler changes them.
    scheduler : learning-rate scheduler of torch, or None
    batches : TensorBatches
        This rank's part of the windows.
    step : WindowStep
        Holds the ``model``.
    loop : Loop
        Holds ``ranks`` and all hooks except the callbacks.
    plan : FitPlan
    task : FixedTask or None
        Of what is fitted in closed form.
    """

    data: FitData
    size: MinibatchSize
    rng: np.random.Generator
    resume: bool
    optimizer: Optimizer
    groups: list[dict[str, Any]]
    scheduler: Any
    batches: TensorBatches
    step: WindowStep
    loop: Loop
    plan: FitPlan
    task: FixedTask | None
