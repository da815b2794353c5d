"""The curves of a fit, in TensorBoard."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.publish import PublishTrainingProgress
from fluxutils_py.reporting.tables import as_number
from fluxutils_py.reporting.writers import SummaryWriter, import_torch_writer

SUFFIX = ".fit"  # of the files that are written here; others in the directory are let be


class TensorBoard:
    """A hook that writes the curves of training for TensorBoard; ``callbacks=[TensorBoard("runs/a")]`` is all.

    Tags are ``train/loss``, ``validation/loss``, ``train/lr`` and so on for the numbers in the record of an epoch, and
    those of :class:`PublishTrainingProgress`, such as ``train/batch_loss``, for single steps. All go by the step of the
    loop. Rank 0 writes, and what was written can be looked at while training goes on.

    Parameters
    ----------
    log_dir : str or path-like
        Is made if need be. The runs of which TensorBoard is shown a folder, as ``tensorboard --logdir runs``, are the
        directories in it.
    trigger : int or Trigger
        After which steps to write what is of single steps; ``n``: whenever the step is a multiple of it.
    each_fit : bool
        Give every fit a directory of its own in ``log_dir``: ``fit-0001``, ``fit-0002``, ..., with the parameters of
        the estimator as a text. For searches and cross-validation, also with ``n_jobs``.

    Raises
    ------
    ImportError
        Without TensorBoard, before training.
    RuntimeError
        If another fit is writing to the directory, before training.

    Notes
    -----
    A directory shows the curves of one training. One that goes on (from a checkpoint, ``partial_fit``, ``warm_start``)
    goes on with them; what an interrupted one wrote behind its checkpoint is replaced. One that begins anew sets aside
    what earlier ones wrote there: their files are renamed, to ``events.out.earlier.*``, which TensorBoard does not
    look at. With ``each_fit``, a fit that goes on has a directory for what it adds.

    Copies and pickles of it, as in clones of an estimator, know the directory only.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(TensorBoard(tempfile.mkdtemp(), trigger=2))
    >>> loop.run_epochs([4, 3, 2, 1], epochs=1)
    """

    name, priority = "TensorBoard", 60  # after all that adds to the record of an epoch

    def __init__(self, log_dir: Any, *, trigger: Any = 10, each_fit: bool = False) -> None:
        by_number = isinstance(trigger, int)
        if by_number and (isinstance(trigger, bool) or trigger < 1):
            raise ValueError(f"trigger must be at least 1, or a Trigger, got {trigger!r}")
        self.log_dir, self.each_fit = Path(log_dir), each_fit
        self.every: int = trigger if by_number else 1
        self.trigger: Any = None if by_number else trigger
        self._writer: SummaryWriter | None = None
        self._progress: PublishTrainingProgress | None = None
        self._open: ExitStack | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None, "_progress": None, "_open": None}

    def on_start(self, loop: Any) -> None:
        if not is_main_process(loop):
            return
        import_torch_writer()  # before anything is made
        self._open = ExitStack()
        folder = make_run_folder(self.log_dir) if self.each_fit else self.log_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(exclusive_lock(folder))
        if loop.step == 0:
            hide_earlier_events(folder)
        writer = SummaryWriter(folder, purge_step=purge_step(loop), filename_suffix=SUFFIX)
        self._writer = self._open.enter_context(writer)
        self._progress = PublishTrainingProgress(self._writer)
        self._progress.on_start(loop)
        self._open.callback(self._progress.on_close, loop)
        if self.each_fit and "estimator" in loop.shared_data:
            text = repr(loop.shared_data["estimator"])
            self._writer.add_text("estimator", "\n".join(f"    {line}" for line in text.splitlines()), loop.step)

    def on_step(self, loop: Any) -> None:
        if self._progress is not None and loop.step % self.every == 0:
            self._progress(loop)

    def on_epoch(self, loop: Any) -> None:
        if self._writer is not None:
            for name, value in loop.record.items():
                if name != "epoch" and (number := as_number(value)) is not None:
                    part, rest = ("validation", name[11:]) if name.startswith("validation_") else ("train", name)
                    self._writer.add_scalar(f"{part}/{rest}", number, loop.step)

    def on_close(self, loop: Any) -> None:
        opened, self._open, self._writer, self._progress = self._open, None, None, None
        if opened is not None:
            opened.close()


def purge_step(loop: Any) -> int | None:
    """From which step on a run that goes on will write: what is there of it and of later ones would be there twice."""
    if loop.step == 0:
        return None
    # Saved behind the last step of an epoch, before its end, which comes again: its record would be there twice. The
    # price is what was written of that single step.
    ends = loop.n_epochs is not None and loop.epoch_step > 0 and loop.steps_per_epoch in (None, loop.epoch_step)
    return int(loop.step) + (not ends)


def hide_earlier_events(folder: Path) -> None:
    """Have TensorBoard not look at what earlier fits wrote. Not all of its readers heed a ``purge_step`` of 0."""
    for path in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        path.rename(path.with_name(path.name.replace("tfevents", "earlier", 1)))


def make_run_folder(root: Path) -> Path:
    """A new folder in ``root``, also where others are making theirs."""
    root.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        with suppress(FileExistsError):
            (path := root / f"fit-{n:04}").mkdir()
            return path
    raise AssertionError


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a folder against other fits, of this process and of others; where the system has locks."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of file systems without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another fit is writing to {folder}: give each a directory, or let TensorBoard(..., each_fit=True)"
                ) from None
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a forked process has it open
    finally:
        os.close(lock)
