"""Write metrics over steps to a file for plotting."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fluxutils_py.gomlx.report_eval import evaluate_datasets
from fluxutils_py.parallel import is_main_process
from fluxutils_py.reporting.tables import as_number

if TYPE_CHECKING:
    from fluxutils_py.training.loop import Loop
    from fluxutils_py.training.triggers import Trigger


class Point(NamedTuple):
    """One value of a metric. Metrics of the same type share a plot."""

    step: int
    metric: str
    type: str
    value: float


class PointsWriter:
    """Hook that appends metrics to a file, one JSON object per line.

    Parameters
    ----------
    path : str or path-like
        File to append to, on rank 0 only.
    trainer : Trainer, optional
        Evaluates ``datasets``.
    *datasets
        For points named ``"Eval on <dataset>: <metric>"``. Not the training dataset: evaluation
        resets it.
    trigger : Trigger, optional
        When to write. None: after every step.

    Notes
    -----
    Training points are named ``"Train: <metric>"``: the metrics of the step, or its loss if it has
    none. The type is ``"loss"`` or ``"accuracy"`` if the metric's name contains it, else the name.
    Values that are NaN, infinite or not numbers are skipped. Source: ``plots`` of gomlx.

    Examples
    --------
    >>> import tempfile
    >>> from fluxutils_py.training import EveryNSteps, Loop, StepInfo
    >>> path = Path(tempfile.mkdtemp(), "points.jsonl")
    >>> loop = Loop(lambda batch: StepInfo(float(batch)))
    >>> loop.hooks.attach(PointsWriter(path, trigger=EveryNSteps(2)))
    >>> _ = loop.run_epochs([4, 3, 2, 1], epochs=1)
    >>> for point in load_points(path):
    ...     print(point)
    Point(step=2, metric='Train: batch_loss', type='loss', value=3.0)
    Point(step=4, metric='Train: batch_loss', type='loss', value=1.0)
    """

    name = "points"

    def __init__(
        self,
        path: str | os.PathLike[str],
        trainer: Any = None,
        *datasets: Iterable[Any],
        trigger: Trigger | None = None,
    ) -> None:
        self.path = Path(path)
        self.trainer = trainer
        self.datasets = datasets
        self.trigger = trigger
        self.collective = bool(datasets)  # all ranks evaluate together

    def on_step(self, loop: Loop) -> None:
        metrics = {"Train": loop.metrics or {"batch_loss": loop.batch_loss}}
        for data, values in evaluate_datasets(self.trainer, self.datasets).items():
            metrics[f"Eval on {data}"] = values
        if is_main_process(loop):  # only now: all ranks take part in the evaluation
            self.write(loop.step, metrics)

    def write(self, step: int, metrics_by_source: Mapping[str, Mapping[str, Any]]) -> None:
        """Append metrics, grouped by their source, such as ``{"Train": {"loss": 0.5}}``."""
        with open(self.path, "a+", encoding="utf-8") as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                file.write("\n")  # ends the line that a killed process left
            for source, metrics in metrics_by_source.items():
                for name, number in metrics.items():
                    value = as_number(number)
                    if value is None or not math.isfinite(value):  # JSON has no NaN
                        continue
                    common = (kind for kind in ("loss", "accuracy") if kind in name.lower())
                    point = {"step": step, "metric": f"{source}: {name}"}
                    point |= {"type": next(common, name), "value": value}
                    file.write(json.dumps(point) + "\n")


def load_points(path: str | os.PathLike[str]) -> list[Point]:
    """Read the points that a :class:`PointsWriter` wrote, sorted by step.

    Of points with the same step and metric the last is kept: a run continued from a checkpoint
    writes some again. Lines that a killed process left incomplete are skipped.
    """
    points: dict[tuple[int, str], Point] = {}  # by step and metric: a later one replaces another
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            point = Point(**json.loads(line))
            points[point.step, point.metric] = point
    return sorted(points.values(), key=lambda p: p.step)
