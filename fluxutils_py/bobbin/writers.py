"""Writers for TensorBoard with the methods of flax's: plain, in a thread, into several folders."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.tensorboard import open_torch_writer
from fluxutils_py.tree import tree_map


class NullSummaryWriter:
    """Writer that writes nothing, for ranks other than the first or to turn summaries off.

    The other writers are subclasses, whose ``_call`` writes. Values are tensors on any device,
    arrays, or numbers; later changes to them do not show. Every writer can be used in ``with``.

    >>> NullSummaryWriter().scalar("loss", 0.5, 1)
    """

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        """Execute a method; the first argument is the tag, but for ``hparams``."""

    def scalar(self, tag: str, value: object, step: int) -> None:
        """Write a number; TensorBoard stores it as float32."""
        self._call("scalar", tag, value, step)

    def image(self, tag: str, image: Any, step: int, max_outputs: int = 3) -> None:
        """Write an image (H, W) or (H, W, C), floats in 0..1 or uint8, or the first ``max_outputs``
        of (N, H, W, C), side by side.
        """
        self._call("image", tag, image, step, max_outputs=max_outputs)

    def audio(
        self, tag: str, audiodata: Any, step: int, sample_rate: int = 44100, max_outputs: int = 3
    ) -> None:
        """Write sound (L,) or (1, L) in -1..1, or the first ``max_outputs`` of (N, L, 1), as
        ``tag/0``, ``tag/1``, ...
        """
        options = {"sample_rate": sample_rate, "max_outputs": max_outputs}
        self._call("audio", tag, audiodata, step, **options)

    def histogram(self, tag: str, values: object, step: int, bins: object = None) -> None:
        """Write a histogram of values of any shape; ``bins`` as in NumPy."""
        self._call("histogram", tag, values, step, bins=bins)

    def text(self, tag: str, textdata: str, step: int) -> None:
        """Write text, which TensorBoard shows as Markdown."""
        self._call("text", tag, textdata, step)

    def write(self, tag: str, tensor: Any, step: int, metadata: object = None) -> None:
        """Write a tensor or array for other programs; torch's writer cannot store ``metadata``."""
        self._call("write", tag, tensor, step)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Write hyper-parameters: numbers, strings and booleans by name."""
        self._call("hparams", hparams)

    def as_result_processor(self, method: Callable[..., Any] | None = None) -> Callable[..., None]:
        """Return a result processor that does nothing; see :class:`MultiDirectorySummaryWriter`."""
        return lambda results, state: None

    def flush(self) -> None:
        """Write everything to disk."""

    def close(self) -> None:
        """Close the files. A second call does nothing; writing afterwards raises ValueError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SummaryWriter(NullSummaryWriter):
    """Write event files into a directory, with torch's ``SummaryWriter``.

    Parameters
    ----------
    log_dir : str, path-like or torch.utils.tensorboard.SummaryWriter
        Created if it does not exist. A writer of torch is written to; closing closes it.
    auto_flush : bool
        Whether each summary is on disk when the call returns. False: within some seconds.

    Raises
    ------
    ImportError
        If TensorBoard is not installed.
    ValueError
        When writing after :meth:`close`.

    Notes
    -----
    An open writer is closed when the program ends.

    Examples
    --------
    >>> import tempfile
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> folder = tempfile.mkdtemp()
    >>> with SummaryWriter(folder) as writer:
    ...     writer.scalar("loss", 0.5, 1)
    >>> [(e.step, e.value) for e in EventAccumulator(folder).Reload().Scalars("loss")]
    [(1, 0.5)]
    """

    def __init__(self, log_dir: Any, *, auto_flush: bool = False) -> None:
        is_writer = hasattr(log_dir, "add_scalar")
        self.auto_flush = auto_flush
        self._torch = log_dir if is_writer else open_torch_writer(log_dir)
        self.log_dir = Path(self._torch.log_dir)
        atexit.register(self.close)

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        if self._torch is None:
            raise ValueError(f"the writer of {self.log_dir} is closed; open another to write more")
        WRITE[method](self._torch, *args, **options)
        if self.auto_flush:
            self._torch.flush()

    def flush(self) -> None:
        if self._torch is not None:
            self._torch.flush()

    def close(self) -> None:
        if self._torch is not None:
            self._torch.close()
            self._torch = None
            atexit.unregister(self.close)  # which would keep the writer in memory


def _write_image(writer: Any, tag: str, image: Any, step: int, max_outputs: int) -> None:
    if image.ndim == 4:
        writer.add_images(tag, image[:max_outputs], step, dataformats="NHWC")
    else:
        writer.add_image(tag, image, step, dataformats="HWC"[: image.ndim])


def _write_audio(
    writer: Any, tag: str, sound: Any, step: int, sample_rate: int, max_outputs: int
) -> None:
    if sound.ndim < 3:
        writer.add_audio(tag, sound, step, sample_rate=sample_rate)
        return
    for n, one in enumerate(sound[:max_outputs]):
        writer.add_audio(f"{tag}/{n}", one.reshape(-1), step, sample_rate=sample_rate)


def _write_histogram(writer: Any, tag: str, values: object, step: int, bins: object) -> None:
    writer.add_histogram(tag, values, step, bins="tensorflow" if bins is None else bins)


# how torch's writer does what flax's does, by flax's names
WRITE: dict[str, Callable[..., None]] = {
    "scalar": lambda writer, *args: writer.add_scalar(*args),
    "image": _write_image,
    "audio": _write_audio,
    "histogram": _write_histogram,
    "text": lambda writer, *args: writer.add_text(*args),
    "write": lambda writer, tag, x, step: writer.add_tensor(tag, torch.as_tensor(x), step),
    "hparams": lambda writer, hparams: writer.add_hparams(hparams, {}, run_name="."),
}


class ThreadedSummaryWriter(NullSummaryWriter):
    """Write summaries in another thread: a call returns as soon as values are copied to main
    memory. The thread writes them in the order of the calls.

    Parameters
    ----------
    base_writer : writer with flax's methods
        Writer that the thread uses, and nothing else may. Closing this writer closes it.
    max_workers, wait_on_flush
        Accepted for bobbin and ignored: there is one thread, and :meth:`flush` waits for it.

    Notes
    -----
    An error of the thread is raised by the next :meth:`flush` or :meth:`close`. Source: bobbin,
    which drops errors of its threads.

    Examples
    --------
    >>> import tempfile
    >>> with ThreadedSummaryWriter.open(tempfile.mkdtemp()) as writer:
    ...     value = np.zeros(3)
    ...     writer.histogram("zeros", value, 1)
    ...     value += 1  # too late
    """

    def __init__(self, base_writer: Any, max_workers: int = 1, wait_on_flush: bool = False) -> None:
        self.base_writer = base_writer
        self._thread = ThreadPoolExecutor(1)
        self._error: Exception | None = None

    @classmethod
    def open(cls, log_dir: str | os.PathLike[str], *args: Any, **options: Any) -> Self:
        """Open a writer for a directory; the other arguments are those of the class."""
        return cls(SummaryWriter(log_dir), *args, **options)

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        # copied now, because the caller may change them before the thread reads them
        values = [tree_map(copy_to_cpu, arg) for arg in args]
        self._thread.submit(self._run, getattr(self.base_writer, method), *values, **options)

    def _run(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except Exception as error:  # nobody waits for this call
            self._error = self._error or error

    def flush(self) -> None:
        self._thread.submit(self._run, self.base_writer.flush).result()
        self._raise_error()

    def close(self) -> None:
        self._thread.shutdown()  # after its queue
        self.base_writer.close()
        self._raise_error()

    def _raise_error(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error


def copy_to_cpu(value: object) -> object:
    """Copy a tensor or array to main memory; return other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return np.array(value) if isinstance(value, np.ndarray) else value


def split_tag(tag: str) -> tuple[str, str]:
    """Split a tag into the key of its directory and the rest; ValueError if it lacks one of them.

    >>> split_tag("dev/loss/mean")
    ('dev', 'loss/mean')
    """
    key, _, rest = tag.partition("/")
    if not (key and rest):
        raise ValueError(
            f"tag {tag!r} has no directory; write it as 'key/name', such as 'dev/accuracy'"
        )
    return key, rest


@dataclass(kw_only=True)
class MultiDirectorySummaryWriter(NullSummaryWriter):
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
    ...     writer.scalar("dev/acc", 0.75, 100)
    ...     writer.subwriter("test").scalar("acc", 0.5, 100)
    >>> sorted(path.name for path in root.iterdir())
    ['dev', 'test']
    """

    log_dir_root: str | os.PathLike[str] = field(kw_only=False)
    keys: Iterable[str] = ()
    allow_new_keys: bool = True
    only_from_leader_process: bool = True
    auto_flush: bool = True
    tag_to_key: Callable[[str], tuple[str, str]] = split_tag
    dirname: Callable[[str], str] = str
    use_threaded_writer: bool = True
    comm: object = "auto"

    def __post_init__(self) -> None:
        # a directory is created on first use, when the program may have changed its folder
        self.log_dir = Path(self.log_dir_root).absolute()
        self.disabled = self.only_from_leader_process and not is_main_process(comm=self.comm)
        self._writers: dict[str, Any] = {}

    def subwriter(self, key: str) -> Any:
        """Return the writer for the directory of a key. Closing this writer closes it."""
        if not (self.allow_new_keys or key in self.keys):
            raise ValueError(f"key {key!r} is not among {self.keys}; set allow_new_keys=True")
        if key not in self._writers:
            writer = NullSummaryWriter()
            if not self.disabled:
                folder = self.log_dir / self.dirname(key)
                writer = SummaryWriter(folder, auto_flush=self.auto_flush)
                if self.use_threaded_writer:
                    writer = ThreadedSummaryWriter(writer)
            self._writers[key] = writer
        return self._writers[key]

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        key, tag = self.tag_to_key(args[0])
        getattr(self.subwriter(key), method)(tag, *args[1:], **options)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Write hyper-parameters into the directories of ``keys`` and of all keys used so far."""
        for key in dict.fromkeys([*self.keys, *self._writers]):
            self.subwriter(key).hparams(hparams)

    def as_result_processor(self, method: Callable[..., Any] | None = None) -> Callable[..., None]:
        """Return a result processor for :class:`RunEval` that writes each result to the directory
        of its dataset.

        It calls ``method(result, state, writer)``, by default ``result.write_to_tensorboard(state,
        writer)``.
        """

        def write_results(results: Mapping[str, Any], state: object) -> None:
            for name, result in results.items():
                write = method or type(result).write_to_tensorboard
                write(result, state, self.subwriter(name))
            self.flush()  # results are rare and worth reading at once

        return write_results

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
