"""The array protocol of the package, and conversions to it."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from fluxutils_py.data.indexing import Index, as_key, parse_index, read_slices
from fluxutils_py.errors import DataError, ShapeError


class DuckArray:
    """An array whose values are read, or computed, when it is indexed. A subclass sets two attributes and one method.

    It takes indices as NumPy does, one array of indices at most, and returns NumPy arrays; ``np.asarray`` reads it all.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nonblocking : bool
        Whether reading never waits for a disk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nonblocking: bool = False

    def read(self, *index: Index) -> np.ndarray:
        """The block where the given places of every axis meet (``oindex`` of zarr and xarray)."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> Any:
        index = parse_index(key, self.shape)
        block = self.read(*(range(i, i + 1) if isinstance(i, int) else i for i in index))
        singles = any(isinstance(i, int) for i in index)  # beside one of these, NumPy may move the axis of an array
        return block[
            tuple(
                0 if isinstance(i, int) else np.arange(len(i)) if singles and isinstance(i, np.ndarray) else slice(None)
                for i in index
            )
        ]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("cannot return a lazily read array without copying it")
        return np.array(self[...], dtype)


def read_block(source: Any, *index: Index) -> np.ndarray:
    """The block where the given places of every axis meet, of any array that takes slices; may be a view."""
    if isinstance(source, DuckArray):
        return source.read(*index)
    if not isinstance(source, np.ndarray):
        return read_slices(lambda key: np.asarray(source[key]), index)
    if sum(isinstance(i, np.ndarray) for i in index) > 1:
        return np.asarray(source[np.ix_(*index)])
    return np.asarray(source[tuple(map(as_key, index))])


def is_tensor(value: Any) -> bool:
    """Whether something is a tensor of torch, which is not imported to find out."""
    return type(value).__module__.split(".")[0] == "torch"


def to_numpy(value: Any) -> Any:
    """Return a torch tensor as a NumPy array, sharing memory if it is on the CPU; anything else unchanged."""
    return value.detach().cpu().numpy() if is_tensor(value) else value


def in_memory(array: Any) -> bool:
    """Whether an array is a NumPy array whose values are in memory, not in a file that is mapped."""
    if type(array) is not np.ndarray:
        return False
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap | mmap.mmap):
            return False
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return True


def is_nonblocking(array: Any) -> bool:
    """Whether reading an array never waits for a disk."""
    return array.nonblocking if isinstance(array, DuckArray) else in_memory(array)


def as_three_axes(array: Any, name: str) -> Any:
    """An array of shape (F, N, T) that takes three slices; of a torch tensor or nested lists, a NumPy array.

    Raises
    ------
    ShapeError, DataError
        If it has other axes, an axis is empty, or it is masked.
    """
    array = to_numpy(array)
    if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
        try:
            array = np.asarray(array)
        except ValueError as error:
            raise ShapeError(
                f"{name} must be an array of shape (F, N, T), and the shapes of its parts differ; series of unequal "
                f"length are a list of arrays (F, T_i), given to fit and predict as it is ({error})"
            ) from None
    reject_masked(array, name)
    if len(array.shape) != 3:
        raise ShapeError(
            f"{name} must have three axes (F, N, T) = (features, series, time steps), got shape "
            f"{tuple(array.shape)}{_WAYS_OUT.get(min(len(array.shape), 4), '')}"
        )
    check_no_empty_axis(array, name, ("features", "series", "time steps"))
    return array


_WAYS_OUT = {
    1: "; one feature of one series is x[None, None]",
    2: "; add the missing axis: x[None] for one feature, x[:, None] for one series",
    4: "; reshape the leading axes into one, x.reshape(-1, N, T), and back inside the model",
}


def check_no_empty_axis(array: Any, name: str, axes: tuple[str, ...]) -> None:
    """Raise ShapeError if one of the axes, whose names are given, has length 0."""
    for size, axis in zip(array.shape, axes, strict=True):
        if size == 0:
            raise ShapeError(f"{name} has no {axis}: shape {tuple(array.shape)}")


def reject_masked(array: Any, name: str, fill: str = "np.nan") -> None:
    """Raise DataError if an array is masked: most of what would be done to it drops the mask silently."""
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose mask would be lost; use {name}.filled({fill})")
