"""Evaluate several datasets and print a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fluxutils_py.reporting.tables import format_metric, text_table


def report_eval(trainer: Any, *datasets: Iterable[Any], printer: Callable[[str], Any] = print) -> None:
    """Evaluate each dataset and print a table with a row per dataset and a column per metric.

    Parameters
    ----------
    trainer : Trainer
        Or any object whose ``eval(dataset)`` returns a dict of numbers.
    *datasets
        Datasets for ``eval``. The table shows their ``name``, or the name of their class.
    printer : callable
        Called with the table, as one string.

    Raises
    ------
    ValueError
        If there are no datasets, or two with the same name. Nothing is evaluated then.

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
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    rows = [["dataset", *names]] + [
        [data, *(format_metric(row.get(n)) for n in names)] for data, row in results.items()
    ]
    printer(text_table(rows))


def evaluate_datasets(trainer: Any, datasets: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the results of ``trainer.eval`` by dataset name."""
    datasets = list(datasets)
    names = [getattr(data, "name", None) or type(data).__name__ for data in datasets]
    if not names:
        raise ValueError("there is nothing to evaluate: give at least one dataset")
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(
            f"datasets must have different names, {', '.join(sorted(twice))} occurs twice; rename one with "
            "as_dataset(data, name=...)"
        )
    return {name: trainer.eval(data) for name, data in zip(names, datasets, strict=True)}
