"""Models without recurrent state: their last inputs are the state, as in streams."""

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting import ExportedModel, Graph, write_graph
from fluxutils_py.exporting.context import ContextWindow


class Convolution(nn.Module):
    takes_windows = True

    def __init__(self, causal=True):
        super().__init__()
        self.conv, self.head, self.pad = nn.Conv1d(3, 4, 5), nn.Linear(4, 1), (4, 0) if causal else (2, 2)

    def forward(self, x):
        return self.head(self.conv(nn.functional.pad(x.permute(1, 2, 0), self.pad)).tanh().permute(2, 0, 1))


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_file_keeps_the_last_inputs(format, tmp_path, worst_difference):
    model, path = Convolution().eval(), tmp_path / "model.pt2"
    window = ContextWindow(model, [torch.randn(5, 2, 3)], 6)
    write_graph(path, Graph([torch.zeros(3)], window=window, gaps=True), format, ["x"], ["y"], {})

    def start(n_series):
        file = ExportedModel(path, n_series)
        return file.run, lambda: file.state

    assert worst_difference("", model, start, overlap=6) < 1e-6


def test_without_overlap_there_is_no_state():
    window = ContextWindow(Convolution(), [torch.randn(5, 2, 3)], 0)
    assert window.initial == ()


def test_reading_the_future_is_an_error():
    with pytest.raises(ExportError, match="reads the future"):
        ContextWindow(Convolution(causal=False), [torch.randn(5, 2, 3)], 4)
