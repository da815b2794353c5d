"""Write files atomically: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO


@contextlib.contextmanager
def atomic_path(path: Any) -> Iterator[str]:
    """The path of a new, empty file to write to, which takes the place of ``path`` when all has gone well.

    It is removed if anything fails. Whoever has an old file of that name open or mapped keeps it. The new one has the
    mode of the old one, or what the umask leaves. A process that is killed meanwhile leaves it behind, as
    ``.NAME.*.part`` in the same folder.
    """
    target = os.path.realpath(os.fsdecode(path))
    folder, name = os.path.split(target)
    new = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.part")
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield new
        descriptor = os.open(new, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if os.path.exists(target):
            shutil.copymode(target, new)
        os.replace(new, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


@contextlib.contextmanager
def atomic_write(path: Any) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes the place of ``path`` when it is whole; see :func:`atomic_path`."""
    with atomic_path(path) as new, open(new, "wb") as file:
        yield file
