"""Callbacks of PrayTools that judge a model as it is trained, and keep the best."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluxutils_py.files import atomic_write
from fluxutils_py.training.plain_files import write_file
from fluxutils_py.validation import check_integer

KIND = "fluxutils_py parameters"
FIRST, FIRST_EVERY = 200, 20  # steps of which the mean so far is printed, and how often


class EvalCby:
    """Take losses, one at each step; every so many, note their mean and judge the model. See :func:`initevalcby`."""

    def __init__(
        self,
        steps: int,
        accuracy: Callable[[], Any] | None,
        resultdir: Any,
        model: nn.Module | None,
        printer: Callable[[str], Any],
        clock: Callable[[], float],
    ) -> None:
        self.steps, self.accuracy, self.model = check_integer("steps", steps, 1), accuracy, model
        self.resultdir = None if resultdir is None else Path(resultdir)
        self.printer, self.clock = printer, clock
        self.history: list[dict[str, Any]] = []
        self.step, self.sum, self.n, self.began = 0, 0.0, 0, clock()

    def __call__(self, loss: float) -> None:
        self.step += 1
        self.sum += float(loss)
        self.n += 1
        if self.step % self.steps == 0:
            self._judge()
        elif self.step <= FIRST and self.step % FIRST_EVERY == 0:
            self.printer(f"{self.step}: loss {self.sum / self.n:.6g}")

    def _judge(self) -> None:
        now = self.clock()
        record = {"step": self.step, "loss": self.sum / self.n, **self._items(), "seconds": now - self.began}
        self.history.append(record)
        self.sum, self.n, self.began = 0.0, 0, now
        shown = (f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items() if k != "step")
        self.printer(f"{self.step}: {', '.join(shown)}")
        if self.resultdir is not None:
            self.resultdir.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.resultdir / "history.json") as f:
                f.write(json.dumps(self.history, indent=1).encode())
            if self.model is not None:
                parameters = {k: v.detach() for k, v in self.model.state_dict().items()}
                write_file(self.resultdir / f"model_{self.step}.pt", {"kind": KIND, "parameters": parameters})

    def _items(self) -> dict[str, Any]:
        found = None if self.accuracy is None else self.accuracy()
        if found is None:
            return {}
        return {k: _item(v) for k, v in (found if isinstance(found, Mapping) else {"accuracy": found}).items()}

    def state_dict(self) -> dict[str, Any]:
        """History, and losses since the last record."""
        elapsed = self.clock() - self.began
        return {"step": self.step, "sum": self.sum, "n": self.n, "elapsed": elapsed, "history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.step, self.sum, self.n = state["step"], state["sum"], state["n"]
        self.began = self.clock() - state["elapsed"]
        self.history[:] = state["history"]  # the list that the user holds


def initevalcby(
    steps: int = 1000,
    accuracy: Callable[[], Any] | None = None,
    resultdir: Any = None,
    model: nn.Module | None = None,
    printer: Callable[[str], Any] = print,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[EvalCby, list[dict[str, Any]]]:
    """A function to be given the loss after each step, and the history that it writes.

    Every ``steps`` steps it appends to the history, and prints, the mean loss since the last time, what ``accuracy()``
    gives, and the seconds since. In the first 200 steps it prints the mean loss so far at every 20th.

    Parameters
    ----------
    steps : int
    accuracy : callable, optional
        Returns a number or a mapping of them.
    resultdir : path-like, optional
        Where to write ``history.json``, and the model's parameters as ``model_STEP.pt``, which
        ``read_file(path, "fluxutils_py parameters")["parameters"]`` reads.
    model : nn.Module, optional
    printer : callable
        Given a line of text.
    clock : callable
        Returns seconds.

    Returns
    -------
    cby : callable
        For ``train(..., cby=cby)``, or as a callback: ``Estimator(callbacks=training.cby(cby))``.
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


class BestModel:
    """The best parameters so far; see :func:`bestmodelselector`.

    Attributes
    ----------
    score : float or None
        None before the first judgement.
    parameters : dict or None
        The model's ``state_dict``, copied to the CPU.
    """

    def __init__(self, model: nn.Module, accuracy: Callable[[], Any], show: Callable[[str], Any] | None, every: int):
        self.model, self.accuracy, self.show, self.every = model, accuracy, show, check_integer("every", every, 1)
        self.score: float | None = None
        self.parameters: dict[str, Any] | None = None
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % self.every:
            return
        found = float(self.accuracy())
        better = found > self.score if self.score is not None else found == found  # never NaN
        if better:
            self.score = found
            self.parameters = {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}
        if self.show is not None:
            self.show(
                f"accuracy {found:.6g}, the best so far {self.score if self.score is None else f'{self.score:.6g}'}"
            )

    def restore(self) -> nn.Module:
        """Put the best parameters back into the model, which is returned; as it is, if there are none."""
        if self.parameters is not None:
            self.model.load_state_dict(self.parameters)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"score": self.score, "parameters": self.parameters, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.score, self.parameters, self._calls = state["score"], state["parameters"], state["calls"]


def bestmodelselector(
    model: nn.Module,
    accuracy: Callable[[], Any],
    *,
    show: bool | Callable[[str], Any] = False,
    every: int = 1,
) -> tuple[BestModel, BestModel]:
    """A function to be called after each step, and what it keeps: the parameters with the highest accuracy so far.

    Parameters
    ----------
    model : nn.Module
    accuracy : callable
        Returns a number. Only a higher one than the best so far replaces it; the first always does, unless it is NaN.
    show : bool or callable
        Print each judgement, or give it to a function as a line of text.
    every : int
        Judge at every so many calls.

    Returns
    -------
    cb : callable without arguments
        For ``train(..., cb=cb)``, or as a callback: ``Estimator(callbacks=training.cb(cb))``.
    best : BestModel
        ``score``, ``parameters``, and ``restore()``.

    Notes
    -----
    Source: ``bestmodelselector`` of PrayTools.jl, which starts from 0 and so never keeps a model of negative score.

    Examples
    --------
    >>> model, scores = nn.Linear(1, 1), iter([-3.0, -1.0, -2.0])
    >>> cb, best = bestmodelselector(model, lambda: next(scores))
    >>> for _ in range(3):
    ...     cb()
    >>> best.score
    -1.0
    """
    best = BestModel(model, accuracy, print if show is True else show or None, every)
    return best, best


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) or hasattr(value, "item") else value
