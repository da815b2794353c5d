"""Text of C: names, tables of numbers, texts and functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fluxutils_py.errors import ExportError

WIDTH = 100  # columns of a table
# of C99 and of C++: a header for both must use neither
KEYWORDS = """
alignas alignof and asm auto bool break case catch char class const continue default delete do
double else enum explicit extern false float for friend goto if inline int long main mutable
namespace new not operator or private protected public register restrict return short signed
sizeof static struct switch template this throw true try typedef typename union unsigned using
virtual void volatile while xor
"""
_TYPES = {
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int32": "int",
}


def check_prefix(prefix: object) -> str:
    """Return a prefix of names in C; raise ExportError if it cannot be one."""
    if not isinstance(prefix, str) or not re.fullmatch(r"[A-Za-z]\w*", prefix, re.ASCII):
        raise ExportError(
            f"prefix must begin with a letter and have no others than letters, digits and _, got "
            f"{prefix!r}"
        )
    if prefix in KEYWORDS.split() or prefix.endswith("_"):
        raise ExportError(
            f"prefix must be no word of C and must not end with _, got {prefix!r}; use for example "
            f"{prefix.strip('_') + '_model'!r}"
        )
    return prefix


def table(name: str, values: np.ndarray) -> str:
    """Return the definition of a constant array: of float, double, int or char, by the type of
    the values. It holds all their digits.
    """
    flat = np.ravel(values)
    kind = _TYPES[flat.dtype.name]
    lines = [f"static const {kind} {name}[{max(flat.size, 1)}] = {{"]
    line = "   "
    for value in flat.tolist() or [0]:
        text = f" {number(value, kind)},"
        if len(line) + len(text) > WIDTH:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join([*lines, line, "};"])


def number(value: float, kind: str) -> str:
    """Return a finite number as a constant of C of a type, with all its digits."""
    if kind not in ("float", "double"):
        return str(value)
    if not np.isfinite(value):
        raise ExportError(f"a weight of the model is {value}: fit it on data without such numbers")
    digits, suffix = (".9g", "f") if kind == "float" else (".17g", "")
    text = format(value, digits)
    if not re.search("[.e]", text):
        text += ".0"
    return text + suffix


def string(text: str) -> str:
    """Return a text as a constant of C, in UTF-8."""
    escaped = ""
    for byte in text.encode():
        # ? because of trigraphs; @ stands for the prefix in a header
        is_plain = 32 <= byte < 127 and chr(byte) not in '"\\?@'
        escaped += chr(byte) if is_plain else f"\\{byte:03o}"
    return f'"{escaped}"'


def function(comment: str, signature: str, statements: Sequence[str]) -> str:
    """Return the definition of a function."""
    body = "\n".join(f"    {s}" for s in statements)
    return f"/* {comment} */\nstatic inline {signature} {{\n{body}\n}}"
