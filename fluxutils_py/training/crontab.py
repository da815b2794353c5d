"""A table of what to do when, beside training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from fluxutils_py.training.hooks import Hooks
from fluxutils_py.training.triggers import Trigger, when


@dataclass
class _Row:
    name: str
    action: Callable[..., Any]
    trigger: Trigger
    priority: float
    collective: bool
    begun: bool = False  # by run(), in this process


@dataclass
class _Now:
    """What triggers are told of training that has no loop."""

    step: int
    start_step: int
    end_step: int | None = None


class CronTab:
    """Actions and when to do them: as hooks of a loop, or called in a loop of one's own.

    Actions take the state of training, and what else is given to :meth:`run`. Given to ``loop.hooks.attach``, or among
    the callbacks of an ``Estimator``, each becomes a hook of the loop, and the state is the loop, which has ``step``,
    ``model``, ``info`` and ``ranks``. In a ``for`` loop of one's own, with a :class:`TrainState`, call :meth:`run`
    after every step.

    Attributes
    ----------
    results : dict
        What each action returned last, by name.

    Notes
    -----
    Actions whose ``collective`` is true, such as ``RunEval`` and ``Checkpointer.save``, are what all ranks do
    at once; they come after the others. ``priority`` is the action's own, lowest first, or 0. Of an action that is an
    object with ``on_start`` or ``on_close``, those are called around each run, as of any hook. Source: ``CronTab`` of
    bobbin, where a trigger that fires hides the step from the others of its row.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> cron = CronTab().schedule(lambda loop: print("at", loop.step), name="show", step_interval=2, at_step=1)
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(cron)
    >>> loop.run_epochs([3, 2, 1, 0], epochs=1)
    at 1
    at 2
    at 4
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._start: int | None = None
        self.results: dict[str, Any] = {}

    def schedule(
        self, action: Callable[..., Any], *, name: str | None = None, trigger: Trigger | None = None, **times: Any
    ) -> Self:
        """Have an action done at certain steps. Returns self.

        Parameters
        ----------
        action : callable
            ``action(state, ...)``
        name : str, optional
            Of what it returns, in ``results``, and of the hook. By default that of the function or class.
        trigger : Trigger, optional
            Any of this package, such as ``EverySeconds(60)``.
        **times
            Those of :func:`when`: ``step_interval=100``, ``at_step=(1, 10)``, ``at_first_steps``,
            ``at_first_steps_of_process``, ``time_interval``. With several of all these, any of them will do.

        Raises
        ------
        TypeError
            If the action is not callable, or there is no trigger of a name.
        ValueError
            If no trigger is given, or the name is taken.
        """
        if not callable(action):
            raise TypeError(f"an action is a function of the state, got {action!r}")
        taken = [row.name for row in self._rows]
        if name in taken:
            raise ValueError(f"there is an action {name!r} in the table already; give this one another name")
        if trigger is None:
            trigger = when(**times)
        elif times:
            trigger = trigger | when(**times)
        base = name or str(getattr(action, "__qualname__", type(action).__name__))
        names = (base if n == 1 else f"{base} ({n})" for n in range(1, len(taken) + 2))
        unique = next(n for n in names if n not in taken)
        priority, collective = (_of(action, key, default) for key, default in [("priority", 0), ("collective", False)])
        self._rows.append(_Row(unique, action, trigger.copy(), priority, collective))
        return self

    def run(self, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Do what is due, to be called once after every step; what the actions returned, by name.

        Parameters
        ----------
        state : Any
            Has ``step``, the steps made; is given to actions.
        *args, **kwargs
            Are given to actions too, such as the :class:`StepInfo` of the step.
        """
        before = state.step - 1
        if self._start is None:
            self._start = before
        now: Any = _Now(state.step, self._start)
        found: dict[str, Any] = {}
        for row in sorted(self._rows, key=lambda r: (r.collective, r.priority)):
            if not row.begun:
                row.trigger.start(_Now(before, self._start))
                row.begun = True
            if not row.trigger.fires(now):
                continue
            try:
                found[row.name] = row.action(state, *args, **kwargs)
            except Exception as error:
                error.add_note(f"raised by the action {row.name!r} at step {state.step}")
                raise
            finally:
                row.trigger.fired(now)
        self.results.update(found)
        return found

    def add_to(self, hooks: Hooks) -> None:
        """Make each row a hook; ``hooks.attach(crontab)`` calls this."""
        for row in self._rows:
            hooks.add(
                "step",
                self._noted(row),
                name=row.name,
                priority=row.priority,
                trigger=row.trigger,
                collective=row.collective,
            )
            for event in ("start", "close"):
                if hasattr(row.action, f"on_{event}"):
                    hooks.add(event, getattr(row.action, f"on_{event}"), name=row.name, priority=row.priority)

    def _noted(self, row: _Row) -> Callable[[Any], None]:
        def act(loop: Any) -> None:
            self.results[row.name] = row.action(loop)

        return act

    def state_dict(self) -> dict[str, Any]:
        """What triggers remember, for a loop of one's own that goes on in another process."""
        return {"start": self._start, "triggers": {row.name: row.trigger.state_dict() for row in self._rows}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, with a table of the same names."""
        self._start = state["start"]
        for row in self._rows:
            row.trigger.load_state_dict(state["triggers"][row.name])


def _of(action: Any, what: str, default: Any) -> Any:
    """An attribute of an action, or of the object whose method it is."""
    return getattr(action, what, getattr(getattr(action, "__self__", None), what, default))
