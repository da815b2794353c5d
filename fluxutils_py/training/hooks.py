"""One list of hooks, for everything that happens around training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVENTS = ("start", "step", "epoch", "end", "close")

Action = Callable[[Any], None]


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
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {event: [] for event in EVENTS}
        self._n = 0

    def add(self, event: str, action: Action, *, name: str | None = None, priority: float = 0) -> None:
        """Have ``action(loop)`` called at ``event``."""
        name = name or getattr(action, "__name__", None) or repr(action)
        self._n += 1
        self._entries[event].append(_Entry(priority, self._n, name, action))
        self._entries[event].sort()

    def attach(self, hook: Any) -> None:
        """Add what a user gives as a callback.

        A function ``f(loop)`` is called after every step. An object is asked for any of ``on_start``, ``on_step``,
        ``on_epoch``, ``on_end``, ``on_close``, each called with the loop, and for ``name`` and ``priority``.

        Raises
        ------
        TypeError
            If it is neither, or a class that was not built.
        """
        if isinstance(hook, type):
            raise TypeError(f"callback {hook.__name__} is a class; build it first: {hook.__name__}(...)")
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
            self.add(event, action, name=name, priority=getattr(hook, "priority", 0))

    def run(self, event: str, loop: Any) -> None:
        """Call the actions of an event; an error says which hook it came from.

        An error ends the event, but not ``close``: the others release their things all the same.
        """
        failed: Exception | None = None
        for entry in self._entries[event]:
            try:
                entry.action(loop)
            except StopTraining:
                loop.stop()
            except Exception as error:
                error.add_note(f"raised by the on_{event} hook {entry.name!r}")
                if event != "close":
                    raise
                failed = failed or error
        if failed is not None:
            raise failed
