"""Check the other files that a virtual or external dataset needs.

HDF5 itself gives fill values, and no error, where a source of a virtual dataset is missing or too
many files are open, and zeros past the end of an external file.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import h5py

from fluxutils_py.data.hdf5.opening import Shape
from fluxutils_py.errors import H5DataError


def check_sources(dataset: h5py.Dataset, where: str) -> None:
    """Check that all of a dataset can be read.

    Raises
    ------
    H5DataError
        If a file or dataset that it takes data from is missing, shorter than it should be, or
        cannot be opened.
    """
    problems = list(dict.fromkeys(_find_problems(dataset, frozenset())))
    storage = "virtual" if dataset.is_virtual else "external"
    if missing := [problem for problem in problems if isinstance(problem, _MissingFile)]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise H5DataError(
            f"{where} is {storage} and {len(missing)} of its source files are missing: {shown}; "
            "put them back, or recreate the dataset (HDF5 would give fill values in their place)"
        )
    if problems:
        raise H5DataError(
            f"{where} is {storage} and {problems[0]}; fix that, or recreate the dataset"
        )


def check_open_file_limit(where: str) -> None:
    """Check that HDF5 could open all sources of a virtual dataset that was just read.

    Raises
    ------
    H5DataError
        If this process has as many files open as it may have: sources beyond those were taken for
        missing.
    """
    # HDF5 keeps the sources open: if one more file can be opened, none was left out
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise H5DataError(
            f"{where} is virtual and needs more files open at once than this process may have "
            f"({error.strerror}); raise the limit, as with `ulimit -n 65536`, or copy it with "
            "h5concat(..., virtual=False)"
        ) from error


def escape(name: str) -> str:
    """Return a name as virtual datasets store it, where a percent sign begins a pattern."""
    return name.replace("%", "%%")


class _MissingFile(str):
    """Name of a missing file, in a list with descriptions of other problems."""


def _find_problems(dataset: h5py.Dataset, seen: frozenset[tuple[str, str]]) -> Iterator[str]:
    """Return the names of missing files, and descriptions of other problems."""
    if dataset.external:
        yield from _external_problems(dataset)
    if not dataset.is_virtual:
        return
    # each file once, however many parts of it the dataset has
    sources = defaultdict(list)
    for source in dataset.virtual_sources():
        if not _is_open_ended(source):
            sources[_unescape(source.file_name)].append(source)
    here = os.path.realpath(dataset.file.filename)
    for name, parts in sources.items():
        path = here if name == "." else _locate_file(name, os.path.dirname(here))
        if path is None:
            yield _MissingFile(name)
            continue
        try:
            with h5py.File(path, "r") as file:
                for part in parts:
                    yield from _part_problems(file, path, part, seen)
        except BlockingIOError:
            yield f"its source file {path} is open for writing in another process"
        except OSError as error:
            yield f"its source file {path} cannot be opened ({error})"


def _is_open_ended(source: Any) -> bool:
    """Whether the names of a source hold a pattern, which stands for as many as there are."""
    names = (source.file_name, source.dset_name)
    return any(re.search(r"%\d*b", name.replace("%%", "")) for name in names)


def _unescape(name: str) -> str:
    return name.replace("%%", "%")


def _part_problems(
    file: h5py.File, path: str, part: Any, seen: frozenset[tuple[str, str]]
) -> Iterator[str]:
    name = _unescape(part.dset_name)
    try:
        source = file[name]
    except (KeyError, OSError, RuntimeError) as error:
        reason = str(error).strip('"')  # a KeyError shows its text with quotes
        yield f"its source file {path} does not give dataset '{name}' ({reason})"
        return
    selection = _Selection.of(part)
    if selection is not None and not selection.is_in(source):
        yield (
            f"its source '{name}' in {path} has shape {source.shape} where {selection.shape} is "
            "taken from it"
        )
    elif (path, name) in seen:  # HDF5 would follow the circle without end
        yield f"its source '{name}' in {path} takes data from itself"
    else:
        yield from _find_problems(source, seen | {(path, name)})


class _Selection(NamedTuple):
    """What a virtual dataset takes from a source."""

    shape: Shape  # that the source has, or has at least
    is_all: bool

    @classmethod
    def of(cls, part: Any) -> Self | None:
        """Return what is taken; None if that has no bounds."""
        try:
            if part.src_space.get_select_type() != h5py.h5s.SEL_ALL:
                last = part.src_space.get_select_bounds()[1]
                return cls(tuple(n + 1 for n in last), False)
            low, high = part.vspace.get_select_bounds()
        except (RuntimeError, ValueError):
            return None
        return cls(tuple(b - a + 1 for a, b in zip(low, high, strict=True)), True)

    def is_in(self, source: h5py.Dataset) -> bool:
        if len(self.shape) != source.ndim:
            # HDF5 takes elements in the order of the file, whatever the shape
            return not self.is_all or source.size == math.prod(self.shape)
        if self.is_all:
            return source.shape == self.shape
        return all(m >= n for m, n in zip(source.shape, self.shape, strict=True))


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


def _external_problems(dataset: h5py.Dataset) -> Iterator[str]:
    # that of the call that opened the dataset wins over that of the environment
    access = dataset.id.get_access_plist().get_efile_prefix().decode()
    folder = os.path.dirname(os.path.realpath(dataset.file.filename))
    prefix = access or os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    left = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    for name, start, room in dataset.external:
        path = os.path.join(prefix, name)
        needed = min(left, room)  # the room of the last one may be unlimited
        left -= needed
        if not os.path.exists(path):
            yield _MissingFile(name)
        elif os.path.getsize(path) < start + needed:
            yield f"its source file {path} has {os.path.getsize(path)} bytes of {start + needed}"
