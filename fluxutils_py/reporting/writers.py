"""Write summaries for TensorBoard with torch's writer."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.data.arrays import to_numpy

Step: TypeAlias = int | None


class Writer:
    """Base class of all writers: torch's methods, the same under bobbin's names, and ``with``.

    Subclasses define ``_call``, which executes a method of torch's ``SummaryWriter``. Values are
    tensors on any device, arrays, or numbers; later changes to them do not show. Steps are counts,
    such as ``loop.step``. ``walltime`` is in seconds since 1970, by default the time of the call.
    """

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        """Call ``method`` of torch's writer. The first argument is the tag, except for
        ``add_hparams``.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write everything to disk. Does nothing after :meth:`close`."""

    def close(self) -> None:
        """Close the files. A second call does nothing; writing afterwards raises ValueError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- torch's names; ``options`` go to torch's methods ------------------------------------------

    def _write(self, method: str, *args: Any, **options: Any) -> None:
        # the time of the call, because another thread may execute it later
        if options.get("walltime") is None:
            options["walltime"] = time.time()
        self._call(method, *args, **options)

    def add_scalar(
        self, tag: str, scalar_value: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write a number; TensorBoard stores it as float32."""
        self._write("add_scalar", tag, scalar_value, global_step, **options)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: Step = None,
        **options: Any,
    ) -> None:
        """Write several numbers for one plot, each into a directory below this writer's."""
        self._write("add_scalars", main_tag, dict(tag_scalar_dict), global_step, **options)

    def add_image(
        self, tag: str, img_tensor: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write an image (C, H, W), floats in 0..1 or uint8; ``dataformats`` names other axes, such
        as ``"HW"``.
        """
        self._write("add_image", tag, img_tensor, global_step, **options)

    def add_images(
        self, tag: str, img_tensor: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write images (N, C, H, W), side by side as one; ``dataformats`` names other axes."""
        self._write("add_images", tag, img_tensor, global_step, **options)

    def add_figure(
        self, tag: str, figure: object, global_step: Step = None, close: bool = True, **options: Any
    ) -> None:
        """Draw a matplotlib figure, from pyplot or not, and write the image; ``close`` closes it in
        pyplot.
        """
        self.add_image(tag, render_figure(figure, close), global_step, dataformats="HWC", **options)

    def add_histogram(
        self, tag: str, values: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write a histogram of one or more values, of any shape; ``bins`` as in NumPy, or
        ``"tensorflow"``.
        """
        self._write("add_histogram", tag, values, global_step, **options)

    def add_audio(
        self, tag: str, snd_tensor: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write sound of one channel, (L,) or (1, L), in -1..1, at ``sample_rate`` (default 44100
        Hz).
        """
        self._write("add_audio", tag, snd_tensor, global_step, **options)

    def add_text(
        self, tag: str, text_string: str, global_step: Step = None, **options: Any
    ) -> None:
        """Write text, which TensorBoard shows as Markdown."""
        self._write("add_text", tag, text_string, global_step, **options)

    def add_tensor(
        self, tag: str, tensor: object, global_step: Step = None, **options: Any
    ) -> None:
        """Write a tensor or array, for other programs to read."""
        if isinstance(tensor, np.ndarray):  # which torch's writer does not know
            tensor = torch.from_numpy(tensor)
        self._write("add_tensor", tag, tensor, global_step, **options)

    def add_hparams(
        self, hparam_dict: dict[str, Any], metric_dict: dict[str, Any], **options: Any
    ) -> None:
        """Write hyper-parameters (numbers, strings, booleans) and the resulting metrics.

        They go to the directory ``run_name`` below this writer's; None: named after the time.
        """
        self._call("add_hparams", hparam_dict, metric_dict, **options)

    # -- bobbin's names, which are flax's ----------------------------------------------------------

    def scalar(self, tag: str, value: object, step: Step) -> None:
        """Same as :meth:`add_scalar`."""
        self.add_scalar(tag, value, step)

    def image(self, tag: str, image: Any, step: Step, max_outputs: int = 3) -> None:
        """Write an image (H, W) or (H, W, C), or the first ``max_outputs`` of (N, H, W, C), side by
        side.
        """
        if image.ndim == 4:
            self.add_images(tag, image[:max_outputs], step, dataformats="NHWC")
        else:
            self.add_image(tag, image, step, dataformats="HWC"[: image.ndim])

    def audio(
        self,
        tag: str,
        audiodata: Any,
        step: Step,
        sample_rate: int = 44100,
        max_outputs: int = 3,
    ) -> None:
        """Write sound (L,) or (1, L), or the first ``max_outputs`` of (N, L, 1), as ``tag/0``,
        ``tag/1``, ...
        """
        if audiodata.ndim < 3:
            self.add_audio(tag, audiodata, step, sample_rate=sample_rate)
        else:
            for n, sound in enumerate(audiodata[:max_outputs]):
                self.add_audio(f"{tag}/{n}", sound.reshape(-1), step, sample_rate=sample_rate)

    def histogram(self, tag: str, values: object, step: Step, bins: object = None) -> None:
        """Same as :meth:`add_histogram`; ``bins`` is ``"tensorflow"`` by default."""
        self.add_histogram(tag, values, step, bins="tensorflow" if bins is None else bins)

    def text(self, tag: str, textdata: str, step: Step) -> None:
        """Same as :meth:`add_text`."""
        self.add_text(tag, textdata, step)

    def write(self, tag: str, tensor: object, step: Step, metadata: object = None) -> None:
        """Same as :meth:`add_tensor`; ``metadata`` is ignored: torch's writer cannot store it."""
        self.add_tensor(tag, tensor, step)

    def hparams(self, hparams: dict[str, Any]) -> None:
        """Write hyper-parameters without metrics into this writer's directory; see
        :meth:`add_hparams`.
        """
        self.add_hparams(hparams, {}, run_name=".")


FLAX_NAMES = {"add_tensor": "write", "add_images": "image"}  # else without "add_"


class FlaxNames(Writer):
    """Writer that passes calls on to one that has flax's method names only, such as ``scalar`` and
    ``text``.
    """

    def __init__(self, writer: object) -> None:
        self.writer: Any = writer

    def _call(
        self,
        method: str,
        tag: Any,
        value: object = None,
        step: Step = None,
        **options: Any,
    ) -> None:
        name = FLAX_NAMES.get(method, method.removeprefix("add_"))
        # flax has no add_scalars, for instance
        if not hasattr(self.writer, name):
            raise AttributeError(f"{type(self.writer).__name__} has neither {method} nor {name}")
        call = getattr(self.writer, name)
        if name == "hparams":
            call(tag)
        elif name == "image":
            default = "NCHW" if method == "add_images" else "CHW"
            call(tag, channels_last(value, options.get("dataformats", default)), step)
        elif name == "audio":  # (N, L, C) for flax
            sound = to_numpy(value).reshape(1, -1, 1)
            call(tag, sound, step, sample_rate=options.get("sample_rate", 44100))
        else:
            call(tag, to_numpy(value), step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def with_torch_names(writer: object) -> Any:
    """Return a writer that has torch's method names: itself, or one around a writer with flax's
    names only.
    """
    if hasattr(writer, "add_scalar") or not hasattr(writer, "scalar"):
        return writer
    return FlaxNames(writer)


def channels_last(image: Any, dataformats: str) -> np.ndarray:
    """Return an image with axes (H, W, C), or several with (N, H, W, C)."""
    axes = [dataformats.index(axis) for axis in "NHWC" if axis in dataformats]
    image = np.asarray(to_numpy(image)).transpose(axes)
    return image if "C" in dataformats else image[..., None]


class NullSummaryWriter(Writer):
    """Writer that writes nothing, for ranks other than the first or to turn summaries off.

    >>> NullSummaryWriter().add_scalar("loss", 0.5, 1)
    """

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        pass

    def add_figure(self, *args: Any, **options: Any) -> None:
        pass  # without drawing it

    def as_result_processor(self, method: object = None) -> Callable[..., None]:
        """Return a result processor that does nothing; see :class:`MultiDirectorySummaryWriter`."""
        return lambda results, loop: None


class SummaryWriter(Writer):
    """Write event files into a directory, with torch's ``SummaryWriter``.

    Parameters
    ----------
    log_dir : str or path-like
        Created if it does not exist.
    purge_step : int, optional
        Make TensorBoard hide what earlier files in the directory hold for this step and later ones.
    auto_flush : bool
        Whether each summary is on disk when the call returns. False: within some seconds.
    filename_suffix : str
        Suffix of the file name.

    Raises
    ------
    ImportError
        If TensorBoard is not installed.
    ValueError
        When writing after :meth:`close`.
    RuntimeError
        When writing in a process that was forked from the one that opened the writer.

    Notes
    -----
    TensorBoard reads the files of a directory in the order of their names; the new name sorts after
    existing ones. An open writer is closed when the program ends.

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

    flush_s = 5  # seconds until a summary is on disk: short enough to watch a run

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        purge_step: int | None = None,
        auto_flush: bool = False,
        filename_suffix: str = "",
    ) -> None:
        # torch opens the file in a thread, when the program may have changed its folder
        self.log_dir = Path(log_dir).absolute()
        self.auto_flush = auto_flush
        self._torch = self._open_torch(
            purge_step=purge_step, flush_secs=self.flush_s, filename_suffix=filename_suffix
        )
        self._process = OpenInProcess(self.close)

    def _open_torch(self, **options: Any) -> Any:
        """Open torch's writer with a file whose name sorts after the others.

        Names begin with the second and end in an increasing number, but "10" sorts before "9".
        """
        open_writer = import_torch_writer()
        while True:
            earlier = self._event_files()
            writer = open_writer(self.log_dir, **options)
            new = self._event_files() - earlier
            # several new files: another process opened one at the same time
            if not earlier or len(new) != 1:
                return writer
            last = max(earlier)
            # a file from the future, after a change of the clock, is not waited for
            if min(new) > last or creation_second(last) > time.time():
                return writer
            writer.close()
            min(new).unlink()
            time.sleep(max(creation_second(last) + 1 - time.time(), 0.01))

    def _event_files(self) -> set[Path]:
        return set(self.log_dir.glob("events.out.tfevents.*"))

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        self._process.require(self.log_dir)  # torch's writer would drop the value silently
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
    """Truth value: the writer is open, and this is the process that opened it. Closes it when the
    program ends.
    """

    def __init__(self, close: Callable[[], Any]) -> None:
        self.close = close
        self.pid = os.getpid()
        self.open = True
        atexit.register(close)

    def __bool__(self) -> bool:
        return self.open and self.pid == os.getpid()

    def require(self, where: object) -> None:
        """Raise an error if the writer is closed, or belongs to another process."""
        if not self.open:
            raise ValueError(f"the writer of {where} is closed; open another to write more")
        if self.pid != os.getpid():
            raise RuntimeError(
                f"the writer of {where} belongs to process {self.pid}, from which this one was "
                "forked; open another in the process that is to write"
            )

    def ends(self) -> bool:
        """Mark the writer as closed, and return whether it was open in this process."""
        was_open = bool(self)
        self.open = False
        atexit.unregister(self.close)  # which would keep the writer in memory
        return was_open


def copy_to_cpu(value: object) -> object:
    """Copy a tensor or array to main memory; return other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return np.array(value) if isinstance(value, np.ndarray) else value


def creation_second(path: Path) -> int:
    """Return the second at which an event file was opened, read from its name; 0 if the name has
    none.
    """
    text = path.name.removeprefix("events.out.tfevents.").split(".")[0]
    return int(text) if text.isdigit() else 0


def import_torch_writer() -> Any:
    """Return torch's ``SummaryWriter``, which needs TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter as TorchWriter
    except ImportError as error:
        raise ImportError(
            "writing for TensorBoard needs the package tensorboard: pip install tensorboard"
        ) from error
    return TorchWriter


def render_figure(figure: Any, close: bool = False) -> np.ndarray:
    """Draw a matplotlib figure as a uint8 image (H, W, 3), without a display and with any backend
    in use.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    shown_by = figure.canvas
    canvas = FigureCanvasAgg(figure)  # takes the place of the other
    try:
        canvas.draw()
        image = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_canvas(shown_by)
    pyplot = sys.modules.get("matplotlib.pyplot")  # not imported for this: it chooses a backend
    if close and pyplot is not None:
        pyplot.close(figure)
    return image
