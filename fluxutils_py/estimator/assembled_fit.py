"""The components of a fit that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.optim import Optimizer

from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.estimator.minibatch_size import MinibatchSize
from fluxutils_py.parallel import Threads
from fluxutils_py.training import Loop
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.window_step import WindowStep


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
    threads : Threads
    step : WindowStep
        Holds the ``model``.
    loop : Loop
        Holds ``ranks`` and all hooks except the callbacks.
    """

    data: FitData
    size: MinibatchSize
    rng: np.random.Generator
    resume: bool
    optimizer: Optimizer
    groups: list[dict[str, Any]]
    scheduler: Any
    batches: TensorBatches
    threads: Threads
    step: WindowStep
    loop: Loop
