"""The training loop."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fluxutils_py.errors import DataError
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.dataset import iterate_from, known_length
from fluxutils_py.training.hooks import Action, Hooks
from fluxutils_py.training.pending_loss import PendingLoss
from fluxutils_py.training.triggers import Trigger

NO_MORE = object()


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one step gives: its loss (None if it computed none), how many data it was a mean over, and metrics.

    A loss that a GPU is still computing is a number for hooks all the same: ``loop.info`` waits for it.
    """

    loss: Any
    n_live: float = 1
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Sums:
    """Of the steps of an epoch so far."""

    n_steps: int = 0
    n_live: float = 0
    total: float = 0.0
    weighted: float = 0.0
    seconds: float = 0.0

    def add(self, info: StepInfo) -> None:
        if info.loss is not None:
            self.n_steps += 1
            self.n_live += info.n_live
            self.total += info.loss
            self.weighted += info.loss * info.n_live

    def means(self) -> dict[str, float | None]:
        return {
            "loss": self.weighted / self.n_live if self.n_live else None,
            "mean_batch_loss": self.total / self.n_steps if self.n_steps else None,
            "seconds": self.seconds,
        }


class Loop:
    """Call a step function for every batch of every epoch, and hooks around it.

    Parameters
    ----------
    step : callable
        ``step(batch) -> StepInfo``; or None, if it was not done because ranks agreed to stop before it. Or an object
        with a method ``train_step`` that does this, such as a :class:`Trainer`; it is attached as a hook too.
    comm : RankGroup, optional
        The ranks that run this loop together, each with its own hooks. An error or a wish to stop on one becomes
        one on all, at the step's collective or, for what comes after it, at the next. None: this process alone.

    Attributes
    ----------
    step : int
        Steps completed so far, over all runs. If the step is an object that counts its steps in ``step``, it goes on
        from there.
    loop_step : int
        The step under way, counted from 0: in step hooks one less than ``step``, after a run the same.
    epoch : int
        Epochs completed so far, over all runs.
    epoch_step : int
        Steps completed of the epoch under way.
    start_step : int
        Where the run began.
    end_step : int or None
        Where the run ends. None if that is not known: in the first epoch over batches without a length; after it, an
        estimate from the epochs so far.
    record : dict
        Of the epoch that just ended, for ``on_epoch`` hooks to read and to add to: ``epoch``, ``loss`` (mean over
        the data), ``mean_batch_loss`` (mean over the steps), ``seconds``.
    history : list of dict
        The records of all epochs.
    n_epochs, steps_per_epoch : int or None
        What the run will come to, if it is known.
    train_step_durations : array of float
        Seconds that each step of the run took: the step alone, without waiting for the batch, and without hooks. On a
        GPU, what it takes to set the step to work.
    shared_data : dict
        For hooks to leave things for each other.
    rank : int
        Which of the ranks this is: hooks run on all of them, and what one alone is to do is for rank 0.
    model : nn.Module or None
        What is trained, if the step is an object that has it, as all of this package have.

    Raises
    ------
    FloatingPointError
        In a run, if a step returns a loss that is NaN or infinite; before its hooks, so that none of them saves it.

    Notes
    -----
    Source: ``Loop`` of gomlx ``train``.

    Examples
    --------
    >>> from fluxutils_py.training import Every
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.on_step("print", lambda loop: print(loop.step, loop.info.loss), trigger=Every(2))
    >>> loop.run_epochs([4, 3, 2], epochs=2)
    2 3.0
    4 4.0
    6 2.0
    >>> [record["loss"] for record in loop.history]
    [3.0, 3.0]
    """

    def __init__(self, step: Callable[[Any], StepInfo | None] | Any, comm: RankGroup | None = None) -> None:
        self.ranks = RankGroup() if comm is None else comm
        self.rank = self.ranks.rank
        self.hooks = Hooks()
        self.step_fn = getattr(step, "train_step", step)
        if self.step_fn is not step:
            self.hooks.attach(step)
        self.model = getattr(step, "model", None)
        made = getattr(step, "step", 0)
        self.step = self.loop_step = self.start_step = made if isinstance(made, int) else 0
        self.epoch = self.epoch_step = self._start_epoch = 0
        self.end_step: int | None = None
        self._info = StepInfo(None, 0)
        self._late: deque[StepInfo] = deque()  # whose losses have not been read yet, oldest first
        self.record: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.n_epochs: int | None = None
        self.steps_per_epoch: int | None = None
        self.train_step_durations = array("d")
        self.shared_data: dict[str, Any] = {}
        self._batches: Any = None
        self._source: Iterator[Any] | None = None  # what is left of the epoch under way, of those batches
        self._sums, self._began = _Sums(), 0.0
        self._running = self._between = False  # in a run; in the hooks at the end of an epoch
        self._goes_on = False  # the next run is the one that was interrupted
        self._asked_to_stop = False

    def on_start(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called before the first step of each run; lowest priority first."""
        self.hooks.add("start", action, name=name, priority=priority)

    def on_step(self, name: str, action: Action, priority: float = 0, trigger: Trigger | None = None) -> None:
        """Have ``action(loop)`` called after each step, or after those at which a trigger fires."""
        self.hooks.add("step", action, name=name, priority=priority, trigger=trigger)

    def on_epoch(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called after each epoch."""
        self.hooks.add("epoch", action, name=name, priority=priority)

    def on_end(self, name: str, action: Action, priority: float = 0) -> None:
        """Have ``action(loop)`` called after the last step of each run."""
        self.hooks.add("end", action, name=name, priority=priority)

    def stop(self) -> None:
        """End the run after the step that is under way, as if it were the last; on all ranks, whichever asks for it."""
        self._asked_to_stop = True
        self.ranks.stop()

    @property
    def info(self) -> StepInfo:
        """Of the last step; its loss is waited for, if a GPU is still computing it."""
        if isinstance(self._info.loss, PendingLoss):
            self._info = replace(self._info, loss=float(self._info.loss))
        return self._info

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

        An epoch that earlier :meth:`run_steps` over the same batches left unfinished is finished, and counts as the
        first. After each epoch ``batches.reset()`` is called, if there is such a method.

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
        self._begin()
        self.n_epochs, self.steps_per_epoch = epochs, known_length(batches)
        until = self._start_epoch + epochs
        if self.steps_per_epoch is not None:
            made = self.epoch_step if self._is_under_way(batches) else 0
            self.end_step = self.step - made + (until - self.epoch) * self.steps_per_epoch
        with self._hooked():
            while self.epoch < until and not (self.stopped and self.epoch_step == 0):
                if self.steps_per_epoch is None and self.epoch > self._start_epoch:
                    each = (self.step - self.epoch_step - self.start_step) / (self.epoch - self._start_epoch)
                    self.end_step = self.start_step + round(each * epochs)
                self._run_epoch(batches)

    def run_steps(self, batches: Iterable[Any], n: int) -> None:
        """Take ``n`` more steps. No epoch ends: a later run over the same ``batches`` goes on behind the last step.

        Raises
        ------
        DataError
            If the batches end before. The next run begins with their first.
        """
        self._begin()
        self._run_to(batches, self.start_step + n)

    def run_to_step(self, batches: Iterable[Any], step: int) -> None:
        """:meth:`run_steps` until ``step`` is so much; nothing if it is that or more already."""
        self._begin()
        self._run_to(batches, step)

    def _run_to(self, batches: Iterable[Any], step: int) -> None:
        self.n_epochs = self.steps_per_epoch = None
        self.end_step, began = step, self.step
        with self._hooked():
            self._walk(batches, max(step - self.step, 0))
            if self.step < step and not self.stopped:
                self._leave()
                self.ranks.raise_on_all(
                    DataError(
                        f"the batches ended after {self.step - began} of {step - began} steps; give more of them, or "
                        "run_epochs to go through them again"
                    )
                )

    def _begin(self) -> None:
        self.ranks.clear_stop()
        if self._goes_on:
            if self._asked_to_stop:
                self.ranks.stop()
        else:
            self.start_step, self._start_epoch = self.step, self.epoch
            self._asked_to_stop = False
        self._goes_on = False
        self.end_step = None
        self.train_step_durations = array("d")

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The hooks around a run."""
        ranks, self._running = self.ranks, True
        try:
            ranks.guard(self.hooks.require_all)
            if not ranks.is_single:
                ranks.guard(self.hooks.require_one_clock)
            ranks.guard(self.hooks.run, "start", self)
            ranks.allgather()
            yield
            self.end_step = self.step
            ranks.guard(self.hooks.run, "end", self)
            ranks.allgather()
            self.hooks.run_collective("end", self)
        except BaseException:
            self._leave()
            raise
        finally:
            self._running = False
            ranks.guard(self.hooks.run, "close", self)
        ranks.allgather()

    def _run_epoch(self, batches: Iterable[Any]) -> None:
        self._walk(batches)
        sums = self._sums
        self._leave()
        if hasattr(batches, "reset"):
            self.ranks.guard(batches.reset)
        self.record = {"epoch": self.epoch + 1, **sums.means()}
        self._between = True
        try:
            self.ranks.guard(self.hooks.run, "epoch", self)
            self.ranks.allgather()
            self.hooks.run_collective("epoch", self)
        finally:
            self._between = False
        self.history.append(self.record)
        self.epoch += 1

    def _walk(self, batches: Iterable[Any], n: int | None = None) -> None:
        """Take a step for each batch that is left of the epoch, or for the next ``n``."""
        ranks, clock = self.ranks, time.perf_counter
        source = ranks.guard(self._open, batches)
        end = None if n is None else self.step + n
        self._began = clock()
        while self.step != end and not ranks.stopped and (batch := ranks.guard(next, source, NO_MORE)) is not NO_MORE:
            self.loop_step = self.step
            began = clock()
            info = self.step_fn(batch)
            if info is None:
                break
            self.train_step_durations.append(clock() - began)
            if isinstance(info.loss, PendingLoss):
                self._late.append(info)
                self._settle(1)
            else:
                if info.loss is not None and not math.isfinite(info.loss):
                    ranks.raise_on_all(FloatingPointError(f"the loss of step {self.step + 1} is {info.loss}"))
                self._sums.add(info)
            self._info = info
            self.step += 1
            self.epoch_step += 1
            ranks.guard(self.hooks.run, "step", self)
            self.hooks.run_collective("step", self)
        self._settle(0)
        self.loop_step = self.step
        now = clock()
        self._sums.seconds += now - self._began
        self._began = now
        ranks.allgather()

    def _settle(self, but: int) -> None:
        """Read the losses that a GPU was still computing, but for the newest ones; it works on those meanwhile."""
        while len(self._late) > but:
            info = self._late.popleft()
            self._sums.add(replace(info, loss=float(info.loss)))

    # -- the epoch under way -------------------------------------------------------------------------

    def _is_under_way(self, batches: Iterable[Any]) -> bool:
        """Whether the epoch under way is one over these batches."""
        return self.epoch_step > 0 if self._source is None else self._batches is batches

    def _open(self, batches: Iterable[Any]) -> Iterator[Any]:
        """What is left of the epoch under way, or all of a new one."""
        if not self._is_under_way(batches):
            self._leave()
        if self._source is None:
            self._batches, self._source = batches, iterate_from(batches, self.epoch_step)
        return self._source

    def _leave(self) -> None:
        """The epoch under way is over, or given up."""
        source, batches, self._source, self._batches = self._source, self._batches, None, None
        self.epoch_step, self._sums = 0, _Sums()
        self._late.clear()
        close = getattr(source, "close", None)
        if close is not None and source is not batches:  # it may be reading ahead; batches are the caller's to close
            close()

    # -- going on in another process -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this loop is, as plain data: counters, sums, history, and what hooks and triggers remember.

        Asked by the last hook of a step, of an epoch or of the run, it lacks nothing: another loop, with the same
        hooks, that loads it and is then run with the same arguments over the same batches, goes on behind that
        point, and ends as this one will.
        """
        self._settle(0)
        sums = asdict(self._sums)
        if self.epoch_step:
            sums["seconds"] += time.perf_counter() - self._began if self._running else 0.0
        return {
            "step": self.step,
            "epoch": self.epoch + self._between,
            "epoch_step": self.epoch_step,
            "run": (self.start_step, self._start_epoch) if self._running else None,
            "stop": self._running and (self._asked_to_stop or self.stopped),
            "sums": sums,
            "history": [dict(record) for record in [*self.history, *([self.record] if self._between else [])]],
            "hooks": self.hooks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        The next run is the one that was interrupted, and so takes the same number of steps or epochs, those already
        done included. In an epoch under way, the batches done are passed over: by ``batches.skip(n)``, an iterator
        over the others, if there is such a method; else they are read once more. Hooks may be added before or after;
        one that is missing then, and remembered something, is a ``LoadError``.
        """
        self.hooks.load_state_dict(state["hooks"])
        self._leave()
        self.step = self.loop_step = state["step"]
        self.epoch, self.epoch_step = state["epoch"], state["epoch_step"]
        self._goes_on = state["run"] is not None
        if self._goes_on:
            self.start_step, self._start_epoch = state["run"]
        self._asked_to_stop = state["stop"]
        self._sums = _Sums(**state["sums"])
        self.history = [dict(record) for record in state["history"]]
