"""Writers of summaries for TensorBoard: one family, over torch's."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


class Writer:
    """What all writers here have: torch's names, bobbin's names for the same, and ``with``.

    Subclasses define ``_call``, which does what a method of torch's ``SummaryWriter`` does, or has it done.
    Values are tensors on any device, arrays, or numbers, as of the moment of the call. Steps are counts, as those of
    ``loop.step``; ``walltime`` is by default the time of the call, in seconds since 1970.
    """

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        """Have ``method`` of torch's writer called. The first argument is the tag, but for ``add_hparams``."""
        raise NotImplementedError

    def flush(self) -> None:
        """Have on disk what was written; nothing after :meth:`close`."""

    def close(self) -> None:
        """Finish the files. A second call does nothing; writing after it is a ValueError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- torch's names; options are those of torch's methods -------------------------------------------

    def _write(self, method: str, *args: Any, **options: Any) -> None:
        if options.get("walltime") is None:
            options["walltime"] = time.time()
        self._call(method, *args, **options)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, **options: Any) -> None:
        """A number; kept as float32, as TensorBoard does."""
        self._write("add_scalar", tag, scalar_value, global_step, **options)

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: Any = None, **options: Any
    ) -> None:
        """Several numbers for one plot; each gets a directory of its own, below this writer's."""
        self._write("add_scalars", main_tag, dict(tag_scalar_dict), global_step, **options)

    def add_image(self, tag: str, img_tensor: Any, global_step: Any = None, **options: Any) -> None:
        """An image (C, H, W), floats from 0 to 1, or uint8; ``dataformats`` names other axes, such as ``"HW"``."""
        self._write("add_image", tag, img_tensor, global_step, **options)

    def add_images(self, tag: str, img_tensor: Any, global_step: Any = None, **options: Any) -> None:
        """Several images (N, C, H, W), side by side in one; ``dataformats`` names other axes."""
        self._write("add_images", tag, img_tensor, global_step, **options)

    def add_figure(self, tag: str, figure: Any, global_step: Any = None, close: bool = True, **options: Any) -> None:
        """A matplotlib figure, drawn now; it need not come from pyplot, and if it does, is closed there."""
        self.add_image(tag, render_figure(figure, close), global_step, dataformats="HWC", **options)

    def add_histogram(self, tag: str, values: Any, global_step: Any = None, **options: Any) -> None:
        """How values are distributed; any shape, at least one; ``bins`` as in NumPy, or ``"tensorflow"``."""
        self._write("add_histogram", tag, values, global_step, **options)

    def add_audio(self, tag: str, snd_tensor: Any, global_step: Any = None, **options: Any) -> None:
        """Sound of one channel, (L,) or (1, L), from -1 to 1, at ``sample_rate`` (44100)."""
        self._write("add_audio", tag, snd_tensor, global_step, **options)

    def add_text(self, tag: str, text_string: str, global_step: Any = None, **options: Any) -> None:
        """Text, shown as Markdown."""
        self._write("add_text", tag, text_string, global_step, **options)

    def add_tensor(self, tag: str, tensor: Any, global_step: Any = None, **options: Any) -> None:
        """A tensor or array, for other programs to read."""
        tensor = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
        self._write("add_tensor", tag, tensor, global_step, **options)

    def add_hparams(self, hparam_dict: dict[str, Any], metric_dict: dict[str, Any], **options: Any) -> None:
        """Hyper-parameters (numbers, strings, truth values) and what came of them.

        They go to the directory ``run_name`` below this writer's, named after the time if None.
        """
        self._call("add_hparams", hparam_dict, metric_dict, **options)

    # -- bobbin's names, which are flax's ------------------------------------------------------------

    def scalar(self, tag: str, value: Any, step: Any) -> None:
        """:meth:`add_scalar`"""
        self.add_scalar(tag, value, step)

    def image(self, tag: str, image: Any, step: Any, max_outputs: int = 3) -> None:
        """An image (H, W) or (H, W, C), or of a batch (N, H, W, C) the first ``max_outputs``, side by side."""
        if image.ndim == 4:
            self.add_images(tag, image[:max_outputs], step, dataformats="NHWC")
        else:
            self.add_image(tag, image, step, dataformats="HWC"[: image.ndim])

    def audio(self, tag: str, audiodata: Any, step: Any, sample_rate: int = 44100, max_outputs: int = 3) -> None:
        """Sound (L,) or (1, L), or of a batch (N, L, 1) the first ``max_outputs``, as ``tag/0``, ``tag/1``, ..."""
        if audiodata.ndim < 3:
            self.add_audio(tag, audiodata, step, sample_rate=sample_rate)
        else:
            for n, sound in enumerate(audiodata[:max_outputs]):
                self.add_audio(f"{tag}/{n}", sound.reshape(-1), step, sample_rate=sample_rate)

    def histogram(self, tag: str, values: Any, step: Any, bins: Any = None) -> None:
        """:meth:`add_histogram`"""
        self.add_histogram(tag, values, step, bins="tensorflow" if bins is None else bins)

    def text(self, tag: str, textdata: str, step: Any) -> None:
        """:meth:`add_text`"""
        self.add_text(tag, textdata, step)

    def write(self, tag: str, tensor: Any, step: Any, metadata: Any = None) -> None:
        """:meth:`add_tensor`; torch's writer has no place for TensorFlow's ``metadata``, which is left out."""
        self.add_tensor(tag, tensor, step)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """:meth:`add_hparams`, without results, into this writer's directory itself."""
        self.add_hparams(hparams, {}, run_name=".")


class NullSummaryWriter(Writer):
    """A writer that writes nothing: for ranks other than the first, and to switch summaries off.

    >>> NullSummaryWriter().add_scalar("loss", 0.5, 1)
    """

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        pass

    def add_figure(self, *args: Any, **options: Any) -> None:
        pass  # without drawing it

    def as_result_processor(self, method: Any = None) -> Callable[..., None]:
        """A result processor, as of :class:`MultiDirectorySummaryWriter`, that does nothing."""
        return lambda results, loop: None


class SummaryWriter(Writer):
    """Write event files into a directory, by torch's ``SummaryWriter``.

    Parameters
    ----------
    log_dir : str or path-like
        Is made if need be.
    purge_step : int, optional
        TensorBoard is to hide what earlier files of the directory have for this step and later ones.
    auto_flush : bool
        Have each summary on disk when the call returns; else within some seconds.
    filename_suffix : str
        What the name of the file ends in.

    Raises
    ------
    ImportError
        Without TensorBoard.
    ValueError
        When written to after :meth:`close`.
    RuntimeError
        When written to in a process that was forked from the one that made it: its file belongs to that one.

    Notes
    -----
    TensorBoard reads the files of a directory in the order of their names; this one's comes after those that are there.
    A writer that was not closed is closed when the program ends.

    Examples
    --------
    >>> import tempfile
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> folder = tempfile.mkdtemp()
    >>> with SummaryWriter(folder) as writer:
    ...     writer.add_scalar("loss", 0.5, 1)
    >>> [(e.step, e.value) for e in EventAccumulator(folder).Reload().Scalars("loss")]
    [(1, 0.5)]
    """

    flush_s = 5  # how long a summary may wait, so that whoever watches sees a run go on

    def __init__(
        self, log_dir: Any, *, purge_step: int | None = None, auto_flush: bool = False, filename_suffix: str = ""
    ) -> None:
        self.log_dir, self.auto_flush = Path(log_dir), auto_flush
        self._torch = self._opened(purge_step=purge_step, flush_secs=self.flush_s, filename_suffix=filename_suffix)
        self._process = OpenInProcess(self.close)

    def _opened(self, **options: Any) -> Any:
        """Torch's writer, of a file that sorts behind the others.

        Names begin with the second and end in a number that grows, but "10" sorts before "9".
        """
        open_writer = import_torch_writer()
        while True:
            before = set(self.log_dir.glob("events.out.tfevents.*"))
            writer = open_writer(self.log_dir, **options)
            own = set(self.log_dir.glob("events.out.tfevents.*")) - before
            if not before or len(own) != 1 or min(own) > max(before) or creation_second(max(before)) > time.time():
                return writer
            writer.close()
            min(own).unlink()
            time.sleep(max(creation_second(max(before)) + 1 - time.time(), 0.01))

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        self._process.require(self.log_dir)
        getattr(self._torch, method)(*args, **options)
        if self.auto_flush:
            self._torch.flush()

    def flush(self) -> None:
        if self._process:
            self._torch.flush()

    def close(self) -> None:
        if self._process.ends():
            self._torch.close()


class OpenInProcess:
    """Whether a writer is open, in the process that made it; it is closed when the program ends."""

    def __init__(self, close: Callable[[], Any]) -> None:
        self.close, self.pid, self.open = close, os.getpid(), True
        atexit.register(close)

    def __bool__(self) -> bool:
        return self.open and self.pid == os.getpid()

    def require(self, where: Any) -> None:
        """Raise if nothing can be written any more."""
        if not self.open:
            raise ValueError(f"the writer of {where} is closed; open another to write more")
        if self.pid != os.getpid():
            raise RuntimeError(
                f"the writer of {where} belongs to process {self.pid}, from which this one was forked; open another "
                "in the process that is to write"
            )

    def ends(self) -> bool:
        """Whether it was open until now."""
        there, self.open = bool(self), False
        atexit.unregister(self.close)
        return there


def copy_to_cpu(value: Any) -> Any:
    """A value that nobody else will change, in main memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return np.array(value) if isinstance(value, np.ndarray) else value


def creation_second(path: Path) -> int:
    """When an event file was opened, as its name says; 0 if it does not."""
    text = path.name.removeprefix("events.out.tfevents.").split(".")[0]
    return int(text) if text.isdigit() else 0


def import_torch_writer() -> Any:
    """Torch's class of writers, which needs TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter as TorchWriter
    except ImportError as error:
        raise ImportError(
            'writing for TensorBoard needs the package tensorboard: pip install "fluxutils_py[tensorboard]"'
        ) from error
    return TorchWriter


def render_figure(figure: Any, close: bool = False) -> np.ndarray:
    """A matplotlib figure as an image (H, W, 3) of uint8; without a display, and whatever backend is in use."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    shown_by, canvas = figure.canvas, FigureCanvasAgg(figure)
    try:
        canvas.draw()
        image = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_canvas(shown_by)
    if close and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
    return image
