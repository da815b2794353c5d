"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fluxutils_py.parallel import Sync
from fluxutils_py.training.hooks import Action, Hooks

NO_MORE = object()


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one step gives: its loss (None if it computed none) and how many data it was a mean over."""

    loss: float | None
    n_live: int = 1


class Loop:
    """Call a step function for every batch of every epoch, and hooks around it.

    Parameters
    ----------
    step : callable
        ``step(batch) -> StepInfo``; or None, if it was not done because ranks agreed to stop before it.
    sync : Sync, optional
        The ranks that run this loop together, each with its own hooks. An error or a wish to stop on one becomes
        one on all, at the step's collective or, for what comes after it, at the next. None: this process alone.

    Attributes
    ----------
    step : int
        Steps completed so far, over all runs.
    epoch : int
        Epochs completed so far, over all runs.
    info : StepInfo
        Of the last step.
    record : dict
        Of the epoch that just ended, for ``on_epoch`` hooks to read and to add to: ``epoch``, ``loss`` (mean over
        the data), ``window_loss`` (mean over the steps), ``seconds``.
    history : list of dict
        The records of all epochs.
    n_epochs, steps_per_epoch : int or None
        What the run will come to, if it is known.
    shared_data : dict
        For hooks to leave things for each other.
    rank : int
        Which of the ranks this is: hooks run on all of them, and what one alone is to do is for rank 0.

    Notes
    -----
    Source: ``Loop`` of gomlx ``train``.
    """

    def __init__(self, step: Callable[[Any], StepInfo | None], sync: Sync | None = None) -> None:
        self.step_fn = step
        self.sync = Sync() if sync is None else sync
        self.rank = self.sync.rank
        self.hooks = Hooks()
        self.step = self.epoch = 0
        self.info = StepInfo(None, 0)
        self.record: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.n_epochs: int | None = None
        self.steps_per_epoch: int | None = None
        self.shared_data: dict[str, Any] = {}

    def on_start(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called before the first step of each run; lowest priority first."""
        self.hooks.add("start", action, name=name, priority=priority)

    def on_step(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called after each step."""
        self.hooks.add("step", action, name=name, priority=priority)

    def on_epoch(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called after each epoch."""
        self.hooks.add("epoch", action, name=name, priority=priority)

    def on_end(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called after the last step of each run."""
        self.hooks.add("end", action, name=name, priority=priority)

    def stop(self) -> None:
        """End the run after the step that is under way, as if it were the last; on all ranks, whichever asks for it."""
        self.sync.stop()

    @property
    def stopped(self) -> bool:
        """Whether the run is to end: :meth:`stop` was called in it, and all ranks know."""
        return self.sync.stopped

    def run_epochs(self, batches: Iterable[Any], epochs: int) -> None:
        """Go through ``batches`` ``epochs`` times. A run that is stopped keeps the record of the epoch it broke off."""
        self.n_epochs = epochs
        self.steps_per_epoch = len(batches) if isinstance(batches, Sized) else None
        with self._hooked():
            for _ in range(epochs):
                if self.stopped:
                    break
                self._run_epoch(batches)

    def run_steps(self, batches: Iterable[Any], n: int) -> None:
        """Take ``n`` more steps, or as many as there are batches; no epoch begins or ends.

        An iterator is left where it is, and the next run goes on from there.
        """
        self.n_epochs = self.steps_per_epoch = None
        with self._hooked():
            if not self.stopped:
                self._walk(islice(batches, n))

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The hooks around a run."""
        sync = self.sync
        sync.restart()
        try:
            sync.attempt(self.hooks.run, "start", self)
            sync.share()
            yield
            sync.attempt(self.hooks.run, "end", self)
            sync.share()
        finally:
            sync.attempt(self.hooks.run, "close", self)
        sync.share()

    def _run_epoch(self, batches: Iterable[Any]) -> None:
        began = time.perf_counter()
        losses = self._walk(batches)
        self.record = {"epoch": self.epoch + 1, **losses, "seconds": time.perf_counter() - began}
        self.sync.attempt(self.hooks.run, "epoch", self)
        self.sync.share()
        self.history.append(self.record)
        self.epoch += 1

    def _walk(self, batches: Iterable[Any]) -> dict[str, float | None]:
        """Take a step for each batch; their mean losses."""
        n_steps, n_live, total, weighted, sync = 0, 0, 0.0, 0.0, self.sync
        source = iter(batches)
        try:
            while (batch := sync.attempt(next, source, NO_MORE)) is not NO_MORE:
                info = self.step_fn(batch)
                if info is None:
                    break
                self.info = info
                self.step += 1
                if info.loss is not None:
                    n_steps += 1
                    n_live += info.n_live
                    total += info.loss
                    weighted += info.loss * info.n_live
                sync.attempt(self.hooks.run, "step", self)
                if sync.stopped:
                    break
        finally:
            if hasattr(source, "close"):  # a generator that reads ahead in the background stops now
                source.close()
        sync.share()
        return {
            "loss": weighted / n_live if n_live else None,
            "window_loss": total / n_steps if n_steps else None,
        }
