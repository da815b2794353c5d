"""Open an HDF5 file, tell one version of it from another, find a dataset in it, and read what its
attributes say: the order of its axes, names of features, and packing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluxutils_py.data.arrays import Names, stored_names
from fluxutils_py.errors import H5DataError, warn

PathLike = str | os.PathLike[str]
Shape = tuple[int, ...]

UNREADABLE = "cannot be read ({}); check the file with `h5dump -H`, copy or write it again"
LOCK_WAIT = 3.0  # seconds
# seconds: file systems stamp times with a clock that stands still for up to 10 ms
CLOCK_TICK = 0.02

# of the cache of chunks: the 1 MiB that is HDF5's default holds none of the usual size
CACHE_BYTES = 64 << 20
CACHE_SLOTS = 10007  # a prime, at best 100 times the number of chunks

LETTERS = "FNT"
# of NetCDF (CF conventions, sections 2.5.1 and 8.1), with values that change nothing
PACKING = {"_FillValue": None, "missing_value": None, "scale_factor": 1.0, "add_offset": 0.0}
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


def check_dataset(dataset: h5py.Dataset, name: str) -> None:
    """Check a dataset before it is used as it is; ``name`` is that in messages.

    Raises
    ------
    H5DataError
        If its file was closed, or a file that it takes data from is missing: HDF5 would give fill
        values.

    Warns
    -----
    UserWarning
        If attributes of NetCDF say how to read it.
    """
    require_open(dataset, name)
    where = f"{name}, {describe(dataset.file.filename, dataset.name or 'without a name')},"
    with wrap_h5_errors(where):
        check_sources(dataset, where)
        warn_of_packing(dataset, where)


def require_open(dataset: h5py.Dataset, name: str) -> None:
    """Raise H5DataError if the file of a dataset was closed."""
    if not dataset:
        raise H5DataError(
            f"{name} is in an HDF5 file that was closed; keep that file open, or use "
            "h5mmap(path, name)"
        )


def check_sources(dataset: h5py.Dataset, where: str) -> None:
    """Check that there are the files and datasets that a virtual dataset takes data from.

    HDF5 itself gives fill values, and no error, where one is missing; so it does past the end of
    an external file, for which such datasets are refused.

    Raises
    ------
    H5DataError
    """
    if dataset.external:
        raise H5DataError(
            f"{where} is in external files, of which HDF5 reads zeros where they are short; save "
            "what h5py reads of it, h5save(path, {'x': file['x'][:]})"
        )
    if not dataset.is_virtual:
        return
    here = os.path.realpath(dataset.file.filename)
    missing = []
    # each dataset once, however many parts of it are used
    for source in dict.fromkeys((s.file_name, s.dset_name) for s in dataset.virtual_sources()):
        # a name with a pattern stands for as many as there are
        if any(re.search(r"%\d*b", name.replace("%%", "")) for name in source):
            continue
        file_name, name = (text.replace("%%", "%") for text in source)
        path = here if file_name == "." else _locate_file(file_name, os.path.dirname(here))
        if path is None:
            missing.append(file_name)
            continue
        with open_file(path) as file:
            check_sources(find_dataset(file, path, name), f"{where} takes data from {path}, which")
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise H5DataError(
            f"{where} is virtual and {len(missing)} of its source files are missing: {shown}; "
            "put them back, or recreate the dataset (HDF5 would give fill values in their place)"
        )


def _locate_file(name: str, folder: str) -> str | None:
    """Return the path at which HDF5 finds a source.

    It looks below its prefix, in the folder of the file, and in the current directory.
    """
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
    for base in (prefix or folder, folder, os.getcwd()):
        path = os.path.join(base, name)
        if os.path.exists(path):
            return os.path.realpath(path)
    return None


# -- order of axes ---------------------------------------------------------------------------------


def read_axes(dataset: h5py.Dataset, axes: str | None, where: str) -> str | None:
    """Return which axis of the file is which, as ``"TNF"``; None where axes have no letters and
    stay as they are.

    Raises
    ------
    H5DataError
        If the order of three axes is not known, or not possible.
    """
    with wrap_h5_errors(where):
        noted = dataset.attrs.get("axes")
    if isinstance(noted, bytes):
        noted = noted.decode(errors="replace")
    # other software may use the name for something else
    known = noted if isinstance(noted, str) and _is_axes_order(noted, dataset.ndim) else None
    if axes is None:
        if known is None and dataset.ndim == 3:
            raise H5DataError(
                f"{where} has the attribute axes={noted!r}, so the order of its axes "
                f"{dataset.shape} cannot be known; pass axes='TNF' for a file from Julia or other "
                "column-major software, axes='FNT' if h5py shows (features, series, time steps)"
            )
        return known
    if not isinstance(axes, str) or not _is_axes_order(axes, dataset.ndim):
        raise H5DataError(
            f"{where} has {dataset.ndim} axes, {dataset.shape}; axes must name each by one of the "
            "letters F (features), N (series) and T (time steps), as in "
            f"{'TNF'[: dataset.ndim]!r}, got {axes!r}"
        )
    if known not in (None, axes):
        raise H5DataError(
            f"{where} is in the order {known!r} by its attribute 'axes', not {axes!r}; leave "
            "axes out"
        )
    return axes


def _is_axes_order(axes: str, ndim: int) -> bool:
    return len(axes) == ndim == len(set(axes)) and set(axes) <= set(LETTERS)


def fnt_axes(axes: str | None, ndim: int) -> list[int]:
    """Return the axis of the file for each axis of the (F, N, T) array, for ``transpose``."""
    if axes is None:
        return list(range(ndim))
    return sorted(range(ndim), key=lambda i: LETTERS.index(axes[i]))


def check_axes(axes: str, ndim: int, where: str) -> list[int]:
    """Return the axis of the file for each axis of an array; only three can change places."""
    if not isinstance(axes, str) or not _is_axes_order(axes, 3):
        raise H5DataError(
            f"{where}: axes must name F (features), N (series) and T (time steps), as 'TNF', got "
            f"{axes!r}"
        )
    return fnt_axes(axes if ndim == 3 else None, ndim)


# -- names of features -----------------------------------------------------------------------------


def check_names(names: Any, shape: Sequence[int], where: str) -> Names:
    """Check that there is one name for each feature of an array of a shape (F, N, T).

    Raises
    ------
    H5DataError
    """
    checked = names.tolist() if isinstance(names, np.ndarray) else names
    is_list = isinstance(checked, Iterable) and not isinstance(checked, str)
    if not is_list or not all(isinstance(n, str) and "\0" not in n for n in checked):
        raise H5DataError(
            f"{where}: feature_names must be a list of strings, without zero bytes, got {names!r}"
        )
    checked = tuple(checked)
    if len(shape) != 3 or len(checked) != shape[0]:
        raise H5DataError(
            f"{where}: {len(checked)} feature_names for an array of shape {tuple(shape)}; expected "
            "three axes (F, N, T) and F names"
        )
    return checked


def read_names(dataset: h5py.Dataset, n_features: int) -> Names | None:
    """Return the feature names that a dataset has as an attribute.

    Warns, and returns None, if the attribute is something else.
    """
    where = describe(dataset.file.filename, dataset.name)
    with wrap_h5_errors(where):
        names = stored_names(dataset, n_features)
    if names is None and "feature_names" in dataset.attrs:
        warn(
            f"{where} has an attribute 'feature_names' that does not hold {n_features} texts: the "
            "features have no names; write the attribute again, as with h5save"
        )
    return names


def write_names(dataset: h5py.Dataset, names: Names, where: str) -> None:
    """Store names as an attribute ``feature_names``: a vector of F strings, in UTF-8."""
    # an attribute holds 64 KiB at most
    sentence = (
        f"has {len(names)} feature_names, which do not fit into an HDF5 attribute ({{}}); save "
        "without them"
    )
    with wrap_h5_errors(where, sentence):
        dataset.attrs.create("feature_names", list(names), dtype=h5py.string_dtype())


# -- packing ---------------------------------------------------------------------------------------


def warn_of_packing(dataset: h5py.Dataset, where: str) -> None:
    """Warn where attributes of NetCDF, which nothing here applies, say which values are missing or
    how they are packed.
    """
    given = {name: np.ravel(dataset.attrs[name])[0] for name in PACKING if name in dataset.attrs}
    # NaN stands for a missing value everywhere in this package too
    ignored = {name: v for name, v in given.items() if v != PACKING[name] and v == v}
    if not ignored:
        return
    shown = ", ".join(f"{name}={value}" for name, value in ignored.items())
    variable = (dataset.name or "x").rpartition("/")[2]
    warn(
        f"{where} has the attributes {shown} of NetCDF, which h5py and h5mmap ignore: missing "
        "values stay the numbers that stand for them, packed values stay packed; use "
        f'xarray.open_dataset({os.fsdecode(dataset.file.filename)!r})["{variable}"], which '
        "applies them"
    )
