"""Fitted estimators and pipelines as headers of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fluxutils_py.errors import ExportError
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.streams.step_chain import scaler_of
from fluxutils_py.exporting.c_header import FUNCTIONS, CHeader, Description
from fluxutils_py.exporting.c_source import check_prefix
from fluxutils_py.exporting.graph import initial_of
from fluxutils_py.exporting.rounded_weights import with_rounded_weights
from fluxutils_py.inputs.labels import Classify
from fluxutils_py.inputs.moments import Affine
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.nn.model_windows import as_tuple, run_window
from fluxutils_py.nn.states import reset
from fluxutils_py.steps.operations import Scaler
from fluxutils_py.steps.step_program import StepProgram, UnsupportedStep, program_of
from fluxutils_py.transformers.imputer import ForwardFill

N_STEPS = 1000  # of random inputs, to measure what weights of 8 bits cost


class HeaderSettings(NamedTuple):
    """What a user may choose of a header; see :func:`fluxutils_py.export`."""

    prefix: str = "model"
    quantize: str | None = None
    example: Any = None

    def check(self, format: str) -> None:
        """Raise ValueError if a setting is wrong, or the format has none."""
        if format != "c" and self != HeaderSettings():
            raise ValueError(
                f"prefix, quantize and example are for format='c', a C header; got {format!r}"
            )
        check_prefix(self.prefix)
        if self.quantize not in (None, "int8"):
            raise ValueError(f"quantize must be None or 'int8', got {self.quantize!r}")
        if self.example is not None and self.quantize is None:
            raise ValueError(
                "example= is what quantize='int8' measures its error on; leave it out, or quantize"
            )


def header_of(
    est: BaseSeriesEstimator,
    before: Sequence[nn.Module],
    after: Sequence[nn.Module],
    metadata: dict[str, Any],
    settings: HeaderSettings,
) -> tuple[str, float | None]:
    """Return the C header of a fitted estimator, and the largest error of its outputs; None without
    rounded weights.

    Parameters
    ----------
    est : Estimator
    before, after : sequence of nn.Module
        What transforms inputs, and what turns outputs into predictions.
    metadata : dict
        With ``feature_names`` and ``per_series``.
    settings : HeaderSettings

    Raises
    ------
    ExportError
        If a header cannot hold some part; the message names it.
    """
    model = reset(deep_copy(est.model_)).cpu().eval()
    program = _program(model, n_features_of(est))
    inputs = [_transform(module) for module in before]
    if program.moments is not None:
        inputs += [Scaler("round")] * bool(inputs) + [program.moments]
    outputs = [_transform(module) for module in after if not isinstance(module, Classify)]
    notes = []
    if metadata["per_series"]:
        notes.append("Targets belong to whole series: only the output at the last step counts.")
    error = None
    if settings.quantize is not None:
        error, note = _measure_error(model, program, before, after, settings.example)
        notes.append(note)
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
    header = CHeader(
        program, inputs, outputs, description, settings.prefix, settings.quantize is not None
    )
    return header.text(), error


def n_features_of(est: BaseSeriesEstimator) -> int:
    """Return the number of features of the one input that a header takes."""
    layout = est.fitted_parts_.layout
    features = layout.features if isinstance(layout.features, tuple) else (layout.features,)
    if len(features) > 1 or layout.kinds[0] == "int":
        what = f"{len(features)} inputs" if len(features) > 1 else "integers"
        raise ExportError(
            f"the model takes {what}, a C header one input of floating-point numbers: use "
            "format='onnx'"
        )
    return int(features[0])


def _program(model: nn.Module, n_in: int) -> StepProgram:
    try:
        return program_of(model, n_in)
    except UnsupportedStep as error:
        raise ExportError(
            f"the model cannot be written as C: {error}. Headers hold recurrent layers, features "
            "of time, linear layers, normalisations and activations in nn.Sequential or "
            "SequenceStack, and ready-made models; use format='onnx' for others"
        ) from None


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


# -- what weights of 8 bits cost -------------------------------------------------------------------


def _measure_error(
    model: nn.Module,
    program: StepProgram,
    before: Sequence[nn.Module],
    after: Sequence[nn.Module],
    example: Any,
) -> tuple[float, str]:
    """Return the largest error of outputs with rounded weights, and a note about it."""
    if example is None:
        xs = np.random.default_rng(0).normal(size=(N_STEPS, 1, program.n_in))
        if program.moments is not None:
            xs = xs * program.moments.scale + program.moments.mean
        about = f"{N_STEPS} standard-normal steps"
    else:
        xs = _inputs_of_model(example, before, program.n_in)
        about = f"{len(xs)} steps of {xs.shape[1]} series"
    exists = np.asarray(np.isfinite(xs).all(-1))
    gap = 0 if program.moments is None else np.nan  # which it takes for the mean
    inputs = torch.from_numpy(np.where(exists[..., None], xs, gap).astype(program.dtype))
    results = []
    for each in (model, with_rounded_weights(model)):
        with torch.no_grad():
            ys = as_tuple(run_window(each, inputs))
        for module in after:
            ys = as_tuple(module(*ys))
        results.append(ys[-1].numpy()[exists])  # of a classifier, the probabilities
    exact, rounded = results
    error = float(np.abs(rounded - exact).max(initial=0))
    largest = float(np.abs(exact).max(initial=0))
    note = (
        f"Weights of 8 bits: outputs differ by up to {error:.3g} on {about}, where the largest is "
        f"{largest:.3g}."
    )
    return error, note


def _inputs_of_model(example: Any, before: Sequence[nn.Module], n_features: int) -> np.ndarray:
    """Return series (F, N, T) as what the model gets of them at each step, (T, N, F)."""
    given = np.asarray(example)
    if given.ndim != 3:
        raise ExportError(f"example must be an array (F, N, T), got shape {given.shape}")
    if len(given) != n_features:
        raise ExportError(f"example has {len(given)} features, the model takes {n_features}")
    xs = torch.from_numpy(np.array(given.transpose(2, 1, 0), float))
    with torch.no_grad():
        for module in before:
            if not initial_of(module):
                xs = module(xs)
                continue
            state = [s.of(xs.shape[1]) for s in initial_of(module)]
            steps = []
            for x in xs:
                y, *state = module(x, *state)
                steps.append(y)
            xs = torch.stack(steps)
    return xs.numpy()
