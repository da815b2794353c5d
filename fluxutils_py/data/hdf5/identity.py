"""Identify a file and its version, for maps and lazy arrays in other processes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from typing import Any, NamedTuple

import h5py

from fluxutils_py.errors import H5DataError

# seconds: file systems stamp times with a clock that stands still for up to 10 ms
CLOCK_TICK = 0.02
# of Linux: the flag that asks for the time of creation, and the one for a file by its descriptor
STATX_BTIME = 0x800
AT_EMPTY_PATH = 0x1000


class FileReplaced(H5DataError):
    """The file at a path is not the one that is meant."""


class FileIdentity(NamedTuple):
    """Distinguishes a file from one that is put in its place later; None where a fact is not known
    or may change.

    The inode alone does not: it is used again as soon as the old file is gone.
    """

    machine: str
    device: int
    inode: int
    created: int | None  # ns
    size: int | None
    modified: int | None  # ns

    def without_contents(self) -> FileIdentity:
        """Return the identity without what changes when the file is written to in place."""
        return self._replace(size=None, modified=None)

    def matches(self, other: FileIdentity) -> bool:
        """Whether two may be of one file."""
        # a device has another number on another machine
        first = 1 if self.machine == other.machine else 2
        pairs = zip(self[first:], other[first:], strict=True)
        return all(a is None or b is None or a == b for a, b in pairs)


def identity_of(file: int | h5py.File) -> FileIdentity:
    """Return the identity of an open file, given as a descriptor or by h5py."""
    if isinstance(file, h5py.File):
        # other drivers have a handle that is no descriptor
        if file.driver not in ("sec2", "direct"):
            return identity_at(file.filename)
        file = file.id.get_vfd_handle()
    stat = os.fstat(file)
    return FileIdentity(
        platform.node(),
        stat.st_dev,
        stat.st_ino,
        _creation_time(file),
        stat.st_size,
        stat.st_mtime_ns,
    )


def identity_at(path: str) -> FileIdentity:
    """Return the identity of the file that is at a path now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return identity_of(descriptor)
    finally:
        os.close(descriptor)


def current_identity(path: str, known: FileIdentity) -> FileIdentity:
    """Return the identity of a file that this process has open, with its present size and time.

    While it is open its inode is not used again, so that the path leads to it or to a file with
    another inode. Waits until the clock of the file system has moved on: a file written later shall
    not have the same time.
    """
    try:
        current = identity_at(path)
    except OSError:
        return known
    if not known.without_contents().matches(current):
        return known
    stamps = [stamp for stamp in (current.created, current.modified) if stamp is not None]
    age = time.time() - max(stamps) / 1e9
    if 0 <= age < CLOCK_TICK:
        time.sleep(CLOCK_TICK - age)
    return current if known.modified is not None else current.without_contents()


def check_same_file(path: str, current: FileIdentity, expected: FileIdentity) -> None:
    """Check that an open file is the one that is meant.

    Raises
    ------
    FileReplaced
    """
    if not current.matches(expected):
        raise FileReplaced(
            f"{path}: this is not the file that was mapped or opened, as it was: it has been "
            "replaced, copied or written to since; open it where it is needed with h5mmap, or map "
            "it again and send that"
        )


def _creation_time(descriptor: int) -> int | None:
    """Return when a file was made, in ns: Linux has a call for it that Python lacks."""
    if _statx is None:
        return None
    buffer = ctypes.create_string_buffer(256)
    if _statx(descriptor, b"", AT_EMPTY_PATH, STATX_BTIME, buffer):
        return None
    if not struct.unpack_from("I", buffer)[0] & STATX_BTIME:
        return None  # this file system does not note it
    seconds, ns = struct.unpack_from("qI", buffer, 80)
    return seconds * 10**9 + ns


def find_system_call(name: str) -> Any:
    """Return a function of the C library; None where there is none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_statx = find_system_call("statx")
