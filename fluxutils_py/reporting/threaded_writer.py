"""Write summaries in another thread, while training continues."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from fluxutils_py.reporting.writers import (
    OpenInProcess,
    SummaryWriter,
    Writer,
    copy_to_cpu,
    with_torch_names,
)
from fluxutils_py.tree import tree_map
from fluxutils_py.validation import check_integer


class ThreadedSummaryWriter(Writer):
    """Write summaries in another thread: a call returns as soon as values are copied to main
    memory.

    Each call copies tensors and arrays, draws figures and takes the time, so later changes do not
    show. The thread writes summaries in the order of the calls.

    Parameters
    ----------
    base_writer : Writer, torch.utils.tensorboard.SummaryWriter, or one with flax's names alone
        Writer that the thread uses, and nothing else may. Closing this writer closes it.
    max_workers : int
        Accepted for bobbin and ignored: a file takes one summary at a time, so there is one thread.
    wait_on_flush : bool
        Whether :meth:`flush` waits until everything is on disk. False: it is queued like a summary.

    Raises
    ------
    RuntimeError
        From :meth:`flush` and :meth:`close`, if a summary could not be written since the last of
        these calls; names the first one. Also when writing in a process that was forked from the
        one that opened the writer.
    ValueError
        When writing after :meth:`close`.

    Notes
    -----
    An open writer is closed when the program ends. Source: bobbin, which drops errors of its
    threads.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with ThreadedSummaryWriter.open(tempfile.mkdtemp()) as writer:
    ...     value = np.zeros(3)
    ...     writer.add_histogram("zeros", value, 1)
    ...     value += 1  # too late
    """

    def __init__(
        self, base_writer: object, max_workers: int = 1, wait_on_flush: bool = False
    ) -> None:
        check_integer("max_workers", max_workers, 1)
        self.base_writer = with_torch_names(base_writer)
        self.wait_on_flush = wait_on_flush
        self.log_dir = getattr(base_writer, "log_dir", base_writer)
        # one thread, because order matters and a file takes one summary at a time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="summaries")
        self._failed: list[tuple[str, Exception]] = []
        self._process = OpenInProcess(self.close)

    @classmethod
    def open(
        cls,
        log_dir: str | os.PathLike[str],
        max_workers: int = 1,
        wait_on_flush: bool = False,
        **options: Any,
    ) -> Self:
        """Open a writer for a directory; ``options`` go to :class:`SummaryWriter`."""
        return cls(SummaryWriter(log_dir, **options), max_workers, wait_on_flush)

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        self._process.require(self.log_dir)  # a forked process has the queue, but no thread
        # copied now, because the caller may change them before the thread reads them
        values = [tree_map(copy_to_cpu, arg) for arg in args]
        summary = repr(args[0]) if isinstance(args[0], str) else method
        self._submit(summary, getattr(self.base_writer, method), *values, **options)

    def flush(self) -> None:
        if self._process:
            done = self._submit("flush", self.base_writer.flush)
            if self.wait_on_flush:
                done.result()
            self._raise_failed()

    def close(self) -> None:
        if self._process.ends():
            try:
                self._submit("close", self.base_writer.close).result()
            except RuntimeError:
                # the program is ending: the thread has finished its queue and ended
                self._run_and_keep_error("close", self.base_writer.close)
            self._thread.shutdown()
            self._raise_failed()

    def _submit(
        self, summary: str, call: Callable[..., Any], *args: Any, **options: Any
    ) -> Future[None]:
        return self._thread.submit(self._run_and_keep_error, summary, call, *args, **options)

    def _run_and_keep_error(
        self, summary: str, call: Callable[..., Any], *args: Any, **options: Any
    ) -> None:
        try:
            call(*args, **options)
        except Exception as error:  # raised by the next flush: nobody waits for this call
            self._failed.append((summary, error))

    def _raise_failed(self) -> None:
        """Raise the first error since the last call."""
        if not self._failed:
            return
        summary, error = self._failed[0]
        n_more = len(self._failed) - 1
        self._failed = []
        others = f" (and {n_more} more)" if n_more else ""
        raise RuntimeError(
            f"summary {summary} was not written to {self.log_dir}{others}: "
            f"{type(error).__name__}: {error}"
        ) from error
