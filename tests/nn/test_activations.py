"""The two parabolas, against NumPy's rendering of their definitions and against what they stand
for.
"""

import numpy as np
import pytest
import torch

from fluxutils_py.nn.activations import dpsigmoid, dptanh, psigmoid, ptanh

POINTS = np.concatenate(
    [
        np.linspace(-6, 6, 1201),
        [-4.1, 4.1, -1.92033, 1.92033, 0.0, -0.0, -1e30, 1e30, -np.inf, np.inf],
    ]
)


def numpy_psigmoid(x):
    u = x / 4.1
    with np.errstate(invalid="ignore"):
        return np.where(u > 1, 1, np.where(u < -1, 0, 0.5 + u * (1 - 0.5 * abs(u))))


def numpy_ptanh(x):
    knee, plateau, bend = 1.92033, 0.96016, 0.26037
    with np.errstate(over="ignore"):
        right, left = plateau - bend * (x - knee) ** 2, bend * (x + knee) ** 2 - plateau
    return np.where(x > knee, plateau, np.where(x > 0, right, np.where(x > -knee, left, -plateau)))


@pytest.mark.parametrize(
    ("ours", "theirs", "true", "apart"),
    [(psigmoid, numpy_psigmoid, torch.sigmoid, 0.01937), (ptanh, numpy_ptanh, torch.tanh, 0.03984)],
)
def test_values_are_those_of_the_definition_and_near_the_true_function(ours, theirs, true, apart):
    x = torch.from_numpy(POINTS)
    np.testing.assert_allclose(ours(x).numpy(), theirs(POINTS), rtol=0, atol=1e-15)
    assert float((ours(x) - true(x)).abs().max()) == pytest.approx(apart, abs=1e-5)
    assert ours(torch.tensor([torch.nan])).isnan().all()
    assert ours(x.float()).dtype == torch.float32


def test_ends():
    assert psigmoid(torch.tensor([-4.1, 0.0, 4.1], dtype=torch.float64)).tolist() == [0, 0.5, 1]


@pytest.mark.parametrize(("f", "df"), [(psigmoid, dpsigmoid), (ptanh, dptanh)])
def test_derivatives_are_those_of_autograd_and_of_small_differences(f, df):
    x = torch.from_numpy(POINTS[abs(POINTS) < 1e30]).requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(df(x), gradient, rtol=0, atol=1e-15)
    # off the knees and 0
    smooth = x.detach()[((x.detach().abs() - 1.92033).abs() > 1e-4) & (x.detach().abs() > 1e-4)]
    difference = (f(smooth + 1e-6) - f(smooth - 1e-6)) / 2e-6
    torch.testing.assert_close(df(smooth), difference, rtol=0, atol=1e-6)
    away = torch.tensor([-3.0, -1.0, 0.3, 1.5, 3.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, away)
    assert torch.autograd.gradgradcheck(f, away)
