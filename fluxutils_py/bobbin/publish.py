"""Write training progress and the environment to a summary writer."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from fluxutils_py.bobbin.summaries import (
    active_collector,
    collected_summaries,
    publish_train_intermediates,
)
from fluxutils_py.parallel import get_communicator, is_main_process
from fluxutils_py.reporting.curve_hook import step_numbers, step_rate
from fluxutils_py.reporting.tensorboard import as_code
from fluxutils_py.training.loop import Loop
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
