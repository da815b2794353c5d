"""Show training progress: a progress bar, or lines in a log."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from fluxutils_py.parallel import RankGroup, is_main_process
from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.tables import as_number, format_metric
from fluxutils_py.terminal import shows_progress

_said: set[str] = set()  # lines that this process needs only once
LOG = logging.getLogger("fluxutils_py")
# not shown among the numbers of an epoch's record
HIDDEN_KEYS = ("epoch", "mean_batch_loss", "seconds")


def progress_hook(verbose: object) -> ProgressBar | EpochLog | None:
    """Return the progress hook for an estimator's ``verbose``, or None.

    "auto": a bar on a terminal and in a notebook, elsewhere a line per epoch in the log. True: the
    same, but the line goes to stderr if logging does not show it. False: None.
    """
    if not shows_progress(verbose) and verbose != "auto":
        return None
    return ProgressBar() if shows_progress("auto") else EpochLog(insist=verbose != "auto")


def say_stage(verbose: object, ranks: RankGroup, line: str) -> None:
    """Say what is done before a stage that may take long, if ``verbose`` is true, on rank 0."""
    progress = progress_hook(verbose)
    # "auto" stays with what shows how far a fit is: a search would say a line for each
    if progress is not None and verbose != "auto" and ranks.rank == 0:
        progress.say(line)


def show_stage(verbose: object, loop: Any, name: str) -> None:
    """Show the progress of a loop that is a stage of a fit, where there are bars, on rank 0."""
    progress = progress_hook(verbose)
    if isinstance(progress, ProgressBar) and loop.rank == 0:
        progress.stage = name
        loop.hooks.attach(progress)


def say_once(progress: ProgressBar | EpochLog, line: str) -> None:
    """Say a line, also where the log does not show it, unless this process has said it before."""
    if line not in _said:
        _said.add(line)
        progress.say(line, insist=True)


class EpochLog:
    """Hook that logs a line after each epoch, to the logger ``fluxutils_py`` at level INFO.

    Parameters
    ----------
    insist : bool
        Write the lines of epochs to stderr if the logger would drop them, for lack of a handler or
        by its level.

    Notes
    -----
    The line shows the numbers of the epoch's record, such as ``epoch 3: loss 0.1234,
    validation_loss 0.2, 1.2 s``. Of several ranks only rank 0 writes.
    """

    name = "epoch log"
    priority = 100  # after hooks that add to the record

    def __init__(self, insist: bool = False) -> None:
        self.insist = insist

    def on_epoch(self, loop: RunningLoop) -> None:
        if not is_main_process(loop):
            return
        record = loop.record
        hidden = HIDDEN_KEYS if record.get("folds", 1) > 1 else (*HIDDEN_KEYS, "folds")
        numbers = [
            f"{k} {format_metric(v)}"
            for k, v in record.items()
            if k not in hidden and as_number(v) is not None
        ]
        self.say(f"epoch {record['epoch']}: {', '.join(numbers)}, {record['seconds']:.1f} s")

    def say(self, line: str, insist: bool | None = None) -> None:
        """Log a line, or write it to stderr if the log does not show it and ``insist`` is true."""
        if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
            LOG.info(line)
        elif (self.insist if insist is None else insist) and sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


class ProgressBar:
    """Hook that shows epoch, step and metrics with tqdm, as a widget in notebooks.

    It shows the metrics of the step, or its loss if it has none; after an epoch also the losses of
    its record, and the number of pieces into which its series were folded. Of several ranks only
    rank 0 shows it.
    """

    name = "progress bar"
    priority = 100

    def __init__(self) -> None:
        self.stage: str | None = None  # shown before the bar, which goes when the stage is done
        self._bar: Any = None

    def on_start(self, loop: RunningLoop) -> None:
        self._bar = None
        if not is_main_process(loop):
            return
        with warnings.catch_warnings():
            # tqdm warns when the notebook lacks widgets, then falls back to text
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
        total = None if loop.end_step is None else max(loop.end_step - loop.start_step, 0)
        done = loop.step - loop.start_step  # not 0 in a run that continues an interrupted one
        self._bar = tqdm(
            desc=self.stage,
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            leave=self.stage is None,
        )

    def say(self, line: str, insist: bool = True) -> None:
        """Print a line above the bar."""
        print(line, file=sys.stderr, flush=True)

    def on_step(self, loop: RunningLoop) -> None:
        # true when tqdm redraws the bar; format numbers only then
        if self._bar is not None and self._bar.update():
            self._show_epoch(loop)

    def _show_epoch(self, loop: RunningLoop) -> None:
        epoch = [] if loop.n_epochs is None else [f"epoch {loop.epoch + 1}"]
        metrics = [f"{name} {text}" for name, text in _metrics(loop).items()]
        self._bar.set_postfix_str(", ".join(epoch + metrics))

    def on_epoch(self, loop: RunningLoop) -> None:
        if self._bar is None:
            return
        record = loop.record
        shown = {"epoch": record["epoch"]}
        if record.get("folds", 1) > 1:
            shown["folds"] = record["folds"]
        for name, value in record.items():
            if name.endswith("loss") and value is not None:
                shown[name] = format_metric(value)
        if loop.metrics:  # else _metrics would add the loss of a single step
            shown |= _metrics(loop)
        self._bar.set_postfix(shown)

    def on_end(self, loop: RunningLoop) -> None:
        if self._bar is not None and loop.n_epochs is None:  # else on_epoch has shown it
            self._show_epoch(loop)

    def on_close(self, loop: RunningLoop) -> None:
        if self._bar is not None:
            self._bar.close()


def _metrics(loop: RunningLoop) -> dict[str, str]:
    metrics = loop.metrics or {"batch_loss": loop.batch_loss}
    return {
        name: format_metric(value)
        for name, value in metrics.items()
        if as_number(value) is not None
    }
