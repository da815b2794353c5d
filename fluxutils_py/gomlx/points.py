"""Write metrics over steps to a file for plotting."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from fluxutils_py.errors import DataError
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
    Values that are NaN, infinite or not numbers are skipped. An incomplete last line of a killed
    process is removed. Source: ``plots`` of gomlx.

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
        if (trainer is None) != (not datasets):
            raise ValueError("points of evaluation need a trainer and datasets; give both or none")
        self.path = Path(path)
        self.trainer = trainer
        self.datasets = datasets
        self.trigger = trigger
        self.collective = bool(datasets)  # all ranks evaluate together

    def on_step(self, loop: Loop) -> None:
        metrics = {"Train": loop.metrics or {"batch_loss": loop.batch_loss}}
        if self.trainer is not None:
            for data, values in evaluate_datasets(self.trainer, self.datasets).items():
                metrics[f"Eval on {data}"] = values
        if is_main_process(loop):  # only now: all ranks take part in the evaluation
            self.write(loop.step, metrics)

    def write(self, step: int, metrics_by_source: Mapping[str, Mapping[str, Any]]) -> None:
        """Append metrics, grouped by their source, such as ``{"Train": {"loss": 0.5}}``."""
        lines = []
        for source, metrics in metrics_by_source.items():
            for name, number in metrics.items():
                value = as_number(number)
                if value is not None and math.isfinite(value):  # JSON has no NaN
                    point = {"step": step, "metric": f"{source}: {name}"}
                    point |= {"type": _plot_type(name), "value": value}
                    lines.append(json.dumps(point) + "\n")
        # opened each time: another process may read or move the file in between
        with open(self.path, "a+b") as file:
            if file.tell() and _ends_within_a_line(file):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write("".join(lines).encode())


def _plot_type(metric_name: str) -> str:
    """Return the type of a metric, by its name."""
    for common_type in ("loss", "accuracy"):
        if common_type in metric_name.lower():
            return common_type
    return metric_name


def _ends_within_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"


def load_points(path: str | os.PathLike[str]) -> list[Point]:
    """Read the points that a :class:`PointsWriter` wrote, sorted by step.

    Of points with the same step and metric the last is kept: a run continued from a checkpoint
    writes some again.

    Raises
    ------
    DataError
        If a line is not a point. An incomplete last line is skipped.
    """
    path = Path(path)
    points: dict[tuple[int, str], Point] = {}  # by step and metric: a later one replaces another
    lines = path.read_bytes().split(b"\n")
    for k, line in enumerate(lines[:-1], 1):  # what follows the last newline is incomplete
        try:
            point = Point(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"line {k} of {path} is not a point: {error}; a line is a JSON object of step, "
                "metric, type and value"
            ) from error
        points[point.step, point.metric] = point
    return sorted(points.values(), key=lambda p: p.step)
