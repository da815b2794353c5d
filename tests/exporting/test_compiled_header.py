"""Headers of C, compiled and run: the outputs of whole series."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.exporting.c_header import CHeader, Description
from fluxutils_py.exporting.compiled_header import is_header, run_header
from fluxutils_py.nn import GRU, LSTM
from fluxutils_py.steps.step_program import program_of


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_series_starts_anew(dtype, tmp_path, rng):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(3, 5), GRU(5, 4), nn.Linear(4, 2)).to(getattr(torch, dtype)).eval()
    text = CHeader(program_of(model, 3), [], [], Description("a model"), "pump", False).text()
    path = tmp_path / "model.h"
    path.write_text(text)
    assert is_header(path)
    x = rng.normal(size=(3, 4, 11)).astype(dtype)  # (F, N, T)
    with torch.no_grad():
        wanted = model(torch.from_numpy(x.transpose(2, 1, 0).copy())).numpy()
    found = run_header(path, x)
    assert found.shape == (11, 4, 2)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"\x08\x0a", b""])
def test_other_files_are_no_headers(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert not is_header(tmp_path / "file")
