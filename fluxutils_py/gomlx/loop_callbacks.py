"""Functions ``fn(loop, metrics)`` as hooks, under the names of gomlx."""

from __future__ import annotations

import time

from fluxutils_py.training.hooks import Action, require_arguments
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
