"""Collect summaries that a model records in its forward pass; write them, and progress."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fluxutils_py.parallel import get_communicator, is_main_process
from fluxutils_py.reporting.curve_hook import step_numbers, step_rate
from fluxutils_py.reporting.tensorboard import as_code
from fluxutils_py.training.loop import Loop
from fluxutils_py.tree import named_leaves, summarize_shape, total_dimensionality

logger = logging.getLogger(__name__)


class Summary:
    """A value, and the method of a writer that writes it: "scalar", "image" and so on.

    Tensors are detached and copied on their device, arrays are copied: later changes do not show.
    """

    def __init__(self, method: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif isinstance(value, np.ndarray):
            value = value.copy()
        self.method = method
        self.value = value

    def publish(self, writer: object, tag: str, step: int) -> None:
        """Write the value with a writer that has flax's methods."""
        getattr(writer, self.method)(tag, self.value, step)


def ScalarSummary(value: object) -> Summary:
    """Return the summary of a number: a tensor or array of one element, or a Python number.

    >>> ScalarSummary(torch.ones(3, requires_grad=True).mean()).value
    tensor(1.)
    """
    return Summary("scalar", value)


def ImageSummary(image: object) -> Summary:
    """Return the summary of an image of floats in 0..1, or uint8, with axes (H, W) or (H, W, C)."""
    return Summary("image", image)


def MplImageSummary(
    image: Any,
    h_paddings: ArrayLike | None = None,
    v_paddings: ArrayLike | None = None,
    *,
    with_colorbar: bool = False,
    **options: Any,
) -> Summary:
    """Return the summary of an image that ``imshow`` of matplotlib draws at once, without pyplot or
    a display.

    For a figure of your own, with a canvas of matplotlib's Agg, call ``figure.canvas.draw()``, and
    take ``ImageSummary(np.asarray(figure.canvas.buffer_rgba())[..., :3])``.

    Parameters
    ----------
    image : array of shape (H, W) or (H, W, C)
    h_paddings, v_paddings : array of shape (W,) and (H,), optional
        Leave out the columns (``h_paddings``) or rows where these are above 0.5.
    with_colorbar : bool
    **options
        Arguments of ``imshow``, such as ``cmap``, ``interpolation``, ``aspect``, ``origin``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pixels = np.asarray(image)
    # h_paddings has an entry per column
    for axis, paddings in enumerate((v_paddings, h_paddings)):
        if paddings is not None:
            pixels = np.compress(np.asarray(paddings) <= 0.5, pixels, axis)
    figure = Figure()  # not of pyplot, which would keep it
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = axes.imshow(pixels, **options)
    if with_colorbar:
        figure.colorbar(drawn)
    canvas.draw()
    return ImageSummary(np.asarray(canvas.buffer_rgba())[..., :3])


class SummaryCollector:
    """Keep the summaries sown since the last ``take``, the latest for each module and name."""

    def __init__(self) -> None:
        self.sown: dict[tuple[nn.Module, str], Summary] = {}

    def take(self, model: nn.Module) -> dict[str, Summary]:
        """Remove and return the summaries of a model's modules, by path, such as
        ``"layers/0/mean_output"``.
        """
        taken = {}
        for path, module in model.named_modules():
            for key in [key for key in self.sown if key[0] is module]:
                # the model itself has no path
                taken[f"{path}.".lstrip(".").replace(".", "/") + key[1]] = self.sown.pop(key)
        return taken


# of the innermost block of collected_summaries
active_collector: ContextVar[SummaryCollector | None] = ContextVar("collector", default=None)


@contextmanager
def collected_summaries() -> Iterator[SummaryCollector]:
    """Collect the summaries that models in training mode :func:`sow`, within ``with
    collected_summaries() as found:``.

    ``found.take(model)`` returns the summaries by path. If blocks are nested, the innermost
    collects.
    """
    collector = SummaryCollector()
    token = active_collector.set(collector)
    try:
        yield collector
    finally:
        active_collector.reset(token)


def sow(module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
    """Record a summary in ``forward``, for :func:`collected_summaries`; without a collector, or in
    evaluation mode, do nothing.

    A later summary under the same name replaces an earlier one.

    Parameters
    ----------
    module : nn.Module
        The module that records; its path in the model becomes part of the tag.
    name : str
    summary : Summary, or a callable that returns one
        A callable is called, without gradients, only if there is a collector.

    Notes
    -----
    Source: ``Module.sow`` of flax, with which bobbin records summaries.

    Examples
    --------
    >>> class Loud(nn.Linear):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         sow(self, "mean_output", lambda: ScalarSummary(y.mean()))
    ...         return y
    >>> model = nn.Sequential(nn.ReLU(), Loud(3, 2))
    >>> with collected_summaries() as found:
    ...     y = model(torch.randn(5, 3))
    >>> list(found.take(model))
    ['1/mean_output']
    """
    collector = active_collector.get()
    if collector is None or not module.training:
        return
    if not isinstance(summary, Summary):
        with torch.no_grad():
            summary = summary()
    collector.sown[module, name] = summary


def publish_train_intermediates(
    writer: object, tree: object, step: int, *, prefix: str = "summary/"
) -> None:
    """Write each summary in a tree under its path, and ignore other leaves.

    Parameters
    ----------
    writer : writer with flax's methods
    tree : nested dict, list or tuple
        For instance the result of ``SummaryCollector.take``.
    step : int
    prefix : str
        Prefix of the tags.

    Notes
    -----
    Source: bobbin.

    Examples
    --------
    >>> class Printer:
    ...     def scalar(self, *args):
    ...         print(args)
    >>> publish_train_intermediates(Printer(), {"layers": [{"mean_output": ScalarSummary(0.5)}]}, 7)
    ('summary/layers/0/mean_output', 0.5, 7)
    """
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, Summary):
            leaf.publish(writer, prefix + path, step)


# -- progress and environment ----------------------------------------------------------------------


class PublishTrainingProgress:
    """Hook that writes loss and metrics of the step, the speed, and the summaries that the model
    sows.

    Tags are ``train/batch_loss``, ``train/<metric>``, ``trainer/steps_per_sec`` (since the previous
    call, so not at the first one), and ``summary/<path>/<name>`` for each :func:`sow`. Only rank 0
    writes.

    Parameters
    ----------
    writer : writer with flax's methods
        ``SummaryWriter(w)`` is one around a writer ``w`` of torch.
    summary_collections : iterable of str
        Accepted for bobbin and ignored: all sown summaries are written.
    trigger : Trigger, optional
        When to act as a hook of a loop. None: after every step.
    clock : callable
        Returns the time in seconds.

    Notes
    -----
    As a hook of a loop, in a ``CronTab``, or among the callbacks of an ``Estimator``, it collects
    the sown summaries itself. In a custom loop, call ``publish(state, step_info=info)`` within
    ``with collected_summaries():``.

    Source: bobbin, which writes the speed and the summaries.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> class Printer:
    ...     def scalar(self, *args):
    ...         print(args)
    >>> times = iter([1000.0, 1010.0])
    >>> publish = PublishTrainingProgress(Printer(), clock=lambda: next(times))
    >>> publish(SimpleNamespace(step=10, model=None))
    >>> publish(
    ...     SimpleNamespace(step=133, model=None),
    ...     SimpleNamespace(batch_loss=0.5, metrics={"accuracy": 0.75}),
    ... )
    ('trainer/steps_per_sec', 12.3, 133)
    ('train/batch_loss', 0.5, 133)
    ('train/accuracy', 0.75, 133)
    """

    name = "training progress"
    priority = 50  # after hooks that change the step's results

    def __init__(
        self,
        writer: Any,
        summary_collections: Iterable[str] = (),
        *,
        trigger: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer = writer
        self.trigger = trigger
        self.clock = clock
        self._last: tuple[int, float] | None = None
        self._collecting = ExitStack()

    def __call__(self, loop: Any, step_info: Any = None, **_: Any) -> None:
        if not is_main_process(loop):
            return
        now = (loop.step, self.clock())
        numbers = step_rate(self._last, now)
        self._last = now
        if step_info is None:
            step_info = getattr(loop, "step_info", None)  # a TrainState has none
        if step_info is not None:
            numbers |= step_numbers(step_info)
        for tag, number in numbers.items():
            self.writer.scalar(tag, number, loop.step)
        collector = active_collector.get()
        if collector is not None and loop.model is not None:
            publish_train_intermediates(self.writer, collector.take(loop.model), loop.step)

    def on_start(self, loop: Loop) -> None:
        """Begin a run; the speed does not include the time since an earlier run."""
        self._last = None
        # a collector that the caller has opened is left to the caller
        if is_main_process(loop) and active_collector.get() is None:
            self._collecting.enter_context(collected_summaries())

    def on_step(self, loop: Loop) -> None:
        self(loop)

    def on_close(self, loop: Loop) -> None:
        self._collecting.close()


def publish_trainer_env_info(
    writer: Any,
    state: Any,
    *,
    prefix: str = "trainer/diagnosis/",
    also_do_logging: bool = True,
    loglevel: int = logging.INFO,
) -> None:
    """Write the numbers of parameters and of extra variables (buffers), the parameters' shapes,
    devices, command line and process as text. Only rank 0 writes.

    Parameters
    ----------
    writer : writer with flax's methods
        ``SummaryWriter(w)`` is one around a writer ``w`` of torch.
    state : TrainState or Loop
        Object with ``step`` and ``model``.
    prefix : str
        Prefix of the tags ``total_num_params``, ``param_shape``, ``local_device``, ``trainer_argv``
        and ``process``.
    also_do_logging : bool
        Whether to log the texts as well, at ``loglevel``.

    Notes
    -----
    Source: bobbin, which repeats the prefix.
    """
    if not is_main_process(state):
        return
    # a custom state may have no ranks
    ranks = getattr(state, "ranks", None) or get_communicator("auto")
    params = dict(state.model.named_parameters())
    n_params = total_dimensionality(params)
    n_extra = total_dimensionality(dict(state.model.named_buffers()))
    host = socket.gethostname()
    texts = {
        "total_num_params": (
            f"Number of parameters = {n_params}, number of extra variables = {n_extra}"
        ),
        "param_shape": summarize_shape(params),
        "local_device": "\n".join(dict.fromkeys(str(p.device) for p in params.values())),
        "trainer_argv": "\n".join(sys.argv),
        "process": f"rank {ranks.rank} of {ranks.size}, pid {os.getpid()} on {host}",
    }
    for name, text in texts.items():
        writer.text(prefix + name, as_code(text), state.step)
        if also_do_logging:  # readable, for a run without TensorBoard
            logger.log(loglevel, "%s: %s", name, text)
