"""A table of actions and the steps at which to call them; bobbin's actions as hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from fluxutils_py.training.hooks import Action, Hooks, numbered
from fluxutils_py.training.triggers import (
    AtFirstNSteps,
    AtSteps,
    EveryNSteps,
    ForEachTSeconds,
    OrTrigger,
    Trigger,
)

TIMES: Mapping[str, Callable[[Any], Trigger]] = {
    "step_interval": EveryNSteps,
    "at_step": AtSteps,
    "at_first_steps": AtFirstNSteps,
    "at_first_steps_of_process": partial(AtFirstNSteps, of_process=True),
    "time_interval": ForEachTSeconds,
}


class CronTab:
    """Table of actions and triggers, for a :class:`Loop` or a custom ``for`` loop.

    An action is a hook, a function of the loop. ``loop.hooks.attach(crontab)``, or
    ``callbacks=[crontab]`` of an ``Estimator``, makes each row a hook. In a custom loop, call
    :meth:`run` with the training state after every step; it passes the state and its other
    arguments to each action that is due.

    Attributes
    ----------
    results : dict
        Last return value of each action, by name.

    Notes
    -----
    Source: ``CronTab`` of bobbin, where the first trigger of a row that fires hides the step from
    the others.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> cron = CronTab().schedule(
    ...     lambda loop: print("at", loop.step), name="show", step_interval=2, at_step=1
    ... )
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(cron)
    >>> _ = loop.run_epochs([3, 2, 1, 0], epochs=1)
    at 1
    at 2
    at 4
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Trigger, Action]] = {}
        self.results: dict[str, Any] = {}

    def schedule(
        self,
        action: Action,
        *,
        name: str | None = None,
        trigger: Trigger | None = None,
        **times: Any,
    ) -> Self:
        """Schedule an action. Return self.

        Parameters
        ----------
        action : callable
            Called as ``action(loop)``.
        name : str, optional
            Name of the result and of the hook; by default the name of the function or class.
        trigger : Trigger, optional
            For example ``EveryNSeconds(60)``.
        **times
            Triggers by bobbin's names: ``step_interval=100``, ``at_step=10`` or ``(1, 10)``,
            ``at_first_steps=3``, ``at_first_steps_of_process=3``, ``time_interval=60.0``. The
            action is due when any trigger fires.

        Raises
        ------
        TypeError
            If the action is not callable, or a keyword is not one of these.
        ValueError
            If there is no trigger, or another action has this name.
        """
        triggers = [] if trigger is None else [trigger]
        for key, value in times.items():
            if key not in TIMES:
                raise TypeError(f"schedule() has no trigger {key!r}; there are {', '.join(TIMES)}")
            triggers.append(TIMES[key](value))
        if not triggers:
            raise ValueError(f"schedule() needs a trigger: set trigger, or one of {[*TIMES]}")
        if name is None:
            function_name = str(getattr(action, "__qualname__", type(action).__name__))
            # the same function may be scheduled twice, with other triggers
            name = next(n for n in numbered(function_name) if n not in self._rows)
        return self.add(name, OrTrigger(*triggers), action)

    def add(self, name: str, trigger: Trigger, action: Action) -> Self:
        """Add ``action`` under ``name``; it is called when ``trigger`` fires. Return self."""
        if not callable(action):
            raise TypeError(f"an action is a function of the loop, got {action!r}")
        if name in self._rows:  # one would hide the other in the results
            raise ValueError(
                f"the table already has an action {name!r}; give this one another name"
            )
        self._rows[name] = trigger.copy(), action
        return self

    def run(self, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the actions that are due and return their results by name. Call this once after
        every step.

        Parameters
        ----------
        state : Any
            Object with ``step``, the number of completed steps, such as a :class:`TrainState`.
        *args, **kwargs
            Passed to the actions, such as ``step_info=info``. bobbin's
            ``is_train_state_replicated``, by name or as a first bool, is accepted and ignored.
        """
        kwargs.pop("is_train_state_replicated", None)  # a model here is never replicated
        if args and isinstance(args[0], bool):
            args = args[1:]
        results = {}
        for name, (trigger, action) in self._rows.items():
            if trigger.fires(state):
                results[name] = action(state, *args, **kwargs)
                trigger.acted(state)
        self.results.update(results)
        return results

    def add_to(self, hooks: Hooks) -> None:
        """Add each row to ``hooks``; ``hooks.attach(crontab)`` calls this."""
        for name, (trigger, action) in self._rows.items():
            hooks.add("step", action, name=name, trigger=trigger, results=self.results)
