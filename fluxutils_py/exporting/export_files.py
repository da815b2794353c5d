"""Write graphs as ONNX files and as programs of torch, with what a consumer must know as metadata."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.errors import ExportError, LoadError
from fluxutils_py.exporting.graph import Graph, module_of_operator, quiet_exporters
from fluxutils_py.files import atomic_write
from fluxutils_py.tree import named_leaves
from fluxutils_py.validation import require_package

FORMATS = ("onnx", "torch")
METADATA_FILE = "metadata.json"  # in a program of torch
TEXTS = ("estimator", "fluxutils_py", "torch")  # entries that are texts; the others are JSON
SERIES, STEPS = "batch", "steps"  # names of free axes


def check_format(format: str) -> None:
    """Raise ValueError for a format that there is not."""
    if format not in FORMATS:
        raise ValueError(f"format must be 'onnx' or 'torch', got {format!r}")


def write_graph(
    path: Any,
    graph: Graph,
    format: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: dict[str, Any],
    texts: Mapping[str, Sequence[str]] | None = None,
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
    texts : dict, optional
        For outputs that are places in a list of texts, by name, the list. ONNX gives the texts,
        torch the places.

    Raises
    ------
    ExportError
        If an operator has no counterpart in ONNX, or onnxruntime (where it is installed) cannot
        load the file, for example for want of an operator in float64; the message names the module.
    ImportError
        If the format is "onnx" and its packages are not installed.
    """
    described = {**describe(graph, inputs, outputs), **metadata}
    if format == "torch":
        extra = {METADATA_FILE: json.dumps(described, indent=1)}
        with atomic_write(path) as file:
            torch.export.save(graph.program, file, extra_files=extra)
        return
    model = _to_onnx(graph, inputs, outputs)
    _name_axes(model.graph)
    _restore_digits(model.graph, graph)
    for name, choices in (texts or {}).items():
        _replace_by_texts(model.graph, name, choices)
        next(o for o in described["outputs"] if o["name"] == name)["dtype"] = "string"
    for key, value in described.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value if key in TEXTS else json.dumps(value)
    content = model.SerializeToString()
    _require_kernels(graph, content)
    with atomic_write(path) as file:
        file.write(content)


def describe(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Return names, shapes and types of inputs, outputs and states, and the initial states, as
    plain values.
    """

    def entry(name: str, t: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": [STEPS, SERIES, *t.shape[2:]], "dtype": _dtype_name(t)}

    return {
        "inputs": [entry(name, x) for name, x in zip(inputs, graph.inputs, strict=True)],
        "outputs": [entry(name, y) for name, y in zip(outputs, graph.outputs, strict=True)],
        "states": [
            {
                "name": f"state.{i}",
                "shape": [SERIES if d == s.batch_axis else n for d, n in enumerate(s.value.shape)],
                "dtype": _dtype_name(s.value),
                "initial": _initial_value(s.value),
            }
            for i, s in enumerate(graph.initial)
        ],
    }


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _initial_value(value: Tensor) -> Any:
    """Return one number if all values are equal, else nested lists; None for NaN, which JSON does
    not have.
    """
    if not value.numel():
        return 0
    first = value.flatten()[:1]
    if torch.allclose(value, first.expand_as(value), rtol=0, atol=0, equal_nan=True):
        return _json_number(first.item())
    return _json_numbers(value.tolist())


def _json_numbers(values: Any) -> Any:
    return [_json_numbers(v) for v in values] if isinstance(values, list) else _json_number(values)


def _json_number(value: Any) -> Any:
    return None if value != value else value


def _to_onnx(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    for name in ("onnx", "onnxscript"):
        require(name)
    n_states = len(graph.initial)
    names = [*inputs, *(f"state.{i}" for i in range(n_states))]
    results = [*outputs, *(f"next_state.{i}" for i in range(n_states))]
    try:
        with quiet_exporters(), torch.no_grad():
            made = torch.onnx.export(
                graph.program, dynamo=True, input_names=names, output_names=results, verbose=False
            )
    except Exception as error:
        raise _not_convertible(graph, error) from error
    assert made is not None
    return made.model_proto


def _not_convertible(graph: Graph, error: Exception) -> ExportError:
    said, cause = str(error), error.__cause__
    while cause is not None:
        said, cause = f"{said}\n{cause}", cause.__cause__
    operator = re.search(r"OpOverload\(op='([\w.:]+)'", said) or re.search(
        r"(aten\.\w+\.\w+)", said
    )
    if operator is None:
        first = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
        return ExportError(
            f"the model cannot be written as ONNX: {first}; format='torch' may take it"
        )
    name = operator[1].replace("::", ".")
    where = module_of_operator(graph, name)
    return ExportError(
        f"{where or 'the model'} cannot be written as ONNX, which has no counterpart of torch's "
        f"{name}; format='torch' takes it"
    )


def _require_kernels(graph: Graph, content: bytes) -> None:
    """Raise an ExportError that names the module if onnxruntime is installed and cannot load the
    model.
    """
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime, which has a class for each
        operator = re.search(r"implementation for (\w+)\(", str(error))
        where = module_of_operator(graph, f"onnx.{operator[1].lower()}") if operator else None
        of = f" {operator[1]} in {_dtype_name(graph.inputs[-1])}" if operator else ""
        raise ExportError(
            f"{where or 'the model'} cannot run in onnxruntime, which lacks{of or ' an operator'}; "
            "fit on float32 data, or take format='torch' (onnxruntime: "
            f"{str(error).splitlines()[0]})"
        ) from error


def require(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    return require_package(package, "export", "exporting to ONNX")


def _name_axes(graph: Any) -> None:
    """Give the free axes their names, in place of torch's symbols."""
    names = {}
    for d, name in ((0, STEPS), (1, SERIES)):
        names[graph.input[0].type.tensor_type.shape.dim[d].dim_param] = name
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names))

    def rename(part: Any) -> None:
        for value in (*part.input, *part.output, *part.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = pattern.sub(lambda found: names[found[0]], dim.dim_param)
        for node in part.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(graph)


def _restore_digits(onnx_graph: Any, graph: Graph) -> None:
    """Give numbers in the code of models in float64 all their digits again, which torch.onnx rounds
    to float32.

    Attributes of operators, such as the eps of a normalisation, stay float32: ONNX has no others.
    """
    onnx = require("onnx")
    nodes = [node for program in (graph.program, *graph.programs) for node in program.graph.nodes]
    numbers = [
        v
        for node in nodes
        for _, v in named_leaves([*node.args, node.kwargs])
        if isinstance(v, float)
    ]
    exact = {torch.tensor(v, dtype=torch.float32).item(): v for v in numbers}
    for value in onnx_graph.initializer:
        if (
            value.data_type == onnx.TensorProto.DOUBLE
            and not value.dims
            and value.name not in graph.program.state_dict
        ):
            rounded = onnx.numpy_helper.to_array(value).item()
            if rounded in exact:
                number = onnx.helper.make_tensor(value.name, value.data_type, (), [exact[rounded]])
                value.CopyFrom(number)


def _replace_by_texts(graph: Any, name: str, texts: Sequence[str]) -> None:
    """Replace an output of indices by the texts at these indices."""
    onnx = require("onnx")
    for node in graph.node:
        for k, output in enumerate(node.output):
            if output == name:
                node.output[k] = f"{name}.place"
    graph.initializer.append(
        onnx.helper.make_tensor(
            f"{name}.texts", onnx.TensorProto.STRING, [len(texts)], [t.encode() for t in texts]
        )
    )
    graph.node.append(onnx.helper.make_node("Gather", [f"{name}.texts", f"{name}.place"], [name]))
    declared = next(o for o in graph.output if o.name == name)
    declared.type.tensor_type.elem_type = onnx.TensorProto.STRING


def read_metadata(path: Any) -> dict[str, Any]:
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
            found = json.loads(file.read(names[0])) if names else {}
    else:
        try:
            model = require("onnx").load(os.fspath(path))
        except Exception as error:  # of protobuf
            raise LoadError(f"{path} is neither an ONNX file nor a program of torch") from error
        found = {
            p.key: p.value if p.key in TEXTS else json.loads(p.value) for p in model.metadata_props
        }
    if "states" not in found:
        raise LoadError(f"{path} was not exported by fluxutils_py: it does not tell its states")
    return found


def format_of(path: Any) -> str:
    """Return the format of an exported file, by its content."""
    return "torch" if zipfile.is_zipfile(path) else "onnx"


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

    def __init__(self, path: Any, n_series: int) -> None:
        self.metadata = read_metadata(path)
        self.state = [
            np.full([n_series if n == SERIES else n for n in s["shape"]], s["initial"], s["dtype"])
            for s in self.metadata["states"]
        ]
        self._session: Any = None
        if format_of(path) == "torch":
            # torch warns of paths that do not end in .pt2, and up to 2.12 of the memory that it
            # reads into
            with open(path, "rb") as file, quiet_exporters():
                self._program = torch.export.load(file).module()
        else:
            runtime = require("onnxruntime")
            options = runtime.SessionOptions()
            options.intra_op_num_threads = 1
            self._session = runtime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )

    def run(self, *xs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs (S, B, G) for a window (S, B, F) of each input, and move the state on."""
        dtypes = [entry["dtype"] for entry in self.metadata["inputs"]]
        given = [
            np.ascontiguousarray(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)
        ] + self.state
        if self._session is not None:
            names = [
                entry["name"] for part in ("inputs", "states") for entry in self.metadata[part]
            ]
            found = self._session.run(None, dict(zip(names, given, strict=True)))
        else:
            with torch.no_grad():
                found = [t.numpy() for t in self._program(*map(torch.from_numpy, given))]
        n = len(found) - len(self.state)
        self.state = list(found[n:])
        return list(found[:n])
