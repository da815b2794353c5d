"""Models without recurrent state: their last inputs are the state, as in sessions."""

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.steps import ContextWindow
from fluxutils_py.steps.session import InferenceSession

X = [torch.randn(5, 2, 3)]


class Convolution(nn.Module):
    takes_windows = True

    def __init__(self, pad):
        super().__init__()
        self.conv, self.pad = nn.Conv1d(3, 4, 5), pad

    def forward(self, x):
        return self.conv(nn.functional.pad(x.permute(1, 2, 0), self.pad)).permute(2, 0, 1)


def test_the_last_inputs_are_the_state():
    model = Convolution((4, 0)).eval()
    window = ContextWindow(model, X, 6)
    session = InferenceSession(model, lambda: X, 6)
    session.load(None, 4)
    state = [s.of(4) for s in window.initial]
    for n_steps in (1, 1, 2, 7, 1, 4):
        x = torch.randn(n_steps, 4, 3)
        with torch.no_grad():
            y, *state = window(x, *state)
            assert torch.allclose(y, session.run((x,))[0], atol=1e-6)
        assert [s.shape for s in state] == [s.shape for s in session.state]


def test_without_overlap_there_is_no_state():
    assert ContextWindow(Convolution((4, 0)), X, 0).initial == ()


def test_reading_the_future_is_an_error():
    with pytest.raises(ExportError, match="reads the future"):
        ContextWindow(Convolution((2, 2)), X, 4)
