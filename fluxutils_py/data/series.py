"""An (F, N, T) array of any kind behind one lazy face."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.data.rows import Rows
from fluxutils_py.errors import DataError, ShapeError


class Series:
    """One array of shape (F, N, T): features, series, time steps.

    Parameters
    ----------
    array : array of shape (F, N, T)
        A NumPy array or memory map in any memory order, a torch tensor on the CPU, nested lists, or anything with
        ``shape``, ``dtype`` and slicing along three axes, such as an h5py dataset. Nothing is read on construction,
        but for nested lists; never written to.
    name : str
        What error messages call it.

    Attributes
    ----------
    F, N, T : int
    kind : str
        ``"int"`` or ``"float"`` (which booleans count as).
    in_memory : bool
        Whether looking at all of it is cheap: a NumPy array that is no memory map.

    Raises
    ------
    ShapeError
        If the array is not three-dimensional or an axis is empty.
    DataError
        If it is not numeric.
    """

    def __init__(self, array: Any, name: str) -> None:
        if type(array).__module__.split(".")[0] == "torch":
            array = array.detach().cpu().numpy()
        if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
            array = _from_lists(array, name)
        self.array, self.name = array, name
        if len(array.shape) != 3:
            raise ShapeError(
                f"{name} must have three axes (F, N, T) = (features, series, time steps), got shape "
                f"{tuple(array.shape)}{_way_out(array.shape)}"
            )
        self.F, self.N, self.T = (int(n) for n in array.shape)
        for size, axis in zip(array.shape, ("features", "series", "time steps"), strict=True):
            if size == 0:
                raise ShapeError(f"{name} has no {axis}: shape {tuple(array.shape)}")
        self.dtype = np.dtype(getattr(array, "dtype", None) or np.asarray(array[0:1, 0:1, 0:1]).dtype)
        if self.dtype.kind not in "fiub":
            raise DataError(f"{name} must hold real numbers, got dtype {self.dtype}; convert it, as with astype")
        self.kind = "int" if self.dtype.kind in "iu" else "float"
        self.in_memory = type(array) is np.ndarray and not _maps_a_file(array)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.F, self.N, self.T

    def read(self, rows: Rows, start: int, stop: int) -> np.ndarray:
        """Steps ``start`` to ``stop`` of the given rows, time-major.

        Returns
        -------
        ndarray of shape (S, B, F)
            A view of the array or of a fresh block in the array's own memory order: not contiguous in general, to be
            copied once into its final place, and never to be written to. Steps past a row's end are unspecified.
        """
        first = rows.common_start
        if first is not None:  # a rectangle of the array
            return self._rectangle(rows.series, first + start, min(first + stop, self.T), stop - start)
        steps = np.minimum(rows.start[None, :] + np.arange(start, stop)[:, None], self.T - 1)  # (S, B)
        if isinstance(self.array, np.ndarray):
            return self.array.transpose(2, 1, 0)[steps, rows.series[None, :]]
        out = np.empty((stop - start, len(rows), self.F), self.dtype)
        for begin in np.unique(rows.start):
            which = np.flatnonzero(rows.start == begin)
            part = self._rectangle(rows.series[which], begin + start, min(begin + stop, self.T), stop - start)
            out[:, which] = part
        return out

    def _rectangle(self, series: np.ndarray, start: int, stop: int, size: int) -> np.ndarray:
        a = self.array
        if isinstance(a, np.ndarray):
            block = a[:, _as_slice(series), start:stop]
            if abs(block.strides[0]) > min(abs(n) for n in block.strides[1:]):
                # feature-major memory: first gather in the order of the memory, the caller transposes in the cache
                block = np.ascontiguousarray(block)
        elif isinstance(where := _as_slice(series), slice):
            block = np.asarray(a[:, where, start:stop])
        else:  # HDF5 wants increasing indices: read whole runs, then put them in order
            block = np.empty((self.F, len(series), max(stop - start, 0)), self.dtype)
            order = np.argsort(series, kind="stable")
            for run in np.split(order, np.flatnonzero(np.diff(series[order]) != 1) + 1):
                lo = int(series[run[0]])
                block[:, run] = np.asarray(a[:, lo : lo + len(run), start:stop])
        if stop - start < size:  # rows that end before their neighbours: the rest is masked by the caller
            block = np.concatenate([block, np.zeros((*block.shape[:2], size - max(stop - start, 0)), block.dtype)], 2)
        return block.transpose(2, 1, 0)


def as_series(value: Any, name: str) -> tuple[Series, ...]:
    """The arrays of one argument: a tuple means several inputs or outputs, of equal N and T.

    Raises
    ------
    ShapeError
        If the arrays differ in N or T.
    """
    if isinstance(value, tuple):
        if not value:
            raise ShapeError(f"{name} is an empty tuple; give at least one array of shape (F, N, T)")
        arrays = tuple(Series(a, f"{name}[{i}]") for i, a in enumerate(value))
    else:
        arrays = (Series(value, name),)
    for other in arrays[1:]:
        require_aligned(arrays[0], other)
    return arrays


def require_aligned(a: Series, b: Series) -> None:
    """Check that two arrays hold the same series and the same time steps."""
    for axis, what, m, n in ((1, "series", a.N, b.N), (2, "time steps", a.T, b.T)):
        if m != n:
            raise ShapeError(
                f"{a.name} has {m} {what} and {b.name} has {n} (axis {axis} of shapes {a.shape} and {b.shape}); "
                "both must be (F, N, T) with equal N and T"
            )


def _as_slice(index: np.ndarray) -> slice | np.ndarray:
    """A slice in place of an index array that runs up by one."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _maps_a_file(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def _from_lists(value: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{name} must be an array of shape (F, N, T): {error}") from None


def _way_out(shape: tuple[int, ...]) -> str:
    if len(shape) == 2:
        return "; add the missing axis: x[None] for one feature, x[:, None] for one series"
    if len(shape) == 1:
        return "; one feature of one series is x[None, None]"
    if len(shape) > 3:
        return "; reshape the leading axes into one, x.reshape(-1, N, T), and back inside the model"
    return ""
