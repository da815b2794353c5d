"""When hooks act: one family of triggers, by steps and by time."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = [
    "AtFirstNSteps",
    "AtNthStep",
    "Every",
    "EverySeconds",
    "Exponential",
    "ExponentialCallback",
    "ForEachTSeconds",
    "NTimesDuringLoop",
    "PeriodicCallback",
    "when",
]

Clock = Callable[[], float]


class Moment(Protocol):
    """What a trigger is told of a run; a :class:`Loop` is one.

    Attributes
    ----------
    step : int
        Steps completed, over all runs.
    start_step : int
        What ``step`` was when the run began.
    end_step : int or None
        What it will be when the run ends, if that is known.
    """

    step: int
    start_step: int
    end_step: int | None


class Trigger:
    """Decide after each step whether to act; ``a | b`` acts when either would.

    Give one to ``hooks.add("step", action, trigger=...)``. Each hook works with a copy of its own, as most triggers
    count: the one that was given stays as it is, and may be given again.

    Notes
    -----
    Who runs a trigger calls :meth:`start` before the first step of a run, :meth:`fires` exactly once after every step,
    and :meth:`fired` when the action is over. If ``at_end`` is true, the action is run once more after the last
    step, unless it ran at that step.

    Subclasses define ``_due(at)``, and what they remember in ``_memory``: names of attributes that hold plain data.
    """

    at_end = False
    by_clock = False  # whether ranks may disagree
    _memory: Sequence[str] = ()

    def start(self, at: Moment) -> None:
        """A run begins, or goes on where it was interrupted (then ``step`` is above ``start_step``)."""

    def fires(self, at: Moment) -> bool:
        """Whether to act now."""
        return self._due(at)

    def fired(self, at: Moment) -> None:
        """The action is over."""

    def copy(self) -> Trigger:
        """Another one, that counts by itself from here on."""
        return copy.copy(self)

    def _due(self, at: Moment) -> bool:
        raise NotImplementedError

    def __or__(self, other: Trigger) -> Trigger:
        return AnyOf(self, other) if isinstance(other, Trigger) else NotImplemented

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain data."""
        return {name: getattr(self, name) for name in self._memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name in self._memory:
            setattr(self, name, state[name])


class AnyOf(Trigger):
    """Fire when any of several triggers does. All of them are asked every time, so that none loses count.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trigger = AtNthStep(2) | ForEachNSteps(5)
    >>> [step for step in range(1, 11) if trigger.fires(SimpleNamespace(step=step))]
    [2, 5, 10]
    """

    def __init__(self, *triggers: Trigger) -> None:
        self.triggers: tuple[Trigger, ...] = triggers
        self.at_end = any(t.at_end for t in self.triggers)
        self.by_clock = any(t.by_clock for t in self.triggers)

    def start(self, at: Moment) -> None:
        for t in self.triggers:
            t.start(at)

    def fires(self, at: Moment) -> bool:
        self._firing = [t for t in self.triggers if t.fires(at)]
        return bool(self._firing)

    def fired(self, at: Moment) -> None:
        for t in self._firing:
            t.fired(at)

    def copy(self) -> Trigger:
        return AnyOf(*(t.copy() for t in self.triggers))

    def state_dict(self) -> dict[str, Any]:
        return {"triggers": [t.state_dict() for t in self.triggers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for t, s in zip(self.triggers, state["triggers"], strict=True):
            t.load_state_dict(s)


# -- by steps, from where it was added -----------------------------------------------------------------


class Every(Trigger):
    """Fire at every ``n``-th step since it was added: ``n``, ``2n``, ... steps after that; not specially at the end.

    A loop that has made 150 steps when the trigger is added fires for ``n=100`` at ``loop.step`` 250, 350, ... Over
    several runs it goes on counting. Source: ``EveryNSteps`` of gomlx; :class:`ForEachNSteps` goes by the loop's step.
    """

    _memory = ("count",)

    def __init__(self, n: int) -> None:
        self.n, self.count = at_least(n, 1, "n"), 0

    def _due(self, at: Moment) -> bool:
        self.count += 1
        return self.count % self.n == 0


class NTimes(Trigger):
    """Fire ``n`` times during each run, evenly over its steps, the last time when it ends.

    In a run of ``m`` steps that is ``min(n, m)`` times: after ``ceil(m * k / n)`` of its steps, for ``k`` from 1 to
    ``n - 1``, and at its end. While it is not known how long a run will be (in the first epoch over data without a
    length) nothing fires; a run that is stopped, or that turns out longer or shorter, has at most ``n``, the end
    included.

    Source: ``NTimesDuringLoop`` of gomlx, which fires up to ``n + 1`` times, and not at the end of a single epoch.
    """

    at_end = True
    _memory = ("count",)

    def __init__(self, n: int) -> None:
        self.n, self.count = at_least(n, 1, "n"), 0

    def start(self, at: Moment) -> None:
        if at.step == at.start_step:
            self.count = 0

    def _due(self, at: Moment) -> bool:
        if at.end_step is None or at.end_step <= at.start_step:
            return False
        made, steps = at.step - at.start_step, at.end_step - at.start_step
        before, self.count = self.count, max(self.count, min(made * self.n // steps, self.n - 1))
        return self.count > before


class Exponential(Trigger):
    """Fire at steps further and further apart: ``start``, then ``start * factor`` later, ``start * factor**2``, ...

    Steps are those of ``loop.loop_step``, counted from 0 over all runs, so that the first time is when ``loop.step`` is
    ``start + 1``. Each distance is the one before times ``factor``, rounded (halves up). A loop that is past some of
    these steps goes on with the next: the steps depend on nothing else.

    Parameters
    ----------
    start : int
    factor : float
        At least 1.
    at_end : bool
        Act after the last step of each run too.

    Notes
    -----
    Source: ``ExponentialCallback`` of gomlx.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trigger = Exponential(100, 1.2)
    >>> trigger.start(SimpleNamespace(step=0))
    >>> [step - 1 for step in range(1, 1001) if trigger.fires(SimpleNamespace(step=step))]
    [100, 220, 364, 537, 745, 995]
    """

    def __init__(self, start: int, factor: float, at_end: bool = False) -> None:
        self.first, self.factor, self.at_end = at_least(start, 1, "start"), float(factor), at_end
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1, got {factor!r}")
        self._next = self._skip = self.first

    def start(self, at: Moment) -> None:
        self._next = self._skip = self.first
        self._pass(at.step)

    def _due(self, at: Moment) -> bool:
        due = at.step - 1 == self._next
        self._pass(at.step)
        return due

    def _pass(self, step: int) -> None:
        while self._next < step:
            self._skip = math.floor(self._skip * self.factor + 0.5)  # Python's round() takes halves to even numbers
            self._next += self._skip


# -- by the loop's steps -------------------------------------------------------------------------------


class ForEachNSteps(Trigger):
    """Fire when the loop's step is a multiple of ``n``: at ``n``, ``2n``, ..., also after an interruption."""

    def __init__(self, n: int) -> None:
        self.n = at_least(n, 1, "n")

    def _due(self, at: Moment) -> bool:
        return at.step % self.n == 0


class AtNthStep(Trigger):
    """Fire at the steps named: ``AtNthStep(10)`` when 10 steps have been made, ``AtNthStep(10, 100)`` also at 100."""

    def __init__(self, *steps: int) -> None:
        self.steps = frozenset(at_least(n, 0, "a step") for n in steps)

    def _due(self, at: Moment) -> bool:
        return at.step in self.steps


class AtFirstNSteps(Trigger):
    """Fire at each of the first ``n`` steps of training, step ``n`` included."""

    def __init__(self, n: int) -> None:
        self.n = at_least(n, 0, "n")

    def _due(self, at: Moment) -> bool:
        return at.step <= self.n


class AtFirstNStepsOfProcess(Trigger):
    """Fire at each of the first ``n`` steps that this trigger sees; after an interruption, that is ``n`` times again.

    What it has seen is not saved: that is its use. Source: bobbin, where it fires ``n - 1`` times.
    """

    def __init__(self, n: int) -> None:
        self.n, self.seen = at_least(n, 0, "n"), 0

    def _due(self, at: Moment) -> bool:
        self.seen += 1
        return self.seen <= self.n


# -- by time -------------------------------------------------------------------------------------------


class _Timed(Trigger):
    """A trigger with a clock. How long it has counted is saved: clocks differ from process to process."""

    by_clock = True

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock = float(seconds), clock
        if not self.seconds >= 0:
            raise ValueError(f"the time must be a number of seconds, 0 or more, got {seconds!r}")
        self._since: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": None if self._since is None else self.clock() - self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since = None if state["elapsed"] is None else self.clock() - state["elapsed"]


class EverySeconds(_Timed):
    """Fire at the first step that ends ``seconds`` or more after the action was last over.

    The clock starts at the first step, which therefore never fires. How long the action takes does not count.

    Parameters
    ----------
    seconds : float
    at_end : bool
        Act after the last step of each run too.
    clock : callable
        Returns seconds.

    Notes
    -----
    Source: ``PeriodicCallback`` of gomlx.
    """

    def __init__(self, seconds: float, at_end: bool = False, *, clock: Clock = time.monotonic) -> None:
        super().__init__(seconds, clock)
        self.at_end = at_end

    def _due(self, at: Moment) -> bool:
        if self._since is None:
            self._since = self.clock()
            return False
        return self.clock() - self._since >= self.seconds

    def fired(self, at: Moment) -> None:
        self._since = self.clock()


class ForEachTSeconds(_Timed):
    """Fire at the first step, and at each that ends more than ``seconds`` after the one at which it last fired.

    How long the action takes does count. Source: bobbin.
    """

    def __init__(self, seconds: float, *, clock: Clock = time.monotonic) -> None:
        super().__init__(seconds, clock)

    def _due(self, at: Moment) -> bool:
        now = self.clock()
        if self._since is not None and now - self._since <= self.seconds:
            return False
        self._since = now
        return True


# -- by name -------------------------------------------------------------------------------------------


def when(
    *,
    step_interval: int | None = None,
    at_step: int | Sequence[int] | None = None,
    at_first_steps: int | None = None,
    at_first_steps_of_process: int | None = None,
    time_interval: float | None = None,
    clock: Clock = time.monotonic,
) -> Trigger:
    """A trigger by bobbin's names; several of them fire when any does.

    Parameters
    ----------
    step_interval : int
        :class:`ForEachNSteps`
    at_step : int or sequence of int
        :class:`AtNthStep`
    at_first_steps : int
        :class:`AtFirstNSteps`
    at_first_steps_of_process : int
        :class:`AtFirstNStepsOfProcess`
    time_interval : float
        :class:`ForEachTSeconds`
    clock : callable
        Returns seconds.

    Raises
    ------
    ValueError
        If none is given.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trigger = when(step_interval=100, at_step=(1, 3))
    >>> [step for step in range(1, 301) if trigger.fires(SimpleNamespace(step=step))]
    [1, 3, 100, 200, 300]
    """
    found: list[Trigger] = []
    if step_interval is not None:
        found.append(ForEachNSteps(step_interval))
    if at_step is not None:
        found.append(AtNthStep(*(at_step if isinstance(at_step, Sequence) else [at_step])))
    if at_first_steps is not None:
        found.append(AtFirstNSteps(at_first_steps))
    if at_first_steps_of_process is not None:
        found.append(AtFirstNStepsOfProcess(at_first_steps_of_process))
    if time_interval is not None:
        found.append(ForEachTSeconds(time_interval, clock=clock))
    if not found:
        raise ValueError(
            "when to act is not given: set step_interval, at_step, at_first_steps, at_first_steps_of_process or "
            "time_interval"
        )
    return found[0] if len(found) == 1 else AnyOf(*found)


# -- functions of gomlx --------------------------------------------------------------------------------


def EveryNSteps(loop: Any, n: int, name: str, priority: float, action: Callable[[Any], None]) -> None:
    """Have ``action(loop)`` called at steps ``n``, ``2n``, ... after now: see :class:`Every`."""
    loop.on_step(name, action, priority, trigger=Every(n))


def NTimesDuringLoop(loop: Any, n: int, name: str, priority: float, action: Callable[[Any], None]) -> None:
    """Have ``action(loop)`` called ``n`` times in each run, the last time at its end: see :class:`NTimes`."""
    loop.on_step(name, action, priority, trigger=NTimes(n))


def ExponentialCallback(
    loop: Any,
    start: int,
    factor: float,
    at_end: bool,
    name: str,
    priority: float,
    action: Callable[[Any], None],
) -> None:
    """Have ``action(loop)`` called at steps further and further apart: see :class:`Exponential`."""
    loop.on_step(name, action, priority, trigger=Exponential(start, factor, at_end))


def PeriodicCallback(
    loop: Any,
    seconds: float,
    at_end: bool,
    name: str,
    priority: float,
    action: Callable[[Any], None],
    *,
    clock: Clock = time.monotonic,
) -> None:
    """Have ``action(loop)`` called every so many seconds: see :class:`EverySeconds`."""
    loop.on_step(name, action, priority, trigger=EverySeconds(seconds, at_end, clock=clock))


def at_least(value: Any, least: int, name: str) -> int:
    """``value``, if it is an integer of at least so much; else a TypeError or ValueError that says what it is."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)
