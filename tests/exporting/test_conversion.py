"""Operators without a counterpart in ONNX give there what torch gives, and are not traced again."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.exporting.conversion import convert

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -1.5, 2.25, 3e4, -1e-3]


class Floats(nn.Module):
    def forward(self, x):
        given = x.nan_to_num(1.5, 7.25, -8.5)
        return (
            x.nan_to_num(),
            given,
            0.1 - given,
            torch.rsub(given, 3.0, alpha=0.3),
            given.square(),
            x.to(torch.float32),
        )


class Integers(nn.Module):
    def forward(self, i):
        odd, large = i % 2 == 1, i > 3
        return odd & large, odd | large, i & (i - 3), i | (i + 9), 7 - i, i.square(), i.to(torch.float64)


class InPlace(nn.Module):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = 2.0
        return (x.add_(1.0),)


class Composite(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(8, dtype=torch.float64), nn.RNNCell(8, 3, dtype=torch.float64)

    def forward(self, x):
        return (self.cell(self.norm(x.nan_to_num(0.0, 0.0, 0.0))),)


@pytest.fixture
def decompositions(monkeypatch):
    """The programs that were traced again."""
    traced = []
    trace = torch.export.ExportedProgram.run_decompositions
    note = lambda self, *args, **kwargs: traced.append(self) or trace(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", note)
    return traced


@pytest.mark.parametrize(
    ("module", "values", "again"),
    [
        (Floats(), np.array(SPECIAL), False),
        (Floats(), np.array(SPECIAL, "float32"), False),
        (Integers(), np.arange(8) + 2, False),
        (InPlace(), np.array(SPECIAL), True),
        (Composite().eval(), np.array(SPECIAL), True),
    ],
    ids=["float64", "float32", "integers", "in place", "composite"],
)
def test_onnx_gives_what_torch_gives(module, values, again, decompositions, recwarn):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = torch.from_numpy(np.stack([values] * 3))
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=[{0: torch.export.Dim("series", min=1)}])
        code = program.graph_module.code
        model = convert(program, input_names=["x"])
    recwarn.clear()
    assert program.graph_module.code == code
    assert bool(decompositions) == again
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for n in (1, 5):
        given = np.stack([values] * n)
        found = session.run(None, {"x": given})
        with torch.no_grad():
            wanted = module(torch.from_numpy(given))
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.numpy().dtype
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-15 if got.dtype == "float64" else 1e-6)
