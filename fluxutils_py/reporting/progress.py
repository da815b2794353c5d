"""A progress bar for whoever is watching."""

from __future__ import annotations

import warnings
from typing import Any

from fluxutils_py.reporting.tables import number, shown


class ProgressBar:
    """A hook that shows epoch, step and metrics with tqdm; a notebook widget where there is one.

    Metrics are those of the step, or its loss if it has none; after an epoch, also the losses of its record.
    """

    name, priority = "progress bar", 100

    def __init__(self) -> None:
        self._bar: Any = None

    def on_start(self, loop: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns when the notebook lacks widgets, then falls back to text
            from tqdm.auto import tqdm
        total = None if loop.end_step is None else max(loop.end_step - loop.start_step, 0)
        done = loop.step - loop.start_step  # not 0 in a run that goes on where it was interrupted
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, leave=True)

    def on_step(self, loop: Any) -> None:
        if self._bar.update():  # true when the bar was drawn: format numbers no more often than that
            self._show(loop)

    def _show(self, loop: Any) -> None:
        epoch = [] if loop.n_epochs is None else [f"epoch {loop.epoch + 1}"]
        self._bar.set_postfix_str(", ".join(epoch + [f"{name} {text}" for name, text in _metrics(loop).items()]))

    def on_epoch(self, loop: Any) -> None:
        losses = {k: shown(v) for k, v in loop.record.items() if k.endswith("loss") and v is not None}
        metrics = _metrics(loop) if loop.info.metrics else {}
        self._bar.set_postfix({"epoch": loop.record["epoch"], **losses, **metrics})

    def on_end(self, loop: Any) -> None:
        if loop.n_epochs is None:  # else the last epoch said it
            self._show(loop)

    def on_close(self, loop: Any) -> None:
        if self._bar is not None:
            self._bar.close()


def _metrics(loop: Any) -> dict[str, str]:
    metrics = loop.info.metrics or {"loss": loop.info.loss}
    return {name: shown(value) for name, value in metrics.items() if number(value) is not None}
