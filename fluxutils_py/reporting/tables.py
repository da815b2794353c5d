"""Tables of training histories and evaluation results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from fluxutils_py.parallel import is_main_process


def report_eval(trainer: Any, *datasets: Iterable[Any], printer: Callable[[str], Any] = print) -> None:
    """Evaluate each dataset and print a table with a row per dataset and a column per metric.

    Parameters
    ----------
    trainer : Trainer
        Or any object whose ``eval(dataset)`` returns a dict of numbers.
    *datasets
        Datasets for ``eval``. The table shows their ``name``, or the name of their class; several of one name are
        numbered, such as ``list (1)`` and ``list (2)``, in the order in which you give them.
    printer : callable
        Called with the table, as one string; of several ranks of the trainer only on rank 0. All ranks evaluate.

    Raises
    ------
    ValueError
        If there are no datasets.

    Notes
    -----
    After each run: ``loop.on_end("report", lambda loop: report_eval(trainer, data))``. Source: ``ReportEval`` of gomlx.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(eval=lambda data: {"loss": sum(data) / len(data), "n": len(data)})
    >>> report_eval(trainer, [0.5, 1.0], (2.0, 2.0, 3.0))
    dataset   loss  n
    list      0.75  2
    tuple    2.333  3
    """
    results = evaluate_datasets(trainer, datasets)
    if not is_main_process(trainer):
        return
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    rows = [["dataset", *names]] + [
        [data, *(format_metric(row.get(n)) for n in names)] for data, row in results.items()
    ]
    printer(text_table(rows))


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as lines of text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def evaluate_datasets(trainer: Any, datasets: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the results of ``trainer.eval`` by dataset name; those of one name are numbered."""
    datasets = list(datasets)
    if not datasets:
        raise ValueError("there is nothing to evaluate: give at least one dataset")
    names = number_equal([getattr(data, "name", None) or type(data).__name__ for data in datasets])
    return {name: trainer.eval(data) for name, data in zip(names, datasets, strict=True)}


def number_equal(names: Sequence[str]) -> list[str]:
    """Return the names, with a number after those that occur several times.

    >>> number_equal(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    distinct: list[str] = []
    for name in names:
        if names.count(name) > 1:
            taken = {*names, *distinct}
            name = next(text for k in count(1) if (text := f"{name} ({k})") not in taken)
        distinct.append(name)
    return distinct


def as_number(value: Any) -> float | None:
    """Convert a metric to float; None if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # such as None, a mapping, or a tensor of several
        return None


def format_metric(value: Any) -> str:
    """Format a number with four digits, and any other value with ``str``."""
    number = as_number(value)
    return str(value) if number is None else f"{number:.4g}"


def history_table(history: Iterable[Mapping[str, Any]]) -> Any:
    """Convert epoch records, such as ``Loop.history``, to a table with a row per epoch and a column per quantity.

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
    columns = {name: [record.get(name) for record in records] for name in names}
    try:
        import pandas  # type: ignore[import-untyped]  # its stubs are a separate package
    except ImportError:
        return columns
    return pandas.DataFrame(columns)
