"""Evaluate several datasets and print a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.tables import format_metric, text_table


def report_eval(
    trainer: Any,
    *datasets: Iterable[Any],
    printer: Callable[[str], Any] = print,
) -> None:
    """Evaluate each dataset and print a table with a row per dataset and a column per metric.

    Parameters
    ----------
    trainer : Trainer
        Or any object whose ``eval(dataset)`` returns a dict of numbers.
    *datasets
        Datasets for ``eval``. The table shows their ``name``, or the name of their class; several
        of one name are numbered, such as ``list (1)`` and ``list (2)``, in the order in which you
        give them.
    printer : callable
        Called with the table, as one string. All ranks of the trainer evaluate; only rank 0 prints.

    Raises
    ------
    ValueError
        If there are no datasets.

    Notes
    -----
    After each run: ``loop.on_end("report", lambda loop: report_eval(trainer, data))``. Source:
    ``ReportEval`` of gomlx.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(eval=lambda data: {"loss": sum(data) / len(data), "n": len(data)})
    >>> report_eval(trainer, [0.5, 1.0], (2.0, 2.0, 3.0))
    dataset   loss  n
    list      0.75  2
    tuple    2.333  3
    """
    results = evaluate_datasets(trainer, datasets)  # on all ranks: it may be collective
    if not is_main_process(trainer):
        return
    # datasets may have different metrics: each once, in the order in which they occur
    names: dict[str, None] = {}
    for row in results.values():
        names |= dict.fromkeys(row)
    rows = [["dataset", *names]]
    for data, row in results.items():
        values = [format_metric(row.get(name)) for name in names]
        rows.append([data, *values])
    printer(text_table(rows))


def evaluate_datasets(
    trainer: Any,
    datasets: Iterable[Any],
) -> dict[str, dict[str, Any]]:
    """Return the results of ``trainer.eval`` by dataset name; those of one name are numbered."""
    datasets = list(datasets)
    if not datasets:
        raise ValueError("there is nothing to evaluate: give at least one dataset")
    names = [getattr(data, "name", None) or type(data).__name__ for data in datasets]
    numbered = number_equal(names)
    return {name: trainer.eval(data) for name, data in zip(numbered, datasets, strict=True)}


def number_equal(names: Sequence[str]) -> list[str]:
    """Return the names, with a number after those that occur several times.

    >>> number_equal(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    distinct: list[str] = []
    for name in names:
        if names.count(name) > 1:
            # a dataset may itself be called "a (1)"
            taken = {*names, *distinct}
            numbered = (f"{name} ({k})" for k in count(1))
            name = next(text for text in numbered if text not in taken)
        distinct.append(name)
    return distinct
