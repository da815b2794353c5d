"""Files run as consumers do: both formats give what streams give, for every kind of model."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, check_export
from fluxutils_py.errors import ExportError
from fluxutils_py.estimator import model_export
from fluxutils_py.exporting.export_files import ExportedModel, read_metadata

# the number of steps: some of those that are quick go on for long
KINDS = {
    "torch": 40,
    "own_cells": 40,
    "own_modules": 40,
    "scans": 40,
    "windows": 40,
    "statistics": 40,
    "kernels": 40,
    "no_state": 40,
    "several": 500,
    "classifier": 500,
}
# as programs of torch, whose scan runs in Python
CHEAP = ["own_modules", "no_state", "classifier"]


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
    spec = {"epochs": 1, "batchsize": 4, "seqsize": 10}
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
def test_files_give_what_streams_give(kind, make_model, export_both):
    est = fitted(kind, make_model(kind))
    onnx, program = export_both(est, **({"output_names": ["a", "b"]} if kind == "several" else {}))
    assert check_export(onnx, est, arrays(kind, 3, KINDS[kind])) < 1e-5
    assert check_export(program, est, arrays(kind, 3, 40 if kind in CHEAP else 7)) < 1e-5
    assert check_export(onnx, est, arrays(kind, 1, 4)) < 1e-5
    for path in (onnx, program):
        content = path.read_bytes()
        assert b"conftest.py" not in content  # no lines of source code and their files
        assert b"fluxutils_py/" not in content
    if kind == "classifier":
        # texts are given by their places
        assert read_metadata(onnx)["outputs"][0]["dtype"] == "int64"
        assert read_metadata(onnx)["classes"] == ["down", "same", "up"]
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
def test_weights_of_float64_keep_their_digits(make_model, export_both):
    est = fitted("float64", make_model("float64", torch.float64), "float64")
    for path in export_both(est):
        x = arrays("float64", 2, 7, "float64")
        assert check_export(path, est, x, tolerance=1e-12) < 1e-12


@pytest.mark.slow
def test_a_model_that_sees_its_last_inputs_again_is_refused(tmp_path):
    est = fitted("torch", Padded())
    with pytest.raises(ExportError, match=r"Padded sees its last inputs again.*CausalConv1d"):
        est.export(tmp_path / "model", "torch")


class Padded(nn.Module):
    """A convolution without state."""

    takes_windows = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 2, 5)

    def forward(self, x):
        padded = nn.functional.pad(x.permute(1, 2, 0), (4, 0))
        return self.conv(padded).permute(2, 0, 1)
