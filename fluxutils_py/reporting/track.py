"""Write a fit to a run of an experiment tracker."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import to_numpy
from fluxutils_py.errors import warn
from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.curve_hook import CurveHook
from fluxutils_py.reporting.named_settings import named_settings
from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.reporting.tables import as_number
from fluxutils_py.reporting.trackers import Tracker, as_tracker
from fluxutils_py.reporting.writers import Step, Writer, channels_last
from fluxutils_py.validation import check_integer

NO_SETTINGS = ("callbacks", "comm", "verbose")  # of a process, not of an experiment


class TrackerWriter(Writer):
    """Writer that passes numbers, images and texts on to a run of a tracker.

    Numbers of one step are sent together, at the next step or :meth:`flush`. Histograms, sound and
    tensors are left out, with a warning.

    Parameters
    ----------
    tracker : Tracker
    offset : int
        Added to all steps.
    written : mapping of str to int
        Last step of each number that the run has already, and is not to get again.
    """

    def __init__(
        self, tracker: Tracker, offset: int = 0, written: Mapping[str, int] | None = None
    ) -> None:
        self.tracker = tracker
        self.offset = offset
        self.written = dict(written or {})
        self._values: dict[str, float] = {}
        self._step = 0
        self._left_out: set[str] = set()

    def _call(
        self, method: str, tag: Any, value: Any = None, step: Step = None, **options: Any
    ) -> None:
        at = (step or 0) + self.offset
        if method == "add_scalar":
            self._add(tag, value, at)
        elif method == "add_scalars":
            for name, number in value.items():
                self._add(f"{tag}/{name}", number, at)
        elif method in ("add_image", "add_images"):
            self.tracker.image(tag, _as_image(value, method, options.get("dataformats")), at)
        elif method == "add_text":
            self.tracker.text(tag, str(value), at)
        elif method == "add_hparams":
            self.tracker.parameters(tag)
        elif method not in self._left_out:
            self._left_out.add(method)
            warn(f"trackers get numbers, images and texts: {method}({tag!r}) is left out")

    def _add(self, tag: str, value: object, step: int) -> None:
        number = as_number(value)
        if number is None or step <= self.written.get(tag, -1):
            return
        if step != self._step:
            self.flush()
        self._step = step
        self._values[tag] = number

    def flush(self) -> None:
        values = self._values
        self._values = {}  # also if it fails: not twice
        if values:
            self.tracker.scalars(values, self._step, time.time())

    def close(self) -> None:
        self.flush()


def _as_image(value: Any, method: str, dataformats: str | None) -> np.ndarray:
    """Return a uint8 image (H, W, C), several side by side."""
    array = np.asarray(to_numpy(value))
    if method == "add_images":
        axes = dataformats or "NCHW"
        each = np.moveaxis(array, axes.index("N"), 0)
        image = np.concatenate([channels_last(a, axes.replace("N", "")) for a in each], axis=1)
    else:
        image = channels_last(array, dataformats or "CHW")
    if image.dtype != np.uint8:
        image = (np.clip(image, 0, 1) * 255).astype(np.uint8)
    return image.repeat(3, axis=2) if image.shape[2] == 1 else image


class Track(CurveHook):
    """Hook that writes a fit to an experiment tracker: ``callbacks=[Track(mlflow.start_run())]``.

    The run gets the parameters of the estimator, nested ones by name (``spec__epochs``); every
    number that :class:`TensorBoard` writes, under the same tags; a picture of the loss curves; and
    at the end the fitted estimator as a file, ``model/estimator.pt`` in MLflow, an artefact
    ``estimator`` in W&B and trackio, which :func:`fluxutils_py.load` reads.

    Parameters
    ----------
    run : object
        A run of MLflow (``mlflow.start_run()``), W&B (``wandb.init(...)``) or trackio
        (``trackio.init(...)``); the module ``mlflow`` or ``wandb``, for its active run; an
        ``MlflowClient``, with ``run_id``; or anything with ``log(dict, step=)``, which gets
        parameters by ``config.update(dict)`` if it has that, and the file by
        ``log_artifact(path)``. On ranks other than 0 it is not used, and may be None. The run is
        left open: whoever started it ends it.
    run_id : str, optional
        For an ``MlflowClient``.
    trigger : int or Trigger
        When to write single steps. ``n``: at each step that is a multiple of ``n``.
    pictures : bool, optional
        Whether to draw the curves; None: if matplotlib is installed.
    save : bool
        Whether to store the fitted estimator. Of a pipeline, that is its estimator alone.
    first_step : int, optional
        Number of the run's steps before those of a new fit. None: the last step of the run, where
        it is known (MLflow, W&B), else 0.

    Raises
    ------
    TypeError
        If ``run`` is none of these.
    ImportError
        Before training, if the package of the tracker is not installed.

    Notes
    -----
    A fit that continues from a checkpoint goes on at its step. Numbers that the run has already are
    not written again to MLflow; W&B ignores them. Copies, as in clones of an estimator, write to
    the same run: in a search, each fit goes on after the one before, and MLflow keeps the
    parameters of the first.

    Examples
    --------
    >>> from fluxutils_py.training import Loop, StepInfo
    >>> class Run:
    ...     def log(self, values, step):
    ...         print(step, values.get("train/batch_loss"))
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(Track(Run(), trigger=2))
    >>> _ = loop.run_epochs([4, 3, 2, 1], epochs=1)
    2 3.0
    4 1.0
    4 None
    """

    name = "Track"

    def __init__(
        self,
        run: Any,
        run_id: str | None = None,
        *,
        trigger: object = 10,
        pictures: bool | None = None,
        save: bool = True,
        first_step: int | None = None,
    ) -> None:
        super().__init__(trigger)
        if first_step is not None:
            check_integer("first_step", first_step, 0)
        self.tracker = None if run is None else as_tracker(run, run_id)
        self.pictures = pictures
        self.save = save
        self.first_step = first_step
        self._offset = 0  # a checkpoint keeps it

    def __deepcopy__(self, memo: dict[int, Any]) -> Track:
        # a run cannot be copied
        copied = type(self).__new__(type(self))
        vars(copied).update(self.__getstate__())
        return copied

    def state_dict(self) -> dict[str, int]:
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._offset = int(state["offset"])

    def on_start(self, loop: RunningLoop) -> None:
        if not is_main_process(loop):
            return
        tracker = self.tracker
        if tracker is None:
            raise TypeError("Track(None) is for ranks other than 0: give rank 0 a run")
        written: Mapping[str, int] = {}
        if loop.step > 0:
            written = tracker.last_steps()
        elif self.first_step is None:
            self._offset = tracker.last_step() or 0
        else:
            self._offset = self.first_step
        self.begin(loop, TrackerWriter(tracker, self._offset, written))
        estimator = loop.shared_data.get("estimator")
        if estimator is not None:
            settings = named_settings(estimator)
            tracker.parameters({k: v for k, v in settings.items() if k not in NO_SETTINGS})

    def on_step(self, loop: RunningLoop) -> None:
        super().on_step(loop)
        if self._writer is not None:
            self._writer.flush()

    def on_epoch(self, loop: RunningLoop) -> None:
        super().on_epoch(loop)
        if self._writer is not None:
            self._writer.flush()

    def on_end(self, loop: RunningLoop) -> None:
        if self._writer is None or self.tracker is None:
            return
        if self._draws() and loop.history:
            self._writer.add_figure("curves/loss", loss_figure(loop.history), loop.step)
        estimator: Any = loop.shared_data.get("estimator")
        if self.save and hasattr(estimator, "save"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "estimator.pt")
                estimator.save(path)
                self.tracker.file(path, "model")

    def _draws(self) -> bool:
        if self.pictures is None:
            return importlib.util.find_spec("matplotlib") is not None
        return self.pictures


def loss_figure(history: list[dict[str, Any]]) -> Any:
    """Draw the losses of training and validation after each epoch; return a figure of matplotlib,
    without pyplot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    epochs = range(1, len(history) + 1)
    looks = {"loss": ("training", "-"), "validation_loss": ("validation", "--")}
    for key, (label, style) in looks.items():
        values = [as_number(record.get(key)) for record in history]
        numbers = [np.nan if value is None else value for value in values]
        if not np.all(np.isnan(numbers)):
            axes.plot(epochs, numbers, style, color="C0", marker=".", label=label)
    axes.set(xlabel="epoch", ylabel="loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
