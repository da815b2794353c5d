"""Open an HDF5 file, tell one version of it from another, and find a dataset in it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluxutils_py.errors import H5DataError

PathLike = str | os.PathLike[str]
Shape = tuple[int, ...]

UNREADABLE = "cannot be read ({}); check the file with `h5dump -H`, copy or write it again"
LOCK_WAIT = 3.0  # seconds
# seconds: file systems stamp times with a clock that stands still for up to 10 ms
CLOCK_TICK = 0.02

# of the cache of chunks: the 1 MiB that is HDF5's default holds none of the usual size
CACHE_BYTES = 64 << 20
CACHE_SLOTS = 10007  # a prime, at best 100 times the number of chunks

LAYOUTS = {
    h5py.h5d.VIRTUAL: "is virtual: its data are in other files",
    h5py.h5d.CHUNKED: "is chunked",
    h5py.h5d.COMPACT: "is compact: it is within the header of the file",
}


def open_file(path: PathLike) -> h5py.File:
    """Open an HDF5 file for reading.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    H5DataError
        If it cannot be opened for another reason.
    """
    shown = check_path(path)
    if not os.path.exists(shown):
        raise FileNotFoundError(f"{shown}: there is no such file")
    # HDF5 looks for sources of a virtual dataset in the folder of the name that it is given, which
    # must not be that of a link
    target = os.path.realpath(shown)
    end = time.monotonic() + LOCK_WAIT
    while True:
        try:
            return h5py.File(target, "r", rdcc_nbytes=CACHE_BYTES, rdcc_nslots=CACHE_SLOTS)
        except BlockingIOError as error:  # locked by another process, perhaps for a moment
            if time.monotonic() > end:
                raise H5DataError(
                    f"{shown}: the file is open in another process, or elsewhere in this one; "
                    "close it there, or set HDF5_USE_FILE_LOCKING=FALSE in the environment if that "
                    "process leaves this data alone"
                ) from error
        except OSError as error:
            raise H5DataError(
                f"{shown}: this cannot be opened as an HDF5 file ({error}); write or copy it "
                "again, or run `h5clear -s` on it if a process died while it wrote"
            ) from error
        time.sleep(0.01)


@contextlib.contextmanager
def wrap_h5_errors(where: str, sentence: str = UNREADABLE) -> Iterator[None]:
    """Turn errors of h5py, which name neither file nor dataset, into an H5DataError that does.

    ``sentence`` says what failed, with ``{}`` for the error.
    """
    try:
        yield
    except (H5DataError, FileNotFoundError):
        raise
    except (KeyError, OSError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise H5DataError(f"{where} {sentence.format(error)}") from error


def check_path(path: object, argument: str = "path") -> str:
    """Return a path as text.

    Raises
    ------
    H5DataError
        If it can name no file.
    """
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if not text or "\0" in text:
        raise H5DataError(f"{argument} must be the name of a file, got {path!r}")
    return text


def check_name(path: PathLike, name: object) -> None:
    """Check that something can name a dataset."""
    if not isinstance(name, str) or not name.strip("/") or "\0" in name:
        raise H5DataError(
            f"{os.fsdecode(path)}: a dataset is named by a string, 'x' or 'group/x', got {name!r}"
        )


def describe(path: PathLike, name: str) -> str:
    """Return the beginning of a message about a dataset."""
    return f"{os.fsdecode(path)}: dataset '{name}'"


# -- versions of a file ----------------------------------------------------------------------------


class FileReplaced(H5DataError):
    """The file at a path is not the one that is meant."""


class FileIdentity(NamedTuple):
    """Distinguishes a file from one that is put in its place; None for what may change."""

    inode: int
    size: int | None
    modified: int | None  # ns

    def without_contents(self) -> FileIdentity:
        """Return the identity without what changes when the file is written to in place."""
        return FileIdentity(self.inode, None, None)

    def matches(self, other: FileIdentity) -> bool:
        """Whether two may be of one file."""
        return all(a is None or b is None or a == b for a, b in zip(self, other, strict=True))


def identity_of(file: str | int | h5py.File) -> FileIdentity:
    """Return the identity of a file, given as a path, as a descriptor, or as open in h5py."""
    if isinstance(file, h5py.File):
        file = file.id.get_vfd_handle()
    stat = os.stat(file)
    return FileIdentity(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def current_identity(path: str, known: FileIdentity) -> FileIdentity:
    """Return the identity of a file that this process has open, with its present size and time.

    While it is open its inode is not used again, so that the path leads to it or to a file with
    another inode. Waits until the clock of the file system has moved on: a file written later shall
    not have the same time.
    """
    try:
        current = identity_of(path)
    except OSError:
        return known
    if known.inode != current.inode:
        return known
    age = time.time() - (current.modified or 0) / 1e9
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


# -- datasets --------------------------------------------------------------------------------------


def get_object(file: h5py.File, path: PathLike, name: str) -> Any:
    """Return the group or dataset of that name.

    Raises
    ------
    H5DataError
        If there is none, or it cannot be opened.
    """
    check_name(path, name)
    try:
        return file[name]
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        parent = name.rstrip("/").rpartition("/")[0]
        group = file.get(parent, file)
        text = str(error).strip('"')  # a KeyError shows its text with quotes
        raise H5DataError(
            f"{describe(path, name)} cannot be opened ({text}); {_contents(group)}"
        ) from error


def _contents(group: Any) -> str:
    where = "the file" if group.name == "/" else f"'{group.name}'"
    names = list(group)[:20] if isinstance(group, h5py.Group) else []
    return f"{where} holds {', '.join(names) or 'no datasets'}"


def find_dataset(file: h5py.File, path: PathLike, name: str) -> h5py.Dataset:
    """Return the dataset of that name, which holds an array of real numbers.

    Raises
    ------
    H5DataError
        If there is none, or it holds something else.
    """
    item = get_object(file, path, name)
    where = describe(path, name)
    if isinstance(item, h5py.Group):
        raise H5DataError(f"{where} is a group; name a dataset in it: {_contents(item)}")
    with wrap_h5_errors(where):
        if isinstance(item, h5py.Dataset) and holds_numbers(item) and item.shape:
            return item
        found = item.dtype if isinstance(item, h5py.Dataset) else type(item).__name__.lower()
        raise H5DataError(
            f"{where} is no array of real numbers, but {found} of shape "
            f"{getattr(item, 'shape', None)}; read it with h5py, and save numbers in its place"
        )


def holds_numbers(dataset: h5py.Dataset) -> bool:
    """Whether a dataset holds real numbers, in an array or a single one."""
    return (
        dataset.shape is not None
        and dataset.dtype.kind in "fiub"
        and dataset.dtype.subdtype is None
    )


def numpy_dtype(dataset: h5py.Dataset) -> np.dtype:
    """Return NumPy's type of a dataset of numbers, without the names of an enumeration."""
    return np.dtype(dataset.dtype.str)


def unmappable_reason(dataset: h5py.Dataset) -> str | None:
    """Return why the bytes of a dataset cannot be used where they are; None if they can."""
    if dataset.file.driver != "sec2":
        return f"comes through the file driver {dataset.file.driver!r}"
    layout = dataset.id.get_create_plist().get_layout()
    if layout in LAYOUTS:
        return LAYOUTS[layout]
    # such as integers of 24 bits, which h5py converts when it reads them
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return "has a number format that NumPy lacks"
    if dataset.size and dataset.id.get_offset() is None:
        return "was created but never written, or is in external files"
    return None
