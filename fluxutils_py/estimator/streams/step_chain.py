"""What surrounds a model in one step of a pipeline: scalers of its inputs, and the form of its
outputs.

With the :class:`fluxutils_py.steps.step_program.StepProgram` of the model, this is all that a step
computes, for a native call and for a file alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.inputs.moments import Affine, FeatureModule
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.steps.native_step import OutputForm, Scaler
from fluxutils_py.transformers.imputer import Fill
from fluxutils_py.transformers.winsor_scaler import Winsorize

# of a classifier, by the method
_FORMS = {
    "predict": "label",
    "predict_proba": "probabilities",
    "predict_log_proba": "log_probabilities",
}


def scaler_of(transformer: object) -> Scaler | None:
    """Return what a transformer does to each feature of a step; None if it is not one of those.

    Parameters
    ----------
    transformer : the module of a fitted transformer, or one of scikit-learn's
    """
    from sklearn.preprocessing import StandardScaler  # only now: it takes a twentieth of a second

    kind = type(transformer)  # exactly: a subclass may compute something else
    function: Any = transformer
    if kind is Affine and not function.inverse:
        return _scaler("standardize", function, "center", "scale")
    if kind is Winsorize:
        return _scaler("winsorize", function, "mean", "scale", "lower", "upper")
    if kind is Fill:
        return _scaler("fill", function, "values")
    if kind is StandardScaler:
        n = function.n_features_in_
        # mean_ is there also where with_mean=False leaves it out
        mean = function.mean_ if function.with_mean else np.zeros(n)
        scale = function.scale_ if function.with_std else np.ones(n)
        return Scaler("standardize", mean, scale)
    return None


def _scaler(kind: str, function: FeatureModule, *names: str) -> Scaler:
    return Scaler(kind, *(function.arrays[name].ravel() for name in names))


def output_form(codec: TargetCodec, method: str, dtype: np.dtype) -> OutputForm | None:
    """Return what a prediction method makes of outputs of this type; None if no step knows it."""
    if codec.classes is not None:
        n_classes = len(codec.classes)
        name = _FORMS.get(method, "difference" if n_classes == 2 else "raw")
        return OutputForm(name, codec.log_weight, n_outputs=n_classes)
    if codec.scale is None:
        return OutputForm()
    result = np.result_type(dtype, codec.scale.dtype)
    if result not in (np.float32, np.float64):
        return None
    mean, scale = codec.scale.mean, codec.scale.scale
    return OutputForm("scaled", mean, scale, result, n_outputs=len(mean))
