"""The base of hooks that write training curves: the same numbers under the same tags everywhere."""

from __future__ import annotations

from typing import Any

from fluxutils_py.reporting.publish import PublishTrainingProgress
from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.tables import as_number
from fluxutils_py.reporting.writers import Writer


class CurveHook:
    """Hook that writes the numbers of epochs and of single steps to a writer.

    Subclasses define ``on_start``, and call :meth:`begin` there, on rank 0.

    Parameters
    ----------
    trigger : int or Trigger
        When to write single steps. ``n``: at each step that is a multiple of ``n``.
    """

    priority = 60  # after all hooks that add to the record of an epoch

    def __init__(self, trigger: object) -> None:
        self.every = 1
        self.trigger: object = None
        if not isinstance(trigger, int):
            self.trigger = trigger
        elif isinstance(trigger, bool) or trigger < 1:
            raise ValueError(f"trigger must be at least 1, or a Trigger, got {trigger!r}")
        else:
            self.every = trigger
        self._writer: Writer | None = None
        self._progress: PublishTrainingProgress | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None, "_progress": None}

    def begin(self, loop: RunningLoop, writer: Writer) -> None:
        """Write to this writer until the end of the run."""
        self._writer = writer
        self._progress = PublishTrainingProgress(writer)
        self._progress.on_start(loop)

    def on_step(self, loop: RunningLoop) -> None:
        if self._progress is not None and loop.step % self.every == 0:
            self._progress(loop)

    def on_epoch(self, loop: RunningLoop) -> None:
        if self._writer is None:
            return
        for name, value in loop.record.items():
            number = as_number(value)
            if name == "epoch" or number is None:
                continue
            validated = name.removeprefix("validation_")
            tag = f"train/{name}" if validated == name else f"validation/{validated}"
            self._writer.add_scalar(tag, number, loop.step)

    def on_close(self, loop: RunningLoop) -> None:
        progress = self._progress
        # first, so that an error while closing leaves no closed writer to the next run
        self._writer = None
        self._progress = None
        if progress is not None:
            progress.on_close(loop)
