"""Write files atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO


@contextlib.contextmanager
def atomic_path(path: Any) -> Iterator[str]:
    """Yield the path of a new, empty file, which replaces ``path`` when the block ends without an error.

    The file and its name are then on the disk. An error removes the new file. Processes that have the old file open or
    mapped keep it. The new file takes the mode of the old one, else the umask applies. A process that is killed leaves
    ``.NAME.*.part`` in the same folder.
    """
    target = os.path.realpath(os.fsdecode(path))
    folder, name = os.path.split(target)
    new = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.part")
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield new
        _flush(new, os.O_RDWR)
        if os.path.exists(target):
            shutil.copymode(target, new)
        os.replace(new, target)
        if os.name == "posix":
            with contextlib.suppress(OSError):  # some file systems cannot
                _flush(folder, os.O_RDONLY)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _flush(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: Any) -> Iterator[BinaryIO]:
    """Yield a binary file, which replaces ``path`` when the block ends without an error; see :func:`atomic_path`."""
    with atomic_path(path) as new, open(new, "wb") as file:
        yield file
