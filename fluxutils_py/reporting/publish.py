"""Write training progress and the environment to a summary writer."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fluxutils_py.errors import warn
from fluxutils_py.parallel import get_communicator, is_main_process
from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.summaries import (
    SummaryCollector,
    active_collector,
    collected_summaries,
    nobody_collected,
    publish_train_intermediates,
)
from fluxutils_py.reporting.tables import as_number
from fluxutils_py.reporting.writers import with_torch_names
from fluxutils_py.tree import summarize_shape, total_dimensionality

logger = logging.getLogger(__name__)


class PublishTrainingProgress:
    """Hook that writes loss and metrics of the step, the speed, and the summaries that the model
    sows.

    Tags are ``train/batch_loss``, ``train/<metric>``, ``trainer/steps_per_sec`` (since the previous
    call, so not at the first one), and ``summary/<path>/<name>`` for each :func:`sow`. Only rank 0
    writes.

    Parameters
    ----------
    writer : Writer
        Writer of this package or of torch.
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
    ``with collected_summaries():``. It warns once if the model sows summaries outside such a block.

    Source: bobbin, which writes the speed and the summaries.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> class Printer:
    ...     def add_scalar(self, *args):
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
        writer: object,
        summary_collections: Iterable[str] = (),
        *,
        trigger: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer = with_torch_names(writer)
        self.trigger = trigger
        self.clock = clock
        self._last: tuple[int, float] | None = None
        self._collector: SummaryCollector | None = None

    def __call__(self, loop: Any, step_info: Any = None, **_: Any) -> None:
        if not is_main_process(loop):
            return
        self._write_speed(loop.step, self.clock())
        if step_info is None:
            step_info = getattr(loop, "step_info", None)  # a TrainState has none
        if step_info is not None:
            self._write_metrics(step_info, loop.step)
        self._write_summaries(loop)

    def _write_speed(self, step: int, now: float) -> None:
        if self._last is not None:
            n_steps = step - self._last[0]
            seconds = now - self._last[1]
            # not both above 0 when called twice at a step, or after a restored checkpoint
            if n_steps > 0 and seconds > 0:
                self.writer.add_scalar("trainer/steps_per_sec", n_steps / seconds, step)
        self._last = (step, now)

    def _write_metrics(self, step_info: Any, step: int) -> None:
        values = {"batch_loss": step_info.batch_loss, **step_info.metrics}
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                self.writer.add_scalar(f"train/{name}", number, step)

    def _write_summaries(self, loop: Any) -> None:
        collector = active_collector()
        if collector is not None and loop.model is not None:
            publish_train_intermediates(self.writer, collector.take(loop.model, self), loop.step)
        elif collector is None and nobody_collected(loop.model):
            warn(
                "summaries from sow() are not published: run the training loop inside 'with "
                "collected_summaries():'"
            )

    def on_start(self, loop: RunningLoop) -> None:
        """Begin a run; the speed does not include the time since an earlier run."""
        self._last = None
        # a collector that the caller has opened is left to the caller
        if is_main_process(loop) and active_collector() is None:
            self._collector = collected_summaries()
            self._collector.__enter__()

    def on_step(self, loop: RunningLoop) -> None:
        self(loop)

    def on_close(self, loop: RunningLoop) -> None:
        if self._collector is not None:
            self._collector.__exit__()
            self._collector = None


def publish_trainer_env_info(
    writer: object,
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
    writer : Writer
        Writer of this package or of torch.
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
    devices = dict.fromkeys(p.device for p in params.values())  # each once, in order
    host = socket.gethostname()
    texts = {
        "total_num_params": (
            f"Number of parameters = {n_params}, number of extra variables = {n_extra}"
        ),
        "param_shape": summarize_shape(params),
        "local_device": "\n".join(map(describe_device, devices)),
        "trainer_argv": "\n".join(sys.argv),
        "process": f"rank {ranks.rank} of {ranks.size}, pid {os.getpid()} on {host}",
    }
    torch_writer = with_torch_names(writer)
    for name, text in texts.items():
        torch_writer.add_text(prefix + name, as_code(text), state.step)
        if also_do_logging:  # readable, for a run without TensorBoard
            logger.log(loglevel, "%s: %s", name, text)


def as_code(text: str) -> str:
    """Indent lines, which TensorBoard then shows as they are: it takes text for Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def describe_device(device: torch.device) -> str:
    """Describe a device: the name of a GPU, the number of threads of a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"{device} ({torch.get_num_threads()} threads)"
    return str(device)
