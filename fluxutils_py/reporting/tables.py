"""Metrics as numbers and as text, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as lines of text: the first column to the left, numbers to the
    right.
    """
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        for text, width in zip(others, widths[1:], strict=True):
            cells.append(text.rjust(width))
        lines.append("  ".join(cells))
    return "\n".join(lines)


def as_number(value: object) -> float | None:
    """Convert a metric to float; None if it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]  # that is what is tried
    except (TypeError, ValueError, RuntimeError):
        # such as None, a word, a mapping, or a tensor of several
        return None


def format_metric(value: object) -> str:
    """Format a number with four digits, and any other value with ``str``."""
    number = as_number(value)
    return str(value) if number is None else f"{number:.4g}"
