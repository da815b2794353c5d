"""Warn about data that a model is likely to learn the wrong thing from, by what a fit has in hand:
shapes, and the values of its first minibatch.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from fluxutils_py.errors import SingleStepWarning, warn
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.nn import Recur
from fluxutils_py.nn.sensitivities import carries, truncated_layers
from fluxutils_py.nn.states import recurrent_layers
from fluxutils_py.training.minibatch import Minibatch

LARGE = 1000  # root mean square of a feature, from which it should have been scaled

NORMALIZE = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.Embedding),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def warn_single_steps(inputs: Inputs, model: nn.Module) -> None:
    """Warn if a recurrent model is fitted on a matrix, whose rows are series of a single step."""
    if inputs.form != "rows" or inputs.T > 1:
        return
    if not any(isinstance(m, Recur) for m in model.modules()):
        return
    warn(
        f"{inputs.series[0].name} is a matrix, each of whose rows is taken for a series of one "
        "step: nothing is carried from row to row. If the rows are the steps of one series, fit on "
        "timesteps(x.T[:, None]), or make series of a data frame with fluxutils_py.from_frame; if "
        "the columns are features at T steps, as StandardScaler makes of samples(x), set "
        "n_timesteps=T, or scale with SequenceScaler; if rows are independent, a model without "
        "recurrent layers learns the same",
        SingleStepWarning,
    )


def warn_one_class(classes: np.ndarray | None) -> None:
    """Warn if there is one class only, as found in the labels: all predictions are then equal."""
    if classes is not None and len(classes) == 1:
        warn(
            f"all labels of y are {classes.tolist()[0]!r}: the classifier knows no other class, "
            "and always predicts this one. Give data with all classes, or declare them in the "
            "first call of partial_fit, with classes=[...]"
        )


def warn_unscaled(batch: Minibatch, model: nn.Module) -> None:
    """Warn if a feature or target of a minibatch is too large to learn from.

    Models that begin by normalizing or embedding may have inputs of any size. Models of this
    package, such as those of a Forecaster, are made for the features that they get.
    """
    if type(model).__module__.startswith("fluxutils_py."):
        return
    if not any(isinstance(m, NORMALIZE) for m in model.modules()):
        remedy = "make_pipeline(SequenceScaler(), estimator)"
        _warn_large("x", batch.inputs, [None] * len(batch.inputs), remedy)
    remedy = "SequenceRegressor, which has scale_target=True, or TransformedTargetRegressor"
    _warn_large("y", batch.labels, _weight_of_each(batch), remedy)


def _warn_large(
    name: str, arrays: tuple[Tensor, ...], weights: list[Tensor | None], remedy: str
) -> None:
    for values, weight in zip(arrays, weights, strict=True):
        if not values.is_floating_point() or not values.numel():
            continue
        values = values.detach().double().nan_to_num()
        if weight is not None:  # what does not count may be anything
            values = values.where(weight > 0, 0)
        size = values.square().mean((0, 1)).sqrt()
        if size.max() >= LARGE:
            feature = int(size.argmax())
            warn(
                f"feature {feature} of {name} has values of about {size[feature]:.0g}: networks "
                f"train poorly on such values, or not at all. Unless the model scales them, scale "
                f"them, as with {remedy}"
            )


def _weight_of_each(batch: Minibatch) -> list[Tensor | None]:
    """Return the weights of the steps of each array of labels."""
    if batch.weight is None:
        return [None] * len(batch.labels)
    if batch.weight.shape[2] == 1:  # one weight for all outputs of a step
        return [batch.weight] * len(batch.labels)
    return list(batch.weight.split([y.shape[2] for y in batch.labels], 2))


def warn_truncated_layers(model: nn.Module) -> None:
    """Warn about layers that ``gradient="exact"`` does not help to learn from steps before a
    window.
    """
    names = truncated_layers(model)
    if names:
        warn(
            f"spec.gradient='exact': {', '.join(names)} stay{'s' * (len(names) == 1)} truncated at "
            "windows; only LRU, MinGRU and MinLSTM carry their gradients on"
        )
    elif not any(map(carries, recurrent_layers(model))):
        warn(
            "spec.gradient='exact' does nothing: the model has no recurrent layer with parameters "
            "to train; use LRU, MinGRU or MinLSTM"
        )
