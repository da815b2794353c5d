"""Predictions with the names of dimensions and the coordinates of an array of xarray."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, ShapeError

OUTPUT = "output"  # the dimension of outputs, which are others than the features


def split_labels(x: object, out: str) -> tuple[Any, None]:
    """Return the array of xarray whose labels predictions shall have, and an ``out`` without
    "xarray".

    Raises
    ------
    DataError
        If ``out`` is another text than "xarray", or ``x`` has no labels.
    """
    if out != "xarray":
        raise DataError(f"out must be an array, 'xarray' or None, got {out!r}")
    cls = type(x)
    if cls.__name__ != "DataArray" or not hasattr(x, "dims"):
        raise DataError(
            f"out='xarray' gives predictions the labels of x, which is a {cls.__name__}; give an "
            "xarray.DataArray with the dimensions (features, series, time), or out=None"
        )
    return x, None


def with_labels(values: Any, source: Any) -> Any:
    """Return predictions (G, N, T), (N,) or (N, G) for an array of xarray as such an array.

    It has the dimensions of series and time, and the coordinates that do not belong to features.
    """
    if not isinstance(values, np.ndarray) or len(source.dims) != 3:
        raise ShapeError(
            f"out='xarray' is for one output of an array of three dimensions, got {source.dims}"
        )
    features, series, time = source.dims
    dims: tuple[str, ...] = (OUTPUT, series, time)
    if values.ndim < 3:  # one target per series
        dims = (series, OUTPUT)[: values.ndim]
    coordinates = {
        name: coordinate
        for name, coordinate in source.coords.items()
        if features not in coordinate.dims and set(coordinate.dims) <= set(dims)
    }
    return type(source)(values, coords=coordinates, dims=dims)
