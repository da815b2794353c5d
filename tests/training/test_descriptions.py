"""Texts by which ranks and checkpoints compare values."""

from functools import partial

import numpy as np
import pytest
from torch import nn

from fluxutils_py.training.descriptions import describe, describe_modules


def scaled(x, factor=2.0):
    return factor * x


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (0.1, np.nextafter(0.1, 1.0).item()),
        ("a", b"a"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (partial(scaled, factor=3.0), partial(scaled, factor=4.0)),
        (nn.Linear(2, 3), nn.Linear(3, 2)),
        (nn.MSELoss(), nn.MSELoss(reduction="sum")),
        (lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_values_that_differ_have_other_texts(value, other):
    assert describe("value", value) == describe("value", value)
    assert describe("value", value) != describe("value", other)


def test_texts_have_the_path_to_the_value_as_name():
    assert describe("opt", {"lr": 0.1}) == {"opt": "dict", "opt.lr": "0.1"}
    texts = describe_modules("model", nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25)))
    assert texts["model"] == "Sequential"
    assert texts["model.0.in_features"] == "2"
    assert texts["model.1.p"] == "0.25"
