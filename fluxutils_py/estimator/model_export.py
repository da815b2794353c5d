"""Export fitted estimators and pipelines, and compare the files with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import nn

from fluxutils_py.errors import ExportError, ShapeError
from fluxutils_py.estimator.c_export import (
    check_header_settings,
    header_of,
    n_features_of,
    with_rounded_weights,
)
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.estimator.streams.streaming import ModelParts, stream, unwrap
from fluxutils_py.exporting.compiled_header import is_header, run_header
from fluxutils_py.exporting.export_files import (
    FORMATS,
    ExportedModel,
    check_format,
    largest_difference,
    write_graph,
)
from fluxutils_py.exporting.graph import Gaps, Graph, initial_of
from fluxutils_py.exporting.steps import ModelStep
from fluxutils_py.files import atomic_write
from fluxutils_py.inputs.moments import Affine
from fluxutils_py.nn.layers import Elementwise
from fluxutils_py.nn.model_windows import needs_context, takes_gaps
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.parallel import get_communicator
from fluxutils_py.transformers.sequence_features import SequenceFeatures
from fluxutils_py.transformers.transformer_base import SequenceTransformer


def transformer_module(transformer: object, name: str, n_features: int) -> nn.Module:
    """Return a fitted transformer of a pipeline as a module.

    Raises
    ------
    ExportError
        If there is none for it; the message names the step of the pipeline.
    """
    if isinstance(transformer, SequenceTransformer):
        return transformer.as_module()
    class_name = type(transformer).__name__
    n_columns = getattr(transformer, "n_features_in_", n_features)
    if n_columns != n_features:
        raise ExportError(
            f"the step {name!r} of the pipeline, {class_name}, was fitted on rows of {n_columns} "
            f"columns, but a step has {n_features} features: use SequenceScaler or "
            "SequenceImputer, which know features and time"
        )
    module = _sklearn_module(transformer, n_features)
    if module is None:
        raise ExportError(
            f"the step {name!r} of the pipeline, {class_name}, cannot be exported: use "
            "SequenceScaler, WinsorScaler, SequenceImputer, or StandardScaler, RobustScaler, "
            "MaxAbsScaler, MinMaxScaler, or FunctionTransformer of a function of NumPy, such as "
            "np.log1p"
        )
    return module


def _features_before(transformers: Sequence[tuple[str, Any]], n_features: int) -> int:
    """Return the number of features that a pipeline takes, whose estimator takes ``n_features``."""
    for _, transformer in transformers:
        if isinstance(transformer, SequenceFeatures):
            return transformer.n_inputs
    return n_features


def _modules_before(transformers: Sequence[tuple[str, Any]], n_features: int) -> list[nn.Module]:
    """Return the transformers of a pipeline as modules, for so many features of its input."""
    modules = []
    for name, transformer in transformers:
        modules.append(transformer_module(transformer, name, n_features))
        if isinstance(transformer, SequenceFeatures):
            n_features = transformer.n_features_out_
    return modules


def _sklearn_module(transformer: Any, n_features: int) -> nn.Module | None:
    """Return one of scikit-learn's transformers as a module; None if it is unknown."""
    if not type(transformer).__module__.startswith("sklearn."):
        return None
    zeros = np.zeros(n_features)
    ones = np.ones(n_features)
    # by name: a subclass may compute something else
    match type(transformer).__name__:
        case "StandardScaler":
            # mean_ is there also where with_mean=False leaves it out
            mean = transformer.mean_ if transformer.with_mean else zeros
            return Affine(mean, transformer.scale_ if transformer.with_std else ones)
        case "RobustScaler":
            center = transformer.center_ if transformer.with_centering else zeros
            return Affine(center, transformer.scale_ if transformer.with_scaling else ones)
        case "MaxAbsScaler" if not getattr(transformer, "clip", False):  # since 1.8
            return Affine(zeros, transformer.scale_)
        case "MinMaxScaler" if not transformer.clip:
            return Affine(transformer.min_, transformer.scale_, inverse=True)
        case "FunctionTransformer" if not transformer.kw_args:
            return _torch_counterpart(transformer.func)
    return None


def inverse_target_module(transformer: Any, n_outputs: int) -> nn.Module:
    """Return the inverse of the fitted ``transformer_`` of a ``TransformedTargetRegressor`` as a
    module.

    Raises
    ------
    ExportError
        If there is none for it; the message names the transformer.
    """
    class_name = type(transformer).__name__
    if class_name == "FunctionTransformer":
        return _inverse_of_function(transformer)
    remedy = (
        "scale targets by scale_target=True of SequenceRegressor, or by a function of NumPy and "
        "its inverse"
    )
    n_columns = getattr(transformer, "n_features_in_", n_outputs)
    if n_columns != n_outputs:
        raise ExportError(
            f"the transformer of TransformedTargetRegressor, {class_name}, was fitted on rows of "
            f"{n_columns} columns and cannot be undone for the {n_outputs} outputs of one step: "
            f"{remedy}"
        )
    if isinstance(transformer, SequenceTransformer):
        module: nn.Module | None = transformer.as_module()
    else:
        module = _sklearn_module(transformer, n_outputs)
    if not isinstance(module, Affine):
        raise ExportError(
            f"the transformer of TransformedTargetRegressor, {class_name}, cannot be exported: use "
            f"StandardScaler, RobustScaler, MaxAbsScaler or MinMaxScaler, or {remedy}"
        )
    return module.inverted()


def _inverse_of_function(transformer: Any) -> nn.Module:
    """Return the ``inverse_func`` of a ``FunctionTransformer`` as a module."""
    function = transformer.inverse_func
    module = None if transformer.inv_kw_args else _torch_counterpart(function)
    if module is None:
        name = getattr(function, "__name__", function)
        raise ExportError(
            f"the inverse_func of TransformedTargetRegressor, {name}, cannot be exported: use a "
            "function of NumPy that torch has too, such as np.expm1"
        )
    return module


def _torch_counterpart(function: Callable[..., Any] | None) -> nn.Module | None:
    """Return torch's function of the name of a NumPy function of single numbers, if there is one.

    None stands for the identity, as in ``FunctionTransformer``.
    """
    if function is None:
        return Elementwise(torch.clone)
    if not isinstance(function, np.ufunc) or function.nin != 1 or function.nout != 1:
        return None
    counterpart = getattr(torch, function.__name__, None)
    return None if counterpart is None else Elementwise(counterpart)


@undisturbed()
def export(
    model: Any,
    path: str | PathLike[str],
    format: str = "onnx",
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    prefix: str = "model",
    quantize: str | None = None,
    example: Any = None,
) -> float | None:
    """Write a fitted estimator, or a pipeline of scalers and one, to a file that runs without this
    package.

    With ``format="c"`` it is a C99 header with one step of one series; see the Notes. Otherwise
    the file is a graph of one step or a window and the recurrent state, so that a consumer
    continues where it stopped:

    - inputs: ``x`` (S, B, F), then ``state.0``, ``state.1``, ...
    - outputs: ``y`` (S, B, G); of classifiers ``label`` (S, B, 1) and ``probabilities`` (S, B, K);
      then ``next_state.0``, ``next_state.1``, ..., of the shapes of the states

    S steps and B series may be any numbers, 1 too, at every call. States of imputers that look back
    come first, then those of :func:`fluxutils_py.states`, in its order. Outputs are in the units of
    the targets. A series whose features are all NaN at a step has NaN as output there, as in
    ``predict``.

    Parameters
    ----------
    model : estimator, Pipeline, TransformedTargetRegressor, or fitted search
    path : str or path-like
        Written aside and then moved into place. Of several ranks only rank 0 writes; the others
        return at once.
    format : "onnx", "torch" or "c"
        An ONNX file, for onnxruntime and others, which needs ``pip install onnx onnxscript
        onnxruntime``; a program of ``torch.export``, for ``torch.export.load``, with torch's
        operators only; or a C header.
    input_names, output_names : sequence of str, optional
        Names of inputs and outputs. Several inputs are ``x.0``, ``x.1``, ... by default; several
        outputs need names. Not for a header.
    prefix : str
        Start of all names in a header, so that one program can hold several models.
    quantize : None or "int8"
        Whether a header holds the weights of products as integers of 8 bits, with a scale for each
        unit. All computation is in floating point as before.
    example : array of shape (F, N, T), optional
        Series to measure the error of ``quantize`` on.

    Returns
    -------
    float or None
        With ``example``, the largest difference between outputs of header and model, in the units
        of the targets. The header states it too.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        Before ``fit``.
    ExportError
        If a module looks into the future or uses an operation that the format lacks; the message
        names the module.
    ValueError
        If ``format`` or ``quantize`` is unknown.
    ImportError
        If the packages for ONNX are not installed.

    Notes
    -----
    A header compiles as C99 and C++11 and uses only ``math.h``; its comment says how to use it, and
    how many bytes the state and the tables take. It holds recurrent layers of torch and of this
    package, linear layers, normalisations and activations in ``nn.Sequential`` or
    :class:`fluxutils_py.nn.SequenceStack`, one input and one output.

    ONNX files have metadata in ``metadata_props`` (JSON but for versions and names of classes),
    torch programs in the extra file ``metadata.json``: ``inputs``, ``outputs`` and ``states`` with
    names, shapes, types and initial values (one number if all are equal, null for NaN),
    ``feature_names``, ``scale`` of the targets, ``classes``, ``per_series`` (whether only the
    output at the last step of a series counts), and the versions of this package and torch. Text
    labels are given by their places in ``classes``.

    Time is the operator ``Scan`` of ONNX, or ``scan`` of torch, over the graph of one step.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py import SequenceRegressor, check_export
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> est = SequenceRegressor(4, epochs=1).fit(x, x[:1])
    >>> folder = tempfile.TemporaryDirectory()
    >>> export(est, f"{folder.name}/model.pt2", format="torch")
    >>> check_export(f"{folder.name}/model.pt2", est, x) < 1e-5
    True
    >>> folder.cleanup()
    """
    check_header_settings(format, prefix, quantize, example)
    if hasattr(model, "check_export"):  # a forecaster, which has graphs only
        model.export(path, format)
        return None
    check_format(format, [*FORMATS, "c"])
    parts = _exported_parts(model)
    if format == "c":
        if input_names is not None or output_names is not None:
            raise ValueError(
                "input_names and output_names are for graphs; a C header has arrays x and y"
            )
        return _export_header(path, model, parts, prefix, quantize is not None, example)
    est = parts.estimator
    graph = _graph(est, parts.transformers, parts.of_targets)
    classes = est.fitted_parts_.codec.classes
    names_in, names_out = _names(graph, input_names, output_names, classes is not None)
    # ranks have the same model: one of them writes
    if get_communicator(est.resolved_params().comm).rank == 0:
        write_graph(path, graph, format, names_in, names_out, _metadata(model, est))
    return None


def _export_header(
    path: str | PathLike[str],
    model: Any,
    parts: ModelParts,
    prefix: str,
    quantize: bool,
    example: object,
) -> float | None:
    est = parts.estimator
    metadata = _metadata(model, est)
    n_features = n_features_of(est)
    before = _modules_before(parts.transformers, _features_before(parts.transformers, n_features))
    dtype = next(iter(est.model_.parameters()), torch.empty(0)).dtype
    after = _modules_after(est, parts.of_targets, dtype)
    notes = []
    if metadata["per_series"]:
        notes.append("Targets belong to whole series: only the output at the last step counts.")
    error = None
    if example is not None:
        error = _rounding_error(model, est, example)
        notes.append(f"Weights of 8 bits: outputs differ by up to {error:.3g} on the example.")
    text = header_of(est, before, after, metadata, prefix, quantize, notes)
    if get_communicator(est.resolved_params().comm).rank == 0:
        with atomic_write(path) as file:
            file.write(text.encode("ascii"))
    return error


def _rounding_error(model: Any, est: BaseSeriesEstimator, example: object) -> float:
    """Return the largest difference that weights of 8 bits make to the outputs for an example."""
    xs = _arrays_to_try(example)
    exact = _stream_all(model, xs)[0][-1]  # of a classifier, the probabilities
    of_fit = est.model_
    est.model_ = with_rounded_weights(of_fit)
    try:
        rounded = _stream_all(model, xs)[0][-1]
    finally:
        est.model_ = of_fit
    return float(np.nanmax(np.abs(rounded - exact), initial=0))


@undisturbed()
def check_export(
    path: str | PathLike[str], model: Any, x: object, *, tolerance: float | None = None
) -> float:
    """Compare an exported file with the estimator or pipeline that it came from.

    Streams all steps through the model (``stream``) and the file, the latter in windows of 1, 2, 4,
    8, ... steps, and compares the outputs at each step. A C header is compiled and run, which needs
    a C compiler (``cc``, ``gcc``, ``clang`` or the one that the environment variable ``CC`` names).

    Parameters
    ----------
    path : str or path-like
    model : estimator, Pipeline, TransformedTargetRegressor, or fitted search
    x : array of shape (F, N, T), or a tuple of them for several inputs
        Series to try it on.
    tolerance : float, optional
        Largest difference to allow, relative to the largest value of each output where that is
        above 1. Labels may differ where two probabilities differ by less than 10 times as much.
        None: 1e-5; 0.05 for an estimator with ``precision="bfloat16"``, which rounds more than the
        file, whose numbers are float32. For a header of ``quantize="int8"``, give the error that it
        states.

    Returns
    -------
    float
        The largest difference of any output, relative in the same way.

    Raises
    ------
    ExportError
        If a difference is larger; the message names the output and the step. If there is
        no C compiler for a header.
    LoadError
        If the file was not exported by this package.
    """
    if hasattr(model, "check_export"):  # a forecaster
        return float(model.check_export(path, x, tolerance))
    xs = _arrays_to_try(x)
    # first, since it checks what the model takes
    expected, favoured = _stream_all(model, xs)
    if tolerance is None:  # the largest that rounding explains: a file computes in float32
        spec = read_spec(_exported_parts(model).estimator.resolved_params().spec)
        tolerance = 1e-5 if spec.precision == "float32" else 0.05
    if is_header(path):
        return _check_header(path, xs, expected, tolerance)
    file = ExportedModel(path, xs[0].shape[1])
    if len(file.metadata["inputs"]) != len(xs):
        raise ShapeError(f"{path} takes {len(file.metadata['inputs'])} inputs, x has {len(xs)}")
    outputs = file.run_series(*(a.transpose(2, 1, 0) for a in xs))
    # a file gives the places of labels that are texts
    is_text = favoured is not None and expected[0].dtype.kind not in "iuf"
    if is_text and outputs[0].dtype.kind in "iu":
        outputs[0] = np.asarray(file.metadata["classes"])[outputs[0]]
    names = [entry["name"] for entry in file.metadata["outputs"]]
    return _compare_outputs(path, names, outputs, expected, favoured, tolerance)


def _check_header(
    path: str | PathLike[str],
    xs: tuple[np.ndarray, ...],
    expected: list[np.ndarray],
    tolerance: float,
) -> float:
    if len(xs) > 1:
        raise ShapeError(f"{path} takes one input, x has {len(xs)}")
    name = "y" if len(expected) == 1 else "probabilities"
    return _compare(path, name, run_header(path, xs[0]), expected[-1], tolerance)


def _arrays_to_try(x: object) -> tuple[np.ndarray, ...]:
    """Return the inputs of ``check_export`` as arrays (F, N, T); raise ShapeError for others."""
    if isinstance(x, list) and any(hasattr(a, "shape") for a in x):
        raise ShapeError(
            f"x must be arrays (F, N, T), got a list of {len(x)} arrays: check one series at a "
            "time, as x[0][:, None]"
        )
    given = x if isinstance(x, tuple) else (x,)
    xs = tuple(np.asarray(a) for a in given)
    sizes = {a.shape[1:] for a in xs}
    if any(a.ndim != 3 or a.shape[2] < 1 for a in xs) or len(sizes) > 1:
        raise ShapeError(
            f"x must be arrays (F, N, T) of equal N and T, got {[a.shape for a in xs]}"
        )
    return _from_first_inputs(xs)


def _from_first_inputs(xs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Leave out the steps before all series have begun: a file takes its first step for one of the
    series, a stream waits for an input.
    """
    has_input = np.logical_or.reduce([(a == a).any(0) for a in xs])
    begin = int(has_input.argmax(1).max())
    return tuple(a[:, :, begin:] for a in xs)


def _stream_all(
    model: Any, xs: tuple[np.ndarray, ...]
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Run a model step by step; a classifier once for labels and once for probabilities.

    Returns
    -------
    outputs : list of ndarray (T, N, G)
    favoured : ndarray (T, N, G) or None
        Of a classifier: its last output, times the weights of classes, of sum 1.
    """
    n_series, n_steps = xs[0].shape[1:]
    codec = _exported_parts(model).estimator.fitted_parts_.codec
    is_classifier = codec.classes is not None
    outputs: list[np.ndarray] = []
    # a stream gives one of the two outputs that the file of a classifier has
    for method in ["predict", "predict_proba"] if is_classifier else ["predict"]:
        live = stream(model, n_series, method=method)
        steps = []
        for t in range(n_steps):
            step = tuple(a[:, :, t] for a in xs)
            y = live.step(step if len(step) > 1 else step[0])
            steps.append(y if isinstance(y, tuple) else (y,))
        for of_steps in zip(*steps, strict=True):
            outputs.append(np.stack(of_steps).transpose(0, 2, 1))
    favoured = None
    if is_classifier:
        favoured = outputs[-1] * np.exp(codec.log_weight)
        favoured /= favoured.sum(-1, keepdims=True)
    return outputs, favoured


def _compare_outputs(
    path: object,
    names: Sequence[str],
    outputs: list[np.ndarray],
    expected: list[np.ndarray],
    favoured: np.ndarray | None,
    tolerance: float,
) -> float:
    """Return the largest difference of outputs, if all are within tolerance."""
    pairs = list(zip(names, outputs, expected, strict=True))
    if favoured is not None:
        name, labels, wanted_labels = pairs.pop(0)
        margin = 10 * tolerance
        _compare_labels(path, name, labels, wanted_labels, favoured, margin)
    largest = 0.0
    for name, got, want in pairs:
        largest = max(largest, _compare(path, name, got, want, tolerance))
    return largest


def _exported_parts(model: Any) -> ModelParts:
    """Take a model apart, and check that its estimator is fitted and of this package."""
    parts = unwrap(model)
    est = parts.estimator
    name = type(est).__name__
    # unwrap stops at a search that has no best estimator
    if hasattr(est, "estimator") and hasattr(est, "refit"):
        check_is_fitted(est)
        raise TypeError(f"{name} has no best estimator to export: fit it with refit=True")
    if not hasattr(est, "fitted_parts_") and not hasattr(est, "stream"):
        raise TypeError(
            f"{name} cannot be exported; export takes estimators of this package, pipelines of "
            "scalers, imputers and such an estimator, TransformedTargetRegressor around these, and "
            "searches over these"
        )
    check_is_fitted(est, "model_")
    return parts


def _compare(path: object, name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> float:
    """Return the largest relative difference, if it is within tolerance."""
    if got.shape != want.shape:
        raise ExportError(
            f"{path}: {name} has shape {got.shape}, but shape {want.shape} in the model"
        )
    got = got.astype(float)
    want = want.astype(float)
    # small outputs are compared by their absolute difference: they may be 0
    scale = max(1.0, float(np.nanmax(np.abs(want), initial=0)))
    worst, at = largest_difference(got, want, scale)
    if worst > tolerance:
        raise ExportError(
            f"{path}: {name} is {got[at]:.7g} at step {at[0]}, series {at[1]}, but the model "
            f"gives {want[at]:.7g}: a relative difference of {worst:.1e}, above {tolerance:.1e}"
        )
    return worst


def _compare_labels(
    path: object,
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    favoured: np.ndarray,
    margin: float,
) -> None:
    """Raise ExportError if labels differ where one class is favoured by the margin."""
    # of two classes that are favoured alike, rounding may choose either
    is_clear = np.full(want.shape, True)
    if favoured.shape[-1] > 1:
        ordered = np.sort(favoured, -1)
        lead = ordered[..., -1:] - ordered[..., -2:-1]
        is_clear = lead > margin
    is_wrong = is_clear & (got.astype(want.dtype) != want)
    if is_wrong.any():
        at = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        raise ExportError(
            f"{path}: {name} is {got[at]!r} at step {at[0]}, series {at[1]}, but the model gives "
            f"{want[at]!r}"
        )


def _graph(
    est: BaseSeriesEstimator, transformers: list[tuple[str, Any]], of_targets: list[Any]
) -> Graph:
    dtype = next(iter(est.model_.parameters()), torch.empty(0)).dtype
    samples = _sample_windows(est, dtype)
    n_features = _features_before(transformers, samples[0].shape[-1])
    before = _modules_before(transformers, n_features)
    after = _modules_after(est, of_targets, dtype)
    inputs = [x[0, 0] for x in samples]
    if n_features != len(inputs[0]):
        inputs = [inputs[0].new_zeros(n_features)]
    if transformers and not inputs[0].is_floating_point():
        inputs = [inputs[0].to(dtype)]  # transformers give floats
    with_state = [i for i, module in enumerate(before) if initial_of(module)]
    gaps: Gaps = "kept" if takes_gaps(est.model_) else "zeros"
    if needs_context(est.model_, samples):
        raise ExportError(
            f"{type(est.model_).__name__} sees its last inputs again with each window, but a file "
            "holds only the state of recurrent layers: use layers of fluxutils_py.nn that keep "
            "their past, such as CausalConv1d and TCN"
        )
    # modules without a state run on a whole window at once, those from the first state on by steps
    split = with_state[0] if with_state else len(before)
    steps = [*before[split:], ModelStep(est.model_, samples)]
    # an imputer that looks back fills steps without input, so that no output is NaN for them
    return Graph(inputs, before[:split], steps, after, gaps=None if with_state else gaps)


def _sample_windows(est: BaseSeriesEstimator, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return windows (4, 2, F) to trace the model with."""
    layout = est.fitted_parts_.layout
    generator = torch.Generator().manual_seed(0)  # the global one does not move
    samples = []
    for n, kind in zip(layout.sizes, layout.kinds, strict=True):
        if kind == "int":
            samples.append(torch.zeros(4, 2, n, dtype=torch.int64))
        else:
            samples.append(torch.randn(4, 2, n, generator=generator).to(dtype))
    return samples


def _modules_after(
    est: BaseSeriesEstimator, of_targets: list[Any], dtype: torch.dtype
) -> list[nn.Module]:
    """Return what turns outputs of the model into predictions in the units of the targets."""
    # in this order: transformers of targets come outside of the estimator's own decoding
    modules: list[nn.Module] = est.fitted_parts_.codec.decoding_modules(dtype)
    return modules + [inverse_target_module(t, est.n_outputs_) for t in of_targets]


def _names(
    graph: Graph,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    is_classifier: bool,
) -> tuple[list[str], list[str]]:
    """Return the names of inputs and outputs, as given or the default ones."""
    n_in, n_out = len(graph.inputs), len(graph.outputs)
    names_in = ["x"] if n_in == 1 else [f"x.{i}" for i in range(n_in)]
    names_out = ["label", "probabilities"] if is_classifier else ["y"]
    if inputs is not None:
        names_in = list(inputs)
    if outputs is not None:
        names_out = list(outputs)
    names = [*names_in, *names_out]
    is_taken = any(str(name).startswith(("state.", "next_state.")) for name in names)
    if (len(names_in), len(names_out)) != (n_in, n_out) or len(set(names)) < len(names) or is_taken:
        raise ExportError(
            f"the model has {n_in} inputs and {n_out} outputs: give input_names= and output_names= "
            "lists of as many different names, none beginning with 'state.' or "
            f"'next_state.'; got {names_in} and {names_out}"
        )
    return names_in, names_out


def _metadata(model: object, est: BaseSeriesEstimator) -> dict[str, Any]:
    parts = est.fitted_parts_
    scale = parts.codec.scale
    classes = parts.codec.classes
    names = getattr(model, "feature_names_in_", getattr(est, "feature_names_in_", None))
    if names is not None and len(names) != parts.layout.features:
        names = None  # of all columns of rows that hold whole series
    described_scale = None
    if scale is not None:
        described_scale = {"mean": scale.mean.tolist(), "scale": scale.scale.tolist()}
    return {
        "feature_names": None if names is None else [str(n) for n in names],
        "scale": described_scale,
        "classes": None if classes is None else classes.tolist(),
        "per_series": bool(parts.codec.per_series),
        "estimator": type(est).__name__,
    }
