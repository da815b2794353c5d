"""Checkpoints: save training to a folder and resume it exactly."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from fluxutils_py.errors import LoadError
from fluxutils_py.files import atomic_write, remove_leftovers
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.parallel import RankGroup, get_communicator, is_main_process
from fluxutils_py.training.loop import Loop
from fluxutils_py.training.plain_files import read_file, to_plain_data
from fluxutils_py.training.resharding import reshard, state_of_rank
from fluxutils_py.training.triggers import Trigger
from fluxutils_py.validation import check_integer
from fluxutils_py.versions import installed_version

KIND = "fluxutils_py checkpoint"
FORMAT = 1
NAME = re.compile(r"checkpoint-n(\d{7,})-step-(\d{8,})\.pt")
PACKAGES = ("fluxutils_py", "torch", "numpy")  # whose versions a checkpoint tells
Device = str | torch.device
LOG = logging.getLogger("fluxutils_py")


class Checkpointer:
    """Save the state of a run to a folder and restore it.

    A checkpoint is a file ``checkpoint-nNNNNNNN-step-SSSSSSSS.pt``, named by save number and step,
    with a ``.json`` of its step, metrics and versions. Each is written to a temporary file,
    then renamed: if the process is killed during a save, the earlier checkpoints remain, and the
    next save removes the temporary file. As a callback of an ``Estimator``, it saves what ``fit``
    needs, and ``fit`` resumes from it.

    Files hold plain data and tensors; reading them runs no code. On several ranks, rank 0 saves for
    all. Only one run may save to a folder at a time: a save raises ``FileExistsError`` if another
    run has saved since this one restored or saved a checkpoint.

    Parameters
    ----------
    dir : str or path-like
        The folder. The first save creates it.
    keep : int
        Number of newest checkpoints to keep; -1 keeps all.
    take_mean : int
        Number of newest checkpoints over which :meth:`restore` averages the trainable
        floating-point parameters of modules; -1 averages all. Everything else comes from the
        newest. Above 1, training does not resume exactly.
    trigger : Trigger, optional
        When to save as a hook of a loop, such as ``EveryNSeconds(60)``; by default after every
        epoch.

    Notes
    -----
    As a hook it runs last (``priority`` is infinite), so it saves the final state of the step, the
    epoch or the run. It also saves at the end of a run, and when SIGTERM or SIGUSR1 announces the
    end of the job, which it then ends with status 143 or 138; see the module
    ``fluxutils_py.training.checkpointer``.

    On several ranks, it saves the modules and optimizers of rank 0, and everything else of each
    rank. All ranks save together and read the same files: triggers must fire at the same steps, and
    all ranks must see the folder. Another number of ranks can restore a checkpoint: a tracked
    object or hook whose state differs between ranks then needs ``reshard_state_dict(states, rank,
    size)``, which returns the state for one of ``size`` ranks from those of all ranks that saved.
    Without it, each rank gets the state that it saved, and new ranks get the state of rank 0.

    Source: ``checkpoints.Handler`` of gomlx, which also reads truncated files.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py.training import InMemory
    >>> from fluxutils_py.gomlx import Trainer
    >>> from fluxutils_py.training import Loop
    >>> folder = tempfile.TemporaryDirectory()
    >>> def train(epochs):
    ...     torch.manual_seed(0)
    ...     x = torch.randn(20, 3)
    ...     data = InMemory(x, x.sum(1, keepdim=True), batchsize=8, shuffle=True, random_state=0)
    ...     model = torch.nn.Linear(3, 1)
    ...     trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.Adam)
    ...     loop = Loop(trainer)
    ...     checkpoints = Checkpointer(folder.name).track(
    ...         model=model, optimizer=trainer.optimizer, loop=loop, data=data
    ...     )
    ...     checkpoints.restore()
    ...     loop.hooks.attach(checkpoints)
    ...     loop.run_epochs(data, epochs)
    ...     return model.weight
    >>> _ = train(2)
    >>> on = train(5)
    >>> folder.cleanup()
    >>> torch.equal(on, train(5))  # in one go
    True
    >>> folder.cleanup()
    """

    name = "checkpoint"
    priority = math.inf
    collective = True

    def __init__(
        self,
        dir: str | os.PathLike[str],
        keep: int = 1,
        take_mean: int = 1,
        *,
        trigger: Trigger | None = None,
    ) -> None:
        self.dir = Path(dir)
        if self.dir.exists() and not self.dir.is_dir():
            raise NotADirectoryError(f"dir={str(dir)!r} is a file; give the path of a folder")
        if trigger is not None and not isinstance(trigger, Trigger):
            raise TypeError(f"trigger must be a Trigger, such as EveryNSteps(100), got {trigger!r}")
        self.keep = count_or_all("keep", keep)
        self.take_mean = count_or_all("take_mean", take_mean)
        if -1 != self.keep < self.take_mean:
            raise ValueError(
                f"take_mean={take_mean} needs as many checkpoints, but keep={keep}; raise keep"
            )
        self.trigger = trigger
        self.tracked: dict[str, Any] = {}
        # Number of the checkpoint that this run restored or saved last: 0 is none, None not known.
        self._last_number: int | None = None

    # -- save and restore --------------------------------------------------------------------------

    def with_tracked(self, **things: Any) -> Self:
        """Return a copy for the same folder that tracks these objects too; this checkpointer does
        not change.
        """
        other = copy.copy(self)
        other.tracked = dict(self.tracked)
        return other.track(**things)

    def track(self, **things: Any) -> Self:
        """Add objects, by name, that :meth:`save` saves and :meth:`restore` restores in this order.
        Return self.

        Each needs ``state_dict()``, which returns plain data and tensors, and
        ``load_state_dict(state)``: modules, optimizers, schedulers, a :class:`Loop` (with its hooks
        and triggers), datasets, states of generators. Or it is a dict or list of plain data,
        such as ``track(settings={"lr": 0.01})``: :meth:`restore` then replaces the contents of that
        same dict or list; nested ones are new objects.

        Raises
        ------
        TypeError
            If something is neither; the message says what. Nothing is tracked then.
        """
        self.tracked.update({name: as_tracked(name, thing) for name, thing in things.items()})
        return self

    def save(self, loop: Any, metrics: object = None, **unused: object) -> Path | None:
        """Save all tracked objects and return the path. Also an action for hooks (``collective`` on
        several ranks).

        As a hook it may be called with more arguments, such as ``save(loop, metrics)`` of gomlx,
        which it ignores.

        ``loop`` is a :class:`Loop` or another object with ``step``, such as a :class:`TrainState`.
        Without a loop, rank 0 saves its state only, and the other ranks return None.
        """
        if not self.tracked:
            raise ValueError(
                "nothing is tracked: name what to save, such as track(model=model, "
                "optimizer=optimizer)"
            )
        shared = getattr(loop, "ranks", None)
        if shared is None and not is_main_process():
            return None
        ranks = shared or RankGroup()
        ranks.allgather()  # from here on all ranks know an error or stop request of any rank
        state = ranks.guard(self._local_states, ranks)
        others: list[dict[str, Any]] = []
        if shared is None:  # rank 0 saves for all
            others = [{}] * (get_communicator("auto").size - 1)
        elif not ranks.is_single:
            others = ranks.allgather(None if ranks.rank == 0 else state)[1:]
        path = None
        if ranks.rank == 0:
            path = ranks.guard(self._write_checkpoint, loop, state, others)
        return ranks.allgather(path)[0]

    def _local_states(self, ranks: RankGroup) -> dict[str, Any]:
        """Return the states of the tracked objects that differ on this rank; on rank 0, of all."""
        things = self.tracked
        if not ranks.is_single and ranks.rank > 0:  # these are equal on all ranks
            equal = nn.Module | torch.optim.Optimizer
            things = {name: v for name, v in things.items() if not isinstance(v, equal)}
        return {name: to_plain_data(thing.state_dict(), name) for name, thing in things.items()}

    def _write_checkpoint(
        self, loop: Any, state: dict[str, Any], others: list[dict[str, Any]]
    ) -> Path:
        trainable = {
            # a parameter that two modules share is saved under both names
            name: [k for k, p in thing.named_parameters(remove_duplicate=False) if p.requires_grad]
            for name, thing in self.tracked.items()
            if isinstance(thing, nn.Module)
        }
        info = getattr(loop, "step_info", None)
        numbers = {} if info is None else {"batch_loss": info.batch_loss, **info.metrics}
        metrics = {k: v for k, v in numbers.items() if v is None or isinstance(v, int | float)}
        return self.write(state, loop.step, metrics=metrics, trainable=trainable, others=others)

    def load(self, comm: object = "auto") -> None:
        """Do what :meth:`restore` does, and raise FileNotFoundError if there is no checkpoint."""
        if not self.restore(comm):
            raise FileNotFoundError(
                f"there is no checkpoint in {self.dir}; restore() starts afresh then"
            )

    def restore(self, comm: object = "auto") -> bool:
        """Restore the newest checkpoint (on several ranks, the newest that rank 0 sees). Return
        False if there is none.

        All ranks of ``comm`` call it together; ``"auto"`` means the ranks of a tracked loop, else
        of the launcher.

        Raises
        ------
        LoadError
            If the checkpoint does not fit the tracked objects, or cannot be read. The objects then
            keep their state, on all ranks.
        """
        if comm == "auto":
            tracked = self.tracked.values()
            comm = next((thing.ranks for thing in tracked if hasattr(thing, "ranks")), "auto")
        ranks = RankGroup.from_comm(comm, "Checkpointer.restore")
        # What rank 0 sees decides: a checkpoint may appear while ranks look.
        paths = ranks.allgather(ranks.guard(self._paths_to_read))[0]
        self._last_number = save_number(paths[-1]) if paths else 0
        if not paths:
            return False
        before: dict[str, Any] = {}
        try:
            ranks.guard(self._load_files, paths, before, ranks)
            ranks.allgather()  # an error on any rank is one on all, which then undo
        except BaseException:
            for name, state in before.items():
                _load_state(self.tracked[name], state)
            raise
        return True

    def _load_files(self, paths: list[Path], before: dict[str, Any], ranks: RankGroup) -> None:
        """Load the checkpoints into the tracked objects; keep their old states in ``before``."""
        state, others = self._read_files(paths)
        if set(state) != set(self.tracked):
            raise LoadError(
                f"{self.dir} holds {sorted(state)}; track these, not {sorted(self.tracked)}"
            )
        for name, thing in self.tracked.items():
            before[name] = copy.deepcopy(thing.state_dict())
            parts = [part[name] for part in (state, *others) if name in part]
            try:
                if len(others) + 1 == ranks.size:
                    of_rank = state_of_rank(parts, ranks.rank)
                else:
                    of_rank = reshard(thing, parts, ranks.rank, ranks.size)
                _load_state(thing, of_rank)
            except Exception as error:
                raise LoadError(f"{paths[-1]} does not fit, its {name}: {error}") from error

    # -- as a hook of a loop -----------------------------------------------------------------------

    @property
    def companions(self) -> tuple[Preemption]:
        return (Preemption(self),)

    def on_step(self, loop: Loop) -> None:
        if self.trigger is not None:  # which has fired
            self.save(loop)

    def on_epoch(self, loop: Loop) -> None:
        if self.trigger is None:
            self.save(loop)

    def on_end(self, loop: Loop) -> None:
        self.save(loop)

    # -- files -------------------------------------------------------------------------------------

    def paths(self) -> list[Path]:
        """Return the checkpoints in the folder, sorted by save number, oldest first."""
        if not self.dir.is_dir():
            return []
        found = (path for path in self.dir.iterdir() if NAME.fullmatch(path.name))
        return sorted(found, key=save_number)

    def _paths_to_read(self) -> list[Path]:
        """Return the checkpoints to average, oldest first."""
        return self.paths() if self.take_mean == -1 else self.paths()[-self.take_mean :]

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return next(reversed(self.paths()), None)

    def latest_step(self) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        path = self.latest()
        return -1 if path is None else int(path.stem.rpartition("-")[2])

    def write(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        trainable: Mapping[str, list[str]] | None = None,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> Path:
        """Write a checkpoint of plain data and tensors, remove checkpoints beyond ``keep``, and
        return the path.

        Parameters
        ----------
        state : mapping
        step : int
        metrics : mapping of numbers, optional
            Written to the ``.json``.
        trainable : mapping, optional
            For each part of ``state``, by name, the names of the tensors that may be averaged.
        others : sequence of mapping
            For each rank but the first, the parts of ``state`` that differ there.

        Raises
        ------
        TypeError
            If ``state`` holds other data; the message says where. Nothing is written.
        FileExistsError
            If another run saves to the folder too. Its checkpoints stay.
        """
        content = {
            "kind": KIND,
            "format": FORMAT,
            "step": step,
            "trainable": dict(trainable or {}),
            "state": {name: to_plain_data(part, name) for name, part in state.items()},
            "others": list(others),
        }
        about = {
            "step": step,
            "metrics": dict(metrics or {}),
            "versions": {name: installed_version(name) for name in PACKAGES},
        }
        self.dir.mkdir(parents=True, exist_ok=True)
        newest = self.latest()
        number = 0 if newest is None else save_number(newest)
        if newest is not None and self._last_number is not None and number > self._last_number:
            raise FileExistsError(
                f"{newest} is of another run that saves to this folder too; this run knew only of "
                f"number {self._last_number}. End the other run, or give this one another folder; "
                "when started again, this one continues from the newest checkpoint"
            )
        number += 1
        # of processes that were killed during a save
        for left in self.dir.glob(".checkpoint-n*.part"):
            remove_leftovers(str(self.dir / left.name[1:].rsplit(".", 2)[0]))
        path = self.dir / f"checkpoint-n{number:07d}-step-{step:08d}.pt"
        with atomic_write(path) as f:
            torch.save(content, f)
        with atomic_write(path.with_suffix(".json")) as f:
            f.write(json.dumps(about, indent=1, default=str).encode())
        self._last_number = number
        for old in [] if self.keep == -1 else self.paths()[: -self.keep]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
        return path

    def read(
        self, path: str | os.PathLike[str] | None = None, device: Device = "cpu"
    ) -> dict[str, Any] | None:
        """Return the state in a checkpoint, or None if there is none. Without ``path``, the newest
        (see ``take_mean``).

        Raises
        ------
        LoadError
            If a file is damaged; a killed process cannot cause this. Delete the file to use the
            previous checkpoint.
        """
        paths = self._paths_to_read() if path is None else [Path(path)]
        return self._read_files(paths, device)[0] if paths else None

    def _read_files(
        self, paths: list[Path], device: Device = "cpu"
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the state of rank 0, averaged over the files, and the parts that differ on the
        other ranks.
        """
        try:
            contents = [read_file(path, KIND, device, format=FORMAT) for path in reversed(paths)]
        except LoadError as error:
            raise LoadError(
                f"{error}. Delete it to continue from the previous checkpoint, if there is one"
            ) from None
        newest = contents[0]
        states = [content["state"] for content in contents]
        # means over all of its trainable parameters
        for part, names in newest["trainable"].items() if len(states) > 1 else ():
            tensors = newest["state"][part]
            for name in names:
                if not tensors[name].is_floating_point():
                    continue
                try:
                    saved = torch.stack([state[part][name].double() for state in states])
                except (KeyError, RuntimeError) as error:
                    raise LoadError(
                        f"{part}.{name} differs between the newest checkpoints ({error}); set "
                        "take_mean=1"
                    ) from error
                tensors[name] = saved.mean(0).to(tensors[name].dtype)
        return newest["state"], newest.get("others", [])


def _load_state(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.optim.Optimizer):
        load_optimizer_state(thing, state)
    else:
        thing.load_state_dict(state)


def count_or_all(name: str, value: object) -> int:
    """Check a positive integer, or -1 for all, and return it."""
    return -1 if check_integer(name, value) == -1 else check_integer(name, value, 1)


def save_number(path: Path) -> int:
    """Return the save number of a checkpoint."""
    return int(path.name.split("-")[1].removeprefix("n"))


# -- the end of a job, announced by a signal -------------------------------------------------------

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
LOOK_EVERY = 0.2  # seconds between the steps at which ranks exchange whether one got a signal


class Preemption:
    """Hook that on SIGTERM or SIGUSR1 saves a checkpoint after the step in progress, and then ends
    the program.

    Each :class:`Checkpointer` adds one to its loop. If any rank gets one of the signals, all ranks
    save together and raise ``SystemExit(128 + signal)``: 143 for SIGTERM, 138 for SIGUSR1 (on
    Linux). The next start of the program continues from that step.

    It takes over signals with their default action only, in the main thread, while the loop runs. A
    signal that comes after the last step finds the run complete: SIGTERM is passed on then, SIGUSR1
    is not.

    Parameters
    ----------
    checkpointer : Checkpointer

    Notes
    -----
    Several ranks exchange their signals about every fifth of a second, not after every step.

    Sources: ``#SBATCH --signal`` of SLURM, ``terminationGracePeriodSeconds`` of Kubernetes, and
    ``reached_preemption`` of Orbax.
    """

    name = "preemption"
    priority = math.inf  # after everything else has seen the step
    collective = True

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self._signal = 0
        self._handlers: dict[int, Any] = {}

    def on_start(self, loop: Loop) -> None:
        self._signal = 0
        self._step = loop.step  # of the last exchange between ranks
        self._began = time.monotonic()
        self._next = loop.step + 1  # when ranks exchange next
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # A user's handler stays; that of the ranks would end the program without saving.
            if handler is signal.SIG_DFL or getattr(handler, "__self__", None) is loop.ranks:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def on_step(self, loop: Loop) -> None:
        number = self._signal
        if not loop.ranks.is_single:
            if loop.step < self._next:  # ranks exchange their signals only now and then
                return
            rate = (loop.step - self._step) / max(time.monotonic() - self._began, 1e-9)
            signals, rates = zip(*loop.ranks.allgather((number, rate)), strict=True)
            self._step = loop.step
            self._began = time.monotonic()
            # All ranks go by the speed of rank 0: they must exchange at the same steps.
            self._next = loop.step + max(1, int(LOOK_EVERY * rates[0]))
            number = max(signals)
        if not number:
            return
        self._signal = 0
        path = self.checkpointer.save(loop)
        if loop.rank == 0:
            LOG.warning(
                "%s: saved %s; the program ends with status %d, to be started again",
                signal.Signals(number).name,
                path,
                128 + number,
            )
        raise SystemExit(128 + number)

    def on_close(self, loop: Loop) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        if self._signal == signal.SIGTERM:  # after the last step: end as without this hook
            os.kill(os.getpid(), self._signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = self._signal or number


# -- things without a state_dict -------------------------------------------------------------------


class PlainState:
    """A dict or list of plain data with the methods of what checkpoints save and restore.

    Parameters
    ----------
    value : dict or list
        Restoring replaces its contents, and keeps it the same object.

    Examples
    --------
    >>> settings = {"lr": 0.01}
    >>> state = PlainState(settings)
    >>> saved = state.state_dict()
    >>> settings["lr"] = 0.5
    >>> state.load_state_dict(saved)
    >>> settings
    {'lr': 0.01}
    """

    def __init__(self, value: dict[Any, Any] | list[Any]) -> None:
        self.value: Any = value

    def state_dict(self) -> Any:
        """Return a copy of the data."""
        return to_plain_data(self.value, "the data")

    def load_state_dict(self, state: Any) -> None:
        """Replace the contents of the dict or list.

        Raises
        ------
        TypeError
            If the state is of the other kind. Nothing changes then.
        """
        container = dict if isinstance(self.value, dict) else list
        if not isinstance(state, container):
            raise TypeError(
                f"a {type(state).__name__} was saved, and a {container.__name__} is tracked; track "
                "the same kind"
            )
        # a copy, so that changes to the value never reach the checkpoint in memory
        copied = to_plain_data(state, "the data")
        self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(copied)
        else:
            self.value.extend(copied)


def as_tracked(name: str, thing: Any) -> Any:
    """Return an object with ``state_dict`` and ``load_state_dict`` for a thing to be tracked.

    It is the thing itself if it has these methods, else a :class:`PlainState` of a dict or list.

    Raises
    ------
    TypeError
        For anything else, and for a dict or list that holds other data; the message says where.
    """
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return thing
    if isinstance(thing, dict | list):
        to_plain_data(thing, name)  # raises now rather than at the first checkpoint
        return PlainState(thing)
    raise TypeError(
        f"{name} cannot be tracked: a {type(thing).__name__} has no state_dict and "
        "load_state_dict, and is no dict or list of plain data; put a number or a text into a "
        f"dict, {name}={{...}}, which can be restored in place"
    )
