"""One list of hooks, for everything that happens around training steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluxutils_py.errors import LoadError
from fluxutils_py.training.triggers import Trigger

EVENTS = ("start", "step", "epoch", "end", "close")
COLLECTIVE_EVENTS = ("step", "epoch", "end")

Action = Callable[[Any], Any]  # what it returns is not looked at


class StopTraining(Exception):  # a request, not an error; the name is PrayTools' and Flux'
    """Raised by a hook to end training after this step, cleanly: what was learnt stays."""


@dataclass(order=True)
class _Entry:
    priority: float
    order: int
    name: str = field(compare=False)
    action: Action = field(compare=False)


class Hooks:
    """Actions by event, run in order of priority (lowest first), then of registration.

    Events: ``start`` (before the first step), ``step`` (after each), ``epoch`` (after each), ``end`` (after the last
    step, if nothing failed) and ``close`` (always, at the very end: for releasing things).

    Actions that are ``collective`` are what all ranks do at once, such as a checkpoint: they come after the others, on
    every rank, also where one of the others has failed.

    :meth:`state_dict` holds what triggers remember, and hooks that have ``state_dict`` and ``load_state_dict``
    themselves, by name.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {event: [] for event in EVENTS}
        self._collective: dict[str, list[_Entry]] = {event: [] for event in COLLECTIVE_EVENTS}
        self._n = 0
        self._stateful: dict[str, Any] = {}
        self._unclaimed: dict[str, Any] = {}  # states loaded for hooks that are yet to be added

    def add(
        self,
        event: str,
        action: Action,
        *,
        name: str | None = None,
        priority: float = 0,
        trigger: Trigger | None = None,
        collective: bool | None = None,
    ) -> None:
        """Have ``action(loop)`` called at ``event``; with a trigger, for event ``step``, only when it fires.

        Whether it is ``collective``, an action may say itself, as an attribute.
        """
        collective = getattr(action, "collective", False) if collective is None else collective
        name = name or getattr(action, "__name__", None) or repr(action)
        if trigger is None:
            self._add(event, action, name, priority, collective)
            return
        if event != "step":
            raise ValueError(f"a trigger decides after each step; event {event!r} takes none")
        trigger = trigger.copy()
        triggered = _Triggered(trigger, action)
        self._add("start", trigger.start, name, priority)
        self._add("step", triggered.on_step, name, priority, collective)
        if trigger.at_end:
            self._add("end", triggered.on_end, name, priority, collective)
        self._keep(name, triggered)

    def _add(self, event: str, action: Action, name: str, priority: float, collective: bool = False) -> None:
        self._n += 1
        entries = (self._collective if collective and event in COLLECTIVE_EVENTS else self._entries)[event]
        entries.append(_Entry(priority, self._n, name, action))
        entries.sort()

    def attach(self, hook: Any) -> None:
        """Add what a user gives as a callback.

        A function ``f(loop)`` is called after every step. One with ``add_to(hooks)``, such as :class:`CronTab`, adds
        what it consists of by itself. Any other object is asked for any of ``on_start``, ``on_step``,
        ``on_epoch``, ``on_end``, ``on_close``, called with the loop, and for ``name``, ``priority``, ``collective``,
        and ``trigger``: when to call its ``on_step``.

        Raises
        ------
        TypeError
            If it is neither, a class that was not built, or cannot be called with the loop.
        """
        if isinstance(hook, type):
            raise TypeError(f"callback {hook.__name__} is a class; build it first: {hook.__name__}(...)")
        if hasattr(hook, "add_to"):
            hook.add_to(self)
            return
        methods = {e: getattr(hook, f"on_{e}") for e in EVENTS if hasattr(hook, f"on_{e}")}
        name = getattr(hook, "name", None) or getattr(hook, "__name__", None) or type(hook).__name__
        if not methods and callable(hook):
            methods = {"step": hook}
        if not methods:
            raise TypeError(
                "a callback is a function of the loop, or has on_start, on_step, on_epoch, on_end or on_close; "
                f"got {hook!r}"
            )
        for event, action in methods.items():
            _require_one_argument(name if action is hook else f"{name}.on_{event}", action)
            trigger = getattr(hook, "trigger", None) if event == "step" else None
            priority, collective = getattr(hook, "priority", 0), getattr(hook, "collective", False)
            self.add(event, action, name=name, priority=priority, trigger=trigger, collective=collective)
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            self._keep(name, hook)

    def _keep(self, name: str, thing: Any) -> None:
        n = 1
        while (key := name if n == 1 else f"{name} ({n})") in self._stateful:
            n += 1
        self._stateful[key] = thing
        if key in self._unclaimed:
            thing.load_state_dict(self._unclaimed.pop(key))

    def run(self, event: str, loop: Any) -> None:
        """Call the actions of an event; an error says which hook it came from.

        An error ends the event, but not ``close``: the others release their things all the same.
        """
        self._run(self._entries[event], event, loop)

    def run_collective(self, event: str, loop: Any) -> None:
        """Call the actions of an event that all ranks do together."""
        self._run(self._collective[event], event, loop)

    def _run(self, entries: list[_Entry], event: str, loop: Any) -> None:
        failed: Exception | None = None
        for entry in entries:
            try:
                entry.action(loop)
            except StopTraining:
                if (
                    loop.ranks.error_is_shared
                ):  # raised within what ranks do together, which it ended: an error on the others
                    raise
                loop.stop()
            except Exception as error:
                error.add_note(f"raised by the on_{event} hook {entry.name!r}")
                if event != "close":
                    raise
                failed = failed or error
        if failed is not None:
            raise failed

    def require_one_clock(self) -> None:
        """Raise ValueError if several ranks were to do something together at times on which their clocks differ."""
        for entry in self._collective["step"]:
            trigger = getattr(getattr(entry.action, "__self__", None), "trigger", None)
            if isinstance(trigger, Trigger) and trigger.by_clock:
                raise ValueError(
                    f"the hook {entry.name!r} is what all ranks do together, and their clocks differ: give it a "
                    "trigger that goes by steps, such as ForEachNSteps(100)"
                )

    def state_dict(self) -> dict[str, Any]:
        """What hooks and triggers remember, by the names of the hooks."""
        return {name: thing.state_dict() for name, thing in self._stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, with the same hooks, added before or after; further ones begin anew."""
        self._unclaimed = dict(state)
        for name, thing in self._stateful.items():
            if name in self._unclaimed:
                thing.load_state_dict(self._unclaimed.pop(name))

    def require_all(self) -> None:
        """Raise :class:`LoadError` if a hook is missing of those whose states were loaded."""
        if self._unclaimed:
            raise LoadError(
                f"the state is of a run with the hooks {', '.join(map(repr, self._unclaimed))}, which this run lacks "
                f"(it has {', '.join(map(repr, self._stateful)) or 'none'}); add the same hooks under the same names"
            )


def _require_one_argument(name: str, action: Any) -> None:
    """Raise TypeError unless an action can be called with the loop."""
    try:
        signature = inspect.signature(action)
    except (TypeError, ValueError):  # built-in
        return
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"the callback {name}{signature} must take one argument, the loop; fluxutils_py.training.cb(f) is a "
            "callback that calls f()"
        ) from None


class _Triggered:
    """An action that is called when its trigger fires."""

    def __init__(self, trigger: Trigger, action: Action) -> None:
        self.trigger, self.action = trigger, action
        self.acted: int | None = None  # at which step, last

    def on_step(self, loop: Any) -> None:
        if self.trigger.fires(loop):
            self._act(loop)

    def on_end(self, loop: Any) -> None:
        if loop.step > loop.start_step and self.acted != loop.step:
            self._act(loop)

    def _act(self, loop: Any) -> None:
        self.acted = loop.step
        try:
            self.action(loop)
        finally:  # also when it raised StopTraining
            self.trigger.fired(loop)

    def state_dict(self) -> dict[str, Any]:
        return {"acted": self.acted, **self.trigger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.acted = state["acted"]
        self.trigger.load_state_dict(state)
