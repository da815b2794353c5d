"""Text of C: which definitions a name needs, and numbers that keep their digits."""

import re

import numpy as np
import pytest

from fluxutils_py.errors import ExportError
from fluxutils_py.exporting.c_source import (
    check_prefix,
    definitions,
    needed,
    number,
    resolved,
    table,
)

SOURCE = """\
/* About the file. */
#include <math.h>

#ifdef WIDE
#define real double
#else
#define real float
#endif
#if defined(__cplusplus)
#define KEPT 1
#else
#define KEPT 2
#endif

/* -- a part -- */

enum { FIRST, SECOND };

/* A pair; not used_here(). */
typedef struct {
    real a, b;
} pair;

static real square(real x) { return x * x; }

static real norm(const pair *p,
                 int kind) {
    real sum = square(p->a);

    return kind == FIRST ? sum : sum + square(p->b) + KEPT;
}

static real used_here(real x) { return x; }
"""


def test_a_definition_is_kept_with_what_it_needs_and_its_comment():
    found = list(definitions(resolved(SOURCE, {"WIDE": False})))
    assert [sorted(d.names) for d in found] == [
        ["real"],
        ["KEPT"],
        ["FIRST", "SECOND"],
        ["pair"],
        ["square"],
        ["norm"],
        ["used_here"],
    ]
    kept = needed(found, {"norm"})
    assert [d for d in found if d not in kept] == found[-1:]  # a comment uses nothing
    assert kept[3].text.startswith("/* A pair; not used_here(). */\ntypedef struct {")
    assert kept[0].text == "#define real float"
    assert "#define KEPT 2\n#endif" in kept[1].text
    assert [sorted(d.names) for d in needed(found, {"square"})] == [["real"], ["square"]]


def test_known_conditions_are_resolved_and_others_stay():
    wide = resolved(SOURCE, {"WIDE": True})
    assert "double" in wide
    assert "float" not in wide
    assert "WIDE" not in wide
    assert wide.count("#if") == wide.count("#endif") == 1
    inverse = "#ifndef A\n1\n#ifdef B\n2\n#else\n3\n#endif\n#else\n4\n#endif"
    assert resolved(inverse, {"A": True, "B": False}) == "4"
    assert resolved(inverse, {"A": False, "B": False}) == "1\n3"
    assert resolved(inverse, {"A": False}) == "1\n#ifdef B\n2\n#else\n3\n#endif"


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
