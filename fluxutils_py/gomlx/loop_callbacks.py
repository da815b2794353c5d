"""Functions ``fn(loop, metrics)`` as hooks, under the names of gomlx; a table of evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.tables import format_metric, text_table
from fluxutils_py.training.hooks import Action, numbered, require_arguments
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.triggers import Clock, EveryNSeconds, Exponential, NTimes, Trigger
from fluxutils_py.training.triggers import EveryNSteps as EveryNStepsTrigger


def EveryNSteps(loop: Loop, n: int, name: str, priority: float, fn: Action) -> None:
    """Call ``fn(loop, metrics)`` every ``n`` steps, counted from now as in gomlx 0.9.

    Later gomlx counts all steps of training, as ``loop.on_step`` does
    with ``trigger=EveryNSteps(n)``.
    """
    # relative: a loop that has run before begins to count anew
    _on_step(loop, name, priority, fn, EveryNStepsTrigger(n, relative=True))


def NTimesDuringLoop(loop: Loop, n: int, name: str, priority: float, fn: Action) -> None:
    """Call ``fn(loop, metrics)`` ``n`` times in each run, the last time at its end: see
    :class:`fluxutils_py.training.NTimes`.
    """
    _on_step(loop, name, priority, fn, NTimes(n))


def ExponentialCallback(
    loop: Loop, start: int, factor: float, at_end: bool, name: str, priority: float, fn: Action
) -> None:
    """Call ``fn(loop, metrics)`` at growing intervals: see ``Exponential`` in
    ``training.triggers``.
    """
    _on_step(loop, name, priority, fn, Exponential(start, factor, at_end))


def PeriodicCallback(
    loop: Loop,
    seconds: float,
    at_end: bool,
    name: str,
    priority: float,
    fn: Action,
    *,
    clock: Clock = time.monotonic,
) -> None:
    """Call ``fn(loop, metrics)`` every ``seconds`` seconds: see
    :class:`fluxutils_py.training.EveryNSeconds`.
    """
    # of several ranks, rank 0's clock decides
    _on_step(loop, name, priority, fn, EveryNSeconds(seconds, at_end, clock=clock))


def _on_step(loop: Loop, name: str, priority: float, fn: Action, trigger: Trigger) -> None:
    """Call ``fn(loop, metrics)`` after the steps at which a trigger fires."""
    require_arguments(name, fn, "the loop", "the metrics")
    loop.on_step(name, lambda loop: fn(loop, loop.metrics), priority, trigger)


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
        of one name are numbered, such as ``list`` and ``list (2)``, in the order in which you give
        them.
    printer : callable
        Called with the table, as one string. All ranks of the trainer evaluate; only rank 0 prints.

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
    results: dict[str, dict[str, Any]] = {}
    for data in datasets:  # on all ranks: it may be collective
        name = getattr(data, "name", None) or type(data).__name__
        results[next(n for n in numbered(name) if n not in results)] = trainer.eval(data)
    if not is_main_process(trainer):
        return
    # datasets may have different metrics: each once, in the order in which they occur
    names = dict.fromkeys(metric for row in results.values() for metric in row)
    rows = [["dataset", *names]]
    for name, row in results.items():
        rows.append([name, *[format_metric(row.get(metric)) for metric in names]])
    printer(text_table(rows))
