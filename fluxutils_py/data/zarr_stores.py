"""Make arrays in zarr stores, to be written block by block."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.errors import DataError
from fluxutils_py.files import exchange, flush_folder, remove_leftovers, temporary_path
from fluxutils_py.validation import require_package

CHUNK_BYTES = 1 << 20
CHUNK_SERIES = 256  # as in a minibatch of predict


def zarrcreate(
    path: str | os.PathLike[str],
    name: str,
    shape: Sequence[int],
    dtype: DTypeLike = "float32",
    *,
    chunks: Sequence[int] | None = None,
    dims: Sequence[str] = ("feature", "series", "time"),
    exist_ok: bool = False,
    overwrite: bool = False,
) -> Any:
    """Make an array of shape (F, N, T) in a zarr store, new or existing, as ``out`` of ``predict``.

    The counterpart of :func:`h5create`. Chunks are compressed and take room when they are written;
    what is not written reads as zeros.

    In a folder, the array appears whole or not at all, and an old one that it replaces is gone only
    then, also when the process is killed.

    Parameters
    ----------
    path : path-like
        Folder of the store, or what zarr takes in its place.
    name : str
        Name of the array in the store.
    shape : sequence of int
    dtype : dtype
    chunks : sequence of int, optional
        Shape of a chunk, the least that is read or written. Windows of ``batchsize`` series and
        ``seqsize`` steps are fast where they are whole chunks. None: all features of up to 256
        series, over as many steps as make 1 MiB.
    dims : sequence of str
        Names of the axes, with which xarray opens the store.
    exist_ok : bool
        If the store has an array of that name, shape and type, open that one with its numbers. For
        several processes that make the same array, such as ranks: one makes it, all open it.
    overwrite : bool
        If the store has something of that name, replace it.

    Returns
    -------
    zarr.Array
        Open for reading and writing.

    Raises
    ------
    DataError
        If the store has something of that name, or the numbers of axes, chunks and names differ.

    Examples
    --------
    >>> import os, tempfile
    >>> out = zarrcreate(os.path.join(tempfile.mkdtemp(), "predictions.zarr"), "yhat", (1, 3, 4))
    >>> out[:, 0] = 7  # as est.predict(x, out=out) would
    >>> float(out[:].sum())
    28.0
    """
    zarr = require_package("zarr", None, "zarrcreate")
    shape = tuple(int(n) for n in shape)
    dtype = np.dtype(dtype)
    chunks = _usual_chunks(shape, dtype.itemsize) if chunks is None else tuple(chunks)
    if len(chunks) != len(shape) or (len(dims) != len(shape)):
        raise DataError(
            f"{name!r} has the shape {shape}, chunks={chunks} and dims={tuple(dims)}; give as many "
            "of each"
        )
    store = os.fspath(path) if isinstance(path, os.PathLike) else path
    settings: Any = {"shape": shape, "dtype": dtype, "chunks": chunks}
    if isinstance(store, str) and "://" not in store and not store.endswith(".zip"):
        return _create_in_folder(store, name, dims, exist_ok, overwrite, settings)
    group = zarr.open_group(store, mode="a")
    if name in group and not overwrite:
        return _existing(group, name, store, exist_ok, settings)
    return _create(group, name, dims, overwrite, settings)


def _create_in_folder(
    store: str, name: str, dims: Sequence[str], exist_ok: bool, overwrite: bool, settings: Any
) -> Any:
    """Create an array in a new store beside this one, and move it there."""
    import zarr

    target = os.path.realpath(store)
    remove_leftovers(target)
    zarr_format = None
    if not _is_free(store):
        group = zarr.open_group(store, mode="a")
        zarr_format = group.metadata.zarr_format
        if name in group and not overwrite:
            return _existing(group, name, store, exist_ok, settings)
        for parent in list(PurePosixPath(name.strip("/")).parents)[:-1]:
            if hasattr(group.get(str(parent)), "shape"):
                raise DataError(
                    f"{store} has an array {str(parent)!r}, in which there can be no {name!r}; "
                    "give it another name"
                )
    place = os.path.join(store, name.strip("/"))
    if not overwrite and not _is_free(place):
        raise DataError(
            f"{place} is a folder without an array of zarr; remove it, or pass overwrite=True to "
            "put an array in its place"
        )
    with temporary_path(target) as new:
        new_group = zarr.open_group(new, mode="w", zarr_format=zarr_format)
        _create(new_group, name, dims, overwrite, settings)
        try:
            _move_into_store(new, target, name, overwrite)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # another process has made something there meanwhile: one makes an array, all open it
            return _create_in_folder(store, name, dims, True, False, settings)
    return zarr.open_group(store, mode="r+")[name]


def _existing(group: Any, name: str, store: object, exist_ok: bool, settings: Any) -> Any:
    """Return an array that is there already, if it is wanted and fits."""
    existing = group[name]
    found = [getattr(existing, attribute, None) for attribute in ("shape", "dtype")]
    if exist_ok and found == [settings["shape"], settings["dtype"]]:
        return existing
    raise DataError(
        f"{store} has {name!r} already, {existing!r}; to write to it pass exist_ok=True (for "
        f"shape {settings['shape']} and {settings['dtype']}), to put a new one in its place pass "
        "overwrite=True"
    )


def _create(group: Any, name: str, dims: Sequence[str], overwrite: bool, settings: Any) -> Any:
    names = list(dims) if group.metadata.zarr_format == 3 else None
    return group.create_array(name, dimension_names=names, overwrite=overwrite, **settings)


def _move_into_store(new: str, store: str, name: str, overwrite: bool) -> None:
    """Move an array, and the groups above it that are missing, from a new store to another one."""
    parts = ["", *name.strip("/").split("/")]
    paths = ["/".join(parts[1 : i + 1]) for i in range(len(parts))]
    missing = [path for path in paths if _is_free(os.path.join(store, path))]
    path = missing[0] if missing else paths[-1]
    source = os.path.join(new, path).rstrip("/")
    target = os.path.join(store, path).rstrip("/")
    if missing:
        os.rename(source, target)  # an error if another process has made it meanwhile
    elif overwrite:
        exchange(source, target)
    else:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    flush_folder(target)


def _is_free(path: str) -> bool:
    """Whether a folder can be renamed to a path: there is nothing, or an empty folder."""
    return not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path))


def _usual_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    *leading, n_last = shape
    leading = [max(1, n) for n in leading]
    if len(leading) > 1:
        leading[1:] = [min(n, CHUNK_SERIES) for n in leading[1:]]
    n_steps = CHUNK_BYTES // max(1, math.prod(leading) * itemsize)
    return (*leading, max(1, min(n_last, n_steps)))
