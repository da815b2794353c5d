"""The call forms of PrayTools, gomlx and bobbin, around hooks that take the loop.

PrayTools calls ``cb()`` and ``cby(loss)``, gomlx ``fn(loop, dataset)`` and ``fn(loop, metrics)``, bobbin
``action(state, step_info=...)``. Hooks of this package are called ``hook(loop)``; what is here makes one from each.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fluxutils_py.files import atomic_write
from fluxutils_py.training.best_model import BestModel
from fluxutils_py.training.plain_files import write_file
from fluxutils_py.training.triggers import Clock, EveryNSeconds, Exponential, NTimes, Trigger
from fluxutils_py.training.triggers import EveryNSteps as EveryNStepsTrigger
from fluxutils_py.validation import check_integer

KIND = "fluxutils_py parameters"
FIRST, FIRST_EVERY = 200, 20  # steps of which the mean so far is printed, and how often

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


class EvalCby:
    """Take losses, one after each step; every ``steps`` of them, note their mean. See :func:`initevalcby`."""

    def __init__(
        self,
        steps: int,
        accuracy: Callable[[], Any] | None,
        resultdir: Any,
        model: nn.Module | None,
        printer: Callable[[str], Any],
        clock: Clock,
    ) -> None:
        self.steps, self.accuracy, self.model = check_integer("steps", steps, 1), accuracy, model
        self.resultdir = None if resultdir is None else Path(resultdir)
        self.printer, self.clock = printer, clock
        self.history: list[dict[str, Any]] = []
        self.step, self.sum, self.n, self.started = 0, 0.0, 0, clock()

    def __call__(self, loss: float) -> None:
        self.step += 1
        self.sum += float(loss)
        self.n += 1
        if self.step % self.steps == 0:
            self._record()
        elif self.step <= FIRST and self.step % FIRST_EVERY == 0:
            self.printer(f"{self.step}: loss {self.sum / self.n:.6g}")

    def _record(self) -> None:
        now, values = self.clock(), None if self.accuracy is None else self.accuracy()
        if not isinstance(values, Mapping):
            values = {} if values is None else {"accuracy": values}
        numbers = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
        record = {"step": self.step, "loss": self.sum / self.n, **numbers, "seconds": now - self.started}
        self.history.append(record)
        self.sum, self.n, self.started = 0.0, 0, now
        texts = (f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items() if k != "step")
        self.printer(f"{self.step}: {', '.join(texts)}")
        if self.resultdir is not None:
            self.resultdir.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.resultdir / "history.json") as f:
                f.write(json.dumps(self.history, indent=1).encode())
            if self.model is not None:
                parameters = {k: v.detach() for k, v in self.model.state_dict().items()}
                write_file(self.resultdir / f"model_{self.step}.pt", {"kind": KIND, "parameters": parameters})

    def state_dict(self) -> dict[str, Any]:
        """Return the history, and the sum of the losses since its last record."""
        elapsed = self.clock() - self.started
        return {"step": self.step, "sum": self.sum, "n": self.n, "elapsed": elapsed, "history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.step, self.sum, self.n = state["step"], state["sum"], state["n"]
        self.started = self.clock() - state["elapsed"]
        self.history[:] = state["history"]  # the list that the user holds


def initevalcby(
    steps: int = 1000,
    accuracy: Callable[[], Any] | None = None,
    resultdir: Any = None,
    model: nn.Module | None = None,
    printer: Callable[[str], Any] = print,
    *,
    clock: Clock = time.perf_counter,
) -> tuple[EvalCby, list[dict[str, Any]]]:
    """Make a function that takes the loss after each step, and the history that it writes.

    Every ``steps`` steps it appends to the history, and prints, the mean loss since the last time, what ``accuracy()``
    returns, and the seconds since. In the first 200 steps it prints the mean loss so far at every 20th.

    Parameters
    ----------
    steps : int
    accuracy : callable, optional
        Returns a number or a mapping of numbers.
    resultdir : path-like, optional
        Where to write ``history.json``, and the model's parameters as ``model_STEP.pt``, which
        ``read_file(path, "fluxutils_py parameters")["parameters"]`` reads.
    model : nn.Module, optional
    printer : callable
        Takes a line of text.
    clock : callable
        Returns seconds.

    Returns
    -------
    cby : callable
        For ``train(..., cby=cby)``, or as a hook: ``Estimator(callbacks=training.cby(cby))``.
    history : list of dict
        With ``step``, ``loss``, the accuracies, ``seconds``.

    Notes
    -----
    Source: ``initevalcby`` of PrayTools.jl, where printing in the first steps begins the mean anew.

    Examples
    --------
    >>> cby, history = initevalcby(steps=2, accuracy=lambda: 0.75, clock=lambda: 0.0)
    >>> for loss in (4.0, 2.0, 1.0):
    ...     cby(loss)
    2: loss 3, accuracy 0.75, seconds 0
    >>> history
    [{'step': 2, 'loss': 3.0, 'accuracy': 0.75, 'seconds': 0.0}]
    """
    cby = EvalCby(steps, accuracy, resultdir, model, printer, clock)
    return cby, cby.history


class ModelSelector(BestModel):
    """Judge a model when called, and keep its best parameters. See :func:`bestmodelselector`."""

    def __init__(self, model: nn.Module, accuracy: Callable[[], Any], show: Callable[[str], Any] | None, every: int):
        super().__init__(model, operator.gt)
        self.accuracy, self.show, self.every, self.calls = accuracy, show, check_integer("every", every, 1), 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            accuracy = float(self.accuracy())
            self.update(accuracy)
            if self.show is not None:
                best = self.value if self.value is None else f"{self.value:.6g}"
                self.show(f"accuracy {accuracy:.6g}, the best so far {best}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]
        super().load_state_dict(state)


def bestmodelselector(
    model: nn.Module,
    accuracy: Callable[[], Any],
    *,
    show: bool | Callable[[str], Any] = False,
    every: int = 1,
) -> tuple[ModelSelector, ModelSelector]:
    """Make a function to call after each step, and what it keeps: the parameters with the highest accuracy so far.

    Parameters
    ----------
    model : nn.Module
    accuracy : callable
        Returns a number; higher is better, and NaN is ignored.
    show : bool or callable
        Print each judgement, or pass it to a function as a line of text.
    every : int
        Judge at every so many calls.

    Returns
    -------
    cb : callable without arguments
        For ``train(..., cb=cb)``, or as a hook: ``Estimator(callbacks=training.cb(cb))``.
    best : BestModel
        ``value``, ``parameters``, and ``restore()``.

    Notes
    -----
    Source: ``bestmodelselector`` of PrayTools.jl, which starts from 0 and so never keeps a model of negative score.

    Examples
    --------
    >>> model, scores = nn.Linear(1, 1), iter([-3.0, -1.0, -2.0])
    >>> cb, best = bestmodelselector(model, lambda: next(scores))
    >>> for _ in range(3):
    ...     cb()
    >>> best.value
    -1.0
    """
    best = ModelSelector(model, accuracy, print if show is True else show or None, every)
    return best, best


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
