"""Save a checkpoint and end the program when a scheduler signals that the job's time is over."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from typing import Any

LOG = logging.getLogger("fluxutils_py")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
LOOK_EVERY = 0.2  # seconds between the steps at which ranks exchange whether one got a signal


class Preemption:
    """Hook that on SIGTERM or SIGUSR1 saves a checkpoint after the step in progress, and then ends the program.

    Each :class:`Checkpointer` adds one to its loop. If any rank gets one of the signals, all ranks save together and
    raise ``SystemExit(128 + signal)``: 143 for SIGTERM, 138 for SIGUSR1 (on Linux). The next start of
    the program continues from that step.

    It takes over signals with their default action only, in the main thread, while the loop runs. A signal that comes
    after the last step finds the run complete: SIGTERM is passed on then, SIGUSR1 is not.

    Parameters
    ----------
    checkpointer : Checkpointer

    Notes
    -----
    Several ranks exchange their signals about every fifth of a second, not after every step.

    Sources: ``#SBATCH --signal`` of SLURM, ``terminationGracePeriodSeconds`` of Kubernetes, and
    ``reached_preemption`` of Orbax.
    """

    name, priority, collective = "preemption", math.inf, True  # after everything else has seen the step

    def __init__(self, checkpointer: Any) -> None:
        self.checkpointer = checkpointer
        self._signal = 0
        self._handlers: dict[int, Any] = {}

    def on_start(self, loop: Any) -> None:
        self._signal, self._step, self._began, self._next = 0, loop.step, time.monotonic(), loop.step + 1
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL or getattr(handler, "__self__", None) is loop.ranks:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def on_step(self, loop: Any) -> None:
        found = self._signal
        if not loop.ranks.is_single:
            if loop.step < self._next:
                return
            rate = (loop.step - self._step) / max(time.monotonic() - self._began, 1e-9)
            answers = loop.ranks.allgather((self._signal, rate))
            found = max(number for number, _ in answers)
            self._step, self._began = loop.step, time.monotonic()
            self._next = loop.step + max(1, int(LOOK_EVERY * answers[0][1]))
        if not found:
            return
        self._signal = 0
        path = self.checkpointer.save(loop)
        if loop.rank == 0:
            name = signal.Signals(found).name
            LOG.warning("%s: saved %s; the program ends with status %d, to be started again", name, path, 128 + found)
        raise SystemExit(128 + found)

    def on_close(self, loop: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        if self._signal == signal.SIGTERM:
            os.kill(os.getpid(), self._signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signal = self._signal or number
