"""Gradients along a path, window by window: what is kept, what is skipped, what is added up."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from fluxutils_py.explaining.integrated_gradients import MOST_ROWS, PathGradients
from fluxutils_py.nn import GRU
from fluxutils_py.steps.session import InferenceSession

T, F = 50, 3
X = torch.tensor(np.random.default_rng(0).normal(size=(T, 1, F)))


STEPS_WITH_GRAPH = []


class Noted(nn.Module):
    """Notes how many steps it computes with a graph, in one call."""

    takes_windows = True

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if torch.is_grad_enabled():
            STEPS_WITH_GRAPH.append(len(x))
        return self.layer(x)


def make(layer, size):
    model = Noted(layer).double()
    session = InferenceSession(model, lambda: [X[:3]])

    def read(steps):
        return (X[steps],), (torch.zeros(1, 1, F, dtype=torch.float64),)

    windows = [slice(a, min(a + size, T)) for a in range(0, T, size)]
    return PathGradients(session, windows, read, lambda outs: outs[0][-1].sum(-1))


def gru():
    torch.manual_seed(0)
    return GRU(F, 4)


def test_only_one_window_has_a_graph():
    expected = make(gru(), T).integrate(7)
    gradients = make(gru(), 8)
    STEPS_WITH_GRAPH.clear()
    result = gradients.integrate(7)
    assert STEPS_WITH_GRAPH == [2, 8, 8, 8, 8, 8, 8]
    assert_allclose(result.attributions[0], expected.attributions[0], rtol=0, atol=1e-12)
    assert_allclose(result.value, expected.value, rtol=1e-12)


def test_many_points_are_computed_in_parts():
    n = MOST_ROWS + 13
    gradients = make(gru(), 20)
    (a,) = gradients.integrate(n).attributions
    (b,) = make(gru(), T).integrate(40).attributions
    assert_allclose(a, b, atol=1e-10)  # both have converged
    integral = gradients.integrate(n)
    assert_allclose(a.sum(), integral.value - integral.baseline_value, atol=1e-10)


@pytest.mark.parametrize("size", [1, 9])
def test_windows_that_cannot_matter_have_no_gradient(size):
    gradients = make(nn.Linear(F, 2), size)
    (a,) = gradients.integrate(3).attributions
    assert not a[:, :-1].any()
    assert a[:, -1].all()
    assert a.shape == (F, T)
