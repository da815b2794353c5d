"""What a fit leaves in an estimator, and what functions of this package need of an estimator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from fluxutils_py.estimator.conformal import Calibration
from fluxutils_py.estimator.fit_choice import FitChoice
from fluxutils_py.estimator.spec import Settings
from fluxutils_py.inputs.inputs import InputLayout, InputSchema
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.nn import Recur


@dataclass(frozen=True, eq=False)
class FittedParts:
    """What a fit leaves for later calls, besides the public attributes of an estimator.

    It is frozen, and replaced whole after each epoch: an estimator whose fit fails gets back the
    parts that it had.

    Attributes
    ----------
    layout : InputLayout
        Layout of the inputs of the first fit.
    codec : TargetCodec
    rng : numpy.random.Generator
    scheduler : learning-rate scheduler of torch, or None
    n_steps : int
        Number of training steps so far.
    choice : FitChoice or None
        What "auto" stood for, in a ready-made estimator.
    data : dict of str to str
        Shapes, types and digests of the arrays of the last fit, for its model card.
    calibration : Calibration or None
        Errors on data that were held out, where ``interval`` asked for them.
    longest : int
        Steps of the longest series of the first fit; 1 in files that do not have it.
    """

    layout: InputLayout
    codec: TargetCodec
    rng: np.random.Generator
    scheduler: Any
    n_steps: int
    choice: FitChoice | None = None
    data: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    longest: int = 1


# ``Estimator`` imports the functions behind its methods, so these cannot import it.
class SeriesEstimator(Protocol):
    """An estimator of this package, as the functions behind its methods see it."""

    model_: nn.Module
    optimizer_: Optimizer
    fitted_parts_: FittedParts
    loss_: float
    grad_: Tensor
    loss_curve_: list[float]
    validation_loss_curve_: list[float]
    history_: list[dict[str, Any]]
    n_iter_: int
    n_features_in_: int | tuple[int, ...]
    n_outputs_: Any  # int, or tuple of int for several outputs
    feature_names_in_: np.ndarray
    classes_: np.ndarray

    def resolved_params(self) -> Settings:
        """Return the constructor's arguments, with defaults in place of None."""
        ...


def input_schema(
    est: SeriesEstimator, settings: Settings, parts: FittedParts | None
) -> InputSchema:
    """Return the requirements on inputs; ``parts`` are those of the fit that they follow."""
    name = type(est).__name__
    if parts is None:
        return InputSchema(name, settings.n_timesteps)
    longest = parts.longest if uses_past(est.model_) else 1
    return InputSchema(name, settings.n_timesteps, fitted=parts.layout, longest=longest)


def uses_past(model: nn.Module) -> bool:
    """Return whether a model has layers that may look at earlier steps."""
    return any(isinstance(m, Recur) or hasattr(m, "takes_windows") for m in model.modules())
