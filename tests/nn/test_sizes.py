"""Checks of the sizes of layers."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.sizes import check_features, check_probability, set_sizes


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_library_are_sizes(value):
    layer = nn.Tanh()
    set_sizes(layer, n_in=value, n_out=2)
    assert (layer.n_in, layer.n_out) == (3, 2)
    assert type(layer.n_in) is int


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (2.0, TypeError), ("2", TypeError), (0, ValueError)]
)
def test_the_error_names_layer_and_argument(value, error):
    with pytest.raises(error) as caught:
        set_sizes(nn.Tanh(), n_in=value)
    assert str(caught.value) == f"Tanh: n_in must be a positive integer, got {value!r}"


def test_probabilities_lie_between_0_and_1():
    assert check_probability(nn.Tanh(), "dropout", np.float32(0.5)) == 0.5
    with pytest.raises(ValueError, match=r"^Tanh: dropout .*0 to 1, got nan$"):
        check_probability(nn.Tanh(), "dropout", float("nan"))


def test_another_number_of_features_is_an_error():
    check_features("Tanh", torch.zeros(5, 2, 3), 3)
    with pytest.raises(ShapeError, match=r"^Tanh .*3 .*n_in.*\(5, 3, 2\)$"):
        check_features("Tanh", torch.zeros(5, 3, 2), 3)
