"""The graph as a program of torch: what stands before and after the scan; what cannot be traced."""

import pytest
import torch
from torch import nn

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.graph import Graph
from fluxutils_py.exporting.steps import ModelStep
from fluxutils_py.nn import LSTM, Recur


@pytest.mark.slow
def test_before_and_after_are_outside_the_scan_and_gaps_between_them():
    double, shift = Times(2.0), Times(10.0)
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1)).eval()
    graph = Graph(
        [torch.zeros(3)],
        before=[double],
        steps=[ModelStep(model, [torch.zeros(4, 2, 3)])],
        after=[shift],
        gaps="zeros",
    )
    x = torch.randn(6, 2, 3)
    x[2, 1] = torch.nan
    y, *_ = graph.program.module()(x, *(s.of(2) for s in graph.initial))
    with torch.no_grad():
        wanted = 10 * model(2 * x.nan_to_num())
    wanted[2, 1] = torch.nan
    assert torch.allclose(y, wanted, atol=1e-6, equal_nan=True)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


class Sized(nn.Module):
    """Works for 3 series only."""

    def forward(self, x):
        return x.view(3, -1)


class ByValue(nn.Module):
    """Decides by the values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.slow
@pytest.mark.parametrize(("part", "said"), [(ByValue(), "^the model cannot"), (Sized(), "series")])
def test_what_cannot_be_traced_is_named(part, said):
    model = nn.Sequential(Recur(nn.GRUCell(3, 4)), part).eval()
    model.takes_windows = False
    with pytest.raises(ExportError, match=said):
        Graph([torch.zeros(3)], steps=[ModelStep(model, [torch.zeros(4, 2, 3)])])
