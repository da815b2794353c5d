"""Text of C: numbers that keep their digits, tables, and names."""

import re

import numpy as np
import pytest

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.c_header import check_prefix, number, table


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_keep_all_their_digits(dtype, rng):
    scales = 10.0 ** rng.integers(-44 if dtype == "float32" else -320, 38, 300)
    values = np.array([*(rng.normal(size=300) * scales), 0, -0.0, 1, 123456789, 1e-45], dtype)
    text = table("w", values)
    suffix = "f" if dtype == "float32" else ""
    constants = re.findall(r"[-\d][-+.\de]*f?(?=,)", text)
    assert all(re.fullmatch(rf"-?\d+(\.\d+)?(e[-+]\d+)?{suffix}", c) for c in constants)
    assert all("." in c or "e" in c for c in constants)
    again = np.array([c.rstrip("f") for c in constants]).astype(dtype)
    assert again.tobytes() == values.tobytes()
    assert max(map(len, text.splitlines())) <= 100


def test_tables_tell_their_type_and_size():
    assert table("w", np.array([-127, 5], "int8")) == (
        "static const signed char w[2] = {\n    -127, 5,\n};"
    )
    assert table("w", np.zeros((2, 3))).startswith("static const double w[6] = {\n    0.0, 0.0,")
    # C has no arrays without elements
    assert table("w", np.zeros(0, "float32")) == "static const float w[1] = {\n    0.0f,\n};"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_an_error(value):
    with pytest.raises(ExportError, match=f"weight .*{value}: fit it on"):
        number(value, "float")


@pytest.mark.parametrize("prefix", ["", "1a", "a b", "_a", "ä", None, 3])
def test_a_prefix_is_a_name(prefix):
    with pytest.raises(ExportError, match="prefix must begin with a letter"):
        check_prefix(prefix)


@pytest.mark.parametrize(("prefix", "instead"), [("class", "class_model"), ("a_", "a_model")])
def test_a_prefix_is_no_word_of_c(prefix, instead):
    with pytest.raises(ExportError, match=f"use for example '{instead}'"):
        check_prefix(prefix)
    assert check_prefix(instead) == instead
