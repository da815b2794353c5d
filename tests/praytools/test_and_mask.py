"""Masks of gradients on which environments agree; numbers of PrayTools' own tests, and NumPy."""

import numpy as np
import pytest
import torch

from fluxutils_py.praytools.sample_gradients import maskedgrad, signalign

XS = [
    torch.tensor([1.0, 1.0, -1.0]),
    torch.tensor([1.0, -1.0, -1.0]),
    torch.tensor([1.0, 1.0, -1.0]),
]


@pytest.mark.parametrize(
    ("tau", "expected"),
    [(0.5, [1.0, 0.0, -1.0]), (1.0, [1.0, 0.0, -1.0]), (0.0, [1.0, 1 / 3, -1.0])],
)
def test_numbers_of_praytools(tau, expected):
    torch.testing.assert_close(signalign(XS, tau), torch.tensor(expected))
    torch.testing.assert_close(signalign([None, *XS, None], tau), torch.tensor(expected))


@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5, 1.0])
def test_against_numpy(rng, tau):
    xs = rng.normal(size=(5, 7, 3))
    xs[1, 2] = xs[3, :2] = 0  # the sign of 0 is 0
    expected = (np.abs(np.sign(xs).sum(0)) >= tau * 5) * xs.mean(0)
    np.testing.assert_allclose(signalign(list(torch.tensor(xs)), tau).numpy(), expected, atol=1e-15)


def test_agreement_of_exactly_tau_counts():
    signs = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([-1.0])]
    assert signalign(signs, 1 / 3) == pytest.approx(1 / 3)


def test_what_is_masked_is_zero_even_if_it_is_infinite():
    assert signalign([torch.tensor([float("inf")]), torch.tensor([-1.0])], 0.5).tolist() == [0.0]


def test_nothing_but_none_is_none():
    assert signalign([None, None], 0.5) is None


def test_maskedgrad_goes_by_parameter():
    a, b = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 2.0]])
    found = maskedgrad([(a, None, a), (b, None, None)], 0.5)
    assert found[0].tolist() == [[2.0, 0.0]]
    assert found[1] is None
    assert found[2] is not a
    assert found[2].tolist() == [[1.0, -2.0]]


def test_one_environment_stays_as_it_is_and_none_is_an_error():
    a = torch.tensor([1.0])
    assert maskedgrad([(a, None)], 1.0) == (a, None)
    with pytest.raises(ValueError, match=r"^maskedgrad .*gradients .*one env"):
        maskedgrad([], 0.5)
