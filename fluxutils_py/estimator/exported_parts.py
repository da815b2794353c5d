"""Transformers, scales and classes of fitted estimators as torch modules, for export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting import InitialState
from fluxutils_py.inputs.moments import Standardize
from fluxutils_py.inputs.target_codec import TargetScale
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.transformers.imputer import FillBlock, ForwardFillBlock
from fluxutils_py.transformers.winsor_scaler import WinsorizeBlock


class _Part(nn.Module):
    """A transformation of each step; without a state, of windows (S, B, F) too."""

    initial: tuple[InitialState, ...] = ()
    n_outputs = 1

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, torch.tensor(np.ravel(value), dtype=torch.float64))


class Affine(_Part):
    """Compute ``(x - center) / scale``, or ``x * scale + center``, in float64, rounded to the type of ``x``."""

    center: Tensor
    scale: Tensor

    def __init__(self, center: Any, scale: Any, inverse: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__(center=center, scale=scale)
        self.inverse, self.dtype = inverse, dtype

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if self.dtype is None else self.dtype
        if self.inverse:
            return (x.double() * self.scale + self.center).to(dtype)
        return ((x.double() - self.center).to(dtype).double() / self.scale).to(dtype)


class Winsorize(_Part):
    """Clamp to quantiles, standardise, and put 0 for NaN."""

    lower: Tensor
    upper: Tensor
    mean: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        clamped = torch.minimum(torch.maximum(x.double(), self.lower), self.upper)
        y = ((clamped - self.mean).to(x.dtype).double() / self.scale).to(x.dtype)
        return torch.where(x.isnan(), torch.zeros_like(y), y)


class Fill(_Part):
    """Put one value per feature for NaN."""

    values: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isnan(), self.values.to(x.dtype), x)


class ForwardFill(_Part):
    """Put the last value before it for NaN; the state is (F, B), the last values, NaN where there is none."""

    start: Tensor

    def __init__(self, start: Any) -> None:
        super().__init__(start=start)
        self.initial = (InitialState(torch.full((len(self.start), 1), torch.nan, dtype=torch.float64), 1),)

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.where(x.isnan(), last.t().to(x.dtype), x)
        return torch.where(known.isnan(), self.start.to(x.dtype), known), known.t().double()


class Classify(nn.Module):
    """Turn class scores (S, B, K) into labels (S, B, 1), or their places among the classes, and probabilities.

    Parameters
    ----------
    classes : ndarray of shape (K,)
        Numbers become labels; anything else stays a place.
    """

    classes: Tensor

    def __init__(self, classes: np.ndarray) -> None:
        super().__init__()
        self.as_numbers = classes.dtype.kind in "iufb"
        if self.as_numbers:
            kind = np.int64 if classes.dtype.kind in "iu" else classes.dtype
            self.register_buffer("classes", torch.from_numpy(np.array(classes, kind)))

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        place = scores.argmax(-1, keepdim=True)
        return self.classes[place] if self.as_numbers else place, torch.log_softmax(scores, -1).exp()


def unscale(scale: TargetScale, dtype: torch.dtype) -> Affine:
    """Return the module that gives outputs of this type the units of the targets."""
    names = np.result_type(str(dtype).removeprefix("torch."), scale.dtype).name
    return Affine(scale.mean, scale.scale, inverse=True, dtype=getattr(torch, names))


def transformer_module(transformer: Any, name: str, n_features: int) -> nn.Module:
    """Return a fitted transformer of a pipeline as a module.

    Raises
    ------
    ExportError
        If there is none for it; the message names the step of the pipeline.
    """
    if hasattr(transformer, "_block_function"):
        function = transformer._block_function()
        if isinstance(function, Standardize):
            return Affine(function.mean, function.scale, function.inverse)
        if isinstance(function, WinsorizeBlock):
            return Winsorize(**dict(zip(("lower", "upper", "mean", "scale"), function.statistics, strict=True)))
        if isinstance(function, FillBlock):
            return Fill(values=function.values)
        if isinstance(function, ForwardFillBlock):
            return ForwardFill(function.start)
    kind = type(transformer).__name__
    if getattr(transformer, "n_features_in_", n_features) != n_features:
        raise ExportError(
            f"the step {name!r} of the pipeline, {kind}, was fitted on rows of {transformer.n_features_in_} columns, "
            f"a step has {n_features} features: take SequenceScaler or SequenceImputer, which know features and time"
        )
    if type(transformer).__module__.startswith("sklearn."):
        zeros, ones = np.zeros(n_features), np.ones(n_features)
        t = transformer
        if kind == "StandardScaler":
            return Affine(zeros if t.mean_ is None else t.mean_, ones if t.scale_ is None else t.scale_)
        if kind == "RobustScaler":
            return Affine(zeros if t.center_ is None else t.center_, ones if t.scale_ is None else t.scale_)
        if kind == "MaxAbsScaler" and not getattr(t, "clip", False):
            return Affine(zeros, t.scale_)
        if kind == "MinMaxScaler" and not t.clip:
            return Affine(t.min_, t.scale_, inverse=True)
        if kind == "FunctionTransformer" and not t.kw_args and (counterpart := _of_torch(t.func)):
            return Elementwise(counterpart)
    raise ExportError(
        f"the step {name!r} of the pipeline, {kind}, cannot be exported: take SequenceScaler, WinsorScaler, "
        "SequenceImputer, or StandardScaler, RobustScaler, MaxAbsScaler, MinMaxScaler, or FunctionTransformer of a "
        "function of NumPy, such as np.log1p"
    )


def inverse_target_module(transformer: Any, n_outputs: int) -> nn.Module:
    """Return the inverse of the fitted ``transformer_`` of a ``TransformedTargetRegressor`` as a module.

    Raises
    ------
    ExportError
        If there is none for it; the message names the transformer.
    """
    kind = type(transformer).__name__
    way_out = "scale targets by scale_target=True of SequenceRegressor, or by a function of NumPy and its inverse"
    if kind == "FunctionTransformer":
        if not transformer.inv_kw_args and (counterpart := _of_torch(transformer.inverse_func)):
            return Elementwise(counterpart)
        name = getattr(transformer.inverse_func, "__name__", transformer.inverse_func)
        raise ExportError(
            f"the inverse_func of TransformedTargetRegressor, {name}, cannot be exported: take a function of NumPy "
            "that torch has too, such as np.expm1"
        )
    wanted = getattr(transformer, "n_features_in_", n_outputs)
    if wanted != n_outputs:
        raise ExportError(
            f"the transformer of TransformedTargetRegressor, {kind}, was fitted on rows of {wanted} columns and cannot "
            f"be undone for the {n_outputs} outputs of one step: {way_out}"
        )
    try:
        module = transformer_module(transformer, "transformer", n_outputs)
    except ExportError:
        module = None
    if not isinstance(module, Affine):
        raise ExportError(
            f"the transformer of TransformedTargetRegressor, {kind}, cannot be exported: take StandardScaler, "
            f"RobustScaler, MaxAbsScaler or MinMaxScaler, or {way_out}"
        )
    return Affine(module.center, module.scale, inverse=not module.inverse)


def _of_torch(function: Any) -> Callable[[Tensor], Tensor] | None:
    """Return torch's counterpart of a function of NumPy for single numbers, if it has one; of None, the identity."""
    if function is None:
        return torch.clone
    if not isinstance(function, np.ufunc) or function.nin != 1 or function.nout != 1:
        return None
    found: Callable[[Tensor], Tensor] | None = getattr(torch, function.__name__, None)
    return found
