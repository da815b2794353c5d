"""Write files atomically."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

LONGEST_NAME = 255  # bytes
OLD = 86400  # seconds: what another machine has not touched for so long belongs to nobody
TAIL = r"\.(?P<host>[0-9a-f]{8})-(?P<process>[0-9]+)-(?P<began>[0-9]+)-[0-9a-f]{8}\.part"


@contextlib.contextmanager
def atomic_path(path: Any, *, replace: bool = True) -> Iterator[str]:
    """Yield the path of a new, empty file, which replaces ``path`` when the block ends without an
    error.

    The file and its name are then on the disk. An error removes the new file. Processes that have
    the old file open or mapped keep it. The new file takes the mode of the old one, else the umask
    applies. Of a symbolic link, the file that it leads to is replaced. A process that is killed
    leaves ``.NAME.*.part`` in the same folder, which the next write to ``path`` removes.

    Parameters
    ----------
    path : path-like
    replace : bool
        If False, a file that is there by the end of the block stays, with a FileExistsError: of
        several processes that make the same file, one succeeds.

    Raises
    ------
    OSError
        If ``path`` is no regular file, such as a device, a pipe or a folder, or a link that leads
        back to itself: a regular file would take its place. If the disk is full.
    """
    target = os.path.realpath(os.fsdecode(path))
    _require_replaceable(target, os.fsdecode(path))
    with temporary_path(target) as new:
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        yield new
        _flush(new, os.O_RDWR)
        if not replace:
            try:
                os.link(new, target)
            except FileExistsError:
                raise
            except OSError as error:  # a file system without such links
                if os.path.lexists(target):
                    taken = errno.EEXIST
                    raise FileExistsError(taken, os.strerror(taken), target) from error
                os.rename(new, target)
        else:
            if os.path.exists(target):
                shutil.copymode(target, new)
            os.replace(new, target)
        # the name, too, is then on the disk
        if os.name == "posix":
            with contextlib.suppress(OSError):  # some file systems cannot
                _flush(os.path.dirname(target) or os.curdir, os.O_RDONLY)


@contextlib.contextmanager
def temporary_path(target: str) -> Iterator[str]:
    """Yield a name for a new file or folder beside ``target``, and remove at the end what has that
    name by then.

    What killed processes left beside this target is removed first. The name tells whose it is, so
    that nothing of a process that is alive is taken for a leftover.
    """
    # in the same folder: os.replace is atomic within a file system only
    folder, name = os.path.split(target)
    if folder and not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: there is no such folder to write to")
    remove_leftovers(target)
    process = os.getpid()
    owner = f"{_host()}-{process}-{_beginning_of(process)}"
    shortened = _shortened(name)  # no more bytes than file systems accept
    new = os.path.join(folder, f".{shortened}.{owner}-{secrets.token_hex(4)}.part")
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            _remove(new)


def remove_leftovers(target: str) -> None:
    """Remove what processes that are dead left beside a file or folder that they wrote.

    Processes of other machines (and containers) are taken for dead a day after their last change.
    """
    folder, name = os.path.split(target)
    pattern = re.compile(re.escape(f".{_shortened(name)}") + TAIL)
    try:
        with os.scandir(folder or os.curdir) as entries:
            found = [(entry.path, pattern.fullmatch(entry.name)) for entry in entries]
    except OSError:  # as writing will say
        return
    for path, owner in found:
        with contextlib.suppress(OSError):  # another process has removed it, or it is another's
            if owner is None:
                continue
            if owner["host"] != _host():
                is_left = time.time() - os.stat(path).st_mtime > OLD
            else:
                is_left = _beginning_of(int(owner["process"])) != owner["began"]
            if is_left:
                _remove(path)


def _host() -> str:
    """Return a hash of the machine or container, within which processes have their numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{zlib.crc32(f'{platform.node()} {space}'.encode()):08x}"


def _beginning_of(process: int) -> str | None:
    """Return when a process began, "0" where the system does not say; None if it has ended.

    The number of a process that has ended is given to another one some day.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        return None if state in (b"Z", b"X") else fields[18].decode()
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
    if os.name != "posix":  # os.kill would end it
        return "0"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # of another user
        pass
    return "0"


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


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


def _shortened(name: str) -> str:
    room = LONGEST_NAME - len("..12345678-1234567890-12345678901234567890-12345678.part")
    return os.fsencode(name)[:room].decode(errors="ignore")


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
