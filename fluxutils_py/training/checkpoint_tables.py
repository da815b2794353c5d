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

SHOWN = 10  # parameters that differ


@dataclass
class ListedCheckpoint:
    """What is shown of a checkpoint.

    Attributes
    ----------
    path : Path
    step : int
    size : int
        Bytes on the disk.
    metrics : dict
        Of the step, such as ``batch_loss``; from the ``.json`` beside it.
    shapes : dict of tuple of int
        Of the parameters and buffers, by name.
    damage : str or None
        Why it cannot be read.
    """

    path: Path
    step: int
    size: int
    metrics: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    damage: str | None = None

    @classmethod
    def read(cls, path: Path) -> ListedCheckpoint:
        """Read a checkpoint, or note why it cannot be read."""
        listed = cls(path, checkpoint_step(path), path.stat().st_size)
        try:
            about = json.loads(path.with_suffix(".json").read_text("utf-8"))
            listed.metrics = dict(about["metrics"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            listed.metrics = {}
        try:
            content = read_file(path, KIND, format=FORMAT)
            for name in content["trainable"]:
                tensors = content["state"][name].items()
                listed.shapes |= {
                    f"{name}.{key}": tuple(v.shape) for key, v in tensors if isinstance(v, Tensor)
                }
        except (LoadError, OSError) as error:
            listed.damage = str(error)
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
    parts = [_table_of_run(folder, found) for folder, found in runs.items()]
    if len(runs) > 1:
        parts.append(_compare_runs(runs))
    return "\n\n".join(parts)


def _table_of_run(folder: str, found: Sequence[ListedCheckpoint]) -> str:
    if not found:
        return f"{folder}: no checkpoints"
    names = _metric_names(found)
    rows = [["checkpoint", "step", "size", "parameters", *names]]
    for one in found:
        numbers = ["damaged"] if one.damage is not None else [str(_count(one))]
        rows.append(
            [one.path.name, str(one.step), _megabytes(one.size), *numbers, *_metrics(one, names)]
        )
    damages = [one.damage for one in found if one.damage is not None]
    return "\n".join([f"{folder}:", text_table(rows), *damages])


def _compare_runs(runs: Mapping[str, Sequence[ListedCheckpoint]]) -> str:
    newest = {
        folder: [one for one in found if one.damage is None][-1:] for folder, found in runs.items()
    }
    names = _metric_names([one for found in newest.values() for one in found])
    rows = [["run", "checkpoints", "step", "size", "parameters", *names]]
    for folder, found in runs.items():
        size = _megabytes(sum(one.size for one in found))
        last = [
            [str(one.step), size, str(_count(one)), *_metrics(one, names)] for one in newest[folder]
        ]
        rows.append(
            [folder, str(len(found)), *(last or [["none", size, "", *([""] * len(names))]])[0]]
        )
    shapes = {folder: found[0].shapes for folder, found in newest.items() if found}
    return "\n".join([text_table(rows), *_differing_parameters(shapes)])


def _differing_parameters(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> list[str]:
    """Lines that name the parameters whose shapes are not those of every run."""
    names = dict.fromkeys(name for run in shapes.values() for name in run)
    lines = []
    for name in names:
        found = [run.get(name) for run in shapes.values()]
        if len(set(found)) > 1:
            lines.append(
                f"{name}: {', '.join('none' if shape is None else str(shape) for shape in found)}"
            )
    more = [f"... {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return ["parameters that differ:", *lines[:SHOWN], *more] if lines else []


def _metric_names(found: Sequence[ListedCheckpoint]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in one.metrics))


def _metrics(one: ListedCheckpoint, names: Sequence[str]) -> list[str]:
    return [
        "" if one.metrics.get(name) is None else format_metric(one.metrics[name]) for name in names
    ]


def _count(one: ListedCheckpoint) -> int:
    return sum(math.prod(shape) for shape in one.shapes.values())


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3g} MB"
