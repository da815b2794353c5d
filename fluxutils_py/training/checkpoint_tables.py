"""List the checkpoints in folders, and compare runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fluxutils_py.errors import LoadError
from fluxutils_py.reporting.tables import format_metric, text_table
from fluxutils_py.training.checkpointer import FORMAT, KIND, checkpoint_paths, checkpoint_step
from fluxutils_py.training.plain_files import read_file

Shape = tuple[int, ...]
SHOWN = 10  # most parameters that a table names as differing


@dataclass
class ListedCheckpoint:
    """The part of a checkpoint that tables show.

    Attributes
    ----------
    path : Path
    step : int
    size : int
        Bytes on the disk.
    metrics : dict
        Of the step, such as ``batch_loss``; from its ``.json``.
    shapes : dict of tuple of int
        Of the parameters and buffers, by name.
    damage : str or None
        Why it cannot be read.
    """

    path: Path
    step: int
    size: int
    metrics: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    damage: str | None = None

    @classmethod
    def read(
        cls,
        path: Path,
    ) -> ListedCheckpoint:
        """Read a checkpoint, or note why it cannot be read."""
        listed = cls(path, checkpoint_step(path), path.stat().st_size)
        try:
            about = json.loads(path.with_suffix(".json").read_text("utf-8"))
            listed.metrics = dict(about["metrics"])
        # A broken description costs the metrics only: the checkpoint itself may be sound.
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            listed.metrics = {}
        try:
            content = read_file(path, KIND, format=FORMAT)
            for name in content["trainable"]:
                for key, value in content["state"][name].items():
                    if isinstance(value, Tensor):
                        listed.shapes[f"{name}.{key}"] = tuple(value.shape)
        except (LoadError, OSError) as error:
            listed.damage = str(error)
        # The file is well-formed, but not what a checkpointer writes.
        except (LookupError, TypeError, AttributeError) as error:
            listed.damage = f"{path} is damaged ({type(error).__name__}: {error})"
        return listed


def list_checkpoints(folder: Any) -> list[ListedCheckpoint]:
    """Return what is known of each checkpoint in a folder, oldest first.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder")
    return [ListedCheckpoint.read(path) for path in checkpoint_paths(Path(folder))]


def checkpoint_report(folders: Sequence[Any]) -> str:
    """Return tables, as text, of the checkpoints in folders, and of the newest of each if there are
    several.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    """
    runs = {str(folder): list_checkpoints(folder) for folder in folders}
    parts = [_table_of_run(folder, checkpoints) for folder, checkpoints in runs.items()]
    if len(runs) > 1:
        parts.append(_compare_runs(runs))
    return "\n\n".join(parts)


def _table_of_run(
    folder: str,
    checkpoints: Sequence[ListedCheckpoint],
) -> str:
    if not checkpoints:
        return f"{folder}: no checkpoints"
    names = _metric_names(checkpoints)
    rows = [["checkpoint", "step", "size", "parameters", *names]]
    for one in checkpoints:
        count = "damaged" if one.damage is not None else str(_count(one))
        row = [one.path.name, str(one.step)]
        row += [_megabytes(one.size), count]
        row += _metrics(one, names)
        rows.append(row)
    # below the table, as reasons are too long for a cell
    damages = [one.damage for one in checkpoints if one.damage is not None]
    return "\n".join([f"{folder}:", text_table(rows), *damages])


def _compare_runs(runs: Mapping[str, Sequence[ListedCheckpoint]]) -> str:
    # they are sorted, oldest first
    newest = {
        folder: next((one for one in reversed(checkpoints) if one.damage is None), None)
        for folder, checkpoints in runs.items()
    }
    readable = [one for one in newest.values() if one is not None]
    names = _metric_names(readable)
    rows = [["run", "checkpoints", "step", "size", "parameters", *names]]
    for folder, checkpoints in runs.items():
        size = _megabytes(sum(one.size for one in checkpoints))
        last = newest[folder]
        row = [folder, str(len(checkpoints))]
        if last is None:
            row += ["none", size]
        else:
            row += [str(last.step), size, str(_count(last))]
            row += _metrics(last, names)
        # a run without a readable checkpoint has no values
        row += [""] * (len(rows[0]) - len(row))
        rows.append(row)
    differing = _differing_parameters([one.shapes for one in readable])
    return "\n".join([text_table(rows), *differing])


def _differing_parameters(shapes: Sequence[Mapping[str, Shape]]) -> list[str]:
    """Return lines that name the parameters whose shapes are not those of every run."""
    lines = []
    for name in dict.fromkeys(name for run in shapes for name in run):
        of_runs = [run.get(name) for run in shapes]
        if len(set(of_runs)) == 1:
            continue
        texts = ["none" if shape is None else str(shape) for shape in of_runs]
        lines.append(f"{name}: {', '.join(texts)}")
    if not lines:
        return []
    n_more = len(lines) - SHOWN
    more = [f"... {n_more} more"] if n_more > 0 else []
    return ["parameters that differ:", *lines[:SHOWN], *more]


def _metric_names(checkpoints: Sequence[ListedCheckpoint]) -> list[str]:
    names: dict[str, None] = {}  # in the order of their first checkpoint
    for one in checkpoints:
        names |= dict.fromkeys(one.metrics)
    return list(names)


def _metrics(
    one: ListedCheckpoint,
    names: Sequence[str],
) -> list[str]:
    texts = []
    for name in names:
        value = one.metrics.get(name)
        # older checkpoints may lack a metric
        texts.append("" if value is None else format_metric(value))
    return texts


def _count(one: ListedCheckpoint) -> int:
    """Return the number of parameters, each value counted."""
    return sum(math.prod(shape) for shape in one.shapes.values())


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3g} MB"
