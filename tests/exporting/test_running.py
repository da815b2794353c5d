"""Files run as consumers do: both formats give what streams give, for every kind of model, over
hundreds of steps.
"""

import numpy as np
import pytest
import torch

from fluxutils_py import Estimator, EstimatorClassifier, check_export
from fluxutils_py.estimator import model_export
from fluxutils_py.exporting.export_files import ExportedModel, read_metadata

KINDS = [
    *("torch", "torch_cells", "own_cells", "own_cells_in_recur", "scans", "convolutions", "stacks"),
    *("norms", "statistics", "kernels", "no_state", "several", "context", "classifier"),
]
# as programs of torch, whose scan runs in Python
CHEAP = [
    "torch_cells",
    "no_state",
    "context",
    "classifier",
]


def arrays(kind, n_series, n_steps, dtype="float32"):
    """Inputs (F, N, T)."""
    rng = np.random.default_rng(n_steps)
    x = rng.normal(size=(3, n_series, n_steps)).astype(dtype)
    return (rng.integers(0, 7, (1, n_series, n_steps)), x) if kind == "several" else x


def sum_of_losses(model, xs, ys):
    return sum((a - b).square().mean() for a, b in zip(model(*xs), ys, strict=True))


def fitted(kind, model, dtype="float32"):
    """An estimator that trained on 7 series of 43 steps."""
    x = arrays(kind, 7, 43, dtype)
    y = np.random.default_rng(1).normal(size=(8, 7, 43)).astype(dtype)
    spec = {"epochs": 1, "batchsize": 4, "seqsize": 10, "overlap": 4 if kind == "context" else 0}
    if kind == "classifier":
        return EstimatorClassifier(model, spec=spec).fit(
            x, np.array(["down", "same", "up"])[x.argmax(0)][None]
        )
    if kind == "several":
        return Estimator(model, sum_of_losses, spec=spec).fit(x, (y[:2], y[2:3]))
    with torch.no_grad():
        n_outputs = model(torch.from_numpy(x).permute(2, 1, 0)).shape[-1]
    return Estimator(model, spec=spec).fit(x, y[:n_outputs])


@pytest.fixture
def export_both(tmp_path, monkeypatch):
    """Write an estimator in both formats, and trace it once, which takes most of the time."""

    def write(est, **names):
        graph = model_export._graph(est, [], [])
        monkeypatch.setattr(model_export, "_graph", lambda *_: graph)
        for format in ("onnx", "torch"):
            est.export(tmp_path / format, format, **names)
        return tmp_path / "onnx", tmp_path / "torch"

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_files_give_what_streams_give_over_500_steps(kind, make_model, export_both):
    est = fitted(kind, make_model(kind))
    onnx, program = export_both(est, **({"output_names": ["a", "b"]} if kind == "several" else {}))
    assert check_export(onnx, est, arrays(kind, 3, 500)) < 1e-5
    assert check_export(program, est, arrays(kind, 3, 500 if kind in CHEAP else 22)) < 1e-5
    assert check_export(onnx, est, arrays(kind, 1, 4)) < 1e-5
    for path in (onnx, program):
        assert read_metadata(path)["context"] == (4 if kind == "context" else 0)
        content = path.read_bytes()
        assert b"conftest.py" not in content  # no lines of source code and their files
        assert b"fluxutils_py/" not in content
    if kind in CHEAP:
        check_export(program, est, arrays(kind, 1, 4))
        require_that_states_go_on(program, onnx, arrays(kind, 2, 9))


def require_that_states_go_on(program, onnx, x):
    """The state of one file goes on in the other."""
    x, one, other, whole = (
        x.transpose(2, 1, 0),
        *(ExportedModel(path, 2) for path in (program, onnx, onnx)),
    )
    one.run(x[:4])
    other.state = one.state
    np.testing.assert_allclose(other.run(x[4:])[-1], whole.run(x)[-1][4:], atol=1e-6)


@pytest.mark.slow
def test_all_kinds_are_tried(model_names):
    assert model_names == [*KINDS, "float64"]


@pytest.mark.slow
def test_float64_keeps_its_digits(make_model, export_both):
    est = fitted("float64", make_model("float64", torch.float64), "float64")
    for path in export_both(est):
        assert check_export(path, est, arrays("float64", 2, 22, "float64"), tolerance=1e-12) < 1e-12
