"""Files run as consumers do: both formats give what the model gives, for every kind of layer."""

import numpy as np
import pytest
import torch

from fluxutils_py.exporting import Graph, ModelStep, write_graph
from fluxutils_py.exporting.running import ExportedModel

KINDS = [
    *("torch", "torch_cells", "own_cells", "own_cells_in_recur", "scans", "convolutions", "stacks"),
    *("norms", "no_state", "several"),
]


def test_all_kinds_are_tried(model_names):
    assert model_names == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_files_give_what_the_model_gives_for_any_steps_and_series(
    kind, make_model, example_inputs, worst_difference, tmp_path
):
    model, xs = make_model(kind), example_inputs(kind, 4, 2)
    check(kind, model, xs, worst_difference, tmp_path, torch.float32, 5e-6)


def test_float64_keeps_its_digits(make_model, example_inputs, worst_difference, tmp_path):
    model, xs = make_model("torch", torch.float64), example_inputs("torch", 4, 2, torch.float64)
    check("torch", model, xs, worst_difference, tmp_path, torch.float64, 1e-13)


def check(kind, model, xs, worst_difference, tmp_path, dtype, tolerance):
    graph = Graph([x[0, 0] for x in xs], steps=[ModelStep(model, xs)], gaps=True)
    names = [f"x.{i}" for i in range(len(xs))], [f"y.{i}" for i in range(len(graph.outputs))]
    for format in ("onnx", "torch"):
        path = tmp_path / format
        write_graph(path, graph, format, *names, {})

        def start(n_series, path=path):
            file = ExportedModel(path, n_series)
            return file.run, lambda: file.state

        assert worst_difference(kind, model, start, dtype) < tolerance, format


def test_a_state_of_one_file_goes_on_in_the_other(make_model, tmp_path):
    graph = Graph([torch.zeros(3)], steps=[ModelStep(make_model("scans"), [torch.zeros(4, 2, 3)])])
    files = []
    for format in ("onnx", "torch"):
        write_graph(tmp_path / format, graph, format, ["x"], ["y"], {})
        files.append(ExportedModel(tmp_path / format, 2))
    x = np.random.default_rng(0).normal(size=(9, 2, 3))
    whole = files[0].run(x)[0]
    files[1].run(x[:4])
    other = ExportedModel(tmp_path / "onnx", 2)
    other.state = files[1].state
    np.testing.assert_allclose(other.run(x[4:])[0], whole[4:], atol=1e-6)
