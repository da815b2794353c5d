"""Write files atomically."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

LONGEST_NAME = 255  # bytes


@contextlib.contextmanager
def atomic_path(path: Any) -> Iterator[str]:
    """Yield the path of a new, empty file, which replaces ``path`` when the block ends without an
    error.

    The file and its name are then on the disk. An error removes the new file. Processes that have
    the old file open or mapped keep it. The new file takes the mode of the old one, else the umask
    applies. A process that is killed leaves ``.NAME.*.part`` in the same folder. Of a symbolic
    link, the file that it leads to is replaced.

    Raises
    ------
    OSError
        If ``path`` is no regular file, such as a device, a pipe or a folder, or a link that leads
        back to itself: a regular file would take its place. If the disk is full.
    """
    target = os.path.realpath(os.fsdecode(path))
    _require_replaceable(target, os.fsdecode(path))
    # in the same folder: os.replace is atomic within a file system only
    folder, name = os.path.split(target)
    new = os.path.join(folder, _temporary_name(name))
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield new
        _flush(new, os.O_RDWR)
        if os.path.exists(target):
            shutil.copymode(target, new)
        os.replace(new, target)
        if os.name == "posix":  # where the name is in the folder, which has a buffer too
            with contextlib.suppress(OSError):  # some file systems cannot
                _flush(folder, os.O_RDONLY)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _require_replaceable(target: str, shown: str) -> None:
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # there is none yet, or no such folder, as opening the new file will say
    if stat.S_ISLNK(mode):
        raise OSError(
            errno.ELOOP, f"{os.strerror(errno.ELOOP)}; remove the link, or give another name", shown
        )
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            errno.EISDIR, f"{os.strerror(errno.EISDIR)}; give the name of a file", shown
        )
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL,
            "This is a device, a pipe or a socket, whose place a file would take; give another "
            "name",
            shown,
        )


def _temporary_name(name: str) -> str:
    """Return a name in the same folder, with no more bytes than file systems accept."""
    room = LONGEST_NAME - len(f"..{'0' * 8}.part")
    short = os.fsencode(name)[:room].decode(errors="ignore")
    return f".{short}.{secrets.token_hex(4)}.part"


def _flush(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: Any) -> Iterator[BinaryIO]:
    """Yield a binary file, which replaces ``path`` when the block ends without an error; see
    :func:`atomic_path`.

    An error of the disk in the block is raised as it was, though the block may have made another
    one of it, as ``torch.save`` does.
    """
    with atomic_path(path) as new, _NoticingFile(new, os.fsdecode(path)) as file:
        try:
            yield file
        except Exception as error:
            if file.error is not None and error is not file.error:
                raise file.error from error
            raise


class _NoticingFile(io.FileIO):
    """A file for writing that keeps the error of the disk which a writer may turn into another."""

    def __init__(self, path: str, shown: str) -> None:
        super().__init__(path, "w")
        self.shown = shown
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            # an unbuffered file may write less than it is given
            while written < len(view):
                written += super().write(view[written:]) or 0
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, self.shown)
            raise self.error from error
        return written
