"""Write summaries into several directories."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.threaded_writer import ThreadedSummaryWriter
from fluxutils_py.reporting.writers import NullSummaryWriter, SummaryWriter, Writer

NO_KEY = "hyper-parameters have no tag that names a directory; write them to subwriter(key)"


def split_tag(tag: str) -> tuple[str, str]:
    """Split a tag into the key of its directory and the rest.

    >>> split_tag("dev/loss/mean")
    ('dev', 'loss/mean')

    Raises
    ------
    ValueError
        If the tag does not have two parts.
    """
    key, _, rest = tag.partition("/")
    if not (key and rest):
        raise ValueError(
            f"tag {tag!r} has no directory; write it as 'key/name', such as 'dev/accuracy'"
        )
    return key, rest


class MultiDirectorySummaryWriter(Writer):
    """Writer that takes the directory from the tag: ``"dev/acc"`` becomes ``"acc"`` in
    ``log_dir_root/dev``.

    TensorBoard shows each directory as a run, and draws the same tag of several runs in one plot.

    Parameters
    ----------
    log_dir_root : str or path-like
        Parent directory. Directories in it are created on first use.
    keys : iterable of str
        Keys known in advance.
    allow_new_keys : bool
        Whether other keys are allowed. False: they raise ValueError.
    only_from_leader_process : bool
        Whether only the first rank writes.
    auto_flush : bool
        Flush each summary to disk as soon as it is written.
    tag_to_key : callable
        ``tag_to_key(tag) -> (key, tag in the directory)``.
    dirname : callable
        ``dirname(key) -> name of the directory``.
    use_threaded_writer : bool
        Write in another thread, with :class:`ThreadedSummaryWriter`.
    comm : "auto", None, "mpi", "torch" or a communicator
        Communicator of the ranks, as for an ``Estimator``.

    Raises
    ------
    ValueError
        When writing with a tag without a key, or a key that is not allowed. Nothing is written
        then.

    Notes
    -----
    Source: bobbin, which ignores ``allow_new_keys``.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> with MultiDirectorySummaryWriter(root) as writer:
    ...     writer.add_scalar("dev/acc", 0.75, 100)
    ...     writer.subwriter("test").add_scalar("acc", 0.5, 100)
    >>> sorted(path.name for path in root.iterdir())
    ['dev', 'test']
    """

    def __init__(
        self,
        log_dir_root: str | os.PathLike[str],
        *,
        keys: Iterable[str] = (),
        allow_new_keys: bool = True,
        only_from_leader_process: bool = True,
        auto_flush: bool = True,
        tag_to_key: Callable[[str], tuple[str, str]] = split_tag,
        dirname: Callable[[str], str] = str,
        use_threaded_writer: bool = True,
        comm: object = "auto",
    ) -> None:
        # a directory is created on first use, when the program may have changed its folder
        self.log_dir = Path(log_dir_root).absolute()
        self.keys = tuple(keys)
        self.allow_new_keys = allow_new_keys
        self.auto_flush = auto_flush
        self.use_threaded_writer = use_threaded_writer
        self.tag_to_key = tag_to_key
        self.dirname = dirname
        self.disabled = only_from_leader_process and not is_main_process(comm=comm)
        self._writers: dict[str, Writer] = {}
        self._lock = threading.Lock()  # several threads may write
        self._closed = False

    def subwriter(self, key: str) -> Writer:
        """Return the writer for the directory of a key. Closing this writer closes it."""
        if not (self.allow_new_keys or key in self.keys):
            known = ", ".join(map(repr, self.keys)) or "none"
            raise ValueError(
                f"key {key!r} is not known (known: {known}); add it to keys, or set "
                "allow_new_keys=True"
            )
        with self._lock:
            # else a directory would be opened that nobody closes
            if self._closed:
                raise ValueError(
                    f"the writer of {self.log_dir} is closed; open another to write more"
                )
            if key not in self._writers:
                self._writers[key] = self._open_writer(key)
            return self._writers[key]

    def _open_writer(self, key: str) -> Writer:
        if self.disabled:
            return NullSummaryWriter()
        open_writer = ThreadedSummaryWriter.open if self.use_threaded_writer else SummaryWriter
        return open_writer(self.log_dir / self.dirname(key), auto_flush=self.auto_flush)

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        if method == "add_hparams":
            raise ValueError(NO_KEY)
        key, tag = self.tag_to_key(args[0])
        getattr(self.subwriter(key), method)(tag, *args[1:], **options)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Write hyper-parameters into the directories of ``keys`` and of all keys used so far."""
        keys = dict.fromkeys([*self.keys, *self._writers])
        if not keys:
            raise ValueError(NO_KEY)
        for key in keys:
            self.subwriter(key).hparams(hparams)

    def as_result_processor(
        self, method: Callable[..., Any] | None = None
    ) -> Callable[[Mapping[str, Any], Any], None]:
        """Return a result processor for :class:`RunEval` that writes each result to the directory
        of its dataset.

        It calls ``method(result, loop, writer)``, by default ``result.write_to_tensorboard(loop,
        writer)``.
        """

        def write_results(results: Mapping[str, Any], loop: object) -> None:
            for name, result in results.items():
                writer = self.subwriter(name)
                if method is None:
                    result.write_to_tensorboard(loop, writer)
                else:
                    method(result, loop, writer)
                # results are rare and worth reading at once
                writer.flush()

        return write_results

    def flush(self) -> None:
        self._for_each_writer(lambda writer: writer.flush())

    def close(self) -> None:
        self._closed = True  # first: no other thread may open one meanwhile
        self._for_each_writer(lambda writer: writer.close())

    def _for_each_writer(self, call: Callable[[Writer], None]) -> None:
        """Apply ``call`` to every writer, then raise the first error."""
        errors: list[Exception] = []
        for writer in self._writers.values():
            try:
                call(writer)
            except Exception as error:  # the others are still to be closed
                errors.append(error)
        if errors:
            raise errors[0]
