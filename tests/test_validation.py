"""Checks of arguments: what passes, and the whole message of what does not."""

import json
import math

import numpy as np
import pytest
import torch

from fluxutils_py.errors import SpecError
from fluxutils_py.validation import check_integer, check_positive, require_package


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_integers_of_every_library_become_pythons(value):
    found = check_integer("n", value, 1)
    assert (found, type(found)) == (3, int)


def test_none_passes_where_it_is_allowed():
    assert check_integer("n", None, 1, optional=True) is None
    check_positive("lr", None, optional=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("n", 0, 1), ValueError, "n must be a positive integer, got 0"),
        (("n", -1, 0), ValueError, "n must be an integer of at least 0, got -1"),
        (("n", 2.0), TypeError, "n must be an integer, got 2.0"),
        (("n", True, 1), TypeError, "n must be a positive integer, got True"),
        (("n", np.True_, 1), TypeError, f"n must be a positive integer, got {np.True_!r}"),
        (("n", "3", 1), TypeError, "n must be a positive integer, got '3'"),
        (("n", None, 1), TypeError, "n must be a positive integer, got None"),
        (("n", np.array([3]), 1), TypeError, "n must be a positive integer, got array([3])"),
    ],
)
def test_what_is_no_such_integer(arguments, error, message):
    with pytest.raises(error) as caught:
        check_integer(*arguments)
    assert str(caught.value) == message
    with pytest.raises(SpecError) as caught:
        check_integer(*arguments, error=SpecError)
    assert str(caught.value) == message


def test_the_message_says_that_none_is_allowed():
    with pytest.raises(ValueError, match=r"^n .*positive integer .*None, got 0$"):
        check_integer("n", 0, 1, optional=True)
    with pytest.raises(ValueError, match=r"^lr .*positive .*None, got 0$"):
        check_positive("lr", 0, optional=True)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), math.inf])
def test_positive_numbers(value):
    check_positive("lr", value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "1", None, 1j])
def test_what_is_no_positive_number(value):
    with pytest.raises(SpecError) as caught:
        check_positive("lr", value, error=SpecError)
    assert str(caught.value) == f"lr must be a positive number, got {value!r}"


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("forecast", "pip install pandas narwhals pyarrow utilsforecast"),
        (None, "pip install no_such_package"),  # a tool of the user's own
    ],
)
def test_an_optional_package_or_what_to_install(extra, command):
    assert require_package("json.decoder", extra, "reading").JSONDecoder is json.JSONDecoder
    with pytest.raises(ImportError) as caught:
        require_package("no_such_package.part", extra, "drawing")
    message = f"drawing needs no_such_package, which is not installed: {command}"
    assert str(caught.value) == message
