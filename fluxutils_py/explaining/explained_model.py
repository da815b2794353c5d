"""Find the model inside of an estimator or a pipeline, and the inputs that reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator, input_schema
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.estimator.streams.streaming import unwrap
from fluxutils_py.inputs.inputs import Inputs, read_inputs
from fluxutils_py.nn.causal_kernels import CausalKernels
from fluxutils_py.training.minibatch import to_tensor
from fluxutils_py.transformers import SequenceScaler
from fluxutils_py.transformers.transformer_base import read_blocks
from fluxutils_py.validation import check_integer

REMEDY = "use permutation_importance of sklearn.inspection on samples(x), which needs no gradient"
# Each feature times a number plus a number: attributions are the same before and after them.
LINEAR_SCALERS = (SequenceScaler, StandardScaler, MaxAbsScaler, MinMaxScaler, RobustScaler)


@dataclass(frozen=True)
class ExplainedModel:
    """A fitted estimator, its inputs, and what stands before it in a pipeline.

    Attributes
    ----------
    est : estimator
    spec : Spec
    inputs : Inputs
        As they reach the model.
    transformers : list of (name, transformer)
    explained : str
        "inputs", or what reaches the model, if that is something else.
    """

    est: BaseSeriesEstimator
    spec: Spec
    inputs: Inputs
    transformers: list[tuple[str, Any]]
    explained: str

    @property
    def model(self) -> nn.Module:
        return self.est.model_

    def feature_names(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the features of each input."""
        names = self.inputs.names
        if names is None:
            names = getattr(self.est, "feature_names_in_", None)
        arrays = self.inputs.series
        if len(arrays) == 1 and names is not None and len(names) == arrays[0].F:
            return (tuple(map(str, names)),)
        return tuple(tuple(f"feature {i}" for i in range(s.F)) for s in arrays)

    def mean(self, series: SeriesArray) -> np.ndarray:
        """Return the mean of each feature of one of the inputs, (F,), over all series and steps."""
        total, count = np.zeros(series.F), np.zeros(series.F)
        for _, _, block in read_blocks(series, self.inputs):
            total += np.nansum(block, (1, 2), dtype=np.float64)
            count += (~np.isnan(block)).sum((1, 2))
        return total / np.maximum(count, 1)


def read_model(est: Any, x: object, lengths: object, starts: object) -> ExplainedModel:
    """Take a fitted estimator, pipeline or search apart, and transform its inputs.

    Raises
    ------
    TypeError
        If this is no estimator of this package, or its model has hard thresholds.
    ValueError
        If ``x`` does not fit.
    """
    parts = unwrap(est)
    inner = parts.estimator
    if not hasattr(inner, "resolved_params"):
        raise TypeError(
            f"explain takes estimators of this package, pipelines and searches of them, got "
            f"{type(inner).__name__}; for another model, {REMEDY}"
        )
    check_is_fitted(inner, "model_")
    if parts.of_targets:
        raise TypeError(
            "explain cannot look through the transformer of targets of a "
            "TransformedTargetRegressor; explain its regressor_, in the units that it predicts"
        )
    if any(isinstance(m, CausalKernels) for m in inner.model_.modules()):
        raise TypeError(
            f"the model of {type(inner).__name__} compares its inputs with hard thresholds "
            f"(CausalKernels), through which no gradient goes; {REMEDY}"
        )
    for _, transformer in parts.transformers:
        x = transformer.transform(x)
    settings = inner.resolved_params()
    schema = input_schema(inner, settings, inner.fitted_parts_)
    inputs = read_inputs(x, schema, starts=starts, lengths=lengths)
    if all(s.kind == "int" for s in inputs.series):
        raise TypeError(f"integer inputs have no gradient; {REMEDY}")
    others = [type(t).__name__ for _, t in parts.transformers if not _is_linear(t)]
    explained = "inputs"
    if others:
        explained = f"inputs of the model, after {', '.join(others)}"
    return ExplainedModel(inner, read_spec(settings.spec), inputs, parts.transformers, explained)


def _is_linear(transformer: Any) -> bool:
    # exactly: a subclass may compute something else
    return type(transformer) in LINEAR_SCALERS and not getattr(transformer, "clip", False)


@dataclass(frozen=True)
class Past:
    """The steps of one series up to an explained one.

    Attributes
    ----------
    windows : SequenceWindows
        Of this series alone.
    rows : Segments
    at : int
        The explained step, counted from the first one of the series.
    device, dtype
        Of the model.
    """

    windows: SequenceWindows
    rows: Segments
    at: int
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> int:
        """The first step of the series in the inputs."""
        return int(self.rows.start[0])

    @property
    def n_steps(self) -> int:
        return int(self.rows.length[0])

    def read(self, steps: slice) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the inputs (S, 1, F) of some steps, zero where there are none, and where that
        is, (S, 1).
        """
        window = self.windows.cut(self.rows, steps.start, steps.stop)
        tensors = tuple(to_tensor(v, self.dtype, self.device) for v in window.x)
        if window.missing_steps is None:
            return tensors, None
        return tensors, torch.from_numpy(np.array(window.missing_steps)).to(self.device)

    def ends(
        self, baselines: Sequence[Tensor], steps: slice
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return inputs and baselines of some steps, for baselines (1, 1, F) of each input; both
        are zero where there is no input, as in ``predict``.
        """
        xs, missing = self.read(steps)
        if missing is None:
            return xs, tuple(baselines)
        where = missing[:, :, None]
        return xs, tuple(torch.where(where, x, b) for x, b in zip(xs, baselines, strict=True))


def read_past(model: ExplainedModel, series: int, step: int | None) -> Past:
    """Return the past of one step of a series, checked; None is its last step."""
    inputs = model.inputs
    check_integer("series", series)
    if not -inputs.N <= series < inputs.N:
        raise ShapeError(f"series is {series}, but x has {inputs.N} series")
    series = int(series) % inputs.N
    whole = inputs.local_series()[series : series + 1]
    end = int(whole.start[0] + whole.length[0])
    first = int(whole.start[0])
    step = _read_step(step, first, end)
    # earlier rows with gaps between them are no past of one state
    if len(inputs.contiguous_runs()) > 1 or inputs.with_context(slice(0, inputs.T))[1]:
        raise ShapeError("rows of timesteps with gaps or context; explain the array (F, N, T)")
    windows = SequenceWindows(
        inputs.series,
        batchsize=1,
        seqsize=model.spec.seqsize or inputs.T,
        segments=whole,
    )
    parameter = next(model.model.parameters(), torch.empty(0))
    past = Past(windows, whole, step - first, parameter.device, parameter.dtype)
    _, missing = past.read(slice(past.at, past.at + 1))
    if missing is not None and bool(missing.any()):
        raise DataError(
            f"step {step} of series {series} has no inputs (NaN), so that there is no output to "
            "explain; choose another step, or give lengths= if the series ends before"
        )
    return past


def _read_step(step: int | None, start: int, end: int) -> int:
    if step is None:
        return end - 1
    check_integer("step", step)
    place = int(step) if step >= 0 else end + int(step)
    if not start <= place < end:
        raise ShapeError(f"step is {step}, but the series has the steps {start} to {end - 1}")
    return place
