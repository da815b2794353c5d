"""Fitted estimators and pipelines as headers of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fluxutils_py.errors import ExportError
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.streams.step_chain import scaler_of
from fluxutils_py.exporting.c_header import FUNCTIONS, CHeader, Description, check_prefix
from fluxutils_py.inputs.labels import Classify
from fluxutils_py.inputs.moments import Affine
from fluxutils_py.nn.closed_form_model import ClosedFormModel
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.nn.states import reset
from fluxutils_py.steps.operations import Scaler, quantized
from fluxutils_py.steps.step_program import UnsupportedStep, program_of
from fluxutils_py.transformers.imputer import ForwardFill


def check_header_settings(format: str, prefix: str, quantize: str | None, example: object) -> None:
    """Raise ValueError if a setting of a header is wrong, or the format has none."""
    if format != "c" and (prefix != "model" or quantize is not None or example is not None):
        raise ValueError(
            f"prefix, quantize and example are for format='c', a C header; got {format!r}"
        )
    check_prefix(prefix)
    if quantize not in (None, "int8"):
        raise ValueError(f"quantize must be None or 'int8', got {quantize!r}")
    if example is not None and quantize is None:
        raise ValueError(
            "example= measures the error of quantize='int8'; leave it out, or set quantize"
        )


def header_of(
    est: BaseSeriesEstimator,
    before: Sequence[nn.Module],
    after: Sequence[nn.Module],
    metadata: dict[str, Any],
    prefix: str,
    quantize: bool,
    notes: Sequence[str],
) -> str:
    """Return the C header of a fitted estimator.

    Parameters
    ----------
    est : Estimator
    before, after : sequence of nn.Module
        What transforms inputs, and what turns outputs into predictions.
    metadata : dict
        With ``feature_names`` and ``per_series``.
    prefix, quantize
        As of :func:`fluxutils_py.export`.
    notes : sequence of str
        What the header says of the model, too.

    Raises
    ------
    ExportError
        If a header cannot hold some part; the message names it.
    """
    model = reset(deep_copy(est.model_)).cpu().eval()
    try:
        program = program_of(model, n_features_of(est))
    except UnsupportedStep as error:
        raise ExportError(
            f"the model cannot be written as C: {error}. Headers hold recurrent layers, features "
            "of time, linear layers, normalisations and activations in nn.Sequential or "
            "SequenceStack, and ready-made models; use format='onnx' for others"
        ) from None
    inputs = [_transform(module) for module in before]
    if program.moments is not None:
        inputs += [Scaler("round")] * bool(inputs) + [program.moments]
    outputs = [_transform(module) for module in after if not isinstance(module, Classify)]
    layers = [type(m).__name__ for m in est.model_.children()]
    if not isinstance(est.model_, nn.Sequential):
        layers = [type(est.model_).__name__]
    description = Description(
        f"{type(est).__name__} ({', '.join(layers)})",
        any(isinstance(m, Affine) and m.dtype is torch.float64 for m in after),
        metadata["feature_names"],
        est.fitted_parts_.codec.classes,
        tuple(notes),
        est.fitted_parts_.codec.class_weight,
    )
    return CHeader(program, inputs, outputs, description, prefix, quantize).text()


def n_features_of(est: BaseSeriesEstimator) -> int:
    """Return the number of features of the one input that a header takes."""
    layout = est.fitted_parts_.layout
    n_inputs = len(layout.sizes)
    if n_inputs > 1 or layout.kinds[0] == "int":
        what = f"{n_inputs} inputs" if n_inputs > 1 else "integers"
        raise ExportError(
            f"the model takes {what}, but a C header takes one input of floating-point numbers: "
            "use format='onnx'"
        )
    return layout.sizes[0]


def _transform(module: nn.Module) -> Scaler:
    """Return what a module does to single features."""
    known = scaler_of(module)
    if known is not None:
        return Scaler(known.kind, *(np.asarray(a, float) for a in known[1:]))
    if isinstance(module, Affine):
        return Scaler("unstandardize", module.center.numpy(), module.scale.numpy())
    if isinstance(module, ForwardFill):
        return Scaler("forward_fill", module.start.double().numpy())
    name = getattr(getattr(module, "function", None), "__name__", "")
    if isinstance(module, Elementwise) and name in FUNCTIONS:
        return Scaler(name)
    raise ExportError(f"{module} cannot be written as C; use format='onnx'")


def with_rounded_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU whose products have the weights that 8 bits leave.

    The weights of products are the matrices ``weight...`` (n_out, n_in) of its modules.
    """
    model = deep_copy(model)
    # a header has one product for each layer before such a head
    parts: dict[nn.Module, Any] = {
        m.head: [layer.n_out for layer in m.layers]
        for m in model.modules()
        if isinstance(m, ClosedFormModel)
    }
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith("weight") and weight.dim() == 2:
                    for part in weight.split(parts.get(module, weight.shape[1]), 1):
                        integers, scale = quantized(part.t().numpy())
                        part.copy_(torch.from_numpy(integers * scale).t())
    return model
