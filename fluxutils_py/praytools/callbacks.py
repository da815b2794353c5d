"""Callbacks of PrayTools.jl: ``cb()`` and ``cby(loss)`` as hooks, evaluation, and the best model so
far.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fluxutils_py.files import atomic_write
from fluxutils_py.training.best_model import BestModel
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.plain_files import write_file
from fluxutils_py.training.triggers import Clock
from fluxutils_py.validation import check_integer

KIND = "fluxutils_py parameters"
PathLike: TypeAlias = str | os.PathLike[str]
# during the first 200 steps, print the running mean every 20 steps
FIRST = 200
FIRST_EVERY = 20


class cb:
    """Hook that calls a function without arguments after every step, as ``cb=`` of Flux and
    PrayTools does.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> loop = Loop(lambda batch: StepInfo(2.0 * batch))
    >>> loop.hooks.attach(cb(lambda: print("a step")))
    >>> loop.hooks.attach(cby(lambda loss: print("its loss:", loss)))
    >>> _ = loop.run_epochs([1.5], 1)
    a step
    its loss: 3.0
    """

    def __init__(self, function: Callable[..., Any], *, with_loss: bool = False) -> None:
        self.function = function
        self.with_loss = with_loss
        self.name = getattr(function, "__name__", "cby" if with_loss else "cb")
        # only then has this hook a state, which the loop puts into checkpoints
        if hasattr(function, "state_dict") and hasattr(function, "load_state_dict"):
            self.state_dict = function.state_dict
            self.load_state_dict = function.load_state_dict

    def on_step(self, loop: Loop) -> None:
        if self.with_loss and loop.batch_loss is None:
            return
        if isinstance(self.function, EvalCby | ModelSelector):
            self.function.writes = loop.rank == 0  # of several ranks only rank 0 prints and writes
        self.function(*([loop.batch_loss] if self.with_loss else []))


def cby(function: Callable[..., Any]) -> cb:
    """Return a hook that calls a function with the loss after every step that has a loss, as
    ``cby=`` of PrayTools does.
    """
    return cb(function, with_loss=True)


@dataclass(eq=False, repr=False)  # an object with a state, not a value
class EvalCby:
    """Callable that takes the loss of each step and records their mean every ``steps`` steps:
    :func:`initevalcby`.
    """

    steps: int
    accuracy: Callable[[], Any] | None
    resultdir: PathLike | None
    model: nn.Module | None
    printer: Callable[[str], Any]
    clock: Clock

    def __post_init__(self) -> None:
        self.steps = check_integer("steps", self.steps, 1)
        self.writes = True  # of several ranks only rank 0 writes and prints
        self.history: list[dict[str, Any]] = []
        self.step = 0
        self._begin_mean(self.clock())

    def _begin_mean(self, now: float) -> None:
        self.sum = 0.0
        self.n = 0
        self.started = now

    def __call__(self, loss: float) -> None:
        self.step += 1
        self.sum += float(loss)
        self.n += 1
        if self.step % self.steps == 0:
            self._record()
        elif self.writes and self.step <= FIRST and self.step % FIRST_EVERY == 0:
            self.printer(f"{self.step}: loss {self.sum / self.n:.6g}")

    def _record(self) -> None:
        now = self.clock()  # before accuracy, whose time counts in the next record
        numbers = {} if self.accuracy is None else _as_numbers(self.accuracy())
        mean = self.sum / self.n
        record = {"step": self.step, "loss": mean, **numbers, "seconds": now - self.started}
        self.history.append(record)
        self._begin_mean(now)
        if not self.writes:
            return
        texts = [
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in record.items()
            if name != "step"
        ]
        self.printer(f"{self.step}: {', '.join(texts)}")
        if self.resultdir is not None:
            self._write_files(Path(self.resultdir))

    def _write_files(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # atomic: a reader, or a run that is killed, never sees half a file
        with atomic_write(folder / "history.json") as f:
            f.write(json.dumps(self.history, indent=1).encode())
        if self.model is not None:
            parameters = {k: v.detach() for k, v in self.model.state_dict().items()}
            write_file(folder / f"model_{self.step}.pt", {"kind": KIND, "parameters": parameters})

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the sum of the losses since the last record, and the history."""
        return {
            "step": self.step,
            "sum": self.sum,
            "n": self.n,
            "elapsed": self.clock() - self.started,
            "history": list(self.history),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.step = state["step"]
        self.sum = state["sum"]
        self.n = state["n"]
        # the clock of another process counts from another origin
        self.started = self.clock() - state["elapsed"]
        self.history[:] = state["history"]  # in place: the user has this list


def _as_numbers(values: Any) -> dict[str, Any]:
    """Return the result of a user's function as Python numbers by name."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        values = {"accuracy": values}
    # records are written as JSON, which has no tensors or NumPy scalars
    return {k: v.item() if hasattr(v, "item") else v for k, v in values.items()}


def initevalcby(
    steps: int = 1000,
    accuracy: Callable[[], Any] | None = None,
    resultdir: PathLike | None = None,
    model: nn.Module | None = None,
    printer: Callable[[str], Any] = print,
    *,
    clock: Clock = time.perf_counter,
) -> tuple[EvalCby, list[dict[str, Any]]]:
    """Return a callback that takes the loss of each step, and the history that it records.

    Every ``steps`` steps the callback prints, and appends to the history, the mean loss since the
    last record, the result of ``accuracy()`` and the elapsed seconds. During the first 200 steps it
    prints the running mean of the loss every 20 steps.

    Parameters
    ----------
    steps : int
        Number of steps between records.
    accuracy : callable, optional
        Returns a number or a mapping of numbers.
    resultdir : path-like, optional
        Folder for ``history.json`` and the parameters of ``model``, ``model_STEP.pt``. Read these
        with ``read_file(path, "fluxutils_py parameters")["parameters"]``.
    model : nn.Module, optional
    printer, clock : callable
        Takes a line of text; returns the time in seconds.

    Returns
    -------
    cby : callable
        For ``train(..., cby=cby)``, or as a hook: ``Estimator(callbacks=training.cby(cby))``.
    history : list of dict
        Records with ``step``, ``loss``, the accuracies and ``seconds``.

    Notes
    -----
    Source: ``initevalcby`` of PrayTools.jl, which also resets the mean when it prints during the
    first steps.

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
    """Evaluates a model and keeps its best parameters; see :func:`bestmodelselector`."""

    def __init__(
        self,
        model: nn.Module,
        accuracy: Callable[[], Any],
        show: Callable[[str], Any] | None,
        every: int,
    ):
        super().__init__(model, operator.gt)
        self.accuracy = accuracy
        self.show = show
        self.every = check_integer("every", every, 1)
        self.calls = 0
        self.writes = True  # of several ranks only rank 0 prints

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % self.every != 0:
            return
        accuracy = float(self.accuracy())
        self.update(accuracy)
        if self.show is not None and self.writes:
            # None as long as all accuracies were NaN
            best = None if self.value is None else f"{self.value:.6g}"
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
    """Return a callback that keeps the parameters with the highest accuracy so far, and the best
    model.

    Parameters
    ----------
    model : nn.Module
    accuracy : callable
        Returns a number; higher is better, and NaN is ignored.
    show : bool or callable
        True prints each accuracy; a function receives it as a line of text. Of several ranks only
        rank 0 calls it.
    every : int
        Evaluate the accuracy at every ``every``-th call.

    Returns
    -------
    cb : callable without arguments
        For ``train(..., cb=cb)``, or as a hook: ``Estimator(callbacks=training.cb(cb))``.
    best : BestModel
        Has ``value``, ``parameters`` and ``restore()``.

    Notes
    -----
    Source: ``bestmodelselector`` of PrayTools.jl, which starts from 0 and so never keeps a model
    with negative score.

    Examples
    --------
    >>> model, scores = nn.Linear(1, 1), iter([-3.0, -1.0, -2.0])
    >>> cb, best = bestmodelselector(model, lambda: next(scores))
    >>> for _ in range(3):
    ...     cb()
    >>> best.value
    -1.0
    """
    printer = print if show is True else show or None
    best = ModelSelector(model, accuracy, printer, every)
    return best, best  # one object is both the callback and the best model
