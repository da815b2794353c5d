"""Write training curves for TensorBoard."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.curve_hook import CurveHook
from fluxutils_py.reporting.publish import as_code
from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.writers import SummaryWriter, import_torch_writer

SUFFIX = ".fit"  # file names of this hook end in it; other files in the directory are left alone


class TensorBoard(CurveHook):
    """Hook that writes training curves for TensorBoard: ``callbacks=[TensorBoard("runs/a")]``.

    The numbers in the record of an epoch have tags ``train/loss``, ``validation/loss``,
    ``train/lr`` and so on. Single steps have the tags of :class:`PublishTrainingProgress`, such as
    ``train/batch_loss``. The x axis is the step of the loop. Rank 0 writes, and TensorBoard can
    show the curves during training.

    Parameters
    ----------
    log_dir : str or path-like
        Directory of the run, created if it does not exist. ``tensorboard --logdir runs`` shows each
        directory in ``runs`` as a run.
    trigger : int or Trigger
        When to write single steps. ``n``: at each step that is a multiple of ``n``.
    each_fit : bool
        Whether to write each fit to a new directory in ``log_dir``, ``fit-0001``, ``fit-0002``,
        ..., with the estimator's parameters as text. For searches and cross-validation, also with
        ``n_jobs``.

    Raises
    ------
    ImportError
        Before training, if TensorBoard is not installed.
    RuntimeError
        Before training, if another fit is writing to the directory.

    Notes
    -----
    A directory shows one training. A fit that continues it (from a checkpoint, ``partial_fit``,
    ``warm_start``) extends the curves, and replaces what an interrupted fit wrote after its
    checkpoint. A new fit hides the files of earlier ones: it renames them to
    ``events.out.earlier.*``, which TensorBoard ignores. With ``each_fit``, a continued fit writes
    what it adds to a new directory.

    Copies and pickles, as in clones of an estimator, keep only the settings.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(TensorBoard(tempfile.mkdtemp(), trigger=2))
    >>> _ = loop.run_epochs([4, 3, 2, 1], epochs=1)
    """

    name = "TensorBoard"

    def __init__(
        self, log_dir: str | os.PathLike[str], *, trigger: object = 10, each_fit: bool = False
    ) -> None:
        super().__init__(trigger)
        self.log_dir = Path(log_dir)
        self.each_fit = each_fit
        self._open: ExitStack | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_open": None}

    def on_start(self, loop: RunningLoop) -> None:
        if not is_main_process(loop):
            return
        import_torch_writer()  # fails before a directory is created
        self._open = ExitStack()
        folder = make_run_folder(self.log_dir) if self.each_fit else self.log_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(exclusive_lock(folder))
        if loop.step == 0:
            hide_earlier_events(folder)
        writer = SummaryWriter(folder, purge_step=purge_step(loop), filename_suffix=SUFFIX)
        self._open.enter_context(writer)
        self.begin(loop, writer)
        if self.each_fit and "estimator" in loop.shared_data:
            text = as_code(repr(loop.shared_data["estimator"]))
            writer.add_text("estimator", text, loop.step)

    def on_close(self, loop: RunningLoop) -> None:
        opened = self._open
        # first, so that an error while closing leaves no closed writer to the next run
        self._open = None
        with opened or nullcontext():  # the writer is closed last
            super().on_close(loop)


def purge_step(loop: RunningLoop) -> int | None:
    """Return the step from which a continued run replaces earlier summaries; None for a new run."""
    if loop.step == 0:
        return None
    # A checkpoint after the last step of an epoch, but before its end: the end is repeated, and its
    # record would appear twice. Purging from this step removes it, together with the summaries of
    # this single step.
    ends = (
        loop.n_epochs is not None
        and loop.epoch_step > 0
        and loop.steps_per_epoch in (None, loop.epoch_step)
    )
    return loop.step + (not ends)


def hide_earlier_events(folder: Path) -> None:
    """Rename the files of earlier fits, so that TensorBoard ignores them. Some readers ignore
    ``purge_step=0``.
    """
    for path in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        path.rename(path.with_name(path.name.replace("tfevents", "earlier", 1)))


def make_run_folder(root: Path) -> Path:
    """Create a new folder in ``root``; safe when several processes do so at once."""
    root.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        with suppress(FileExistsError):
            path = root / f"fit-{n:04}"
            path.mkdir()
            return path
    raise AssertionError


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other fits in any process, if the system supports locks."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # on file systems without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another fit is writing to {folder}: give each fit its own directory, or let "
                    "TensorBoard(..., each_fit=True)"
                ) from None
        try:
            yield
        finally:
            with suppress(OSError):
                # releases it even if a forked process has the folder open
                fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)
