"""Write a fit to a run of an experiment tracker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.curve_hook import CurveHook
from fluxutils_py.reporting.named_settings import named_settings
from fluxutils_py.reporting.running_loop import RunningLoop

NO_SETTINGS = ("callbacks", "comm", "verbose")  # of a process, not of an experiment


class Track(CurveHook):
    """Hook that writes a fit to an experiment tracker: ``callbacks=[Track(wandb.init())]``.

    The run gets the parameters of the estimator, nested ones by name (``spec__epochs``); every
    number that :class:`TensorBoard` writes, under the same tags; and at the end the fitted
    estimator as a file, which :func:`fluxutils_py.load` reads.

    Parameters
    ----------
    run : object
        Anything with ``log(dict, step=)``, such as a run of W&B or trackio. If it has
        ``config.update(dict)``, that gets the parameters; if it has ``log_artifact(path)``, that
        gets the file. On ranks other than 0 it is not used, and may be None. The run is left open:
        whoever started it ends it.
    trigger : int or Trigger
        When to write single steps. ``n``: at each step that is a multiple of ``n``.
    save : bool
        Whether to store the fitted estimator; for a pipeline, its estimator alone.

    Raises
    ------
    TypeError
        If ``run`` has no ``log``.

    Notes
    -----
    MLflow has other names for these methods. Ten lines adapt them::

        class MlflowRun:
            def __init__(self):
                self.config = self

            def update(self, settings):
                mlflow.log_params(settings)

            def log(self, numbers, step):
                mlflow.log_metrics(numbers, step=step)

            def log_artifact(self, path):
                mlflow.log_artifact(path, "model")

    Steps of a new fit follow ``run.step``, where the run has that (W&B). A fit that continues from
    a checkpoint goes on at its step. Copies, as in clones of an estimator, write to the same run.

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
        *,
        trigger: object = 10,
        save: bool = True,
    ) -> None:
        super().__init__(trigger)
        if run is not None and not callable(getattr(run, "log", None)):
            raise TypeError(
                f"Track got {run!r}, which has no log(dict, step=): give a run such as "
                "wandb.init(...), or for MLflow the ten lines of Track's documentation"
            )
        self.run = run
        self.save = save
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
        if self.run is None:
            raise TypeError("Track(None) is for ranks other than 0: give rank 0 a run")
        if loop.step == 0:
            step = getattr(self.run, "step", 0)
            self._offset = step if isinstance(step, int) else 0
        self.begin(self._write)
        estimator = loop.shared_data.get("estimator")
        config: Any = getattr(self.run, "config", None)
        if estimator is not None and hasattr(config, "update"):
            settings = named_settings(estimator)
            given = {k: v for k, v in settings.items() if k not in NO_SETTINGS}
            config.update(given)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step + self._offset)

    def on_end(self, loop: RunningLoop) -> None:
        store = getattr(self.run, "log_artifact", None)
        if self._log is None or store is None or not self.save:
            return
        estimator: Any = loop.shared_data.get("estimator")
        if hasattr(estimator, "save"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "estimator.pt")
                estimator.save(path)
                store(str(path))
