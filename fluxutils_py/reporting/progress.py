"""A progress bar for whoever is watching."""

from __future__ import annotations

import warnings
from typing import Any


class ProgressBar:
    """A hook that shows epoch, step and loss with tqdm; a notebook widget where there is one."""

    name, priority = "progress bar", 100

    def __init__(self) -> None:
        self._bar: Any = None

    def on_start(self, loop: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns when the notebook lacks widgets, then falls back to text
            from tqdm.auto import tqdm
        total = None if loop.n_epochs is None or loop.steps_per_epoch is None else loop.n_epochs * loop.steps_per_epoch
        self._bar = tqdm(total=total, unit="step", dynamic_ncols=True, leave=True)

    def on_step(self, loop: Any) -> None:
        if self._bar.update():  # true when the bar was drawn: format the loss no more often than that
            loss = loop.info.loss
            self._bar.set_postfix_str(f"epoch {loop.epoch + 1}" + (f", loss {loss:.4g}" if loss is not None else ""))

    def on_epoch(self, loop: Any) -> None:
        shown = {k: f"{v:.4g}" for k, v in loop.record.items() if k.endswith("loss") and v is not None}
        self._bar.set_postfix({"epoch": loop.record["epoch"], **shown})

    def on_close(self, loop: Any) -> None:
        if self._bar is not None:
            self._bar.close()
