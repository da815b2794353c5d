"""The training loop."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.training.dataset import known_length
from fluxutils_py.training.epoch_progress import EpochProgress
from fluxutils_py.training.generator_state import RandomGenerators
from fluxutils_py.training.hooks import Action, Hooks
from fluxutils_py.training.pending_loss import PendingLoss
from fluxutils_py.training.step_info import StepInfo
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.training.triggers import Trigger

NO_MORE = object()


class Loop:
    """Call a step function for every batch of every epoch, and hooks around it.

    Every hook is called with the loop as its only argument, ``hook(loop)``, and reads what it needs from the
    attributes below.

    Parameters
    ----------
    step : callable
        ``step(batch) -> StepInfo``; or None, if it was not done because ranks agreed to stop before it. Or an object
        with a method ``train_step`` that does this, such as a :class:`Trainer`; it is attached as a hook too, and its
        ``model``, ``optimizer``, ``state``, ``step`` and ``ranks`` are those of the loop.
    comm : "auto", None, "mpi", "torch", a communicator or a RankGroup
        The ranks that run this loop together, each with its own hooks, unless the step brings them. An error or a
        request to stop on one rank becomes one on all, at the next collective.

    Attributes
    ----------
    step : int
        Steps completed so far, over all runs. A loop goes on from the ``step`` of the step object.
    loop_step : int
        The step in progress, counted from 0: in step hooks one less than ``step``, after a run the same.
    epoch : int
        Epochs completed so far, over all runs.
    epoch_step : int
        Completed steps of the epoch in progress.
    start_step, start_epoch : int
        Where the run began.
    end_step : int or None
        Where the run ends. None if that is unknown: in the first epoch over batches without a length; after it, an
        estimate from the epochs so far.
    batch_loss : float or None
        Loss of the last step. A loss that a GPU is still computing is waited for.
    metrics : mapping
        What the last step returned besides, by name.
    record : dict
        Of the epoch that just ended, for ``on_epoch`` hooks to read and to add to: ``epoch``, ``loss`` (mean over
        the data), ``mean_batch_loss`` (mean over the steps), ``seconds``.
    history : list of dict
        The records of all epochs.
    model : nn.Module or None
    optimizer : torch.optim.Optimizer or None
    state : TrainState
        Step, model and optimizer.
    batches : iterable or None
        What the run goes through.
    n_epochs, steps_per_epoch : int or None
        What the run comes to, if it is known.
    train_step_durations : array of float
        Seconds that each step of the run took, without waiting for the batch, and without hooks. On a GPU, what it
        takes to start the work.
    shared_data : dict
        For hooks to leave things for each other.
    rank : int
        Which of the ranks this is: hooks run on all of them, and what one alone is to do is for rank 0.

    Raises
    ------
    FloatingPointError
        In a run, if a step returns a loss that is NaN or infinite; before its hooks, so that none of them saves it.

    Notes
    -----
    Source: ``Loop`` of gomlx ``train``, where ``Epoch`` begins at 0 in each run: that is ``epoch - start_epoch``.

    Examples
    --------
    >>> from fluxutils_py.training import EveryNSteps
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.on_step("print", lambda loop: print(loop.step, loop.batch_loss), trigger=EveryNSteps(2))
    >>> loop.run_epochs([4, 3, 2], epochs=2)
    2 3.0
    4 4.0
    6 2.0
    >>> [record["loss"] for record in loop.history]
    [3.0, 3.0]
    """

    def __init__(self, step: Callable[[Any], StepInfo | None] | Any, comm: Any = "auto") -> None:
        ranks = getattr(step, "ranks", None)
        if ranks is not None and isinstance(comm, RankGroup) and comm.size != ranks.size:
            raise ValueError(f"the step trains on {ranks.size} ranks, the loop on {comm.size}: give the step comm= too")
        self.ranks = RankGroup.from_comm(comm if ranks is None else ranks, "Loop")
        self.rank = self.ranks.rank
        self.hooks = Hooks()
        self.step_fn = getattr(step, "train_step", step)
        if self.step_fn is not step:
            self.hooks.attach(step)
        self.model: nn.Module | None = getattr(step, "model", None)
        self.optimizer: Any = getattr(step, "optimizer", None)
        self._stepper = step
        self._ends_together = getattr(step, "ends_together", False)
        completed = getattr(step, "step", 0)
        self.step = self.loop_step = self.start_step = completed if isinstance(completed, int) else 0
        self.epoch = self.start_epoch = 0
        self.end_step: int | None = None
        self._info = StepInfo(None, 0)
        self.record: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.n_epochs: int | None = None
        self.steps_per_epoch: int | None = None
        self.train_step_durations = array("d")
        self.shared_data: dict[str, Any] = {}
        self._progress = EpochProgress()
        self._running = self._in_epoch_hooks = False
        self._resuming = False  # the next run is the one that was interrupted
        self._stop_requested = False

    # -- hooks ---------------------------------------------------------------------------------------

    def on_start(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` before the first step of each run; lowest priority first."""
        self.hooks.add("start", action, name=name, priority=priority)

    def on_step(self, name: str, action: Action, priority: float | None = None, trigger: Trigger | None = None) -> None:
        """Call ``action(loop)`` after each step, or when a trigger fires."""
        self.hooks.add("step", action, name=name, priority=priority, trigger=trigger)

    def on_epoch(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` after each epoch."""
        self.hooks.add("epoch", action, name=name, priority=priority)

    def on_end(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` after the last step of each run."""
        self.hooks.add("end", action, name=name, priority=priority)

    def stop(self) -> None:
        """End the run after the step in progress, as if it were the last; on all ranks, whichever asks for it."""
        self._stop_requested = True
        self.ranks.stop()

    @property
    def step_info(self) -> StepInfo:
        """What the last step returned."""
        if isinstance(self._info.batch_loss, PendingLoss):
            self._info = replace(self._info, batch_loss=float(self._info.batch_loss))
        return self._info

    @property
    def batch_loss(self) -> float | None:
        return self.step_info.batch_loss

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self._info.metrics

    @property
    def state(self) -> TrainState:
        state = getattr(self._stepper, "state", None)
        return TrainState(self.step, self.model, self.optimizer) if state is None else state  # type: ignore[arg-type]

    @property
    def batches(self) -> Any:
        return self._progress.batches

    @property
    def epoch_step(self) -> int:
        return self._progress.step

    @property
    def stopped(self) -> bool:
        """Whether the run is to end: :meth:`stop` was called in it, and all ranks know."""
        return self.ranks.stopped

    def median_train_step_duration(self) -> float:
        """Median of the seconds that a step took, hooks not included; 0.001 if there was none yet."""
        return statistics.median(self.train_step_durations) if self.train_step_durations else 1e-3

    # -- runs ----------------------------------------------------------------------------------------

    def run_epochs(self, batches: Iterable[Any], epochs: int) -> None:
        """Go through ``batches`` ``epochs`` times. A run that is stopped keeps the record of the epoch it broke off.

        An epoch that :meth:`run_steps` over the same batches left unfinished is finished, and counts as the first; so
        do the epochs of a run that a checkpoint interrupted. After each epoch ``batches.reset()`` is called, if there
        is such a method.

        Raises
        ------
        DataError
            If ``batches`` can be gone through once only, and ``epochs`` is more than that. Nothing is run then.
        """
        if epochs > 1 and isinstance(batches, Iterator) and not hasattr(batches, "reset"):
            raise DataError(
                f"the batches are a {type(batches).__name__}, which can be gone through once, not in {epochs} epochs; "
                "give a list, or an object whose __iter__ begins anew each time"
            )
        self._begin(resume=True)
        self.n_epochs, self.steps_per_epoch = epochs, known_length(batches)
        end_epoch = self.start_epoch + epochs
        if self.steps_per_epoch is not None:
            done = self.epoch_step if self._progress.is_over(batches) else 0
            self.end_step = self.step - done + (end_epoch - self.epoch) * self.steps_per_epoch
        with self._run_hooks():
            while self.epoch < end_epoch and not (self.stopped and self.epoch_step == 0):
                if self.steps_per_epoch is None and self.epoch > self.start_epoch:
                    mean = (self.step - self.epoch_step - self.start_step) / (self.epoch - self.start_epoch)
                    self.end_step = self.start_step + round(mean * epochs)
                self._run_epoch(batches)

    def run_steps(self, batches: Iterable[Any], n: int) -> None:
        """Take ``n`` more steps, also after a checkpoint was restored. No epoch ends.

        A later run over the same ``batches`` goes on behind the last step. With ``n = 0`` nothing happens.

        Raises
        ------
        DataError
            If the batches end before. The next run begins with their first.
        """
        if n != 0:
            self._begin(resume=False)
            self._run_to(batches, self.step + n)

    def run_to_step(self, batches: Iterable[Any], step: int) -> None:
        """:meth:`run_steps` until ``loop.step`` is ``step``. A run that a checkpoint interrupted goes on."""
        if step > self.step or self._resuming:
            self._begin(resume=True)
            self._run_to(batches, step)

    def _run_to(self, batches: Iterable[Any], step: int) -> None:
        self.n_epochs = self.steps_per_epoch = None
        self.end_step, first = step, self.step
        with self._run_hooks():
            self._take_steps(batches, max(step - first, 0))
            if self.step < step and not self.stopped:
                self._progress.close()
                self.ranks.raise_on_all(
                    DataError(
                        f"the batches ended after {self.step - first} of {step - first} steps; give more of them, or "
                        "run_epochs to go through them again"
                    )
                )

    def _begin(self, resume: bool) -> None:
        self.ranks.clear_stop()
        if self._resuming and resume:
            if self._stop_requested:
                self.ranks.stop()
        else:
            self.start_step, self.start_epoch = self.step, self.epoch
            self._stop_requested = False
        self._resuming = False
        self.end_step = None
        self.train_step_durations = array("d")

    @contextmanager
    def _run_hooks(self) -> Iterator[None]:
        """Call the hooks at the start and the end of a run."""
        ranks, self._running = self.ranks, True
        with ranks:
            try:
                ranks.guard(self.hooks.check_restored)
                if not ranks.is_single:
                    ranks.guard(self.hooks.check_collective_triggers)
                self._call_hooks("start")
                yield
                self.end_step = self.step
                self._call_hooks("end")
            except BaseException:
                self._progress.close()
                raise
            finally:
                self._running = False
                self.hooks.run("close", self)
            ranks.allgather()

    def _call_hooks(self, event: str) -> None:
        self.hooks.run(event, self)
        self.ranks.allgather()

    def _run_epoch(self, batches: Iterable[Any]) -> None:
        self._take_steps(batches)
        self.record = {"epoch": self.epoch + 1, **self._progress.record()}
        self._progress.close()
        if hasattr(batches, "reset"):
            self.ranks.guard(batches.reset)
        self._in_epoch_hooks = True
        try:
            self._call_hooks("epoch")
        finally:
            self._in_epoch_hooks = False
        self.history.append(self.record)
        self.epoch += 1

    def _take_steps(self, batches: Iterable[Any], n: int | None = None) -> None:
        """Take a step for each batch that is left of the epoch, or for the next ``n``."""
        ranks, progress, clock = self.ranks, self._progress, time.perf_counter
        source = ranks.guard(progress.open, batches)
        end = None if n is None else self.step + n
        progress.start_clock()
        while self.step != end and not ranks.stopped:
            batch = ranks.guard(next, source, NO_MORE)
            if batch is NO_MORE and ranks.is_single:
                break
            self.loop_step = self.step
            began = clock()
            info = self._checked_step(batch) if ranks.is_single else self._step_with_others(batch)
            if info is None:
                break
            self.train_step_durations.append(clock() - began)
            progress.add(info)
            self._info = info
            self.step += 1
            self.hooks.run("step", self)
        progress.read_pending()
        progress.stop_clock()
        self.loop_step = self.step
        ranks.allgather()

    def _checked_step(self, batch: Any) -> StepInfo | None:
        info = self.step_fn(batch)
        loss = None if info is None else info.batch_loss
        if not (loss is None or isinstance(loss, PendingLoss) or math.isfinite(loss)):
            raise FloatingPointError(f"the loss of step {self.step + 1} is {loss}")
        return info

    def _step_with_others(self, batch: Any) -> StepInfo | None:
        """A step of several ranks; one whose batches have ended takes part until those of all have."""
        if self._ends_together:
            return self.step_fn(None if batch is NO_MORE else batch)
        if not any(self.ranks.allgather(batch is not NO_MORE)):
            return None
        return StepInfo(None, 0) if batch is NO_MORE else self.ranks.guard(self._checked_step, batch)

    # -- going on in another process -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop as plain data: counters, means, history, hooks, torch's random generators.

        Saved by the last hook of a step, of an epoch or of the run, it is complete: another loop, with the same
        hooks, that loads it and is then run with the same arguments over the same batches, goes on from there, and
        ends as this one will.
        """
        in_hooks = self._in_epoch_hooks
        return {
            "step": self.step,
            "epoch": self.epoch + in_hooks,
            "progress": self._progress.state_dict(),
            "run": (self.start_step, self.start_epoch) if self._running else None,
            "stop": self._running and (self._stop_requested or self.stopped),
            "history": [dict(record) for record in [*self.history, *([self.record] if in_hooks else [])]],
            "hooks": self.hooks.state_dict(),
            "random": self._generators().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        The next :meth:`run_epochs` or :meth:`run_to_step` is the run that was interrupted, and takes as many epochs or
        steps, those already done included; :meth:`run_steps` takes so many more. In an epoch in progress, the batches
        done are passed over: by ``batches.skip(n)``, an iterator over the others, if there is such a method; else they
        are read once more. Hooks may be added before or after; a run raises ``LoadError`` if one is missing that has
        a state.
        """
        self.hooks.load_state_dict(state["hooks"])
        self._progress.load_state_dict(state["progress"])
        self.step = self.loop_step = state["step"]
        self.epoch = state["epoch"]
        self._resuming = state["run"] is not None
        if self._resuming:
            self.start_step, self.start_epoch = state["run"]
        self._stop_requested = state["stop"]
        self.history = [dict(record) for record in state["history"]]
        self._generators().load_state_dict(state["random"])

    def _generators(self) -> RandomGenerators:
        device = next((p.device for p in self.model.parameters()), None) if self.model is not None else None
        return RandomGenerators(device)
