"""The files in a folder of checkpoints, which belongs to one run at a time."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

NAME = re.compile(r"checkpoint-n(\d{7,})-step-(\d{8,})\.pt")


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, sorted by save number, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=save_number)


def save_number(path: Path) -> int:
    """Return the save number of a checkpoint."""
    return int(path.name.split("-")[1].removeprefix("n"))


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.stem.rpartition("-")[2])


def require_sole_run(folder: Path, last: int | None) -> int:
    """Return the number of the newest checkpoint, 0 if there is none.

    Raises
    ------
    FileExistsError
        If it is newer than ``last``, the number that this run restored or saved last; None is not known.
    """
    newest = next(reversed(checkpoint_paths(folder)), None)
    number = 0 if newest is None else save_number(newest)
    if newest is not None and last is not None and number > last:
        process = ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            about = json.loads(newest.with_suffix(".json").read_text("utf-8"))
            process = f" by process {about['process']} on {about['host']}"
        known = f"number {last}" if last else "none"
        raise FileExistsError(f"{newest.name} was saved{process}, and this run knew of {known}: {_way_out(folder)}")
    return number


@contextlib.contextmanager
def explain_lost_files(folder: Path) -> Iterator[None]:
    """Explain why a file is gone: another run took it for a leftover, or had newer ones."""
    try:
        yield
    except FileNotFoundError as error:
        lost = error.filename or "a checkpoint"
        raise FileExistsError(f"{lost} was removed while this run used it: {_way_out(folder)}") from error


def _way_out(folder: Path) -> str:
    return (
        f"another run saves to {folder} too. End that run, or give this one another folder; when started again, this "
        "one goes on from the newest checkpoint"
    )


def remove_leftovers(folder: Path) -> None:
    """Remove the files that a process killed during a save left behind."""
    complete = {path.stem for path in checkpoint_paths(folder)}
    for path in folder.iterdir():
        temporary = path.name.startswith(".checkpoint-n") and path.name.endswith(".part")
        orphan = path.suffix == ".json" and NAME.fullmatch(f"{path.stem}.pt") and path.stem not in complete
        if temporary or orphan:
            path.unlink(missing_ok=True)
