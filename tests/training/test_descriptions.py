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


def test_texts_are_those_of_earlier_versions():
    """Checkpoints hold them: a fit must find the same ones again."""
    value = partial(nn.HuberLoss, delta=np.float32(0.5))
    assert describe("a", value) == {"a": "HuberLoss", "a.delta": "0.5"}
    assert describe("a", np.arange(3, dtype="float32")) == {"a": "(3,) float32 dd303d9b1abf"}
    assert describe("a", {"b": [1, 2.0], "c": None}) == {"a": "dict", "a.c": "None"}
    assert describe("a", [1, "x", {3, 2}]) == {
        "a": "3 things",
        "a.0": "1",
        "a.1": "'x'",
        "a.2": "(2, 3)",
    }


def test_attributes_of_modules_count_where_they_are_settings():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.sizes, self.found = [1, 2], [object()]

    texts = describe("m", Own())
    assert texts["m.sizes"] == "(1, 2)"
    assert not any(name.startswith("m.found") for name in texts)
