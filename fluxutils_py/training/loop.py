"""The training loop."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import nn

from fluxutils_py.errors import DataError
from fluxutils_py.parallel.rank_group import RankGroup
from fluxutils_py.training.generator_state import RandomGenerators
from fluxutils_py.training.hooks import Action, Hooks
from fluxutils_py.training.resharding import reshard, state_of_rank
from fluxutils_py.training.step_info import PendingLoss, StepInfo
from fluxutils_py.training.train_state import TrainState
from fluxutils_py.training.triggers import Trigger

NO_MORE = object()  # what a rank without further batches gets in place of one


class Loop:
    """Training loop: call a step function for every batch of every epoch, and call hooks.

    The loop calls every hook as ``hook(loop)``. Hooks read what they need from the attributes
    below.

    Parameters
    ----------
    step : callable
        ``step(batch)`` returns a :class:`StepInfo`, or None if the ranks agreed to stop before the
        step. Or an object with such a method ``train_step``, for example a :class:`Trainer`: the
        loop attaches it as a hook too, and uses its ``model``, ``optimizer``, ``state``, ``step``
        and ``ranks``.
    comm : "auto", None, "mpi", "torch", a communicator or a RankGroup
        The ranks that run this loop together; ignored if the step has ``ranks``. Each rank calls
        its hooks. An error or a request to stop on one rank reaches all ranks at the next
        collective.

    Attributes
    ----------
    step : int
        Number of steps completed in all runs. The loop starts from the ``step`` of the step object.
    loop_step : int
        Index of the step in progress, from 0: ``step - 1`` in step hooks, ``step`` after a run.
    epoch : int
        Number of epochs completed in all runs.
    epoch_step : int
        Number of steps completed in the current epoch.
    start_step, start_epoch : int
        ``step`` and ``epoch`` at the start of the run.
    end_step : int or None
        ``step`` at the end of the run. If the batches have no length, None during the first epoch,
        then an estimate from the completed epochs.
    batch_loss : float or None
        Loss of the last step. Reading it waits for the GPU if the loss is still being computed.
    metrics : mapping
        Other values that the last step returned, by name. Hooks may add some.
    record : dict
        Record of the epoch that just ended: ``epoch``, ``loss`` (mean over the data),
        ``mean_batch_loss`` (mean over the steps) and ``seconds``. Epoch hooks read it and may add
        entries.
    history : list of dict
        The records of all epochs.
    model : nn.Module or None
    optimizer : torch.optim.Optimizer or None
    state : TrainState
        Step, model and optimizer.
    trainer : callable or object
        What was given as ``step``.
    batches : iterable or None
        The batches of the run, from its start hooks on.
    n_epochs, steps_per_epoch : int or None
        Number of epochs of the run and of steps per epoch, if known.
    train_step_durations : array of float
        Duration of each step of the run in seconds, without loading the batch and without hooks. On
        a GPU, the time to launch the work.
    shared_data : dict
        Values that hooks share with each other.
    rank : int
        Hooks run on all ranks; let only rank 0 write files or print.

    Raises
    ------
    FloatingPointError
        During a run, if a step returns a NaN or infinite loss. The step's hooks do not run, so none
        saves the model.

    Notes
    -----
    Source: ``Loop`` of gomlx ``train``, whose ``Epoch`` starts at 0 in each run: here ``epoch -
    start_epoch``.

    Examples
    --------
    >>> from fluxutils_py.training import EveryNSteps
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.on_step(
    ...     "print", lambda loop: print(loop.step, loop.batch_loss), trigger=EveryNSteps(2)
    ... )
    >>> _ = loop.run_epochs([4, 3, 2], epochs=2)
    2 3.0
    4 4.0
    6 2.0
    >>> [record["loss"] for record in loop.history]
    [3.0, 3.0]
    """

    def __init__(self, step: Any, comm: object = "auto") -> None:
        ranks = getattr(step, "ranks", None)
        if ranks is not None and isinstance(comm, RankGroup) and comm.size != ranks.size:
            raise ValueError(
                f"the step trains on {ranks.size} ranks, the loop on {comm.size}: give the step "
                "comm= too"
            )
        self.ranks = RankGroup.from_comm(comm if ranks is None else ranks, "Loop")
        self.rank = self.ranks.rank
        self.hooks = Hooks()
        self.step_fn = getattr(step, "train_step", step)
        if self.step_fn is not step:  # an object: its hooks come before those of users
            self.hooks.attach(step)
        self.model: nn.Module | None = getattr(step, "model", None)
        self.optimizer: Any = getattr(step, "optimizer", None)
        self.trainer = step
        self._ends_together = getattr(step, "ends_together", False)
        self._shares_batches = getattr(step, "shares_batches", None)
        completed = getattr(step, "step", 0)
        self.step = completed if isinstance(completed, int) else 0
        self.loop_step = self.step
        self.start_step = self.step
        self.epoch = 0
        self.start_epoch = 0
        self.end_step: int | None = None
        self._info = StepInfo(None, 0)
        self.record: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.n_epochs: int | None = None
        self.steps_per_epoch: int | None = None
        self.train_step_durations = array("d")  # 8 bytes per step of a long run
        self.shared_data: dict[str, Any] = {}
        self.batches: Iterable[Any] | None = None
        self._progress = EpochProgress()
        self._running = False
        self._in_epoch_hooks = False  # the epoch's record is complete, but not yet in the history
        self._resuming = False  # whether the next run continues an interrupted one
        # whether the loop was saved between an epoch's last step and its end, and has not run since
        self._awaits_epoch_end = False
        self._stop_requested = False

    # -- hooks -------------------------------------------------------------------------------------

    def on_start(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` before the first step of each run; lowest priority first."""
        self.hooks.add("start", action, name=name, priority=priority)

    def on_step(
        self,
        name: str,
        action: Action,
        priority: float | None = None,
        trigger: Trigger | None = None,
    ) -> None:
        """Call ``action(loop)`` after each step, or only when ``trigger`` fires."""
        self.hooks.add("step", action, name=name, priority=priority, trigger=trigger)

    def on_epoch(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` after each epoch."""
        self.hooks.add("epoch", action, name=name, priority=priority)

    def on_end(self, name: str, action: Action, priority: float | None = None) -> None:
        """Call ``action(loop)`` after the last step of each run."""
        self.hooks.add("end", action, name=name, priority=priority)

    def stop(self) -> None:
        """End the run on all ranks after the step in progress, as if it were the last. Any rank may
        call it.
        """
        self._stop_requested = True  # a checkpoint keeps the wish, as the run has not ended yet
        self.ranks.stop()

    @property
    def step_info(self) -> StepInfo:
        """The :class:`StepInfo` of the last step."""
        if isinstance(self._info.batch_loss, PendingLoss):  # read it once, and only if wanted
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
        state = getattr(self.trainer, "state", None)
        if state is not None:
            return state
        return TrainState(self.step, self.model, self.optimizer)  # type: ignore[arg-type]  # None

    @property
    def epoch_step(self) -> int:
        return self._progress.step

    @property
    def stopped(self) -> bool:
        """Whether the run ends after this step: a rank called :meth:`stop`, and all ranks know."""
        return self.ranks.stopped

    def median_train_step_duration(self) -> float:
        """Return the median duration of a step in seconds, without hooks; 0.001 before the first
        step.
        """
        return statistics.median(self.train_step_durations) if self.train_step_durations else 1e-3

    # -- runs --------------------------------------------------------------------------------------

    def run_epochs(self, batches: Iterable[Any], epochs: int) -> Mapping[str, Any]:
        """Train for ``epochs`` passes over ``batches``; return the metrics of the last step.

        If the run is stopped, the unfinished epoch is recorded too. If :meth:`run_steps` left an
        epoch over the same batches unfinished, the run finishes it and counts it as the first. A
        run resumed from a checkpoint counts its completed epochs too. After each epoch the loop
        calls ``batches.reset()`` if it exists.

        Raises
        ------
        DataError
            If ``batches`` is an iterator, which can be read only once, and ``epochs`` is above 1.
            No step runs.
        """
        if epochs > 1 and isinstance(batches, Iterator) and not hasattr(batches, "reset"):
            raise DataError(
                f"the batches are a {type(batches).__name__}, which can be iterated over only "
                f"once, not in {epochs} epochs; give a list, or an object that can be iterated "
                "over again"
            )
        self._begin_run(batches, resume=True)
        self.n_epochs = epochs
        self.steps_per_epoch = known_length(batches)
        end_epoch = self.start_epoch + epochs
        if self.steps_per_epoch is not None:
            completed = self.epoch_step if self._progress.is_over(batches) else 0
            n_epochs_left = end_epoch - self.epoch
            self.end_step = self.step - completed + n_epochs_left * self.steps_per_epoch
        with self._run_hooks(**self._settings_of_run(epochs)):
            while self.epoch < end_epoch and not (self.stopped and self.epoch_step == 0):
                if self.steps_per_epoch is None and self.epoch > self.start_epoch:
                    self.end_step = self._estimated_end(epochs)
                self._take_steps(batches)
                self._end_epoch(batches)
        return self.metrics

    def _settings_of_run(self, epochs: int) -> dict[str, Any]:
        """Return what all ranks must have alike, or some would wait for others forever."""
        settings: dict[str, Any] = {"epochs": epochs}
        if self._shares_batches is not None:
            settings["batches"] = "same" if self._shares_batches else "per_rank"
        if self._shares_batches:
            settings["batches of an epoch"] = self.steps_per_epoch
        return settings

    def _estimated_end(self, epochs: int) -> int:
        """Return the step at the end of the run, from the mean length of the completed epochs."""
        n_steps = self.step - self.epoch_step - self.start_step
        n_epochs = self.epoch - self.start_epoch
        return self.start_step + round(n_steps / n_epochs * epochs)

    def run_steps(self, batches: Iterable[Any], n: int) -> Mapping[str, Any]:
        """Take ``n`` more steps, counted from now even after a restore; return the metrics. No
        epoch ends.

        A later run over the same ``batches`` continues after the last step. ``n = 0`` does nothing
        and returns no metrics.

        Raises
        ------
        DataError
            If there are fewer than ``n`` batches left. The next run starts again at the first
            batch.
        """
        self._require_equal_steps(n)
        if not n:
            return {}
        return self._run_until(batches, self.step + n, resume=False)

    def run_to_step(self, batches: Iterable[Any], step: int) -> Mapping[str, Any]:
        """Take steps until ``loop.step`` is ``step``, as :meth:`run_steps` does. Continue a
        restored run.
        """
        self._require_equal_steps(max(step - self.step, 0))
        if step <= self.step and not self._resuming:
            return {}
        return self._run_until(batches, step, resume=True)

    def _require_equal_steps(self, n: int) -> None:
        """Raise :class:`RankError` on every rank unless all are to take as many steps; some might
        take none.
        """
        if not self.ranks.is_single:
            with self.ranks as ranks:
                ranks.require_equal({"steps": n})

    def _run_until(self, batches: Iterable[Any], step: int, resume: bool) -> Mapping[str, Any]:
        ends_epoch = self._awaits_epoch_end
        self._begin_run(batches, resume)
        self.n_epochs = self.steps_per_epoch = None
        self.end_step = step
        first = self.step
        with self._run_hooks():
            if ends_epoch:
                self._end_epoch(batches)
            self._take_steps(batches, max(step - first, 0))
            if self.step < step and not self.stopped:
                self._progress.close()
                self.ranks.raise_on_all(
                    DataError(
                        f"the batches ended after {self.step - first} of {step - first} steps; "
                        "give more of them, or run_epochs to go through them again"
                    )
                )
        return self.metrics

    def _begin_run(self, batches: Iterable[Any], resume: bool) -> None:
        self.batches = batches
        self.epoch -= self._awaits_epoch_end  # the run ends it
        self._awaits_epoch_end = False
        self.ranks.clear_stop()
        if self._resuming and resume:
            if self._stop_requested:
                self.ranks.stop()
        else:
            self.start_step = self.step
            self.start_epoch = self.epoch
            self._stop_requested = False
        self._resuming = False
        self.end_step = None
        self.train_step_durations = array("d")

    @contextmanager
    def _run_hooks(self, **settings: Any) -> Iterator[None]:
        """Call the start hooks, then the end hooks; always the close hooks. Ranks compare the
        settings.
        """
        ranks = self.ranks
        self._running = True
        with ranks:
            try:
                ranks.guard(self.hooks.check_restored)
                if not ranks.is_single:
                    ranks.require_equal({**self.hooks.agree(ranks), **settings})
                ranks.guard(self._run_begins)
                self._call_hooks("start")
                yield
                self.end_step = self.step
                ranks.guard(self._run_ends)
                self._call_hooks("end")
            except BaseException:
                self._progress.close()  # the source may hold threads that read ahead
                raise
            finally:
                self._running = False
                self.hooks.run("close", self)
            ranks.allgather()

    # What a loop of a fit does itself, before the hooks.

    def _run_begins(self) -> None:
        """Do what comes before the first step."""

    def _step_ends(self) -> None:
        """Do what follows a step."""

    def _epoch_ends(self) -> None:
        """Do what follows the last step of an epoch, whose ``record`` is there."""

    def _run_ends(self) -> None:
        """Do what follows the last step."""

    def _call_hooks(self, event: str) -> None:
        self.hooks.run(event, self)
        self.ranks.allgather()  # an error or a wish to stop on one rank is then known on all

    def _end_epoch(self, batches: Iterable[Any]) -> None:
        """Record an epoch whose steps have been taken, and call its hooks."""
        self.record = {"epoch": self.epoch + 1, **self._progress.record()}
        self._progress.close()
        self.ranks.guard(getattr(batches, "reset", lambda: None))
        self._in_epoch_hooks = True
        try:
            self.ranks.guard(self._epoch_ends, collective=True)
            self._call_hooks("epoch")
        finally:
            self._in_epoch_hooks = False
        self.history.append(self.record)
        self.epoch += 1

    def _take_steps(self, batches: Iterable[Any], n: int | None = None) -> None:
        """Take a step for each remaining batch of the epoch, or for the next ``n``."""
        ranks = self.ranks
        progress = self._progress
        clock = time.perf_counter
        # Without batches to open, this rank still takes part: the next collective tells the others.
        source = ranks.guard(progress.open, batches)
        end = None if n is None else self.step + n
        progress.start_clock()
        while self.step != end and not ranks.stopped:
            batch = ranks.guard(next, source, NO_MORE)
            if batch is NO_MORE and ranks.is_single:
                break  # on several ranks, others may still have batches
            self.loop_step = self.step
            began = clock()
            info = self.step_fn(batch) if ranks.is_single else self._step_with_others(batch)
            if info is None:
                break
            self._require_finite(info)
            self.train_step_durations.append(clock() - began)
            # Counted before the hooks, which read the record and may save it.
            progress.add(info)
            self._info = info
            self.step += 1
            ranks.guard(self._step_ends)
            self.hooks.run("step", self)
        progress.read_pending()
        progress.stop_clock()
        self.loop_step = self.step
        ranks.allgather()

    def _require_finite(self, info: StepInfo | None) -> StepInfo | None:
        loss = None if info is None else info.batch_loss
        # A pending loss checks itself when it is read.
        if not (loss is None or isinstance(loss, PendingLoss) or math.isfinite(loss)):
            raise FloatingPointError(f"the loss of step {self.step + 1} is {loss}")
        return info

    def _step_with_others(self, batch: object) -> StepInfo | None:
        """Take one step on several ranks; a rank without batches takes part until none has any."""
        if self._ends_together:
            return self.step_fn(None if batch is NO_MORE else batch)
        if not any(self.ranks.allgather(batch is not NO_MORE)):
            return None
        if batch is NO_MORE:
            return StepInfo(None, 0)
        return self.ranks.guard(lambda: self._require_finite(self.step_fn(batch)))

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop as plain data: counters, means, history, hooks, torch's
        random generators.

        Save it in the last hook of a step, an epoch or the run: a loop with the same hooks that
        loads it and runs with the same arguments over the same batches then continues and ends
        exactly as this loop.
        """
        # In epoch hooks the epoch is over, although the counters say so only after the last hook.
        finished = [self.record] if self._in_epoch_hooks else []
        return {
            "step": self.step,
            "epoch": self.epoch - self._awaits_epoch_end + len(finished),
            "awaits_epoch_end": self._awaits_epoch_end or self._all_steps_taken(),
            "progress": self._progress.state_dict(),
            "run": (self.start_step, self.start_epoch) if self._running else None,
            "stop": self._running and (self._stop_requested or self.stopped),
            "history": [dict(record) for record in [*self.history, *finished]],
            "hooks": self.hooks.state_dict(),
            "random": self._random_generators().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The next :meth:`run_epochs` or :meth:`run_to_step` continues the interrupted run: its
        argument includes the epochs or steps already completed. :meth:`run_steps` counts from now.
        In an unfinished epoch the loop skips the completed batches with ``batches.skip(n)``, an
        iterator over the remaining ones; without that method it reads and drops them. An epoch all
        of whose steps were taken counts in ``epoch``; the next run begins with its hooks. Add hooks
        before or after; a run raises ``LoadError`` if a hook with a saved state is missing.
        """
        self.hooks.load_state_dict(state["hooks"])
        self._progress.load_state_dict(state["progress"])
        self.step = state["step"]
        self.loop_step = self.step
        self._awaits_epoch_end = state.get("awaits_epoch_end", False)  # 0.2.0 did not save it
        self.epoch = state["epoch"] + self._awaits_epoch_end
        self._resuming = state["run"] is not None
        self.start_step, self.start_epoch = state["run"] or (self.start_step, self.start_epoch)
        self._stop_requested = state["stop"]
        self.history = [dict(record) for record in state["history"]]
        self._random_generators().load_state_dict(state["random"])

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """Return the state for one of ``size`` ranks, from the states of the ranks that saved a
        checkpoint.
        """
        parts = {"hooks": self.hooks, "random": self._random_generators()}
        divided = {
            name: reshard(part, [state[name] for state in states], rank, size)
            for name, part in parts.items()
        }
        return {**state_of_rank(states, rank), **divided}

    def _all_steps_taken(self) -> bool:
        """Return whether a run of epochs has taken the last step of an epoch, and not ended it."""
        return self.epoch_step > 0 and self.epoch_step == self.steps_per_epoch

    def _random_generators(self) -> RandomGenerators:
        params = iter(()) if self.model is None else self.model.parameters()
        return RandomGenerators(next((p.device for p in params), None))


# -- one epoch -------------------------------------------------------------------------------------

SUMS = ("n_losses", "n_live", "total", "weighted")  # of EpochProgress, which a checkpoint holds


class EpochProgress:
    """Position of an epoch in its batches, and the sums behind the means in its record.

    Attributes
    ----------
    step : int
        Number of steps completed in the epoch.
    batches : iterable or None
        The batches of the epoch.
    """

    def __init__(self) -> None:
        self.batches: Iterable[Any] | None = None
        self._source: Iterator[Any] | None = None  # the rest of the epoch
        self._pending: deque[StepInfo] = deque()  # steps with unread losses, oldest first
        self._reset_sums()

    def _reset_sums(self) -> None:
        self.step = 0
        self.n_losses = 0
        self.n_live = 0.0
        self.total = 0.0
        self.weighted = 0.0  # losses times their data
        self._seconds = 0.0
        self._started: float | None = None
        self._pending.clear()

    def is_over(self, batches: Iterable[Any]) -> bool:
        """Return whether an epoch over these batches has begun."""
        return self.step > 0 if self._source is None else self.batches is batches

    def open(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return the rest of the epoch, or a new epoch if the batches are others."""
        if not self.is_over(batches):
            self.close()
        if self._source is None:
            self._source = iterate_from(batches, self.step)
            self.batches = batches
        return self._source

    def close(self) -> None:
        """Forget the epoch, complete or not."""
        source = self._source
        batches = self.batches
        self._source = None
        self.batches = None
        self._reset_sums()
        close = getattr(source, "close", None)
        # The iterator may be reading ahead. Batches that are their own iterator the caller closes.
        if close is not None and source is not batches:
            close()

    def add(self, info: StepInfo) -> None:
        """Count a step."""
        self.step += 1
        if isinstance(info.batch_loss, PendingLoss):
            self._pending.append(info)
            self.read_pending(keep=1)
        elif info.batch_loss is not None:
            self._add_loss(info.batch_loss, info.n_live)

    def read_pending(self, keep: int = 0) -> None:
        """Read the losses computed on a GPU, except the ``keep`` newest, which it may still be
        computing.
        """
        while len(self._pending) > keep:
            info = self._pending.popleft()
            self._add_loss(float(info.batch_loss), info.n_live)

    def _add_loss(self, batch_loss: float, n_live: float) -> None:
        self.n_losses += 1
        self.n_live += n_live
        self.total += batch_loss
        self.weighted += batch_loss * n_live

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        self._seconds = self.seconds
        self._started = None

    @property
    def seconds(self) -> float:
        if self._started is None:
            return self._seconds
        return self._seconds + (time.perf_counter() - self._started)

    def record(self) -> dict[str, float | None]:
        """Return the means over the steps so far, and the seconds."""
        return {
            "loss": self.weighted / self.n_live if self.n_live else None,
            "mean_batch_loss": self.total / self.n_losses if self.n_losses else None,
            "seconds": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        self.read_pending()
        return {
            "step": self.step,
            "seconds": self.seconds,
            **{name: getattr(self, name) for name in SUMS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        self.step = state["step"]
        self._seconds = state["seconds"]
        for name in SUMS:
            setattr(self, name, state[name])


def known_length(batches: object) -> int | None:
    """Return the number of batches in a pass, or None if it is unknown."""
    try:
        return len(batches)  # type: ignore[arg-type]  # what has no length raises TypeError
    except TypeError:
        return None


def iterate_from(batches: Iterable[Any], done: int) -> Iterator[Any]:
    """Return a pass without its first ``done`` batches: call ``batches.skip``, or else read and
    drop them.
    """
    if not done:
        return iter(batches)
    if hasattr(batches, "skip"):
        return iter(batches.skip(done))
    rest = iter(batches)
    deque(islice(rest, done), maxlen=0)
    return rest
