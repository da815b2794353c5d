"""Files of both formats: names, metadata, and what ONNX does not have."""

import json
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fluxutils_py.errors import ExportError, LoadError
from fluxutils_py.exporting.export_files import (
    ExportedModel,
    read_metadata,
    write_graph,
)
from fluxutils_py.exporting.graph import Graph
from fluxutils_py.exporting.steps import ModelStep
from fluxutils_py.nn import LSTM, RollingStatistics


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 5, trainable_init=True), nn.Linear(5, 2)).eval()
    with torch.no_grad():
        model[0].initial_state[1].normal_()
    return Graph([torch.zeros(3)], steps=[ModelStep(model, [torch.zeros(4, 2, 3)])])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_metadata_tell_names_shapes_types_and_initial_states(format, graph, tmp_path):
    path = tmp_path / "model.pt2"
    write_graph(path, graph, format, ["x"], ["y"], {"scale": {"mean": [1.5]}, "fluxutils_py": "0"})
    found = read_metadata(path)
    assert found["inputs"] == [{"name": "x", "shape": ["steps", "batch", 3], "dtype": "float32"}]
    assert found["outputs"] == [{"name": "y", "shape": ["steps", "batch", 2], "dtype": "float32"}]
    first, second = found["states"]
    assert first == {
        "name": "state.0",
        "shape": [1, "batch", 5],
        "dtype": "float32",
        "initial": 0.0,
    }
    assert np.array_equal(np.array(second["initial"], "float32"), graph.initial[1].value)
    assert found["scale"] == {"mean": [1.5]}
    assert found["fluxutils_py"] == "0"
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
def test_an_onnx_file_has_named_axes_and_states_after_the_inputs(graph, tmp_path):
    import onnx

    write_graph(tmp_path / "m.onnx", graph, "onnx", ["x"], ["y"], {})
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model)

    def shapes(values):
        return {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in values
        }

    states = {f"state.{i}": [1, "batch", 5] for i in range(2)}
    assert shapes(model.graph.input) == {"x": ["steps", "batch", 3], **states}
    assert shapes(model.graph.output) == {
        "y": ["steps", "batch", 2],
        **{f"next_{name}": shape for name, shape in states.items()},
    }
    assert {o.domain for o in model.opset_import} == {""}


@pytest.mark.slow
def test_constants_that_nothing_reads_are_left_out(tmp_path):
    model = nn.Sequential(RollingStatistics(3, [2, 4]), nn.Linear(18, 1)).eval()
    steps = [ModelStep(model, [torch.zeros(4, 2, 3)])]
    write_graph(tmp_path / "m.onnx", Graph([torch.zeros(3)], steps=steps), "onnx", "x", "y", {})
    (scan,) = (graph := onnx.load(tmp_path / "m.onnx").graph).node
    (body,) = (attribute.g for attribute in scan.attribute if attribute.HasField("g"))
    read = {name for node in (*graph.node, *body.node) for name in node.input}
    read |= {output.name for part in (graph, body) for output in part.output}
    assert {tensor.name for tensor in (*graph.initializer, *body.initializer)} <= read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "message"),
    [
        (lambda: Special(), torch.float32, r"ONNX.*bessel_j0.*format='torch'"),
        (lambda: nn.ELU(), torch.float64, r"onnxruntime.*Elu.*float32"),
    ],
    ids=["ONNX", "onnxruntime"],
)
def test_an_operator_that_is_missing_is_named(make, dtype, message, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), make()).to(dtype).eval()
    steps = [ModelStep(model, [torch.zeros(4, 2, 3, dtype=dtype)])]
    graph = Graph([torch.zeros(3, dtype=dtype)], steps=steps)
    with pytest.raises(ExportError, match=message):
        write_graph(tmp_path / "m.onnx", graph, "onnx", ["x"], ["y"], {})
    assert list(tmp_path.iterdir()) == []
    if dtype is torch.float32:
        write_graph(tmp_path / "m.pt2", graph, "torch", ["x"], ["y"], {})
        assert ExportedModel(tmp_path / "m.pt2", 2).run(np.zeros((3, 2, 3)))[0].shape == (3, 2, 4)


class Special(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


@pytest.mark.slow
def test_missing_packages_are_told_with_what_to_install(graph, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnx(script)?, .*pip install .*onnxruntime"):
        write_graph(tmp_path / "m.onnx", graph, "onnx", ["x"], ["y"], {})


def test_other_files_are_refused(tmp_path):
    torch.save({}, tmp_path / "other.pt2")
    (tmp_path / "other.onnx").write_bytes(b"no model")
    for name in ("other.pt2", "other.onnx"):
        with pytest.raises(LoadError, match=name):
            read_metadata(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none\.onnx"):
        read_metadata(tmp_path / "none.onnx")
