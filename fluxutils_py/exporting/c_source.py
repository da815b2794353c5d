"""Text of C: the definitions of a header by name, tables of numbers, and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

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
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_NAME = r"[A-Za-z_]\w*"


class Definition(NamedTuple):
    """A definition of a C file, with the comment above it, and the names that it defines."""

    names: frozenset[str]
    text: str

    def uses(self) -> set[str]:
        """Return all words of the code."""
        return set(re.findall(_NAME, _COMMENT.sub("", self.text)))


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


def resolved(text: str, known: dict[str, bool]) -> str:
    """Return a C file without the conditions ``#ifdef`` and ``#ifndef`` on known macros, of which
    ``known`` says whether they are defined.
    """
    kept = []
    # of each condition around a line: whether it holds; None if it is none of the known ones
    around: list[bool | None] = []
    for line in text.splitlines():
        found = re.match(r"#\s*(if\w*|else|endif)\b\s*(\w*)", line)
        word, name = found.groups() if found else ("", "")
        if word in ("ifdef", "ifndef") and name in known:
            around.append(known[name] == (word == "ifdef"))
        elif word.startswith("if"):
            around.append(None)
        elif word == "else" and around[-1] is not None:
            around[-1] = not around[-1]
        is_of_known = bool(word) and around[-1] is not None
        if False not in around and not is_of_known:
            kept.append(line)
        if word == "endif":
            around.pop()
    return "\n".join(kept)


def definitions(text: str) -> Iterator[Definition]:
    """Yield the definitions of a C file in their order, without its includes.

    A definition ends with a line at whose end no brace or parenthesis, no condition of the
    preprocessor, and no comment is open.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if not lines and not line.strip():
            continue
        lines.append(line)
        whole = "\n".join(lines)
        code = _COMMENT.sub("", whole).rstrip()
        if _is_complete(code):
            if not re.match(r"\s*#\s*include\b", code):
                yield Definition(_defined_names(code), whole)
            lines = []
        elif not code and not line.strip():
            lines = []  # a comment that stands alone: about the file, or a part of it


def _is_complete(code: str) -> bool:
    """Whether the code, without comments, is one definition or more."""
    if "/*" in code or code.count("(") != code.count(")") or code.count("{") != code.count("}"):
        return False
    if len(re.findall(r"^#\s*if", code, re.M)) != len(re.findall(r"^#\s*endif", code, re.M)):
        return False
    last_line = code.rpartition("\n")[2]
    return code.endswith((";", "}")) or (last_line.startswith("#") and not code.endswith("\\"))


def _defined_names(code: str) -> frozenset[str]:
    names = set(re.findall(rf"^#\s*define\s+({_NAME})", code, re.M))
    if code.lstrip().startswith("#"):
        return frozenset(names)
    if enumeration := re.match(r"\s*enum\s*\{(.*)\}", code, re.DOTALL):
        return frozenset(re.findall(_NAME, enumeration[1]))
    if code.lstrip().startswith("typedef"):
        return frozenset(re.findall(rf"({_NAME})\s*;$", code))
    return frozenset(re.findall(rf"({_NAME})\s*[\[(]", code)[:1])


def needed(found: Iterable[Definition], roots: Set[str]) -> list[Definition]:
    """Return those of the definitions that some names need, directly or by others, in order."""
    wanted = set(roots)
    kept = []
    # from the last on, since in C a definition uses only what stands above it
    for definition in reversed(list(found)):
        if definition.names & wanted:
            kept.append(definition)
            wanted |= definition.uses()
    return kept[::-1]


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
