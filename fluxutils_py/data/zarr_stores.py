"""Make arrays in zarr stores, to be written block by block."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.errors import DataError
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
        If the store has an array of that name, shape and type, open that one with its numbers.
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
    group = zarr.open_group(store, mode="a")
    if name in group and not overwrite:
        existing = group[name]
        fits = getattr(existing, "shape", None) == shape and existing.dtype == dtype
        if exist_ok and fits:
            return existing
        raise DataError(
            f"{store} has {name!r} already, {existing!r}; to write to it pass exist_ok=True (for "
            f"shape {shape} and {dtype}), to put a new one in its place pass overwrite=True"
        )
    return group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        dimension_names=list(dims) if group.metadata.zarr_format == 3 else None,
        overwrite=overwrite,
    )


def _usual_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    *leading, n_last = shape
    leading = [max(1, n) for n in leading]
    if len(leading) > 1:
        leading[1:] = [min(n, CHUNK_SERIES) for n in leading[1:]]
    n_steps = CHUNK_BYTES // max(1, math.prod(leading) * itemsize)
    return (*leading, max(1, min(n_last, n_steps)))
