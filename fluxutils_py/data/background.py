"""Load the next items in background threads."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from fluxutils_py.validation import check_integer

T = TypeVar("T")
S = TypeVar("S")

Outcome = tuple[Any, BaseException | None]
Requests = SimpleQueue  # of (number, arguments of the call), or None: the worker that gets it ends

# for loads under way when the interpreter exits: a thread killed inside HDF5 may take it down
EXIT_WAIT_S = 2.0

NOTHING: Outcome = (None, None)  # of a call after the end


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
    loader lets its thread end after it, and the interpreter waits 2 s for it at exit. In a forked
    process the loader has no threads and raises an error.

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
        self._start_workers(loadfun, repeat(()), n, workers, ordered)

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
        self._start_workers(
            partial(_without_stop, fn), map(_one_argument, items), n, workers, ordered
        )
        return self

    def _start_workers(
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
        self._workers = (
            self._n if workers is None else min(self._n, check_integer("workers", workers, 1))
        )
        self._fn = fn
        self._items = items
        self._ordered = ordered
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards what follows
        self._ready: dict[int, Outcome] = {}  # by number of the call, in order of completion
        self._drawn = self._taken = 0  # calls asked for, and outcomes handed out
        self._ended = False  # nothing more to ask for
        self._stopped = False  # loadfun raised StopIteration: queued calls are not wanted any more
        self._closed = False
        self._drawing = threading.Lock()
        # A waiting worker holds only the queue and the weak reference, so that a loader can be
        # collected. put() of a SimpleQueue may be called at any moment, by the garbage collector
        # too.
        requests: Requests = SimpleQueue()
        self._requests = requests
        count = self._workers
        ref = weakref.ref(self, lambda _: _stop_workers(requests, count))
        self._threads: list[threading.Thread] = []
        try:
            for i in range(count):
                worker = threading.Thread(
                    target=self._work_loop,
                    args=(requests, ref),
                    name=f"BackgroundDataLoader-{i}",
                    daemon=True,
                )
                worker.start()
                self._threads.append(worker)
                _all_threads.add(worker)
        except BaseException:  # no more threads to be had
            _stop_workers(requests, count)
            raise
        _open_loaders.add(self)
        self._fill_queue()

    # -- taking ------------------------------------------------------------------------------------

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
            process; inside ``loadfun``.
        BaseException
            The exception that ``loadfun`` raised in place of this item.
        """
        self._check_caller()
        deadline = None if timeout is None else time.monotonic() + timeout
        self._fill_queue()  # makes good for a refill that Ctrl-C cut short; else there is no room
        with self._changed:
            while (outcome := self._pop_next()) is None:
                if self._ended and self._taken == self._drawn:
                    raise StopIteration
                if self._closed:
                    raise RuntimeError(
                        "this BackgroundDataLoader is closed: no items can be taken from it"
                    )
                remaining = (
                    threading.TIMEOUT_MAX if deadline is None else deadline - time.monotonic()
                )
                if remaining <= 0:
                    raise TimeoutError(
                        f"no item was ready within {timeout} s; the next take may get it"
                    )
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
        self._fill_queue()
        value, error = outcome
        if error is None:
            return value
        try:
            raise error
        finally:
            del error, outcome  # the traceback refers to this frame

    def __call__(self) -> T:
        """Return the next item, as :meth:`take` without a timeout."""
        return self.take()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self.take()

    def _pop_next(self) -> Outcome | None:
        """Remove and return the outcome whose turn it is, or None if it is not there. Call it under
        the lock.
        """
        while self._ready:
            number = self._taken if self._ordered else next(iter(self._ready))
            if number not in self._ready:
                break
            outcome = self._ready.pop(number)
            self._taken += 1
            if outcome is not NOTHING:
                return outcome
        return None

    # -- asking for more ---------------------------------------------------------------------------

    def _has_room(self) -> bool:
        with self._changed:
            return not (self._closed or self._ended) and self._drawn - self._taken < self._n

    def _fill_queue(self) -> None:
        """Start calls until there are ``n`` items; in the thread that takes, without holding the
        lock.
        """
        while self._has_room():
            if not self._drawing.acquire(blocking=False):
                return  # another thread is drawing, and looks for room again when it is done
            try:
                if self._has_room():
                    self._draw_item()
            finally:
                self._drawing.release()

    def _draw_item(self) -> None:
        try:
            args = next(self._items)
        except StopIteration:
            with self._changed:
                self._end_items()
        except Exception as error:
            with self._changed:
                self._drawn += 1
                self._put_outcome(self._drawn - 1, (None, error))
        else:
            with self._changed:
                if not (self._closed or self._ended):  # else nobody would answer
                    self._drawn += 1
                    self._requests.put((self._drawn - 1, args))

    # -- in the workers ---------------------------------------------------------------------

    # Static, as a bound method would hold the loader. The frame forgets everything before it waits,
    # so that items are freed promptly. And it calls the function itself: the traceback of an error
    # refers to the frames of all callers, which must not hold the loader.
    @staticmethod
    def _work_loop(requests: Requests, ref: weakref.ref[BackgroundDataLoader]) -> None:
        while (request := requests.get()) is not None:
            number, args = request
            outcome = NOTHING
            stop = False
            self = ref()
            if self is not None and self._is_open():
                fn = self._fn
                del self
                try:
                    outcome = fn(*args), None
                except StopIteration:
                    stop = True
                except BaseException as error:
                    outcome = None, error
                del fn
                self = ref()
            if self is not None:  # else the queue ends with None
                self._store_outcome(number, outcome, stop)
            del self, outcome, request, args

    def _is_open(self) -> bool:
        with self._changed:
            return not (self._closed or self._stopped)

    def _store_outcome(self, number: int, outcome: Outcome, stop: bool) -> None:
        with self._changed:
            if stop:
                self._stopped = True
                self._end_items()
            self._put_outcome(number, outcome)

    def _put_outcome(self, number: int, outcome: Outcome) -> None:
        if not self._closed:
            self._ready[number] = outcome
            self._changed.notify_all()  # all of them: in order, those after it may be there already

    def _end_items(self) -> None:
        self._ended = True
        _stop_workers(self._requests, self._workers)
        self._changed.notify_all()

    # -- ending ------------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Stop: make no further calls, drop items not taken, and end the threads. May be called
        again.

        Parameters
        ----------
        wait : bool
            Return only when the threads have ended, which takes as long as the running loads.
            Inside ``loadfun`` it does not wait.
        """
        if os.getpid() != self._pid:
            # the threads are the parent's, and the lock may have been held when this process was
            # forked
            return
        with self._changed:
            self._closed = True
            dropped = self._ready
            self._ready = {}
            _stop_workers(self._requests, self._workers)
            self._changed.notify_all()
        del dropped  # without the lock: deleting an item may run any code
        if wait and threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> BackgroundDataLoader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_caller(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this BackgroundDataLoader belongs to process {self._pid}, its threads do not "
                f"exist in process {os.getpid()} forked off it; make a new one there"
            )
        if threading.current_thread() in self._threads:
            raise RuntimeError(
                "loadfun takes from the BackgroundDataLoader that calls it: it would wait for "
                "itself"
            )


def _stop_workers(requests: Requests, workers: int) -> None:
    for _ in range(workers):
        requests.put(None)


def _without_stop(fn: Callable[[S], T], item: S) -> T:
    try:
        return fn(item)
    except StopIteration as error:
        raise RuntimeError("fn raised StopIteration") from error


def _one_argument(item: S) -> tuple[S]:
    # a function, as zip, or the frame of a generator, would keep the last item alive
    return (item,)


_open_loaders: weakref.WeakSet[BackgroundDataLoader] = weakref.WeakSet()
_all_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of dropped loaders too


@atexit.register
def _close_at_exit() -> None:
    for loader in list(_open_loaders):
        loader.close(wait=False)
    deadline = time.monotonic() + EXIT_WAIT_S
    for thread in list(_all_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
