"""The ranks of a call, which agree on errors, on stopping and on values."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.errors import RankError, RemoteError
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.parallel.communicator import (
    METHODS,
    Communicator,
    Link,
    SingleProcessComm,
    describe_by_rank,
    describe_error,
    mean_of_buffers,
    name_ranks,
)
from fluxutils_py.parallel.launched_comm import LaunchedComm
from fluxutils_py.parallel.launcher import detect_launcher
from fluxutils_py.parallel.mpi import MPIComm
from fluxutils_py.parallel.torch_distributed import TorchComm

T = TypeVar("T")
SIGNAL_GRACE = 0.5  # seconds to wait for a signal that another rank got
END = "the end of the program"


_thread = threading.local()  # group: the innermost entered group of several ranks


class RankGroup:
    """Context manager for the ranks that run one call together. A single rank has no overhead.

    Every collective carries errors. :meth:`guard` and the end of the ``with`` block keep an error
    of one rank until the next collective, where all ranks raise in the same step: the failed rank
    raises the original error, the others raise :class:`RemoteError`, or ``FloatingPointError`` if
    the error is one. SIGINT and SIGTERM are kept in the same way. So every rank takes part in every
    collective, even after an error, and no rank waits forever.

    There are two kinds of collectives: the sum over ranks in a training step, and all others, which
    begin with an ``allgather``. So a failed rank knows which collective comes next. Entering a
    group again inside its ``with`` block changes nothing.

    Parameters
    ----------
    comm : Communicator, optional
        None: this process alone.
    call : str
        Name of the call, for errors and warnings when other ranks call something else, or nothing.

    Attributes
    ----------
    rank, size : int
    is_single : bool
        Whether there is only one rank.
    stopped : bool
        Whether all ranks know that training must stop.
    error_is_shared : bool
        Whether all ranks know of the current error.
    """

    def __init__(self, comm: Communicator | None = None, call: str = "fit") -> None:
        self.comm = SingleProcessComm() if comm is None else comm
        self.call = call
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.is_single = self.size == 1
        self._link: Any = None if self.is_single else Link.of(self.comm)
        self.error: BaseException | None = None  # of this rank; unknown to the others so far
        self.error_is_shared = False
        self.stopped = False
        self._wants_stop = False
        self._has_met = False  # in a collective of this group
        self._is_broken = False  # after a collective failed: no other is possible
        self._is_interrupt = False
        self._all_left = False  # no rank has a batch any more
        self._signal: int | None = None
        self._error_is_signal = False
        self._depth = 0  # with blocks in progress
        self._n_guarded = 0  # functions under guard in progress
        self._n_steps = 0  # training steps so far
        self._outer: RankGroup | None = None
        self._handlers: dict[int, Any] = {}

    @classmethod
    def from_comm(cls, comm: Any, call: str, *, allow_nested: bool = True) -> RankGroup:
        """Return the ranks for a ``comm`` argument, see :func:`get_communicator`; return a
        RankGroup unchanged.

        Inside another call of several ranks, such as in a callback of ``fit``, where a rank may
        fail and leave, the group is this process alone. If ``allow_nested`` is false, this raises
        RuntimeError instead.
        """
        if isinstance(comm, RankGroup):
            return comm
        if getattr(_thread, "group", None) is None:
            return cls(get_communicator(comm), call)
        if not allow_nested:
            raise RuntimeError(
                f"{call} is for all ranks, but within another call of theirs, such as in a "
                "callback of fit, a rank that fails would be missing; call it afterwards"
            )
        return cls(SingleProcessComm(), call)

    # -- entering, leaving, stopping ---------------------------------------------------------------

    def __enter__(self) -> RankGroup:
        if self.is_single:
            return self
        self._depth += 1
        if self._depth == 1:
            if self.error_is_shared:  # from an earlier run
                self.error = None
                self.error_is_shared = self._error_is_signal = self._is_interrupt = False
            self._outer = getattr(_thread, "group", None)
            _thread.group = self
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    if signal.getsignal(number) is not None:  # else Python cannot restore it
                        self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_single:
            return
        try:
            is_news = error is not None and not self.error_is_shared
            if is_news and self._depth == 1 and not self._is_broken:
                self.error = self.error or error
                self._exchange_answers(None)  # the others wait in a collective for the error
        finally:
            self._depth -= 1
            if self._depth == 0:
                _thread.group = self._outer
                self._outer = None
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)
                if self._signal is not None:  # too late for this call: pass it on
                    number = self._signal
                    self._signal = None
                    os.kill(os.getpid(), number)

    def guard(self, f: Callable[..., T], *args: Any, collective: bool = False) -> T | None:
        """Return ``f(*args)``. With several ranks, keep an error for the next collective and return
        None.

        Set ``collective`` if all ranks call ``f`` together. Otherwise collectives in ``f`` raise
        RuntimeError, since a rank that fails earlier would be missing.
        """
        if self.is_single:
            return f(*args)
        self._n_guarded += not collective
        try:
            return f(*args)
        except BaseException as error:
            if self.error_is_shared or self._is_broken:
                raise
            self.error = self.error or error
            return None
        finally:
            self._n_guarded -= not collective

    @property
    def is_leaving(self) -> bool:
        """Whether this rank has an error or a stop request to report, so that further work is
        pointless.
        """
        return self.error is not None or self._wants_stop

    def stop(self) -> None:
        """Ask all ranks to stop after the current step. They stop when the request has reached
        them.
        """
        self._wants_stop = True
        self.stopped = self.stopped or self.is_single

    def clear_stop(self) -> None:
        """Withdraw the request to stop."""
        self.stopped = self._wants_stop = False

    # -- training steps ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, take_part: Callable[[], Any]) -> Iterator[None]:
        """Enclose a training step, whose sum over ranks carries :meth:`flags`.

        In a user-written loop, a rank may have fewer batches than others, or end the program.
        Before its next collective of another kind, and at the end of the program, it then calls
        ``take_part()``, a step without a batch, until all ranks have left. Horovod calls this
        ``join``.
        """
        if self.is_single:
            yield
            return
        if self._link.group is not self:
            self._link.leave_steps()
        if self._depth:  # a loop that has entered the group keeps ranks in step
            yield
            return
        try:
            with self:
                yield
        except BaseException:
            self._link.take_part = None
            raise
        self._link.group = self
        self._link.take_part = None if self._all_left else take_part

    def flags(self) -> tuple[float, float]:
        """Return as numbers, to sum over ranks, whether this rank failed and whether it wants to
        stop.
        """
        self._keep_signal()
        self._n_steps += 1
        return float(self.error is not None), float(self._wants_stop)

    def check_flags(self, n_failed: float, n_stopping: float, n_batches: float = 1) -> None:
        """React to the sums of :meth:`flags`, and to the number of ranks that had a batch.

        Raise on every rank if a rank failed; set ``stopped`` if a rank wants to stop.
        """
        if n_failed:
            self.allgather()
        if n_stopping:
            self._agree_to_stop()
        self._all_left = self.stopped or not n_batches

    def call_comm(self, collective: Callable[..., T], *args: Any) -> T:
        """Call a method of the communicator. If it fails, try no further collectives."""
        if self._n_guarded:
            raise RuntimeError(
                f"{self.call} is for all ranks, but called in a hook or function that each rank "
                "runs by itself: a rank that fails would be missing. Make it a collective hook of "
                "the loop, or call it after the run"
            )
        if self._link.ended:
            raise RankError(
                f"{self.call} is for all ranks, and {name_ranks(self._link.ended)} ended the "
                "program"
            )
        if not self._link.is_used:
            links = list(Link.registry.values())  # ranks that are threads add theirs meanwhile
            if not any(link.is_used for link in links):  # so that it runs before communicators end
                atexit.register(_end_program)
            self._link.is_used = True
        try:
            if isinstance(self.comm, LaunchedComm):
                self.comm.describe_wait = self._describe_wait
            return collective(*args)
        except BaseException:
            self._is_broken = True  # nobody knows what the other ranks wait for
            self._link.is_broken = True
            raise
        finally:
            self._has_met = True
            if isinstance(self.comm, LaunchedComm):
                self.comm.describe_wait = None

    # -- collectives -------------------------------------------------------------------------------

    def allgather(self, value: Any = None) -> list[Any]:
        """Return the values of all ranks in rank order; values are small plain data. Raise if a
        rank failed.
        """
        if self.is_single:
            return [value]
        calls, errors, wishes_to_stop, values = zip(*self._exchange_answers(value), strict=True)
        self._link.ended = [rank for rank, call in enumerate(calls) if call == END]
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failed:
            self._raise_shared(failed)
        if len(set(calls)) > 1:
            self.raise_on_all(
                RankError(
                    f"ranks call different things: {describe_by_rank(calls)}; call the same on "
                    "every rank"
                )
            )
        if any(wishes_to_stop):
            self._agree_to_stop()
        return list(values)

    def _agree_to_stop(self) -> None:
        self.stopped = True
        self._wants_stop = False

    def require_equal(self, fields: Mapping[str, Any]) -> None:
        """Raise :class:`RankError` on every rank unless all have the same fields. Compare values as
        text.
        """
        if self.is_single:
            return
        answers = self.allgather({name: str(value) for name, value in fields.items()})
        for name in dict.fromkeys(name for answer in answers for name in answer):
            values = [answer.get(name, "none") for answer in answers]
            if len(set(values)) > 1:
                self.raise_on_all(
                    RankError(
                        f"ranks disagree about {name}: {describe_by_rank(values)}; every rank must "
                        "be given the same arguments and run the same versions"
                    )
                )

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors of any types with the tensors of rank 0, bit by bit."""
        # an empty one has no bits, and strides that cannot be viewed as bytes
        tensors = [t for t in tensors if t.numel()]
        if self.is_single or not tensors:
            return
        parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        everything = torch.cat(parts)
        self.call_comm(self.comm.broadcast_, everything)
        with torch.no_grad():
            for t, part in zip(tensors, everything.split([p.numel() for p in parts]), strict=True):
                t.copy_(part.clone().view(t.dtype).view(t.shape))

    def broadcast_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Check that all ranks have the same named parameters and buffers, then :meth:`broadcast`
        them.
        """
        self.require_equal(
            {
                f"parameter {i}": f"{name} {tuple(t.shape)} {t.dtype}"
                for i, (name, t) in enumerate(named.items())
            }
        )
        self.broadcast(named.values())

    def average(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Make tensors equal: floats that differ become the weighted mean, integers take the values
        of rank 0.
        """
        if self.is_single or not tensors:
            return
        values = dict(enumerate(t.detach().cpu() for t in tensors))
        weights, of_ranks = zip(*self.allgather((weight, values)), strict=True)
        means = mean_of_buffers(of_ranks, weights)
        with torch.no_grad():
            for i, t in enumerate(tensors):
                t.copy_(means[i])

    # -- errors ------------------------------------------------------------------------------------

    def raise_on_all(self, error: BaseException) -> NoReturn:
        """Raise an error that every rank raises here, as all ranks decide on the same numbers."""
        self.error_is_shared = True
        raise error

    def is_interrupt(self, error: BaseException) -> bool:
        """Return whether the user interrupted the call.

        The answer is the same on all ranks if they share the error.
        """
        return self._is_interrupt if self.error_is_shared else isinstance(error, KeyboardInterrupt)

    def resynchronize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, n_updates: int
    ) -> int:
        """Make model and optimizer the same on all ranks after a shared error, which may leave one
        half updated.

        Parameters
        ----------
        n_updates : int
            Number of updates on this rank.

        Returns
        -------
        int
            Number of updates of the model, the same on all ranks.
        """
        if self.is_single or not self.error_is_shared:
            return n_updates
        tensors = [t for t in model.state_dict().values() if torch.is_tensor(t)]
        # as bytes, since NumPy lacks some types of torch
        flat = (t.detach().cpu().contiguous().view(-1) for t in tensors)
        digest = digest_arrays(*(t.view(torch.uint8).numpy() for t in flat))
        answers = self.comm.allgather((self.error is None, n_updates, digest))
        if len({answer[1:] for answer in answers}) == 1:
            return n_updates
        # a rank without an error has completed its update; of several the one ahead, then the first
        root = max(range(self.size), key=lambda rank: (answers[rank][:2], -rank))
        content = (model.state_dict(), optimizer.state_dict()) if self.rank == root else None
        states = self.comm.allgather(content)[root]
        if self.rank != root:
            model.load_state_dict(states[0])
            load_optimizer_state(optimizer, states[1])
        return answers[root][1]

    def _raise_shared(self, failed: dict[int, tuple[str, str]]) -> NoReturn:
        self.error_is_shared = True
        self._is_interrupt = any(
            name in ("signal", "KeyboardInterrupt") for name, _ in failed.values()
        )
        deadline = time.monotonic() + SIGNAL_GRACE
        if "signal" in dict(failed.values()):
            # a launcher signals all ranks: a signal that comes later would end this process
            while self.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
                self._keep_signal()
        if self.error is not None:
            raise self.error
        text = "; ".join(f"rank {rank}: {message}" for rank, (_, message) in failed.items())
        if all(name == "FloatingPointError" for name, _ in failed.values()):
            raise FloatingPointError(text.replace("FloatingPointError: ", ""))
        raise RemoteError(text)

    def _exchange_answers(self, value: Any) -> list[tuple[Any, ...]]:
        """Return what every rank has to tell, in rank order: its call, the name and text of its
        error, whether it wants to stop, and its value.
        """
        if self._link.group is not self or not self._depth:
            try:
                self._link.leave_steps()
            except BaseException:
                self.error_is_shared = True
                raise
        self._keep_signal()
        error = None
        if self.error is not None:
            name = "signal" if self._error_is_signal else type(self.error).__name__
            error = name, describe_error(self.error)
        answer = self.call, error, self._wants_stop, value
        answers: list[tuple[Any, ...]] = self.call_comm(self.comm.allgather, answer)
        return answers

    def _describe_wait(self) -> tuple[str, str] | None:
        """Return what a rank that waits for others is doing, and advice; None for a wait that may
        last.
        """
        if self.call == END:
            return None
        if not self._has_met:
            return (
                self.call,
                f"Under several ranks all of them call {self.call}; for one rank alone, set "
                "comm=None",
            )
        where = f"{self.call}, training step {self._n_steps}," if self._n_steps else self.call
        return (
            where,
            "A rank that is missing hangs, or is busy with something that the others do not do",
        )

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signal = number

    def _keep_signal(self) -> None:
        if self._signal is not None and self.error is None:
            name = signal.Signals(self._signal).name
            if self._signal == signal.SIGINT:
                self.error = KeyboardInterrupt(name)
            else:
                self.error = SystemExit(128 + self._signal)  # as a shell reports a signal
            self._signal = None
            self._error_is_signal = True


def _end_program() -> None:
    """Tell ranks that wait for this rank that it has ended, and whether with an error."""
    if "mpi4py.run" in sys.modules:  # which ends the other ranks if this one failed
        return
    error = getattr(sys, "last_value", None)
    for link in Link.registry.values():
        is_open = getattr(link.comm, "is_open", lambda: False)
        if not link.is_used or link.is_broken or link.ended or not is_open():
            continue
        # nothing is raised: the interpreter is ending
        with contextlib.suppress(BaseException):
            if link.group is not None:
                link.group.error = error
            link.leave_steps()
        with contextlib.suppress(BaseException):
            group = RankGroup(link.comm, END)
            group.error = error
            group.allgather()


# -- the argument ``comm`` -----------------------------------------------------------------------


def get_communicator(comm: Any) -> Communicator:
    """Return the communicator for a ``comm`` argument.

    Parameters
    ----------
    comm : "auto", "mpi", "torch", None, or a communicator
        ``"auto"`` looks for the environment variables that ``mpirun``, ``srun`` and ``torchrun``
        set; without them it starts neither MPI nor torch.distributed. In child processes and
        threads, such as joblib's workers, it means this process alone, and so does None.

    Raises
    ------
    ImportError
        If ``comm`` is "mpi", or ``mpirun`` started this process, and mpi4py is not installed.
    RuntimeError
        For ``"mpi"`` in a child process.
    ValueError
        For anything else.
    """
    if isinstance(comm, str) and comm == "auto":
        comm = detect_launcher()
    name = comm if isinstance(comm, str) else ""  # arrays and the like have no single truth of ==
    if comm is None:
        return SingleProcessComm()
    if name == "mpi":
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "comm='mpi' in a child process, which is no separate rank; use comm='auto', "
                "which is this process alone here, or do without child processes (n_jobs=1)"
            )
        return MPIComm.world()
    if name == "torch":
        return TorchComm.world()
    if not isinstance(comm, str | type) and all(hasattr(comm, name) for name in METHODS):
        return comm
    raise ValueError(
        "comm must be 'auto', None, 'mpi', 'torch' or a communicator (an object with "
        f"{', '.join(METHODS)}), got {comm!r}"
    )


def is_main_process(state: Any = None, comm: Any = "auto") -> bool:
    """Whether this process writes files and prints: rank 0 does so for all.

    Parameters
    ----------
    state : optional
        A :class:`Loop`, or another object with ``ranks``: rank 0 of those writes. Objects without
        it are ignored.
    comm : "auto", "mpi", "torch", None or Communicator
        The ranks to use if ``state`` has none. None: every process writes.
    """
    ranks = getattr(state, "ranks", None)
    return (get_communicator(comm) if ranks is None else ranks).rank == 0


@contextlib.contextmanager
def ranks_of_call(
    comm: Any,
    call: str,
    sharded: bool,
) -> Iterator[RankGroup]:
    """Enclose a call of the ranks for a ``comm`` argument, undisturbed by what surrounds it; one
    with ``sharded=True`` rejects calls without it.
    """
    if not isinstance(sharded, bool | np.bool_):
        raise TypeError(
            f"sharded must be True (each rank has its own series) or False, got {sharded!r}"
        )
    with (
        undisturbed(),
        RankGroup.from_comm(comm, f"{call}(sharded=True)" if sharded else call) as ranks,
    ):
        yield ranks
