"""The base of hooks that write training curves: the same numbers under the same tags everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.tables import as_number

Log = Callable[[dict[str, float], int], object]  # numbers by tag, and their step


class CurveHook:
    """Hook that writes the numbers of epochs and of single steps.

    Subclasses define ``on_start``, and call :meth:`begin` there, on rank 0.

    Parameters
    ----------
    trigger : int or Trigger
        When to write single steps. ``n``: at each step that is a multiple of ``n``.
    """

    priority = 60  # after all hooks that add to the record of an epoch

    def __init__(self, trigger: object) -> None:
        self.every = 1
        self.trigger: object = None
        if not isinstance(trigger, int):
            self.trigger = trigger
        elif isinstance(trigger, bool) or trigger < 1:
            raise ValueError(f"trigger must be at least 1, or a Trigger, got {trigger!r}")
        else:
            self.every = trigger
        self._log: Log | None = None
        self._last: tuple[int, float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_log": None}

    def begin(self, log: Log) -> None:
        """Call ``log(numbers, step)`` until the end of the run."""
        self._log = log
        self._last = None

    def on_step(self, loop: RunningLoop) -> None:
        if self._log is None or loop.step % self.every:
            return
        now = (loop.step, time.monotonic())
        numbers = step_rate(self._last, now) | step_numbers(loop)
        self._last = now
        self._log(numbers, loop.step)

    def on_epoch(self, loop: RunningLoop) -> None:
        if self._log is None:
            return
        numbers = {}
        for name, value in loop.record.items():
            number = as_number(value)
            if name == "epoch" or number is None:
                continue
            validated = name.removeprefix("validation_")
            tag = f"train/{name}" if validated == name else f"validation/{validated}"
            numbers[tag] = number
        self._log(numbers, loop.step)

    def on_close(self, loop: RunningLoop) -> None:
        self._log = None


def step_numbers(step: Any) -> dict[str, float]:
    """Return the loss and the metrics of a step by tag; ``step`` is a loop or a StepInfo."""
    values = {"batch_loss": step.batch_loss, **step.metrics}
    numbers = {f"train/{name}": as_number(value) for name, value in values.items()}
    return {tag: number for tag, number in numbers.items() if number is not None}


def step_rate(last: tuple[int, float] | None, now: tuple[int, float]) -> dict[str, float]:
    """Return the steps per second between two times, each a step and seconds; nothing at first."""
    if last is None:
        return {}
    n_steps = now[0] - last[0]
    seconds = now[1] - last[1]
    # not both above 0 when called twice at a step, or after a restored checkpoint
    if n_steps <= 0 or seconds <= 0:
        return {}
    return {"trainer/steps_per_sec": n_steps / seconds}
