"""Write training curves for TensorBoard."""

from __future__ import annotations

import itertools
import os
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.curve_hook import CurveHook
from fluxutils_py.reporting.running_loop import RunningLoop

SUFFIX = ".fit"  # file names of this hook end in it; other files in the directory are left alone
FLUSH_S = 5.0  # seconds until a number is on disk: short enough to watch a run


class TensorBoard(CurveHook):
    """Hook that writes training curves for TensorBoard: ``callbacks=[TensorBoard("runs/a")]``.

    The numbers in the record of an epoch have tags ``train/loss``, ``validation/loss``,
    ``train/lr`` and so on; those of single steps are ``train/batch_loss``, ``train/<metric>`` and
    ``trainer/steps_per_sec``. The x axis is the step of the loop. Rank 0 writes, and TensorBoard
    can show the curves during training.

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

    Notes
    -----
    A directory shows one training. A fit that continues it (from a checkpoint, ``partial_fit``,
    ``warm_start``) extends the curves, and replaces what an interrupted fit wrote after its
    checkpoint. A new fit hides the files of earlier ones: it renames them to
    ``events.out.earlier.*``, which TensorBoard ignores. With ``each_fit``, a continued fit writes
    what it adds to a new directory. Fits at the same time need a directory each.

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
        self._writer: Any = None  # torch's

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_writer": None}

    def on_start(self, loop: RunningLoop) -> None:
        if not is_main_process(loop):
            return
        import_torch_writer()  # fails before a directory is created
        folder = make_run_folder(self.log_dir) if self.each_fit else self.log_dir
        if loop.step == 0:
            # some readers ignore purge_step=0
            for path in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
                path.rename(path.with_name(path.name.replace("tfevents", "earlier", 1)))
        options = {"purge_step": purge_step(loop), "filename_suffix": SUFFIX}
        self._writer = open_torch_writer(folder, **options)
        if self.each_fit and "estimator" in loop.shared_data:
            text = as_code(repr(loop.shared_data["estimator"]))
            self._writer.add_text("estimator", text, loop.step)
        self.begin(self._write)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for tag, number in numbers.items():
            self._writer.add_scalar(tag, number, step)

    def on_close(self, loop: RunningLoop) -> None:
        super().on_close(loop)
        writer = self._writer
        self._writer = None  # first: an error while closing leaves no closed writer behind
        if writer is not None:
            writer.close()


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


def make_run_folder(root: Path) -> Path:
    """Create a new folder in ``root``; safe when several processes do so at once."""
    root.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        with suppress(FileExistsError):
            path = root / f"fit-{n:04}"
            path.mkdir()
            return path
    raise AssertionError


def import_torch_writer() -> Any:
    """Return torch's ``SummaryWriter``, which needs TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "writing for TensorBoard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter


def open_torch_writer(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Open torch's ``SummaryWriter`` with a file that TensorBoard reads after those in the folder.

    It reads them in the order of their names, which begin with the second and end in a number that
    grows, but "10" sorts before "9".
    """
    open_writer = import_torch_writer()
    # torch opens the file in a thread, when the program may have changed its folder
    folder = Path(folder).absolute()
    while True:
        earlier = set(folder.glob("events.out.tfevents.*"))
        writer = open_writer(folder, flush_secs=FLUSH_S, **options)
        new = set(folder.glob("events.out.tfevents.*")) - earlier
        in_same_second = {path for path in earlier if second_of(path) == min(map(second_of, new))}
        if not in_same_second or max(in_same_second) < min(new):
            return writer
        writer.close()
        min(new).unlink()
        time.sleep(0.05)


def second_of(path: Path) -> str:
    """Return the second at which an event file was opened, as its name has it."""
    return path.name.split(".")[3]


def as_code(text: str) -> str:
    """Indent lines, which TensorBoard then shows as they are: it takes text for Markdown."""
    return textwrap.indent(text, "    ")
