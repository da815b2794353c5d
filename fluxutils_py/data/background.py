"""Load the next items in background threads."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar

from fluxutils_py.validation import check_integer

T = TypeVar("T")
S = TypeVar("S")


class BackgroundDataLoader(Generic[T]):
    """Call ``loadfun()`` in background threads, so that the next item is ready when you take it.

    Loading begins at once. At most ``n`` items are loaded or loading and not yet taken; each item
    taken starts one more call. Take items with :meth:`take`, by calling the loader, or in a ``for``
    loop. Several threads may take at the same time; each item goes to one of them.

    Parameters
    ----------
    loadfun : callable without arguments
        Returns the next item. ``StopIteration`` ends the loader: it makes no further call, and
        still delivers the items of calls under way. Any other exception, ``SystemExit`` included,
        is raised by the ``take`` that would have returned the item. The loader continues with the
        next call; the caller of ``take`` decides whether to stop.
    n : int
        Items to keep ready, at least 1.
    workers : int, optional
        Threads, and so calls of ``loadfun`` at the same time; at most ``n``, which is the default,
        as in PrayTools. With more than one, ``loadfun`` must be thread-safe (the ``__next__`` of a
        generator is not), and calls that share a random generator draw from it in no fixed order.
        With 1, the items are those of a plain loop.
    ordered : bool
        Deliver items in the order of the calls (the default), or as soon as they are ready.

    Raises
    ------
    TypeError, ValueError
        If ``loadfun`` is not callable, or a number is not an integer of at least 1.

    Notes
    -----
    No thread stays behind. Threads end with the last item, at :meth:`close` (or the end of a
    ``with`` block), and when nothing refers to the loader any more, as after breaking out of a loop
    over it. A running call of ``loadfun`` cannot be interrupted: ``close`` waits for it, a dropped
    loader lets its thread end after it, and at exit the interpreter waits for it and for queued
    calls, as for any ``ThreadPoolExecutor``. In a forked process the loader has no threads and
    raises an error.

    Source: ``BackgroundDataLoader`` of PrayTools.jl. There, ``take!`` waits forever if ``loadfun``
    throws, items come in the order of completion, and nothing stops the loads.

    Examples
    --------
    >>> numbers = iter(range(4))
    >>> with BackgroundDataLoader(lambda: next(numbers), n=2, workers=1) as loader:
    ...     first = loader.take(timeout=60)
    ...     second = loader()
    ...     rest = list(loader)
    >>> first, second, rest
    (0, 1, [2, 3])
    """

    def __init__(
        self, loadfun: Callable[[], T], n: int, workers: int | None = None, *, ordered: bool = True
    ) -> None:
        self._start(loadfun, repeat(()), n, workers, ordered)

    @classmethod
    def map(
        cls,
        fn: Callable[[S], T],
        items: Iterable[S],
        n: int = 1,
        workers: int = 1,
        *,
        ordered: bool = True,
    ) -> BackgroundDataLoader[T]:
        """``map(fn, items)`` that works ahead: ``fn`` runs in the background, ``n`` results before
        they are taken.

        The thread that takes also draws the items, in order: the first ``n`` now, and one more at
        each take, before it returns (its timeout does not cover that). So ``items`` may be any
        iterator, even an endless one. An exception from it is raised in the place of its item.
        ``StopIteration`` from ``fn`` is a mistake and becomes a ``RuntimeError``, as in a
        generator.

        Parameters
        ----------
        fn : callable of one argument
        items : iterable
        n, workers, ordered
            As for the class.

        Examples
        --------
        >>> list(BackgroundDataLoader.map(abs, [-1, 2, -3]))
        [1, 2, 3]
        """
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        self = cls.__new__(cls)
        self._start(partial(_without_stop, fn), map(_one_argument, items), n, workers, ordered)
        return self

    def _start(
        self,
        fn: Callable[..., T],
        items: Iterator[tuple],
        n: int,
        workers: int | None,
        ordered: bool,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"loadfun must be callable, got {type(fn).__name__}")
        self._n = check_integer("n", n, 1)
        n_workers = self._n if workers is None else check_integer("workers", workers, 1)
        self._fn = fn
        self._items = items
        self._ordered = ordered
        self._pid = os.getpid()
        self._taking = threading.Lock()  # one thread at a time takes, and asks for more
        self._futures: list[Future[T]] = []  # of the items not taken, in the order of the calls
        self._closed = self._ended = False
        # not empty: no further call is to be made. Not an Event, whose lock the garbage collector
        # might find taken
        self._stop: list[bool] = []
        weakref.finalize(self, self._stop.append, True)
        # its threads do not refer to the loader, and end when it is dropped
        self._executor = ThreadPoolExecutor(min(self._n, n_workers), "BackgroundDataLoader")
        self._fill_queue()

    def take(self, timeout: float | None = None) -> T:
        """Return the next item; wait until it is loaded.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most, 0 for not at all. The default waits as long as it takes.

        Raises
        ------
        StopIteration
            After the last item.
        TimeoutError
            If there was no item in time. The item is not lost: the next take returns it.
        RuntimeError
            If the loader is closed, even by another thread while this one waits; in a forked
            process.
        BaseException
            The exception that ``loadfun`` raised in place of this item.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this BackgroundDataLoader belongs to process {self._pid}, its threads do not "
                f"exist in process {os.getpid()} forked off it; make a new one there"
            )
        # not kept here: an error that it holds refers to this frame
        return self._next_future(timeout).result()

    def __call__(self) -> T:
        """Return the next item, as :meth:`take` without a timeout."""
        return self.take()

    def __iter__(self) -> Iterator[T]:
        return self

    __next__ = __call__

    def _next_future(self, timeout: float | None) -> Future[T]:
        """Wait for the outcome whose turn it is, and ask for one more."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._taking:
            self._fill_queue()  # makes good for a refill that Ctrl-C cut short
            while self._futures:
                remaining = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                candidates = self._futures[:1] if self._ordered else self._futures
                done, _ = wait(candidates, remaining, FIRST_COMPLETED)
                if self._closed:
                    break
                if not done:
                    raise TimeoutError(
                        f"no item was ready within {timeout} s; the next take may get it"
                    )
                future = done.pop()
                self._futures.remove(future)
                if not isinstance(future.exception(), StopIteration):
                    self._fill_queue()
                    return future
            if self._closed and not self._ended:
                raise RuntimeError(
                    "this BackgroundDataLoader is closed: no items can be taken from it"
                )
            self._ended = True
            self._executor.shutdown(wait=False)
            raise StopIteration

    def _fill_queue(self) -> None:
        """Ask for calls until there are ``n`` items."""
        while not self._stop and len(self._futures) < self._n:
            try:
                args = next(self._items)
            except StopIteration:
                return
            except Exception as error:
                future: Future[T] = Future()
                future.set_exception(error)
            else:
                future = self._executor.submit(_call, self._fn, self._stop, args)
            self._futures.append(future)

    def close(self, wait: bool = True) -> None:
        """Stop: make no further calls, drop items not taken, and end the threads. May be called
        again.

        Parameters
        ----------
        wait : bool
            Return only when the threads have ended, which takes as long as the running loads.
        """
        if os.getpid() != self._pid:  # the threads are the parent's
            return
        self._closed = True
        self._stop.append(True)
        self._executor.shutdown(wait)
        if wait:
            with self._taking:
                self._futures.clear()

    def __enter__(self) -> BackgroundDataLoader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _call(fn: Callable[..., T], stop: list[bool], args: tuple[Any, ...]) -> T:
    if stop:  # since it was asked for
        raise StopIteration
    try:
        return fn(*args)
    except StopIteration:
        stop.append(True)
        raise


def _without_stop(fn: Callable[[S], T], item: S) -> T:
    try:
        return fn(item)
    except StopIteration as error:
        raise RuntimeError("fn raised StopIteration") from error


def _one_argument(item: S) -> tuple[S]:
    # a function, as zip, or the frame of a generator, would keep the last item alive
    return (item,)
