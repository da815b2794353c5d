"""Write graphs as ONNX files and as programs of torch, with metadata for their consumers."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import ExportError, LoadError
from fluxutils_py.exporting.graph import Graph, quiet_exporters
from fluxutils_py.exporting.steps import InitialState
from fluxutils_py.files import atomic_write
from fluxutils_py.validation import require_package
from fluxutils_py.versions import installed_version

FORMATS = ("onnx", "torch")  # of graphs
METADATA_FILE = "metadata.json"  # in a program of torch
TEXTS = ("estimator", "fluxutils_py", "torch")  # entries that are texts; the others are JSON
# names of free axes
SERIES = "batch"
STEPS = "steps"
Path = str | os.PathLike[str]


def check_format(format: str, formats: Sequence[str] = FORMATS) -> None:
    """Raise ValueError if the format is none of those."""
    if format not in formats:
        names = ", ".join(map(repr, formats[:-1]))
        raise ValueError(f"format must be {names} or {formats[-1]!r}, got {format!r}")


def write_graph(
    path: Path,
    graph: Graph,
    format: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: dict[str, Any],
) -> None:
    """Write a graph to a file, aside and then moved into place.

    Parameters
    ----------
    path : str or path-like
    graph : Graph
    format : "onnx" or "torch"
    inputs, outputs : sequence of str
        Their names.
    metadata : dict of plain values
        Added to the names, shapes and types of inputs, outputs and states.

    Raises
    ------
    ExportError
        If an operator has no counterpart in ONNX, or onnxruntime (where it is installed) cannot
        load the file, for example for want of an operator in float64; the message names it.
    ImportError
        If the format is "onnx" and its packages are not installed.
    """
    entries = {**describe(graph, inputs, outputs), **metadata}
    if format == "torch":
        extra = {METADATA_FILE: json.dumps(entries, indent=1)}
        with atomic_write(path) as file:
            torch.export.save(graph.program, file, extra_files=extra)
        return
    model = _to_onnx(graph, inputs, outputs)
    _name_axes(model.graph)
    for key, value in entries.items():
        entry = model.metadata_props.add()
        entry.key = key
        entry.value = value if key in TEXTS else json.dumps(value)
    content = model.SerializeToString()
    _require_kernels(content)
    with atomic_write(path) as file:
        file.write(content)


def describe(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Return names, shapes and types of inputs, outputs and states, and the initial states, as
    plain values.
    """

    def windows(names: Sequence[str], examples: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [
            {"name": name, "shape": [STEPS, SERIES, *t.shape[2:]], "dtype": _dtype_name(t)}
            for name, t in zip(names, examples, strict=True)
        ]

    return {
        "inputs": windows(inputs, graph.inputs),
        "outputs": windows(outputs, graph.outputs),
        "states": [_state_entry(i, s) for i, s in enumerate(graph.initial)],
        "fluxutils_py": installed_version("fluxutils_py"),
        "torch": torch.__version__,
    }


def _state_entry(i: int, state: InitialState) -> dict[str, Any]:
    value = state.value
    shape: list[int | str] = list(value.shape)
    shape[state.batch_axis] = SERIES
    # one number if all values are equal, else nested lists; None for NaN, which JSON does not have
    initial: Any = value.tolist()
    if value.isnan().all():
        initial = None
    elif (value == value.flatten()[:1]).all():
        initial = value.flatten()[:1].item()
    return {
        "name": f"state.{i}",
        "shape": shape,
        "dtype": _dtype_name(value),
        "initial": initial,
    }


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _to_onnx(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    for name in ("onnx", "onnxscript"):
        require(name)
    n_states = len(graph.initial)
    names = [*inputs, *(f"state.{i}" for i in range(n_states))]
    results = [*outputs, *(f"next_state.{i}" for i in range(n_states))]
    try:
        with quiet_exporters(), torch.no_grad():
            program = torch.onnx.export(
                graph.program,
                dynamo=True,
                input_names=names,
                output_names=results,
                verbose=False,
            )
    except Exception as error:  # torch and onnxscript raise many types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(
            f"torch cannot write the model as ONNX: {cause}; format='torch' has all operators"
        ) from error
    assert program is not None
    # constants that nothing reads, of which onnxruntime would warn
    import_module("onnxscript.optimizer").remove_unused_nodes(program.model)
    return program.model_proto


def _require_kernels(content: bytes) -> None:
    """Raise an ExportError if onnxruntime is installed and cannot load the model."""
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return
    try:
        # of the log only what is fatal: the error is raised here anyway
        _session(runtime, content, log_level=4)
    except Exception as error:  # of onnxruntime, which has a class for each
        raise ExportError(
            f"onnxruntime cannot run the model: {error}; fit on float32 data, or use format='torch'"
        ) from error


def _session(runtime: Any, model: str | bytes, log_level: int = 2) -> Any:
    """Return a session of onnxruntime, with one thread, for a file or its content."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = log_level
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def require(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    return require_package(package, "export", "exporting to ONNX")


def _name_axes(graph: Any) -> None:
    """Give the free axes their names, in place of torch's symbols."""
    steps, series = graph.input[0].type.tensor_type.shape.dim[:2]
    names = {steps.dim_param: STEPS, series.dim_param: SERIES}
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names))
    for part in _graphs(graph):
        for value in (*part.input, *part.output, *part.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:  # may be an expression of symbols
                    dim.dim_param = pattern.sub(lambda match: names[match[0]], dim.dim_param)


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph, and the bodies of scans in it, which are graphs in attributes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of an exported file of either format.

    Raises
    ------
    FileNotFoundError
    LoadError
        If it is no file that this package exported.
    """
    os.stat(path)  # zipfile and onnx do not tell a missing file from another one
    if format_of(path) == "torch":
        with zipfile.ZipFile(path) as file:
            names = [n for n in file.namelist() if n.endswith("/" + METADATA_FILE)]
            metadata = json.loads(file.read(names[0])) if names else {}
    else:
        try:
            model = require("onnx").load(os.fspath(path))
        except Exception as error:  # of protobuf
            raise LoadError(f"{path} is neither an ONNX file nor a program of torch") from error
        metadata = {}
        for entry in model.metadata_props:
            is_text = entry.key in TEXTS
            metadata[entry.key] = entry.value if is_text else json.loads(entry.value)
    if "states" not in metadata:
        raise LoadError(f"{path} was not exported by fluxutils_py: it does not tell its states")
    return metadata


def format_of(path: Path) -> str:
    """Return the format of an exported file, by its content."""
    return "torch" if zipfile.is_zipfile(path) else "onnx"


def largest_difference(
    got: np.ndarray, want: np.ndarray, scale: Any
) -> tuple[float, tuple[np.intp, ...]]:
    """Return the largest difference in units of a scale, and where it is; NaN equals NaN alone."""
    both_nan = np.isnan(got) & np.isnan(want)
    away = np.where(both_nan, 0, np.abs(got - want)) / scale
    away = np.nan_to_num(away, nan=np.inf)
    return float(away.max()), np.unravel_index(away.argmax(), away.shape)


class ExportedModel:
    """An exported file of either format, run window by window.

    Parameters
    ----------
    path : str or path-like
    n_series : int

    Attributes
    ----------
    metadata : dict
    state : list of ndarray
        Of all series; at first the initial one.
    """

    def __init__(self, path: Path, n_series: int) -> None:
        self.metadata = read_metadata(path)
        self.state = []
        for entry in self.metadata["states"]:
            shape = [n_series if n == SERIES else n for n in entry["shape"]]
            self.state.append(np.full(shape, entry["initial"], entry["dtype"]))
        self._session: Any = None
        if format_of(path) == "torch":
            # torch warns of paths that do not end in .pt2, and up to 2.12 of the memory that it
            # reads into
            with open(path, "rb") as file, quiet_exporters():
                self._program = torch.export.load(file).module()
        else:
            self._session = _session(require("onnxruntime"), str(path))

    def run(self, *xs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs (S, B, G) for a window (S, B, F) of each input; the state moves on."""
        entries = self.metadata["inputs"]
        pairs = zip(xs, entries, strict=True)
        arrays = [np.ascontiguousarray(x, entry["dtype"]) for x, entry in pairs]
        arrays += self.state
        if self._session is not None:
            names = [entry["name"] for entry in (*entries, *self.metadata["states"])]
            feeds = dict(zip(names, arrays, strict=True))
            results = self._session.run(None, feeds)
        else:
            tensors = map(torch.from_numpy, arrays)
            with torch.no_grad():
                results = [t.numpy() for t in self._program(*tensors)]
        n_outputs = len(results) - len(self.state)
        self.state = list(results[n_outputs:])
        return list(results[:n_outputs])

    def run_series(self, *xs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs (T, B, G) for whole series (T, B, F) of each input."""
        windows = []
        start = 0
        # of 1, 2, 4, ... steps: the state must be handed on at any place
        while start < len(xs[0]):
            stop = 2 * start + 1
            windows.append(self.run(*(x[start:stop] for x in xs)))
            start = stop
        return [np.concatenate(parts) for parts in zip(*windows, strict=True)]
