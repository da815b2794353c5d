"""How training goes, and where it runs, for a writer of summaries."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fluxutils_py.parallel import get_communicator, is_main_process
from fluxutils_py.reporting.summaries import (
    SummaryCollector,
    active_collector,
    collected_summaries,
    nobody_collected,
    publish_train_intermediates,
)
from fluxutils_py.reporting.tables import as_number
from fluxutils_py.tree import summarize_shape, total_dimensionality

logger = logging.getLogger(__name__)


class PublishTrainingProgress:
    """A hook that writes the loss and the metrics of the step, the speed, and what the model has sown.

    Tags are ``train/batch_loss``, ``train/<metric>``, ``trainer/steps_per_sec`` (since the last time that it acted, so
    not at the first), and ``summary/<path>/<name>`` for each :func:`sow`. Only rank 0 writes.

    Parameters
    ----------
    writer : Writer
        Of this package or of torch.
    summary_collections : iterable of str
        As in bobbin, without effect: all that was sown is written.
    trigger : Trigger, optional
        As a hook of a loop: after which steps. None: after all.
    clock : callable
        Returns seconds.

    Notes
    -----
    As a hook of a loop, also in a ``CronTab``, or among the callbacks of an ``Estimator``, it collects what the model
    sows by itself. Called as ``publish(state, step_info=info)`` in a loop of one's own, it takes what is collected
    around it, ``with collected_summaries(): ...``, and warns once if there is something and nobody collects.

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
    >>> publish(SimpleNamespace(step=133, model=None), SimpleNamespace(batch_loss=0.5, metrics={"accuracy": 0.75}))
    ('trainer/steps_per_sec', 12.3, 133)
    ('train/batch_loss', 0.5, 133)
    ('train/accuracy', 0.75, 133)
    """

    name, priority = "training progress", 50  # after what other hooks do to the step

    def __init__(
        self,
        writer: Any,
        summary_collections: Iterable[str] = (),
        *,
        trigger: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer, self.trigger, self.clock = writer, trigger, clock
        self._last: tuple[int, float] | None = None
        self._collector: SummaryCollector | None = None

    def __call__(self, loop: Any, step_info: Any = None, **_: Any) -> None:
        if not is_main_process(loop):
            return
        step, now = loop.step, self.clock()
        if self._last is not None and step > self._last[0] and now > self._last[1]:
            self.writer.add_scalar("trainer/steps_per_sec", (step - self._last[0]) / (now - self._last[1]), step)
        self._last = step, now
        step_info = getattr(loop, "step_info", None) if step_info is None else step_info
        if step_info is not None:
            for name, value in {"batch_loss": step_info.batch_loss, **step_info.metrics}.items():
                if (found := as_number(value)) is not None:
                    self.writer.add_scalar(f"train/{name}", found, step)
        collector = active_collector()
        if collector is not None and loop.model is not None:
            publish_train_intermediates(self.writer, collector.take(loop.model), step)
        elif collector is None and nobody_collected(loop.model):
            warnings.warn(
                "summaries that the model leaves by sow() are not published: put the training loop into "
                "'with collected_summaries():'",
                stacklevel=2,
            )

    def on_start(self, loop: Any) -> None:
        """A run begins: the time that has passed since an earlier one does not count."""
        self._last = None
        if is_main_process(loop) and active_collector() is None:
            self._collector = collected_summaries()
            self._collector.__enter__()

    def on_step(self, loop: Any) -> None:
        self(loop)

    def on_close(self, loop: Any) -> None:
        if self._collector is not None:
            self._collector.__exit__()
            self._collector = None


def publish_trainer_env_info(
    writer: Any,
    state: Any,
    *,
    prefix: str = "trainer/diagnosis/",
    also_do_logging: bool = True,
    loglevel: int = logging.INFO,
) -> None:
    """Write as text what is trained, and where: for a look at it years later.

    Parameters
    ----------
    writer : Writer
        Of this package or of torch.
    state : TrainState or Loop
        With ``step`` and ``model``. Of several ranks the first writes.
    prefix : str
        Of the tags ``total_num_params``, ``param_shape``, ``local_device``, ``trainer_argv`` and ``process``.
    also_do_logging : bool
        Log the texts as well, at ``loglevel``.

    Notes
    -----
    Source: bobbin, where the prefix comes twice.
    """
    if not is_main_process(state):
        return
    ranks = getattr(state, "ranks", None) or get_communicator("auto")
    params = dict(state.model.named_parameters())
    devices = dict.fromkeys(str(p.device) for p in params.values())
    texts = {
        "total_num_params": str(total_dimensionality(params)),
        "param_shape": summarize_shape(params),
        "local_device": "\n".join(describe_device(torch.device(d)) for d in devices),
        "trainer_argv": "\n".join(sys.argv),
        "process": f"rank {ranks.rank} of {ranks.size}, pid {os.getpid()} on {socket.gethostname()}",
    }
    for name, text in texts.items():
        writer.add_text(prefix + name, "\n".join(f"    {line}" for line in text.splitlines()), state.step)
        if also_do_logging:
            logger.log(loglevel, "%s: %s", name, text)


def describe_device(device: torch.device) -> str:
    """A device, and what is behind it."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
