"""Triggers: decide after which steps or epochs a hook acts, or how often."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from fluxutils_py.validation import check_integer

Clock = Callable[[], float]


class Trigger:
    """Decide after each step whether a hook acts; ``a | b`` fires when either does.

    Pass a trigger as ``trigger=`` to :meth:`Loop.on_step`, to ``CronTab.schedule`` or to a hook
    that takes one. Every hook copies its trigger, so you can pass the same trigger to several
    hooks.

    Attributes
    ----------
    event : "step" or "epoch"
        Whether the loop checks the trigger after each step or after each epoch.
    at_end : bool
        Whether the hook also acts at the end of a run, unless it acted at that step.
    by_clock : bool
        Whether the trigger depends on time: of several ranks, rank 0's clock decides.
    counters : frozenset of str
        Attributes that change during a run, which ranks do not compare.

    Notes
    -----
    A subclass defines ``_due(loop)`` and lists in ``_memory`` the attributes that a checkpoint must
    hold. ``loop`` is a :class:`Loop`; triggers that do not need the length of a run work with any
    object with ``step``, the number of completed steps. The loop calls :meth:`fires` exactly once
    after each step.
    """

    event = "step"
    at_end = False
    by_clock = False
    counters: frozenset[str] = frozenset(("count", "start_step", "seen", "origin"))  # no settings
    _memory: Sequence[str] = ()

    def fires(self, loop: Any) -> bool:
        """Return whether the hook acts now. Call it exactly once after each step."""
        return self._due(loop)

    def check(self, loop: Any) -> bool:
        """Alias of :meth:`fires`, as in bobbin."""
        return self.fires(loop)

    def acted(self, loop: Any) -> None:
        """Note that the action has finished; the loop calls this after the action, even if it
        failed.
        """

    def copy(self) -> Trigger:
        """Return a copy that counts independently."""
        return copy.copy(self)

    def _due(self, loop: Any) -> bool:
        raise NotImplementedError(f"{type(self).__name__} does not define _due(loop)")

    def __or__(self, other: Trigger) -> Trigger:
        return OrTrigger(self, other) if isinstance(other, Trigger) else NotImplemented

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {name: getattr(self, name) for name in self._memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in self._memory:
            setattr(self, name, state[name])


class OrTrigger(Trigger):
    """Fire when any of several triggers fires. It checks all of them at every step, so that each
    keeps its count.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trigger = AtSteps(2) | EveryNSteps(5)
    >>> [step for step in range(1, 11) if trigger.fires(SimpleNamespace(step=step))]
    [2, 5, 10]
    """

    def __init__(self, *triggers: Trigger) -> None:
        if len({t.event for t in triggers}) > 1:
            raise ValueError(
                "triggers that go by steps and by epochs cannot be combined; add the hook twice"
            )
        self.triggers = triggers
        self.event = triggers[0].event
        self.at_end = any(t.at_end for t in triggers)
        self.by_clock = any(t.by_clock for t in triggers)

    def fires(self, loop: Any) -> bool:
        # All of them, not up to the first that fires: each counts its own steps.
        self._firing = [t for t in self.triggers if t.fires(loop)]
        return bool(self._firing)

    def acted(self, loop: Any) -> None:
        for t in self._firing:
            t.acted(loop)

    def copy(self) -> Trigger:
        return OrTrigger(*(t.copy() for t in self.triggers))

    def state_dict(self) -> dict[str, Any]:
        return {"triggers": [t.state_dict() for t in self.triggers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for t, s in zip(self.triggers, state["triggers"], strict=True):
            t.load_state_dict(s)


# -- by steps and epochs ---------------------------------------------------------------------------


class EveryNSteps(Trigger):
    """Fire after every ``n``-th step.

    Parameters
    ----------
    n : int
    relative : bool
        False: fire whenever ``loop.step`` is a multiple of ``n``, also after an interruption. True:
        count from the step at which the hook was added, as ``EveryNSteps`` of gomlx does: a hook
        with ``n=100`` added at step 150 acts at 250, 350, ...
    """

    _memory = ("origin",)

    def __init__(self, n: int, *, relative: bool = False) -> None:
        self.n = check_integer("n", n, 1)
        self.relative = relative
        self.origin: int | None = None if relative else 0

    def _due(self, loop: Any) -> bool:
        if self.event == "epoch":
            return loop.record["epoch"] % self.n == 0
        if self.origin is None:
            self.origin = loop.step - 1
        return (loop.step - self.origin) % self.n == 0


def EveryNEpochs(n: int) -> Trigger:
    """Return a trigger that fires after every ``n``-th epoch, from the start of training."""
    trigger = EveryNSteps(n)
    trigger.event = "epoch"
    return trigger


class AtSteps(Trigger):
    """Fire after the given steps: ``AtSteps(10)``, ``AtSteps(10, 20)``, ``AtSteps((10, 20))`` or
    ``AtSteps(range(10, 20))``.

    Parameters
    ----------
    *steps : int or iterable of int
    of_process : bool
        Count the steps of this process instead of all steps of training.
    """

    def __init__(self, *steps: int | Iterable[int], of_process: bool = False) -> None:
        flat: list[int] = []
        for argument in steps:
            flat += argument if isinstance(argument, Iterable) else [argument]
        self.steps: Container[int] = frozenset(check_integer("a step", n, 0) for n in flat)
        self.last = max(flat, default=0)  # a setting that ranks compare
        self.of_process = of_process
        self.seen = 0

    def _due(self, loop: Any) -> bool:
        self.seen += 1
        return (self.seen if self.of_process else loop.step) in self.steps


def AtFirstNSteps(n: int, of_process: bool = False) -> Trigger:
    """Return a trigger that fires after each of the first ``n`` steps, step ``n`` included.

    With ``of_process``, it counts steps of this process: after an interruption it fires ``n`` times
    again (bobbin: ``n - 1`` times).
    """
    trigger = AtSteps(of_process=of_process)
    trigger.last = check_integer("n", n, 0)
    trigger.steps = range(n + 1)
    return trigger


class NTimes(Trigger):
    """Fire ``n`` times during each run, evenly spaced, the last time at its end.

    A run of ``m`` steps fires ``min(n, m)`` times: after step ``ceil(m * k / n)`` of the run for
    ``k`` from 1 to ``n - 1``, and at its end; a resumed run fires at the same steps. The trigger
    does not fire while the length of the run is unknown, in the first epoch over data without a
    length. A finished run that is restored from a checkpoint and extended fires once more, at its
    new end.

    Source: ``NTimesDuringLoop`` of gomlx, which fires up to ``n + 1`` times, and not at the end of
    a single epoch.
    """

    at_end = True
    _memory = ("count", "start_step")

    def __init__(self, n: int) -> None:
        self.n = check_integer("n", n, 1)
        self.count = 0
        self.start_step = -1

    def _due(self, loop: Any) -> bool:
        end_step = getattr(loop, "end_step", None)
        if end_step is None or end_step <= loop.start_step:
            return False
        if self.start_step != loop.start_step:  # another run
            self.start_step = loop.start_step
            self.count = 0
        # whether the end of the run is known from earlier epochs only
        has_epochs = getattr(loop, "n_epochs", None) is not None
        is_estimate = has_epochs and getattr(loop, "steps_per_epoch", None) is None
        if loop.step == end_step and not is_estimate:
            return True  # as a step, so that loop_step is that of the last step
        n_steps = end_step - loop.start_step
        before = self.count
        # The last of the n times is kept for the end, which an estimate may put too early.
        n_taken = loop.step - loop.start_step
        reached = min(n_taken * self.n // n_steps, self.n - 1)
        self.count = max(before, reached)
        return self.count > before


class Exponential(Trigger):
    """Fire at growing distances: at step ``start``, then ``start * factor`` later, then ``start *
    factor**2``, ...

    Steps are counted from 0 like ``loop.loop_step``, so the trigger first fires when ``loop.step``
    is ``start + 1``. Each distance is the previous one times ``factor``, rounded (halves up).

    Parameters
    ----------
    start : int
    factor : float
        Growth of the distance, at least 1.
    at_end : bool
        Also act after the last step of each run.

    Notes
    -----
    Source: ``ExponentialCallback`` of gomlx.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trigger = Exponential(100, 1.2)
    >>> [step - 1 for step in range(1, 1001) if trigger.fires(SimpleNamespace(step=step))]
    [100, 220, 364, 537, 745, 995]
    """

    def __init__(self, start: int, factor: float, at_end: bool = False) -> None:
        self.start = check_integer("start", start, 1)
        self.factor = float(factor)
        self.at_end = at_end
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1, got {factor!r}")
        self._next = self._distance = self.start

    def _due(self, loop: Any) -> bool:
        if loop.step - 1 < self._next - self._distance:  # the loop restored an earlier step
            self._next = self._distance = self.start
        while self._next < loop.step - 1:
            # round() would round halves to even.
            self._distance = math.floor(self._distance * self.factor + 0.5)
            self._next += self._distance
        return loop.step - 1 == self._next


# -- by time ---------------------------------------------------------------------------------------


class EveryNSeconds(Trigger):
    """Fire after the first step that ends ``seconds`` or more after the last action finished.

    The first step starts the clock. A checkpoint stores the elapsed time, because clocks differ
    between processes.

    Parameters
    ----------
    seconds : float
    at_end : bool
        Also act after the last step of each run.
    fire_at_zero : bool
        Also fire after the first step.
    from_start : bool
        As in bobbin: count from the start of the last action, and fire after more than ``seconds``.
    clock : callable
        Returns the time in seconds.

    Notes
    -----
    Source: ``PeriodicCallback`` of gomlx.
    """

    by_clock = True

    def __init__(
        self,
        seconds: float,
        at_end: bool = False,
        fire_at_zero: bool = False,
        *,
        from_start: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.seconds = float(seconds)
        self.at_end = at_end
        self.fire_at_zero = fire_at_zero
        self.from_start = from_start
        self.clock = clock
        if not self.seconds >= 0:
            raise ValueError(f"the time must be a number of seconds, 0 or more, got {seconds!r}")
        self._since: float | None = None

    def _due(self, loop: Any) -> bool:
        now = self.clock()
        if self._since is None:  # the first step
            self._since = now
            return self.fire_at_zero
        elapsed = now - self._since
        due = elapsed > self.seconds if self.from_start else elapsed >= self.seconds
        if due:
            self._since = now
        return due

    def acted(self, loop: Any) -> None:
        if not self.from_start:
            self._since = self.clock()

    def state_dict(self) -> dict[str, Any]:
        elapsed = None if self._since is None else self.clock() - self._since
        return {"elapsed": elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        elapsed = state["elapsed"]
        self._since = None if elapsed is None else self.clock() - elapsed


def ForEachTSeconds(
    seconds: float, fire_at_zero: bool = True, *, clock: Clock = time.monotonic
) -> EveryNSeconds:
    """Return :class:`EveryNSeconds` as in bobbin: it counts from the start of the last action."""
    return EveryNSeconds(seconds, fire_at_zero=fire_at_zero, from_start=True, clock=clock)


# bobbin's names
ForEachNSteps = EveryNSteps
AtNthStep = AtSteps
