"""Open an HDF5 file, find a dataset, and explain why it cannot be used."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import h5py
import numpy as np

from fluxutils_py.data.hdf5.damage import find_heap_damage, read_attribute
from fluxutils_py.errors import H5DataError

PathLike = str | os.PathLike[str]
Shape = tuple[int, ...]
Opened = TypeVar("Opened")

LETTERS = "FNT"
# of NetCDF: CF conventions, sections 2.5.1 and 8.1
PACKING = ("_FillValue", "missing_value", "scale_factor", "add_offset")
ATTRIBUTES = ("axes", "feature_names", *PACKING)  # that are read
DAMAGED = "cannot be read, as the file is damaged ({}); copy or write it again"

LOCK_WAIT = 3.0  # seconds

# of the cache of chunks: the 1 MiB that is HDF5's default holds none of the usual size
CACHE_BYTES = 64 << 20
CACHE_SLOTS = 10007  # a prime, at best 100 times the number of chunks


def open_file(path: PathLike, mode: str = "r", **options: Any) -> h5py.File:
    """Open an HDF5 file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    H5DataError
        If it cannot be opened for another reason.
    """
    shown = check_path(path)
    if mode == "r" and not os.path.exists(shown):
        raise FileNotFoundError(f"{shown}: there is no such file")
    options = {"rdcc_nbytes": CACHE_BYTES, "rdcc_nslots": CACHE_SLOTS} | options
    # HDF5 looks for sources of a virtual dataset in the folder of the name that it is given, which
    # must not be that of a link
    target = os.path.realpath(shown)
    try:
        return wait_for_lock(lambda: h5py.File(target, mode, **options), shown)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{shown}: there is no such file or folder") from error
    except OSError as error:
        # this process has it open without a lock, as for reopening a map
        if "locking flag" in str(error) and options.get("locking") is not False:
            return open_file(path, mode, **options | {"locking": False})
        raise H5DataError(f"{shown}: {_why_not(shown, str(error), error)}") from error


def wait_for_lock(attempt: Callable[[], Opened], path: str) -> Opened:
    """Call something that opens or locks a file, again while another process locks the file, as
    h5create does for a moment.

    Raises
    ------
    H5DataError
        If that process keeps it.
    """
    end = time.monotonic() + LOCK_WAIT
    while True:
        try:
            return attempt()
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise H5DataError(f"{path}: {_why_not(path, str(error), error)}") from error
        time.sleep(0.01)


def find_dataset(file: h5py.File, path: PathLike, name: str) -> h5py.Dataset:
    """Return the dataset of that name, which holds an array of real numbers.

    Raises
    ------
    H5DataError
        If there is none, or it holds something else.
    """
    dataset = get_object(file, path, name)
    where = describe(path, name)
    with wrap_h5_errors(where):
        problem = _not_numbers(dataset)
    if problem is not None:
        raise H5DataError(f"{where} {problem}")
    return dataset


def get_object(file: h5py.File, path: PathLike, name: str) -> Any:
    """Return the group or dataset of that name.

    Raises
    ------
    H5DataError
        If there is none, or it cannot be opened.
    """
    check_name(path, name)
    where = describe(path, name)
    check_heap(file, name, where)
    try:
        item = _open_object(file, name)
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        with wrap_h5_errors(where):
            reason = _why_missing(file, name, error)
        raise H5DataError(f"{where} {reason}") from error
    with wrap_h5_errors(where):
        # through an external link, whose file was not checked yet
        if isinstance(item, h5py.Dataset) and item.file.filename != file.filename:
            check_heap(item.file, item.name, where)
    return item


def holds_numbers(dataset: h5py.Dataset) -> bool:
    """Whether a dataset holds real numbers, in an array or a single one."""
    return (
        dataset.shape is not None
        and dataset.dtype.kind in "fiub"
        and dataset.dtype.subdtype is None
    )


@contextlib.contextmanager
def wrap_h5_errors(where: str, sentence: str = DAMAGED) -> Iterator[None]:
    """Turn errors of h5py, which name neither file nor dataset, into an H5DataError that does.

    ``sentence`` says what failed, with ``{}`` for the error.
    """
    try:
        yield
    except (H5DataError, FileNotFoundError):
        raise
    except (KeyError, OSError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise H5DataError(f"{where} {sentence.format(error)}") from error


def check_heap(
    file: h5py.File,
    name: str,
    where: str,
    attributes: Sequence[str] = ATTRIBUTES,
    values: bool = False,
) -> None:
    """Check that HDF5 can read a dataset and some of its attributes, or its values too, without
    hanging.
    """
    damage = find_heap_damage(file, name, attributes, values)
    if damage is not None:
        raise H5DataError(f"{where} {DAMAGED.format(damage)}")


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


def numpy_dtype(dataset: h5py.Dataset) -> np.dtype:
    """Return NumPy's type of a dataset of numbers, without the names of an enumeration."""
    return np.dtype(dataset.dtype.str)


def read_axes(dataset: h5py.Dataset, axes: str | None, where: str) -> str | None:
    """Return which axis of the file is which, as ``"TNF"``; None where axes have no letters and
    stay as they are.

    Raises
    ------
    H5DataError
        If the order of three axes is not known, or not possible.
    """
    with wrap_h5_errors(where):
        noted = read_attribute(dataset, "axes")
    if isinstance(noted, bytes):
        noted = noted.decode(errors="replace")
    # other software may use the name for something else
    known = noted if isinstance(noted, str) and is_axes_order(noted, dataset.ndim) else None
    if axes is None:
        if known is None and dataset.ndim == 3:
            stored = "no attribute 'axes'"
            if noted is not None:
                stored = f"an attribute 'axes' that says {noted!r}"
            raise H5DataError(
                f"{where} has {stored}, so the order of its axes {dataset.shape} cannot be known; "
                "pass axes='TNF' for a file from Julia or other column-major software, axes='FNT' "
                "if h5py shows (features, series, time steps)"
            )
        return known
    if not isinstance(axes, str) or not is_axes_order(axes, dataset.ndim):
        raise H5DataError(
            f"{where} has {dataset.ndim} axes, {dataset.shape}; axes must name each by one of the "
            "letters F (features), N (series) and T (time steps), as in "
            f"{'TNF'[: dataset.ndim]!r}, got {axes!r}"
        )
    if known is not None and known != axes:
        raise H5DataError(
            f"{where} is in the order {known!r} by its attribute 'axes', not {axes!r}; leave "
            "axes out"
        )
    return axes


def is_axes_order(axes: str, ndim: int) -> bool:
    """Whether a string names so many different axes; three must be all of F, N, T."""
    return len(axes) == ndim == len(set(axes)) and set(axes) <= set(LETTERS)


def fnt_axes(axes: str | None, ndim: int) -> list[int]:
    """Return the axis of the file for each axis of the (F, N, T) array, for ``transpose``."""
    if axes is None:
        return list(range(ndim))
    return sorted(range(ndim), key=lambda i: LETTERS.index(axes[i]))


def check_axes(axes: str, ndim: int, where: str) -> list[int]:
    """Return the axis of the file for each axis of an array; only three can change places."""
    if not isinstance(axes, str) or not is_axes_order(axes, 3):
        raise H5DataError(
            f"{where}: axes must name F (features), N (series) and T (time steps), as 'TNF', got "
            f"{axes!r}"
        )
    return fnt_axes(axes if ndim == 3 else None, ndim)


def unmappable_reason(dataset: h5py.Dataset) -> str | None:
    """Return why the bytes of a dataset cannot be used where they are; None if they can."""
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if dataset.file.driver not in ("sec2", "stdio", "direct"):
        return f"comes through the file driver {dataset.file.driver!r}"
    if layout == h5py.h5d.VIRTUAL:
        return "is virtual: its data are in other files"
    if layout == h5py.h5d.CHUNKED:
        filters = [
            plist.get_filter(i)[3].decode() or "a filter" for i in range(plist.get_nfilters())
        ]
        return "is chunked" + (f" and stored with {', '.join(filters)}" if filters else "")
    if layout == h5py.h5d.COMPACT:
        return "is compact: it is within the header of the file"
    if plist.get_external_count():
        return "is in external files"
    # such as integers of 24 bits, which h5py converts when it reads them
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return "has a number format that NumPy lacks"
    if dataset.size and dataset.id.get_offset() is None:
        return "was created but never written"
    return None


# -- what is wrong ---------------------------------------------------------------------------------


def _why_not(path: str, text: str, error: OSError) -> str:
    """Return why a file cannot be opened, as far as HDF5's error tells, and what to do."""
    # h5py raises a plain OSError for most causes, which only HDF5's text tells apart
    if os.path.isdir(path):
        return "this is a directory; give a file"
    if isinstance(error, PermissionError):
        return "no permission to open this file; change its mode or owner"
    if isinstance(error, BlockingIOError):
        return (
            "the file is open for writing in another process; close it there, or set "
            "HDF5_USE_FILE_LOCKING=FALSE in the environment if that process leaves this data alone"
        )
    if "read-only" in text:  # HDF5 shares one open file within a process, in the mode of the first
        return (
            "the file is open for reading in this process, by h5py or as a lazy array; close that "
            "first"
        )
    # a flag in the file itself, which stays there if the writer dies
    if "open for" in text or "already open" in text:
        return (
            "the file is open for writing in another process, or that process died; pass swmr=True "
            "if it writes in SWMR mode, run `h5clear -s` on the file if it died"
        )
    problem = _damage_of_file(path, text) if os.path.exists(path) else None
    if problem is not None:
        return problem
    return f"the file cannot be opened ({text}); check it with `h5dump -H`, or write it again"


def _damage_of_file(path: str, text: str) -> str | None:
    n_bytes = os.path.getsize(path)
    if n_bytes == 0:
        return "the file is empty; write it again"
    truncated = re.search(r"stored_eof = (\d+)", text)
    if truncated:
        return f"the file is truncated, {n_bytes} bytes of {truncated[1]}; write or copy it again"
    if not h5py.is_hdf5(path):
        return "this is not an HDF5 file; write one, as with h5save"
    return None


def _why_missing(file: h5py.File, name: str, error: Exception) -> str:
    """Follow the name part by part to the one that leads nowhere."""
    group: Any = file
    parts = [p for p in name.split("/") if p]
    for i, part in enumerate(parts):
        so_far = "/".join(parts[: i + 1])
        if not isinstance(group, h5py.Group):
            return f"does not exist: '{'/'.join(parts[:i])}' is no group; {_holds(file)}"
        link = group.get(part, getlink=True)
        if link is None:
            similar = difflib.get_close_matches(part, group.keys(), 1)
            meant = f"; did you mean '{'/'.join([*parts[:i], similar[0]])}'?" if similar else ""
            return f"does not exist; {_holds(group)}{meant}"
        try:
            group = group[part]
        except (KeyError, OSError, RuntimeError, ValueError) as reason:
            if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
                return f"leads nowhere: '{so_far}' is {_broken_link(link, file, reason)}"
            error = reason
            break
    return f"cannot be opened ({error}); check the file with `h5dump -H`"


def _broken_link(
    link: h5py.SoftLink | h5py.ExternalLink, file: h5py.File, reason: Exception
) -> str:
    if isinstance(link, h5py.SoftLink):
        return f"a soft link to '{link.path}', which does not exist; {_holds(file)}"
    target = os.path.join(os.path.dirname(file.filename), link.filename)
    state = "does not exist; put that file back, or make a new link"
    if os.path.exists(target):
        cause = str(reason).strip('"')  # a KeyError shows its text with quotes
        state = f"does not give it ({cause}); open that file itself to see why"
    return f"an external link to '{link.path}' in {target}, which {state}"


def _holds(group: h5py.Group) -> str:
    names = list(group.keys())
    where = "the file" if group.name == "/" else f"group '{group.name}'"
    if not names:
        return f"{where} is empty"
    return f"{where} holds {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"


def _not_numbers(item: Any) -> str | None:
    """Return why something is no array of real numbers; None if it is one."""
    if isinstance(item, h5py.Group):
        return f"is a group; name a dataset in it: {_holds(item)}"
    if not isinstance(item, h5py.Dataset):
        return f"is not a dataset but a {type(item).__name__.lower()}; name a dataset"
    try:
        dtype = item.dtype
    except TypeError as error:
        return f"is of a type that NumPy lacks ({error}); write it again as numbers"
    if item.shape is None:
        return "is null: it has a type and no data; write it again with data"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"is of array type {base}{shape}; write it again with one axis more"
    if dtype.kind not in "fiub":
        type_name, remedy = _type_and_remedy(dtype)
        return f"is of type {type_name}, not of real numbers; {remedy}"
    if item.shape == ():
        return "is a scalar, not an array; read it with h5py: file[name][()]"
    return None


def _type_and_remedy(dtype: np.dtype) -> tuple[str, str]:
    """Return the name of a type that is no real number, and what to save in its place."""
    if dtype.kind == "c":
        return f"complex ({dtype})", "save real and imaginary part as separate features"
    if dtype.names:
        return f"compound ({', '.join(dtype.names)})", "save each field as a separate dataset"
    type_name = f"opaque ({dtype})"
    if h5py.check_string_dtype(dtype) is not None or dtype.kind == "S":
        type_name = "string"
    elif h5py.check_vlen_dtype(dtype) is not None:
        type_name = f"variable length ({h5py.check_vlen_dtype(dtype)})"
    elif h5py.check_ref_dtype(dtype) is not None:
        type_name = "reference"
    return type_name, "read it with h5py, and save numbers in its place"


def _open_object(file: h5py.File, name: str) -> Any:
    """Return the object of that name.

    External files are looked for in the folder of the HDF5 file, not in the current directory, as
    HDF5 does.
    """
    try:
        item = file[name]
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        if "prefix" not in str(error):  # of a dataset that is open already
            raise
        return _open_with_prefix(file, name, os.path.dirname(os.path.realpath(file.filename)))
    if isinstance(item, h5py.Dataset) and item.external:
        folder = os.path.dirname(os.path.realpath(item.file.filename))
        if all(os.path.exists(os.path.join(folder, source)) for source, _, _ in item.external):
            item.id.close()  # only the first to open it says where to look
            return _open_with_prefix(file, name, folder)
    return item


def _open_with_prefix(file: h5py.File, name: str, folder: str) -> h5py.Dataset:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(os.fsencode(folder))
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
