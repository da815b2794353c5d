"""What the ranks of one call tell each other: gradients, errors, and the wish to stop."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fluxutils_py.errors import RankError, RemoteError
from fluxutils_py.nn.vectors import dense_gradients, flatten_into
from fluxutils_py.optim import load_optimizer_state
from fluxutils_py.parallel.comm import Communicator, SingleProcessComm, get_communicator

T = TypeVar("T")
TAIL = 5  # numbers behind the gradients: weight, weight * loss, live steps, ranks that failed, that wish to stop
GRACE = 0.5  # seconds to wait for a signal that another rank has had
_busy = threading.local()  # whether this thread is within a call of several ranks


class RankGroup:
    """The ranks that run one call together, as a context manager; one rank alone pays nothing for it.

    Every collective carries errors. One that a rank raises by itself is kept by :meth:`guard`, and by the end of the
    ``with`` block, until the next collective: there all ranks raise, in the same step. The rank that failed raises its
    own error, the others :class:`RemoteError` (or ``FloatingPointError``, if that is what it was). SIGINT and SIGTERM
    are kept in the same way. So every rank takes part in every collective, whatever happened to it, and none waits in
    vain. ``error_is_shared`` says that all ranks know of the error that is on its way.

    Collectives are of two kinds: those of a training step, :meth:`reduce` (a vector of known size), and all the
    others, which come down to one ``allgather``, so that a rank that failed always knows what the next one is.

    Parameters
    ----------
    comm : Communicator, optional
        None: this process alone.
    call : str
        What is called, for errors and warnings if other ranks call something else, or nothing.

    Attributes
    ----------
    rank, size : int
    is_single : bool
        Whether there is one rank only.
    stopped : bool
        Whether all ranks know that training is to stop.
    """

    def __init__(self, comm: Communicator | None = None, call: str = "fit") -> None:
        self.comm = SingleProcessComm() if comm is None else comm
        self.call = call
        self.rank, self.size = self.comm.rank, self.comm.size
        self.is_single = self.size == 1
        self.error: BaseException | None = None  # of this rank; the others do not know of it yet
        self.error_is_shared = self.stopped = False
        self._wish = self._met = self._lost = self._interrupted = False
        self._signal: int | None = None
        self._signalled = False  # whether the error is a signal
        self._handlers: dict[int, Any] = {}

    @classmethod
    def from_comm(cls, comm: Any, call: str, *, allow_nested: bool = True) -> RankGroup:
        """For an estimator's ``comm`` argument.

        Within another call of several ranks, such as in a callback of ``fit``, which one rank may leave by an error, it
        is this process alone; or a RuntimeError, if ``allow_nested`` is false.
        """
        if isinstance(comm, RankGroup):
            return comm
        if not getattr(_busy, "yes", False):
            return cls(get_communicator(comm), call)
        if not allow_nested:
            raise RuntimeError(
                f"{call} is for all ranks, but within another call of theirs, such as in a callback of fit, a rank "
                "that fails would be missing; call it afterwards"
            )
        return cls(SingleProcessComm(), call)

    # -- from beginning to end -----------------------------------------------------------------------

    def __enter__(self) -> RankGroup:
        if not self.is_single:
            _busy.yes = True
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    if signal.getsignal(number) is not None:  # else it is not Python's to put back
                        self._handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_single:
            return
        try:
            if error is not None and not self.error_is_shared and not self._lost:
                self.error = self.error or error
                self._tell(None)
        finally:
            _busy.yes = False
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._signal is not None:  # too late for this call: to whom it concerns
                os.kill(os.getpid(), self._signal)

    def guard(self, f: Callable[..., T], *args: Any) -> T | None:
        """``f(*args)``; with several ranks, an error is kept for the next collective, and None returned."""
        if self.is_single:
            return f(*args)
        try:
            return f(*args)
        except BaseException as error:
            if self.error_is_shared or self._lost:
                raise
            self.error = self.error or error
            return None

    @property
    def is_leaving(self) -> bool:
        """Whether this rank has something to tell that makes further work pointless."""
        return self.error is not None or self._wish

    def stop(self) -> None:
        """Wish that all ranks stop after the step that is under way; they do once they have heard of it."""
        self._wish = True
        self.stopped = self.stopped or self.is_single

    def clear_stop(self) -> None:
        """Forget that training was to stop."""
        self.stopped = self._wish = False

    # -- collectives ---------------------------------------------------------------------------------

    def allgather(self, value: Any = None) -> list[Any]:
        """The values of all ranks, in their order; small plain data. Raises if a rank failed."""
        if self.is_single:
            return [value]
        told = self._tell(value)
        calls = [call for call, *_ in told]
        if len(set(calls)) > 1:
            self.raise_on_all(
                RankError(f"ranks call different things: {describe_by_rank(calls)}; call the same on every rank")
            )
        failed = {rank: error for rank, (_, error, _, _) in enumerate(told) if error is not None}
        if failed:
            self._raise(failed)
        if any(wish for _, _, wish, _ in told):
            self.stopped, self._wish = True, False
        return [value for *_, value in told]

    def require_equal(self, fields: dict[str, Any]) -> None:
        """Raise :class:`RankError` on every rank unless all have the same fields; values are compared as text."""
        if self.is_single:
            return
        told = self.allgather({name: str(value) for name, value in fields.items()})
        for name in dict.fromkeys(name for given in told for name in given):
            values = [given.get(name, "none") for given in told]
            if len(set(values)) > 1:
                self.raise_on_all(
                    RankError(
                        f"ranks disagree about {name}: {describe_by_rank(values)}; every rank must be given the same "
                        "arguments and run the same versions"
                    )
                )

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors of any types with those of rank 0, bit by bit."""
        tensors = list(tensors)
        if self.is_single or not tensors:
            return
        parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        everything = torch.cat(parts)
        self.comm.broadcast_(everything)
        with torch.no_grad():
            for t, part in zip(tensors, everything.split([p.numel() for p in parts]), strict=True):
                t.copy_(part.clone().view(t.dtype).view(t.shape))

    def average(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Make tensors alike: floating ones that differ become the weighted mean, integers those of rank 0."""
        if self.is_single or not tensors:
            return
        floating = [t for t in tensors if t.is_floating_point()]
        told = self.allgather((weight, [_digest([t]) for t in floating]))
        weights = torch.tensor([w for w, _ in told], dtype=torch.float64)
        weights = weights / weights.sum() if weights.sum() else torch.full_like(weights, 1 / self.size)
        mine = float(weights[self.rank])
        for i, t in enumerate(floating):
            if len({digests[i] for _, digests in told}) > 1:
                part = t.detach().cpu().double() * mine if mine else torch.zeros(t.shape, dtype=torch.float64)
                self.comm.allreduce_(part)
                t.copy_(part)
        self.broadcast([t for t in tensors if not t.is_floating_point()])

    def flags(self) -> tuple[bool, bool]:
        """Whether this rank failed, and whether it wishes to stop: what a collective that is no allgather sums up."""
        self._keep_signal()
        return self.error is not None, self._wish

    def check_flags(self, failed: float, stop: float) -> None:
        """Raise on every rank if one failed; note that all stop if one wishes it. Given the sums of :meth:`flags`."""
        if failed:
            self.allgather()
        if stop:
            self.stopped, self._wish = True, False

    # -- gradients -----------------------------------------------------------------------------------

    def bind(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Take on the parameters whose gradients shall be reduced; returns the vector that they are packed into."""
        self._params = params
        first = next((p for p in params if p.is_floating_point()), torch.empty(0))
        n = sum(p.numel() for p in params)
        if self.is_single:
            return first.new_empty(n, requires_grad=False)
        device = first.device if getattr(self.comm, "cuda_aware", False) else torch.device("cpu")
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._buffer = torch.zeros(n + len(params) + TAIL, dtype=dtype, device=device)
        self._sum, numbers = self._buffer[:n], self._buffer[n:]
        self._staged = first.device != device or first.dtype != dtype
        self._numbers = numbers.cpu()  # itself, if it is there
        self._used, self._tail = self._numbers.numpy()[:-TAIL], self._numbers.numpy()[-TAIL:]
        self._flat = first.new_empty(n, requires_grad=False) if self._staged else self._sum
        parts = self._flat.split([p.numel() for p in params])
        self._views = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
        return self._flat

    def reduce(self, weight: float, loss: float, n_live: float, *, packed: bool) -> tuple[float, float, float]:
        """Add up over ranks what one step gave, in one flat vector; the collective of a training step.

        Parameters
        ----------
        weight, loss : float
            What this rank's loss weighs, and the loss.
        n_live : float
            How many data it is of; if 0, this rank adds nothing.
        packed : bool
            Add up gradients as well, times the weight. The sum is then in the vector of :meth:`bind`.

        Returns
        -------
        tuple of float
            Sums of weights, of weighted losses, and of data. If ``stopped`` is set now, they mean nothing.
        """
        self._keep_signal()
        silent = self.is_leaving or not n_live
        self._tail[:] = (0, 0, 0, 0, 0) if silent else (weight, weight * loss, n_live, 0, 0)
        self._tail[3:] = self.error is not None, self._wish
        if packed:
            if silent:
                self._buffer[:-TAIL].zero_()
                self._numbers[:-TAIL] = 0
            else:
                flatten_into(dense_gradients(self._params), self._flat)
                if self._staged:
                    self._sum.copy_(self._flat)
                if weight != 1:
                    self._sum.mul_(weight)
                self._used[:] = [self._use(p.grad) for p in self._params]
        self._allreduce(packed)
        weights, weighted, live, failed, wishes = self._tail.tolist()
        if failed:
            self.allgather()
        if wishes:
            self.stopped, self._wish = True, False
        elif packed and self._staged:
            self._flat.copy_(self._sum)
        return weights, weighted, live

    def assign_gradients(self) -> None:
        """Make the vector of :meth:`bind` the gradients of the parameters, views of it where that can be.

        A parameter that had no gradient on any rank has none afterwards: optimizers pass it over.
        """
        if self.is_single:
            return
        for p, view, used in zip(self._params, self._views, self._used.tolist(), strict=True):
            if not used:
                p.grad = None
            elif used > self.size:
                p.grad = view.to(p.dtype).to_sparse(1)
            else:
                p.grad = view if p.dtype == view.dtype and p.is_contiguous() else torch.empty_like(p).copy_(view)

    def _use(self, grad: Tensor | None) -> int:
        """0 for no gradient, 1 for a dense one, more than there are ranks for a sparse one."""
        return 0 if grad is None else self.size + 1 if grad.is_sparse else 1

    def _allreduce(self, packed: bool) -> None:
        vector = self._buffer if packed else self._buffer[-TAIL:]
        apart = self._buffer.is_cuda
        if apart:
            self._buffer[len(self._sum) :].copy_(self._numbers)
        self.call_comm(self.comm.allreduce_, vector)
        if apart:
            self._numbers.copy_(self._buffer[len(self._sum) :])

    # -- errors --------------------------------------------------------------------------------------

    def raise_on_all(self, error: BaseException) -> NoReturn:
        """Raise an error that every rank raises at this point, having decided it on the same numbers."""
        self.error_is_shared = True
        raise error

    def is_interrupt(self, error: BaseException) -> bool:
        """Whether an error that was raised is the user's wish to end the call; alike on all ranks that agreed on it."""
        return self._interrupted if self.error_is_shared else isinstance(error, KeyboardInterrupt)

    def resynchronize(self, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> int:
        """After an agreed error: what a rank may have left half done becomes what the others have.

        Parameters
        ----------
        updates : int
            How many updates this rank has made.

        Returns
        -------
        int
            How many updates there are in the model, now the same on all ranks.
        """
        if self.is_single or not self.error_is_shared:
            return updates
        tensors = list(model.state_dict().values())
        told = self.comm.allgather((self.error is None, updates, _digest(t for t in tensors if torch.is_tensor(t))))
        if len({digest for *_, digest in told}) == 1 and len({n for _, n, _ in told}) == 1:
            return updates
        root = max(range(self.size), key=lambda rank: (told[rank][:2], -rank))
        content = (model.state_dict(), optimizer.state_dict()) if self.rank == root else None
        states = self.comm.allgather(content)[root]
        if self.rank != root:
            model.load_state_dict(states[0])
            load_optimizer_state(optimizer, states[1])
        return told[root][1]

    def _raise(self, failed: dict[int, tuple[str, str]]) -> NoReturn:
        self.error_is_shared = True
        self._interrupted = any(name in ("signal", "KeyboardInterrupt") for name, _ in failed.values())
        until = time.monotonic() + GRACE
        while self.error is None and "signal" in dict(failed.values()) and time.monotonic() < until:
            time.sleep(0.01)  # a launcher sends it to all: the one that comes too late would end this process
            self._keep_signal()
        if self.error is not None:
            raise self.error
        text = "; ".join(f"rank {rank}: {told}" for rank, (_, told) in failed.items())
        if all(name == "FloatingPointError" for name, _ in failed.values()):
            raise FloatingPointError(text.replace("FloatingPointError: ", ""))
        raise RemoteError(text)

    def _tell(self, value: Any) -> list[tuple[str, tuple[str, str] | None, bool, Any]]:
        if not self._met:
            self._met = True
            if hasattr(self.comm, "monitored_barrier"):
                self.call_comm(self.comm.monitored_barrier, self._warn)
        self._keep_signal()
        e = self.error
        told = None if e is None else ("signal" if self._signalled else type(e).__name__, f"{type(e).__name__}: {e}")
        return self.call_comm(self.comm.allgather, (self.call, told, self._wish, value))

    def call_comm(self, f: Callable[..., T], *args: Any) -> T:
        try:
            return f(*args)
        except BaseException:
            self._lost = True  # nobody knows what the others are waiting for: no more collectives
            raise

    def _warn(self, missing: list[int] | None, seconds: float) -> None:
        who = "other ranks" if not missing else f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        warnings.warn(
            f"rank {self.rank} has been waiting in {self.call} for {seconds:.0f} s, for {who} to call it too. "
            f"Under several ranks {self.call} is called by all of them; for one rank alone, set comm=None",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- signals -------------------------------------------------------------------------------------

    def _note_signal(self, number: int, frame: Any) -> None:
        self._signal = number

    def _keep_signal(self) -> None:
        if self._signal is not None and self.error is None:
            name = signal.Signals(self._signal).name
            self.error = KeyboardInterrupt(name) if self._signal == signal.SIGINT else SystemExit(128 + self._signal)
            self._signal, self._signalled = None, True


def describe_by_rank(values: Sequence[Any]) -> str:
    """Values of all ranks in words, those that are alike together.

    >>> describe_by_rank(["a", "b", "a"])
    'a on ranks 0 and 2, b on rank 1'
    """
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
