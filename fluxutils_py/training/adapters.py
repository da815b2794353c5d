"""The call forms of PrayTools, gomlx and bobbin, around hooks that take the loop.

PrayTools calls ``cb()`` and ``cby(loss)``, gomlx ``fn(loop, dataset)`` and ``fn(loop, metrics)``, bobbin
``action(state, step_info=...)``. Hooks of this package are called ``hook(loop)``; what is here makes one from each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fluxutils_py.training.triggers import Clock, EveryNSeconds, Exponential, NTimes, Trigger
from fluxutils_py.training.triggers import EveryNSteps as EveryNStepsTrigger

LoopAndMetrics = Callable[[Any, Mapping[str, Any]], Any]


# -- PrayTools -----------------------------------------------------------------------------------------


class cb:
    """A hook that calls a function without arguments after every step, as ``cb=`` of Flux and PrayTools does.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> loop = Loop(lambda batch: StepInfo(2.0 * batch))
    >>> loop.hooks.attach(cb(lambda: print("a step")))
    >>> loop.hooks.attach(cby(lambda loss: print("its loss:", loss)))
    >>> loop.run_epochs([1.5], 1)
    a step
    its loss: 3.0
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, getattr(function, "__name__", type(self).__name__)
        if hasattr(function, "state_dict") and hasattr(function, "load_state_dict"):
            self.state_dict, self.load_state_dict = function.state_dict, function.load_state_dict

    def on_step(self, loop: Any) -> None:
        self.function()


class cby(cb):
    """A hook that calls a function with the loss after every step that has one, as ``cby=`` of PrayTools does."""

    def on_step(self, loop: Any) -> None:
        if loop.batch_loss is not None:
            self.function(loop.batch_loss)


# -- gomlx ---------------------------------------------------------------------------------------------


def OnStart(loop: Any, name: str, priority: float, fn: Callable[[Any, Any], Any]) -> None:
    """Call ``fn(loop, dataset)`` before the first step of each run."""
    loop.on_start(name, lambda loop: fn(loop, loop.batches), priority)


def OnStep(loop: Any, name: str, priority: float, fn: LoopAndMetrics, trigger: Trigger | None = None) -> None:
    """Call ``fn(loop, metrics)`` after each step, with the metrics by name."""
    loop.on_step(name, lambda loop: fn(loop, loop.metrics), priority, trigger)


def OnEnd(loop: Any, name: str, priority: float, fn: LoopAndMetrics) -> None:
    """Call ``fn(loop, metrics)`` after the last step of each run."""
    loop.on_end(name, lambda loop: fn(loop, loop.metrics), priority)


def EveryNSteps(loop: Any, n: int, name: str, priority: float, fn: LoopAndMetrics) -> None:
    """Call ``fn(loop, metrics)`` at steps ``n``, ``2n``, ... from now on."""
    OnStep(loop, name, priority, fn, EveryNStepsTrigger(n, relative=True))


def NTimesDuringLoop(loop: Any, n: int, name: str, priority: float, fn: LoopAndMetrics) -> None:
    """Call ``fn(loop, metrics)`` ``n`` times in each run, the last time at its end: see :class:`NTimes`."""
    OnStep(loop, name, priority, fn, NTimes(n))


def ExponentialCallback(
    loop: Any, start: int, factor: float, at_end: bool, name: str, priority: float, fn: LoopAndMetrics
) -> None:
    """Call ``fn(loop, metrics)`` at steps further and further apart: see :class:`Exponential`."""
    OnStep(loop, name, priority, fn, Exponential(start, factor, at_end))


def PeriodicCallback(
    loop: Any,
    seconds: float,
    at_end: bool,
    name: str,
    priority: float,
    fn: LoopAndMetrics,
    *,
    clock: Clock = time.monotonic,
) -> None:
    """Call ``fn(loop, metrics)`` every so many seconds: see :class:`EveryNSeconds`."""
    OnStep(loop, name, priority, fn, EveryNSeconds(seconds, at_end, clock=clock))


# -- bobbin --------------------------------------------------------------------------------------------


def with_state(action: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a hook of bobbin's ``action(train_state, step_info=...)``, for a :class:`Loop` or a ``CronTab`` in one.

    In a ``for`` loop of one's own, ``CronTab.run(train_state, step_info=info)`` calls such actions as they are.
    """

    def hook(loop: Any) -> Any:
        return action(loop.state, step_info=loop.step_info)

    hook.__name__ = getattr(action, "__name__", type(action).__name__)
    return hook
