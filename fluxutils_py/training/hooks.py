"""Hooks: functions that are called around training steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fluxutils_py.errors import LoadError
from fluxutils_py.training.triggers import Trigger

EVENTS = ("start", "step", "epoch", "end", "close")

Action = Callable[..., Any]


class StopTraining(Exception):  # a request, not an error; the name is that of PrayTools and Flux
    """Raised by a hook to end training cleanly after this step: what was learnt stays."""


@dataclass(order=True)
class _Entry:
    """An action, and when to call it."""

    priority: float
    order: int
    name: str = field(compare=False)
    action: Action = field(compare=False)
    trigger: Trigger | None = field(compare=False)
    collective: bool = field(compare=False)
    results: dict[str, Any] | None = field(compare=False)
    last_step: int | None = field(default=None, compare=False)  # at which the action was called

    def is_due(self, event: str, loop: Any) -> bool:
        assert self.trigger is not None
        if event == "end":
            return loop.step > loop.start_step and self.last_step != loop.step
        return self.trigger.fires(loop)

    def __call__(self, loop: Any, *args: Any, **kwargs: Any) -> None:
        try:
            value = self.action(loop, *args, **kwargs)
            if self.results is not None:
                self.results[self.name] = value
        finally:  # also when it raised StopTraining
            if self.trigger is not None:
                self.last_step = loop.step
                self.trigger.acted(loop)

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step, **(self.trigger.state_dict() if self.trigger else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step = state["last_step"]
        if self.trigger is not None:
            self.trigger.load_state_dict(state)


class Hooks:
    """Actions by event, called in the order of their priority (lowest first), then of their registration.

    Events are ``start`` (before the first step of a run), ``step`` (after each step), ``epoch`` (after each epoch),
    ``end`` (after the last step, unless something failed) and ``close`` (always, at the very end, to release things).

    Collective actions are those that all ranks carry out together, such as saving a checkpoint. A rank on which another
    action has failed takes part in them all the same: the first thing that they exchange is the error.

    :meth:`state_dict` holds the counters of triggers, and the state of hooks that have ``state_dict`` and
    ``load_state_dict`` themselves, by name.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {event: [] for event in EVENTS}
        self._n = 0
        self._stateful: dict[str, Any] = {}
        self._pending_states: dict[str, Any] = {}  # of hooks that are yet to be added

    def add(
        self,
        event: str,
        action: Action,
        *,
        name: str | None = None,
        priority: float | None = None,
        trigger: Trigger | None = None,
        collective: bool | None = None,
        results: dict[str, Any] | None = None,
    ) -> None:
        """Call ``action(loop)`` at an event.

        Parameters
        ----------
        event : str
        action : callable
            If it is an object with ``on_start`` or ``on_close``, those are called too, around each run.
        name : str, optional
            For error messages, and for the state. None: that of the function or the class.
        priority, collective : optional
            None: the attribute of that name of the action, or of the object whose method it is; else 0 and False.
        trigger : Trigger, optional
            Call it after those steps or epochs only. ``event`` is then ``"step"``, or the event of the trigger.
        results : dict, optional
            Put what the action returns in here, under its name.
        """
        name = name or getattr(action, "__name__", None) or type(action).__name__
        priority = _attribute(action, "priority", 0) if priority is None else priority
        collective = _attribute(action, "collective", False) if collective is None else collective
        trigger = None if trigger is None else trigger.copy()
        entry = _Entry(priority, self._n, name, action, trigger, collective, results)
        if trigger is not None:
            if event not in ("step", trigger.event):
                raise ValueError(
                    f"{type(trigger).__name__} decides after each {trigger.event}; event {event!r} has none"
                )
            event = trigger.event
            self._register_state(name, entry)
            if trigger.at_end:
                self._insert("end", entry)
        self._insert(event, entry)
        for other in ("start", "close"):
            if hasattr(action, f"on_{other}"):
                self.add(other, getattr(action, f"on_{other}"), name=name, priority=priority, collective=False)

    def _insert(self, event: str, entry: _Entry) -> None:
        self._n += 1
        self._entries[event].append(entry)
        self._entries[event].sort()

    def attach(self, hook: Any) -> None:
        """Add what a user passes as a callback.

        A function ``f(loop)`` is called after every step. An object with ``add_to(hooks)``, such as :class:`CronTab`,
        adds its parts itself. Any other object may have ``on_start``, ``on_step``, ``on_epoch``, ``on_end`` and
        ``on_close``, each called with the loop; ``name``, ``priority`` and ``collective``; and a ``trigger``, which
        decides when ``on_step`` is called.

        Raises
        ------
        TypeError
            If it is none of these, a class instead of an object, or cannot be called with the loop.
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
        priority, collective = getattr(hook, "priority", 0), getattr(hook, "collective", False)
        for event, action in methods.items():
            _require_one_argument(name if action is hook else f"{name}.on_{event}", action)
            trigger = getattr(hook, "trigger", None) if event == "step" else None
            self.add(event, action, name=name, priority=priority, trigger=trigger, collective=collective)
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            self._register_state(name, hook)

    def run(self, event: str, loop: Any, /, *args: Any, **kwargs: Any) -> None:
        """Call the actions of an event.

        An error ends the event, and says which hook it came from; but all hooks of ``close`` are called. In a loop of
        several ranks it is kept until the next collective.
        """
        ranks: Any = getattr(loop, "ranks", None)
        is_single, failed = ranks is None or ranks.is_single, None
        for entry in self._entries[event]:
            if entry.trigger is not None and not entry.is_due(event, loop):
                continue
            try:
                if is_single:
                    self._call(entry, event, loop, args, kwargs)
                    continue
                collective = entry.collective and event not in ("start", "close")
                if collective or ranks.error is None or event == "close":
                    ranks.guard(self._call, entry, event, loop, args, kwargs, collective=collective)
            except Exception as error:
                if event != "close":
                    raise
                failed = failed or error
        if failed is not None:
            raise failed

    def _call(self, entry: _Entry, event: str, loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            entry(loop, *args, **kwargs)
        except StopTraining:
            # other ranks take it for an error within a collective; a loop of one's own cannot be stopped
            if not hasattr(loop, "stop") or loop.ranks.error_is_shared:
                raise
            loop.stop()
        except Exception as error:
            error.add_note(f"raised by the on_{event} hook {entry.name!r}")
            raise

    def check_collective_triggers(self) -> None:
        """Raise ValueError if ranks would do something together at times on which their clocks disagree."""
        for entry in self._entries["step"]:
            if entry.collective and entry.trigger is not None and entry.trigger.by_clock:
                raise ValueError(
                    f"all ranks carry out the hook {entry.name!r} together, but their clocks differ: give it a trigger "
                    "that goes by steps, such as EveryNSteps(100)"
                )

    # -- state ---------------------------------------------------------------------------------------

    def _register_state(self, name: str, thing: Any) -> None:
        key = next(key for key in numbered(name) if key not in self._stateful)
        self._stateful[key] = thing
        if key in self._pending_states:
            thing.load_state_dict(self._pending_states.pop(key))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of hooks and triggers, by the names of the hooks."""
        return {name: thing.state_dict() for name, thing in self._stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the same hooks, added before or after; further ones begin anew."""
        self._pending_states = dict(state)
        for name, thing in self._stateful.items():
            if name in self._pending_states:
                thing.load_state_dict(self._pending_states.pop(name))

    def check_restored(self) -> None:
        """Raise :class:`LoadError` if a hook is missing whose state was loaded."""
        if self._pending_states:
            raise LoadError(
                f"the state is of a run with the hooks {', '.join(map(repr, self._pending_states))}, which this run "
                f"lacks (it has {', '.join(map(repr, self._stateful)) or 'none'}); add the same hooks under the same "
                "names"
            )


def numbered(name: str) -> Iterator[str]:
    """Yield ``name``, ``name (2)``, ``name (3)``, ..."""
    yield name
    n = 2
    while True:
        yield f"{name} ({n})"
        n += 1


def _attribute(action: Any, name: str, default: Any) -> Any:
    """An attribute of an action, or of the object whose method it is."""
    return getattr(action, name, getattr(getattr(action, "__self__", None), name, default))


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
