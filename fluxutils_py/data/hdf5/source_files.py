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
from typing import Any

import h5py

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
    kind = "virtual" if dataset.is_virtual else "external"
    if missing := [problem for problem in problems if isinstance(problem, _MissingFile)]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise H5DataError(
            f"{where} is {kind} and {len(missing)} of its source files are missing: {shown}; put "
            "them back, or recreate the dataset (HDF5 would give fill values in their place)"
        )
    if problems:
        raise H5DataError(f"{where} is {kind} and {problems[0]}; fix that, or recreate the dataset")


def check_open_file_limit(where: str) -> None:
    """Check that a virtual dataset that was just read had all of its sources: HDF5 keeps them open,
    as many as it may.

    Raises
    ------
    H5DataError
        If this process has as many files open as it may have: sources beyond those were taken for
        missing.
    """
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
    sources = defaultdict(list)
    for source in dataset.virtual_sources():
        patterns = (source.file_name.replace("%%", ""), source.dset_name.replace("%%", ""))
        # an open end: as many files as there are
        if not any(re.search(r"%\d*b", p) for p in patterns):
            sources[source.file_name.replace("%%", "%")].append(source)
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


def _part_problems(
    file: h5py.File, path: str, part: Any, seen: frozenset[tuple[str, str]]
) -> Iterator[str]:
    name = part.dset_name.replace("%%", "%")
    try:
        source = file[name]
    except (KeyError, OSError, RuntimeError) as error:
        yield f"its source file {path} does not give dataset '{name}' ({str(error).strip(chr(34))})"
        return
    takes_all, needed = _required_source(part)
    fits = True
    if needed is not None:
        fits = len(needed) != source.ndim or all(
            m >= n for m, n in zip(source.shape, needed, strict=True)
        )
        if takes_all:  # HDF5 takes elements in the order of the file, whatever the shape
            fits = source.size == math.prod(needed) and (
                len(needed) != source.ndim or source.shape == needed
            )
    if not fits:
        yield (
            f"its source '{name}' in {path} has shape {source.shape} where {needed} is taken from "
            "it"
        )
    elif (path, name) in seen:
        yield f"its source '{name}' in {path} takes data from itself"
    else:
        yield from _find_problems(source, seen | {(path, name)})


def _required_source(part: Any) -> tuple[bool, tuple[int, ...] | None]:
    """Whether all of a source is taken, and the shape that it must have (at least); None if that is
    open.
    """
    try:
        if part.src_space.get_select_type() != h5py.h5s.SEL_ALL:
            return False, tuple(n + 1 for n in part.src_space.get_select_bounds()[1])
        low, high = part.vspace.get_select_bounds()
    except (RuntimeError, ValueError):
        return False, None
    return True, tuple(b - a + 1 for a, b in zip(low, high, strict=True))


def _locate_file(name: str, folder: str) -> str | None:
    """Where HDF5 finds a source: below its prefix, beside the file, from the current directory."""
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
    for base in (*((prefix,) if prefix else ()), folder, os.getcwd()):
        path = os.path.join(base, name)
        if os.path.exists(path):
            return os.path.realpath(path)
    return None


def _external_problems(dataset: h5py.Dataset) -> Iterator[str]:
    access = dataset.id.get_access_plist().get_efile_prefix().decode()
    folder = os.path.dirname(os.path.realpath(dataset.file.filename))
    prefix = access or os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    left = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    for name, start, room in dataset.external:
        path = os.path.join(prefix, name)
        needed = min(left, room)
        left -= needed
        if not os.path.exists(path):
            yield _MissingFile(name)
        elif os.path.getsize(path) < start + needed:
            yield f"its source file {path} has {os.path.getsize(path)} bytes of {start + needed}"
