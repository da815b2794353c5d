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
from typing import Any

from torch import nn

from fluxutils_py.files import atomic_write
from fluxutils_py.training.best_model import BestModel
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.plain_files import write_file
from fluxutils_py.validation import check_integer

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
        if hasattr(function, "state_dict"):
            self.state_dict = function.state_dict
            self.load_state_dict = function.load_state_dict  # type: ignore[attr-defined]

    def on_step(self, loop: Loop) -> None:
        if isinstance(self.function, EvalCby | ModelSelector):
            self.function.writes = loop.rank == 0  # of several ranks only rank 0 prints and writes
        if not self.with_loss:
            self.function()
        elif loop.batch_loss is not None:
            self.function(loop.batch_loss)


def cby(function: Callable[..., Any]) -> cb:
    """Return a hook that calls a function with the loss after every step that has a loss, as
    ``cby=`` of PrayTools does.
    """
    return cb(function, with_loss=True)


@dataclass(eq=False)
class EvalCby:
    """Callable that takes the loss of each step and records their mean every ``steps`` steps:
    :func:`initevalcby`.
    """

    steps: int = 1000
    accuracy: Callable[[], Any] | None = None
    resultdir: str | os.PathLike[str] | None = None
    model: nn.Module | None = None

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)
        self.writes = True  # of several ranks only rank 0 writes and prints
        self.history: list[dict[str, Any]] = []
        self.step = 0
        self.losses: list[float] = []  # since the last record
        self.started = time.perf_counter()

    def __call__(self, loss: float) -> None:
        self.step += 1
        self.losses.append(float(loss))
        mean = sum(self.losses) / len(self.losses)
        if self.step % self.steps == 0:
            self._record(mean)
        elif self.writes and self.step <= FIRST and self.step % FIRST_EVERY == 0:
            print(f"{self.step}: loss {mean:.6g}")

    def _record(self, mean: float) -> None:
        now = time.perf_counter()  # before accuracy, whose time counts in the next record
        found = None if self.accuracy is None else self.accuracy()
        if not isinstance(found, Mapping):
            found = {} if found is None else {"accuracy": found}
        # records are written as JSON, which has no tensors or NumPy scalars
        numbers = {k: v.item() if hasattr(v, "item") else v for k, v in found.items()}
        record = {"loss": mean, **numbers, "seconds": now - self.started}
        self.history.append({"step": self.step, **record})
        self.losses = []
        self.started = now
        if not self.writes:
            return
        texts = [f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()]
        print(f"{self.step}: {', '.join(texts)}")
        if self.resultdir is not None:
            folder = Path(self.resultdir)
            folder.mkdir(parents=True, exist_ok=True)
            # atomic: a reader, or a run that is killed, never sees half a file
            with atomic_write(folder / "history.json") as f:
                f.write(json.dumps(self.history, indent=1).encode())
            if self.model is not None:
                write_file(folder / f"model_{self.step}.pt", self.model.state_dict())


def initevalcby(*args: Any, **options: Any) -> tuple[EvalCby, list[dict[str, Any]]]:
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
        with ``model.load_state_dict(torch.load(path))``.
    model : nn.Module, optional

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
    >>> cby, history = initevalcby(steps=2, accuracy=lambda: 0.75)
    >>> for loss in (4.0, 2.0, 1.0):
    ...     cby(loss)  # doctest: +ELLIPSIS
    2: loss 3, accuracy 0.75, seconds ...
    >>> [(record["step"], record["loss"], record["accuracy"]) for record in history]
    [(2, 3.0, 0.75)]
    """
    cby = EvalCby(*args, **options)
    return cby, cby.history


class ModelSelector(BestModel):
    """Evaluates a model and keeps its best parameters; see :func:`bestmodelselector`."""

    def __init__(
        self,
        model: nn.Module,
        accuracy: Callable[[], Any],
        *,
        show: bool = False,
    ) -> None:
        super().__init__(model, operator.gt)
        self.accuracy = accuracy
        self.show = show
        self.writes = True  # of several ranks only rank 0 prints

    def __call__(self) -> None:
        accuracy = float(self.accuracy())
        self.update(accuracy)
        if self.show and self.writes:
            # None as long as all accuracies were NaN
            best = None if self.value is None else f"{self.value:.6g}"
            print(f"accuracy {accuracy:.6g}, the best so far {best}")


def bestmodelselector(*args: Any, **options: Any) -> tuple[ModelSelector, ModelSelector]:
    """Return a callback that keeps the parameters with the highest accuracy so far, and the best
    model.

    Parameters
    ----------
    model : nn.Module
    accuracy : callable
        Returns a number; higher is better, and NaN is ignored.
    show : bool
        Print each accuracy; of several ranks only rank 0 prints.

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
    best = ModelSelector(*args, **options)
    return best, best  # one object is both the callback and the best model
