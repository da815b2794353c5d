"""Hooks: functions that the loop calls before, between and after training steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

from fluxutils_py.errors import LoadError
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.training.resharding import reshard
from fluxutils_py.training.triggers import OrTrigger, Trigger

SETTINGS = (bool, int, float, str)  # types of the settings of triggers that ranks compare
EVENTS = ("start", "step", "epoch", "end", "close")

Action = Callable[..., Any]


class StopTraining(Exception):  # a request, not an error; named as in PrayTools and Flux
    """Raise this in a hook to end training cleanly after this step, with the parameters so far."""


@dataclass
class _Entry:
    """An action and its trigger."""

    priority: float
    name: str
    action: Action
    trigger: Trigger | None
    collective: bool
    results: dict[str, Any] | None
    last_step: int | None = None  # loop.step at the last call

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step, **(self.trigger.state_dict() if self.trigger else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step = state["last_step"]
        if self.trigger is not None:
            self.trigger.load_state_dict(state)


class Hooks:
    """Actions by event, called in order of priority (lowest first), then of registration.

    Events are ``start`` (before the first step of a run), ``step`` (after each step), ``epoch``
    (after each epoch), ``end`` (after the last step, unless the run failed) and ``close`` (always
    last, to release resources).

    All ranks call a collective action together, such as saving a checkpoint. A rank on which
    another action failed still takes part: the ranks exchange the error first.

    :meth:`state_dict` holds the counters of the triggers, and the state of every hook with
    ``state_dict`` and ``load_state_dict``, by hook name.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {event: [] for event in EVENTS}
        self._stateful: dict[str, Any] = {}  # hooks, and entries with triggers
        self._pending_states: dict[str, Any] = {}  # loaded states of hooks not added yet

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
            If it has ``on_start`` or ``on_close``, the loop calls them at the start and the end of
            each run.
        name : str, optional
            Name in error messages and in the state; by default the name of the function or class.
        priority, collective : optional
            By default the attribute of the action, or of the object whose method it is; else 0 and
            False.
        trigger : Trigger, optional
            Call the action only when it fires. ``event`` must be ``"step"`` or the trigger's event.
        results : dict, optional
            Store the action's return value in it, under ``name``.

        Raises
        ------
        TypeError
            If the action cannot be called with the loop.
        """
        name = name or getattr(action, "__name__", None) or type(action).__name__
        require_arguments(name, action, "the loop")
        if priority is None:
            priority = _action_attribute(action, "priority", 0)
        if collective is None:
            collective = _action_attribute(action, "collective", False)
        # A copy counts separately: a user may give one trigger to several hooks.
        trigger = None if trigger is None else trigger.copy()
        entry = _Entry(priority, name, action, trigger, collective, results)
        if trigger is not None:
            if event not in ("step", trigger.event):
                raise ValueError(
                    f"{type(trigger).__name__} decides after each {trigger.event}; event {event!r} "
                    "has none"
                )
            event = trigger.event
            self.register_state(name, entry)
            if trigger.at_end:
                self._insert_entry("end", entry)
        self._insert_entry(event, entry)
        # An action that needs resources opens and closes them with the run.
        for other in ("start", "close"):
            opens = getattr(action, f"on_{other}", None)
            if opens is not None:
                self.add(other, opens, name=name, priority=priority, collective=False)

    def _insert_entry(self, event: str, entry: _Entry) -> None:
        # of equal priorities, in the order of registration
        self._entries[event].append(entry)
        self._entries[event].sort(key=attrgetter("priority"))

    def attach(self, hook: Any) -> None:
        """Add a user's callback.

        The loop calls a function ``f(loop)`` after every step. An object with ``add_to(hooks)``,
        such as :class:`CronTab`, adds its parts itself. Any other object may have methods
        ``on_start``, ``on_step``, ``on_epoch``, ``on_end`` and ``on_close``, which take the loop;
        attributes ``name``, ``priority`` and ``collective``; a ``trigger``, which decides when
        ``on_step`` is called; and ``companions``, further callbacks.

        Raises
        ------
        TypeError
            If ``hook`` is none of these, is a class, or cannot be called with the loop.
        """
        if isinstance(hook, type):
            raise TypeError(
                f"callback {hook.__name__} is a class; build it first: {hook.__name__}(...)"
            )
        if hasattr(hook, "add_to"):
            hook.add_to(self)
            return
        named = getattr(hook, "name", None) or getattr(hook, "__name__", None)
        name = named or type(hook).__name__
        for event, action in _event_methods(hook).items():
            self.add(
                event,
                action,
                name=name,
                priority=getattr(hook, "priority", 0),
                trigger=getattr(hook, "trigger", None) if event == "step" else None,
                collective=getattr(hook, "collective", False),
            )
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            self.register_state(name, hook)
        for companion in getattr(hook, "companions", ()):
            self.attach(companion)

    def run(self, event: str, loop: Any, /, *args: Any, **kwargs: Any) -> None:
        """Call the actions of an event.

        An error ends the event and names the hook that raised it; ``close`` still calls all its
        hooks. On several ranks the error is raised at the next collective.
        """
        ranks: RankGroup = getattr(loop, "ranks", None) or RankGroup()
        first_error = None
        for entry in self._entries[event]:
            if not self._is_due(entry, event, loop, ranks):
                continue
            # Start and close hooks must not wait for other ranks, which may have failed.
            collective = entry.collective and event not in ("start", "close")
            if not (collective or ranks.error is None or event == "close"):
                continue
            try:
                call = partial(self._call_entry, entry, event, loop, *args, **kwargs)
                ranks.guard(call, collective=collective)
            except Exception as error:
                if event != "close":
                    raise
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _is_due(self, entry: _Entry, event: str, loop: Any, ranks: RankGroup) -> bool:
        """Return whether an action is due; of ranks that act together by the clock, rank 0's clock
        decides.
        """
        if entry.trigger is None:
            return True
        if event == "end":  # for triggers with at_end, unless the action ran in this very step
            return loop.step > loop.start_step and entry.last_step != loop.step
        due = entry.trigger.fires(loop)
        if entry.trigger.by_clock and entry.collective and event == "step":
            return bool(ranks.allgather(due)[0])
        return due

    def _call_entry(self, entry: _Entry, event: str, loop: Any, *args: Any, **kwargs: Any) -> None:
        try:
            value = entry.action(loop, *args, **kwargs)
            if entry.results is not None:
                entry.results[entry.name] = value
        except StopTraining:
            # within a collective, other ranks see an error; a user's loop without stop() gets the
            # exception
            if not hasattr(loop, "stop") or loop.ranks.error_is_shared:
                raise
            loop.stop()
        except Exception as error:
            error.add_note(f"raised by the on_{event} hook {entry.name!r}")
            raise
        finally:  # also if it raised StopTraining
            if entry.trigger is not None:
                entry.last_step = loop.step
                entry.trigger.acted(loop)

    def agree(self, ranks: RankGroup) -> dict[str, Any]:
        """Let rank 0's clock decide for the actions by time that all ranks have; return what ranks
        must have alike.

        They then carry out these actions together.

        An action that only some ranks have, such as printing on rank 0, goes by the clock of that
        rank.
        """
        timed = [e for e in self._entries["step"] if e.trigger is not None and e.trigger.by_clock]
        of_ranks = ranks.allgather([entry.name for entry in timed])
        for entry in timed:
            if all(entry.name in names for names in of_ranks):
                entry.collective = True
        return self.describe_collective()

    def describe_collective(self) -> dict[str, str]:
        """Return when ranks carry out actions together, by name of the action, as texts that ranks
        compare.
        """
        texts: dict[str, str] = {}
        for event in EVENTS:
            for entry in self._entries[event]:
                if entry.collective:
                    names = numbered(f"the callback {entry.name!r} on_{event}")
                    name = next(name for name in names if name not in texts)
                    texts[name] = _describe_trigger(entry.trigger)
        return texts

    # -- state -------------------------------------------------------------------------------------

    def register_state(self, name: str, thing: Any) -> None:
        """Keep the state of a hook or a trigger under a name, or that name with a number."""
        # Two hooks of one class have the same name: number them in the order of registration.
        key = next(key for key in numbered(name) if key not in self._stateful)
        self._stateful[key] = thing
        if key in self._pending_states:
            thing.load_state_dict(self._pending_states.pop(key))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of hooks and triggers, by the names of the hooks."""
        return {name: thing.state_dict() for name, thing in self._stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of hooks by name, also of hooks added later. Hooks without a saved
        state start afresh.
        """
        self._pending_states = dict(state)
        for name, thing in self._stateful.items():
            if name in self._pending_states:
                thing.load_state_dict(self._pending_states.pop(name))

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the states of hooks for one of ``size`` ranks, from those of the ranks that saved
        a checkpoint.
        """
        if rank < len(states):
            names = list(states[rank])
        else:  # a new rank may have other hooks than rank 0
            names = [name for name in states[0] if name in self._stateful]
        parts = {name: [state[name] for state in states if name in state] for name in names}
        return {
            name: reshard(self._stateful.get(name), part, rank, size)
            for name, part in parts.items()
        }

    def check_restored(self) -> None:
        """Raise :class:`LoadError` if a loaded state belongs to a hook that was not added."""
        if self._pending_states:
            raise LoadError(
                "the state is of a run with the hooks "
                f"{', '.join(map(repr, self._pending_states))}, which this run lacks (it has "
                f"{', '.join(map(repr, self._stateful)) or 'none'}); add the same hooks under the "
                "same names"
            )


def numbered(name: str) -> Iterator[str]:
    """Yield ``name``, ``name (2)``, ``name (3)``, ..."""
    yield name
    for n in count(2):
        yield f"{name} ({n})"


def _event_methods(hook: object) -> dict[str, Action]:
    """Return the actions of a callback by event; a function acts after each step."""
    methods = {e: getattr(hook, f"on_{e}") for e in EVENTS if hasattr(hook, f"on_{e}")}
    if methods:
        return methods
    if callable(hook):
        return {"step": hook}
    raise TypeError(
        "a callback is a function of the loop, or has on_start, on_step, on_epoch, on_end or "
        f"on_close; got {hook!r}. Callbacks of scikit-learn are for set_callbacks"
    )


def _action_attribute(action: object, name: str, default: Any) -> Any:
    """Return an attribute of an action, or of the object whose method it is."""
    return getattr(action, name, getattr(getattr(action, "__self__", None), name, default))


def _describe_trigger(trigger: Trigger | None) -> str:
    """Describe a trigger by its class and its settings; a clock may be any function."""
    if trigger is None:
        return "each time"
    if isinstance(trigger, OrTrigger):
        return " | ".join(map(_describe_trigger, trigger.triggers))
    plain = {
        name: value
        for name, value in vars(trigger).items()
        if isinstance(value, SETTINGS) and not name.startswith("_") and name not in trigger.counters
    }
    return f"{type(trigger).__name__} {plain}"


def require_arguments(name: str, action: Any, *arguments: str) -> None:
    """Raise TypeError unless an action can be called with these arguments."""
    try:
        inspect.signature(action).bind(*arguments)
    except ValueError:  # built-in
        return
    except TypeError as error:
        raise TypeError(
            f"the callback {name!r}, {action!r}, must be a function of {' and '.join(arguments)} "
            f"({error}); wrap other functions in a lambda, such as "
            "lambda loop: f(loop.state, step_info=loop.step_info) for bobbin's"
        ) from None


def as_callbacks(callbacks: object) -> list[Any]:
    """Return the ``callbacks`` argument of an estimator as a list, after checking each callback."""
    if callbacks is None:
        return []
    as_list = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in as_list:
        Hooks().attach(callback)  # raises the errors of what cannot be a hook
    return as_list
