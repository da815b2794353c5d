"""Runs of experiment trackers: MLflow, W&B, trackio, and anything with ``log(dict, step=)``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from fluxutils_py.errors import warn
from fluxutils_py.validation import require_package

WITH_IMAGES = ("wandb", "trackio")  # whose class Image takes an array (H, W, C)
BATCH = 100  # parameters in a request of MLflow
BATCH_OF_METRICS = 1000


class Tracker(Protocol):
    """A run of a tracker."""

    def parameters(self, parameters: dict[str, Any]) -> None:
        """Set the parameters of the run: numbers, booleans, None and texts by name."""

    def scalars(self, values: dict[str, float], step: int, seconds: float) -> None:
        """Log numbers of one step; ``seconds`` since 1970."""

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Log a uint8 image (H, W, C)."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Log a text."""

    def file(self, path: Path, kind: str) -> None:
        """Store a copy of a file; ``kind`` is "model"."""

    def last_step(self) -> int | None:
        """Return the last step of the run so far; None if there is none, or it is not known."""

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each number by tag, where the tracker keeps repeated ones."""


def as_tracker(run: Any, run_id: str | None = None) -> Tracker:
    """Return a tracker for what the user gives.

    Raises
    ------
    TypeError
        If it is none.
    """
    if isinstance(run, ModuleType):
        run = _run_of_module(run)
    if hasattr(run, "log_batch") and hasattr(run, "get_run"):
        if run_id is None:
            raise TypeError("Track got a client of MLflow: give the run too, Track(client, run_id)")
        return MlflowRun(run_id, client=run)
    if hasattr(getattr(run, "info", None), "run_id"):
        return MlflowRun(run.info.run_id)
    if callable(getattr(run, "log", None)):
        return DictRun(run)
    raise TypeError(
        f"Track got {run!r}, which is no run of a tracker: give mlflow.start_run(), "
        "wandb.init(...), trackio.init(...), or an object with log(dict, step=)"
    )


def _run_of_module(module: ModuleType) -> Any:
    """Return the active run of the module ``mlflow`` or ``wandb``; any other module is its run."""
    name = module.__name__
    run: Any = module
    if name == "mlflow":
        run = module.active_run()
    elif name == "wandb":
        run = module.run
    if run is None:
        raise TypeError(f"Track got {name}, which has no active run: start one before")
    return run


class MlflowRun:
    """A run of MLflow. Only its id travels to other processes.

    Parameters
    ----------
    run_id : str
    client : mlflow.MlflowClient, optional
    """

    def __init__(self, run_id: str, client: Any = None) -> None:
        self.run_id = run_id
        mlflow = require_package("mlflow", None, "Track")
        # of the moment, as the program may follow another server later
        self.uri = mlflow.get_tracking_uri() if client is None else client.tracking_uri
        self._client = client

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None}

    @property
    def client(self) -> Any:
        if self._client is None:
            mlflow = require_package("mlflow", None, "Track")
            self._client = mlflow.MlflowClient(self.uri)
        return self._client

    def parameters(self, parameters: dict[str, Any]) -> None:
        mlflow = require_package("mlflow", None, "Track")
        there = self.client.get_run(self.run_id).data.params
        texts = {_mlflow_name(name): str(value) for name, value in parameters.items()}
        changed = [name for name, text in texts.items() if there.get(name, text) != text]
        if changed:  # MLflow lets nobody change them
            warn(
                f"the run {self.run_id} of MLflow has other values of {', '.join(changed)}, and "
                "keeps them; start a new run for other settings"
            )
        new = [mlflow.entities.Param(k, v) for k, v in texts.items() if k not in there]
        for start in range(0, len(new), BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + BATCH])

    def scalars(self, values: dict[str, float], step: int, seconds: float) -> None:
        mlflow = require_package("mlflow", None, "Track")
        milliseconds = int(seconds * 1000)
        metrics = [
            mlflow.entities.Metric(_mlflow_name(tag), value, milliseconds, step)
            for tag, value in values.items()
        ]
        for start in range(0, len(metrics), BATCH_OF_METRICS):
            self.client.log_batch(self.run_id, metrics[start : start + BATCH_OF_METRICS])

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.client.log_image(self.run_id, image, f"{_mlflow_name(tag)}.png")

    def text(self, tag: str, text: str, step: int) -> None:
        self.client.log_text(self.run_id, text, f"{_mlflow_name(tag)}.txt")

    def file(self, path: Path, kind: str) -> None:
        self.client.log_artifact(self.run_id, str(path), kind)

    def last_step(self) -> int | None:
        return max(self.last_steps().values(), default=None)

    def last_steps(self) -> Mapping[str, int]:
        client = self.client
        tags = [tag for tag in client.get_run(self.run_id).data.metrics if "/" in tag]
        return {
            tag: max(metric.step for metric in client.get_metric_history(self.run_id, tag))
            for tag in tags
        }


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


class DictRun:
    """A run of W&B or trackio, or another object with ``log(dict, step=)``.

    ``config``, a mapping, gets the parameters; without it, they are logged as ``settings/NAME``.
    ``log_artifact`` gets the file; without it, there is none. Images go to W&B and trackio only.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        name = run.__name__ if isinstance(run, ModuleType) else type(run).__module__
        root = name.partition(".")[0]
        self.package = root if root in WITH_IMAGES else None

    def parameters(self, parameters: dict[str, Any]) -> None:
        config: Any = getattr(self.run, "config", None)
        if self.package == "wandb":
            # a run that goes on has its settings already
            config.update(parameters, allow_val_change=True)
        elif hasattr(config, "update"):
            config.update(parameters)
        else:
            self.run.log({f"settings/{name}": value for name, value in parameters.items()}, step=0)

    def scalars(self, values: dict[str, float], step: int, seconds: float) -> None:
        self.run.log(values, step=step)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        if self.package is not None:
            self.run.log({tag: sys.modules[self.package].Image(image)}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        pass  # a plain log takes numbers

    def file(self, path: Path, kind: str) -> None:
        store = getattr(self.run, "log_artifact", None)
        if self.package is not None:
            store(str(path), name=path.stem, type=kind)  # type: ignore[misc]  # both have it
        elif store is not None:
            store(str(path))

    def last_step(self) -> int | None:
        step = getattr(self.run, "step", None)
        if isinstance(step, int) and not isinstance(step, bool) and step > 0:
            return step
        return None

    def last_steps(self) -> Mapping[str, int]:
        return {}
