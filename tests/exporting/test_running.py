"""Files run as consumers do: onnxruntime gives what the model gives, for every kind of layer."""

import pytest
import torch

from fluxutils_py.exporting import Graph, ModelStep, write_graph
from fluxutils_py.exporting.running import ExportedModel

KINDS = [
    *("torch", "torch_cells", "own_cells", "own_cells_in_recur", "scans", "convolutions", "stacks", "norms"),
    *("no_state", "several"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_gives_what_the_model_gives_for_any_steps_and_series(
    kind, make_model, example_inputs, worst_difference, tmp_path
):
    model, xs = make_model(kind), example_inputs(kind, 4, 2)
    check(kind, model, xs, worst_difference, tmp_path, torch.float32, 5e-6)


def test_float64_keeps_its_digits_in_onnx(make_model, example_inputs, worst_difference, tmp_path):
    model, xs = make_model("torch", torch.float64), example_inputs("torch", 4, 2, torch.float64)
    check("torch", model, xs, worst_difference, tmp_path, torch.float64, 1e-13)


def check(kind, model, xs, worst_difference, tmp_path, dtype, tolerance):
    graph = Graph([x[0, 0] for x in xs], steps=[ModelStep(model, xs)], gaps=True)
    outputs = [f"y.{i}" for i in range(len(graph.outputs))]
    write_graph(tmp_path / "m.onnx", graph, "onnx", [f"x.{i}" for i in range(len(xs))], outputs, {})

    def start(n_series):
        file = ExportedModel(tmp_path / "m.onnx", n_series)
        return file.run, lambda: file.state

    assert worst_difference(kind, model, start, dtype) < tolerance
