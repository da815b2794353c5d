"""Make arrays in zarr stores, to be written block by block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fluxutils_py.errors import DataError
from fluxutils_py.validation import require_package


def zarrcreate(
    path: str | os.PathLike[str],
    name: str,
    shape: Sequence[int],
    dtype: DTypeLike = "float32",
    *,
    chunks: Sequence[int] | None = None,
    dims: Sequence[str] = ("feature", "series", "time"),
    exist_ok: bool = False,
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
        ``seqsize`` steps are fast where they are whole chunks. None: as zarr chooses.
    dims : sequence of str
        Names of the axes, with which xarray opens the store.
    exist_ok : bool
        If the store has an array of that name, shape and type, open that one with its numbers. For
        several processes that make the same array, such as ranks: one makes it, all open it.

    Returns
    -------
    zarr.Array
        Open for reading and writing.

    Raises
    ------
    DataError
        If the store has something of that name.

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
    group = zarr.open_group(os.fspath(path) if isinstance(path, os.PathLike) else path, mode="a")
    try:
        return group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks="auto" if chunks is None else chunks,
            dimension_names=list(dims) if group.metadata.zarr_format == 3 else None,
        )
    except (zarr.errors.ContainsArrayError, zarr.errors.ContainsGroupError) as error:
        existing = group[name]
        # a group has neither
        if exist_ok and getattr(existing, "shape", None) == shape and existing.dtype == dtype:
            return existing
        raise DataError(
            f"{path} has {name!r} already, {existing!r}; give another name, or delete it, or, to "
            f"write to one of shape {shape} and {dtype}, pass exist_ok=True"
        ) from error
