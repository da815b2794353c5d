"""Tables of training histories and evaluation results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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


def history_table(history: Iterable[Mapping[str, Any]]) -> Any:
    """Convert epoch records, such as ``Loop.history``, to a table with a row per epoch and a column
    per quantity.

    Returns
    -------
    pandas.DataFrame or dict of list
        A frame if pandas is installed, else a dict of columns. Values that a record lacks are None.

    Examples
    --------
    >>> table = history_table([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "lr": 0.1}])
    >>> list(table), list(table["loss"])
    (['epoch', 'loss', 'lr'], [0.5, 0.25])
    """
    records = list(history)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {}
    for name in names:
        columns[name] = [record.get(name) for record in records]
    try:
        import pandas  # type: ignore[import-untyped]  # its stubs are a separate package
    except ImportError:
        return columns
    return pandas.DataFrame(columns)
