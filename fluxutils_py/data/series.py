"""One lazy interface for (F, N, T) arrays of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import (
    BlockError,
    as_three_axes,
    in_memory,
    is_nonblocking,
    plain_block,
    read_block,
)
from fluxutils_py.data.hdf5.datasets import check_dataset
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError

GLANCE = 8
SERIES_FIRST = (1, 0, 2), (1, 0, 2)  # orders of the axes (F, B, S) of a copy, and the way back
STEPS_FIRST = (2, 0, 1), (1, 2, 0)


class SeriesArray:
    """One array of shape (F, N, T): features, series, time steps.

    Parameters
    ----------
    array : array of shape (F, N, T)
        A NumPy array or memory map in any memory order, a torch tensor on the CPU, nested lists, or
        anything with ``shape``, ``dtype`` and slicing along three axes, such as an h5py dataset.
        Nothing is read on construction, but for nested lists; never written to.
    name : str
        What error messages call it.

    Attributes
    ----------
    F, N, T : int
    kind : str
        ``"int"`` or ``"float"`` (which booleans count as).
    in_memory : bool
        Whether looking at all of it is cheap: a NumPy array that is no memory map.
    nonblocking : bool
        Whether reading a window never waits: the array is in memory, or :meth:`prefetch` has the
        disk at work.
    missing : int or None
        The label of a step that has none.

    Raises
    ------
    ShapeError
        If the array is not three-dimensional or an axis is empty.
    DataError
        If it is not numeric, or holds integers from 2**63 (looked for on reading, if it is not in
        memory).
    """

    def __init__(self, array: Any, name: str) -> None:
        check_dataset(array, name)
        array = as_three_axes(array, name)
        self.array, self.name = array, name
        self.F, self.N, self.T = (int(n) for n in array.shape)
        self.dtype = np.dtype(
            getattr(array, "dtype", None) or np.asarray(array[0:1, 0:1, 0:1]).dtype
        )
        if self.dtype.kind not in "fiub":
            way_out = "convert it, as with astype"
            if name.startswith("y") and self.dtype.kind in "USO":
                way_out = f"labels are for SequenceClassifier and EstimatorClassifier; if they are numbers, {way_out}"
            raise DataError(f"{name} must hold real numbers, got dtype {self.dtype}; {way_out}")
        self.kind = "int" if self.dtype.kind in "iu" else "float"
        self.in_memory = in_memory(array) or bool(getattr(array, "in_memory", False))
        self._may_wrap = self.dtype.kind == "u" and self.dtype.itemsize == 8
        if self._may_wrap and self.in_memory:
            for a in getattr(array, "arrays", (array,)):
                self._require_int64(a)
        self._map = array if isinstance(array, H5Map) else None
        self.nonblocking = self._map is not None or is_nonblocking(array)
        self.missing_label: int | None = None
        self._found = 0  # windows in a row that were in memory
        self._plain = (
            None if not isinstance(array, np.ndarray) else array.view(np.ndarray)
        )  # slices faster than a map
        strides = (0, 0, 0) if self._plain is None else tuple(abs(n) for n in self._plain.strides)
        self._order = _gathering(strides)
        self._function: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.F, self.N, self.T

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> SeriesArray:
        """Return the same array with a function applied to what :meth:`read` returns; ``array`` is
        unchanged.

        ``function`` takes and returns blocks (F, n, t), and gives floating-point numbers, NaN for
        NaN.
        """
        mapped = copy.copy(self)
        mapped._function, mapped.kind = function, "float"
        mapped.dtype = function(np.zeros((self.F, 1, 1), self.dtype)).dtype
        return mapped

    def missing_mask(self, values: np.ndarray) -> np.ndarray | None:
        """Return which of the values read from this array are missing: bool of the same shape, or
        None if none is.
        """
        if self.kind == "float":
            mask = np.isnan(values) if values.dtype.kind == "f" else None
        else:
            mask = None if self.missing_label is None else values == self.missing_label
        return mask if mask is not None and mask.any() else None

    def read(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Steps ``start`` to ``stop`` of the given rows, time-major.

        Returns
        -------
        ndarray of shape (S, B, F)
            A view of the array or of a fresh block in the array's own memory order: not contiguous
            in general, to be copied once into its final place, and never to be written to. Steps
            past a row's end are unspecified. From a map that is not in memory it comes page by
            page, unless it was prefetched.
        """
        try:
            block = self._read(rows, start, stop)
        except BlockError as error:
            raise DataError(f"{self.name}: {error}") from None
        if self._function is not None:
            return self._function(block.transpose(2, 1, 0)).transpose(2, 1, 0)
        if self._may_wrap:
            self._require_int64(block)
        return block

    def stored_block(self, series: slice, steps: slice) -> np.ndarray:
        """Return the values of some series and steps, (F, n, t), as the array holds them; not to be
        written to.
        """
        try:
            return plain_block(self.array[:, series, steps])
        except BlockError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _require_int64(self, block: np.ndarray) -> None:
        if block.size and block.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"{self.name} holds {block.max()}, of type {self.dtype}, which int64 does not "
                "reach, and integers go to the model as int64; convert it to float if these are "
                "quantities, number the values anew if they are categories"
            )

    def _read(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        if hasattr(self.array, "read_segments"):  # computes its values: for all rows in one go
            return np.asarray(self.array.read_segments(rows, start, stop))
        size = stop - start
        if rows.common_start is not None and (
            rows.common_series is not None or self._plain is not None
        ):
            block = self._rectangle(rows, start, stop)
            if (
                block.shape[2] < size
            ):  # rows that end before their neighbours: the caller masks the rest
                block = np.concatenate(
                    [block, np.zeros((*block.shape[:2], size - block.shape[2]), block.dtype)], 2
                )
            return block.transpose(2, 1, 0)
        if self._plain is not None and self._order is None:
            steps = np.minimum(rows.start + np.arange(start, stop)[:, None], self.T - 1)  # (S, B)
            time_major = self._plain.transpose(2, 1, 0)
            if (
                time_major.flags.c_contiguous
            ):  # as rows of a table: a fourth of the time of two indices
                return time_major.reshape(-1, self.F).take(steps * self.N + rows.series, axis=0)
            return time_major[steps, rows.series]
        there, back = self._order or SERIES_FIRST
        sizes = self.F, len(rows), size
        out = np.zeros([sizes[axis] for axis in there], self.dtype).transpose(back)
        for which, part in rows.groups_by_start:  # folds, each a rectangle
            block = self._rectangle(part, start, stop)
            out[:, which, : block.shape[2]] = block
        return out.transpose(2, 1, 0)

    def _rectangle(self, rows: Segments, start: int, stop: int) -> np.ndarray:
        """Steps of rows that start together, as far as the array goes: shape (F, B, at most S), in
        its own order.
        """
        begin = rows.common_start or 0
        steps = slice(begin + start, max(begin + start, min(begin + stop, self.T)))
        if self._plain is not None:
            return self._plain[
                :, rows.series if rows.common_series is None else rows.common_series, steps
            ]
        series = rows.series if rows.common_series is None else range(self.N)[rows.common_series]
        return read_block(self.array, range(self.F), series, range(steps.start, steps.stop))

    def prefetch(self, rows: Segments, start: int, stop: int) -> None:
        """Say what will be read soon: a map has its pages fetched from the disk meanwhile. Returns
        at once.

        Where all was in memory for a while, only one window in ``GLANCE`` is looked at: a look
        takes longer than the window, between training steps that have emptied the caches of the
        processor.
        """
        if self._map is None or self._plain is None:
            return
        self._found += 1
        if self._found > GLANCE and self._found % GLANCE:
            return
        groups = (
            [rows] if rows.common_start is not None else [part for _, part in rows.groups_by_start]
        )
        views: list[np.ndarray] = []
        for part in groups:
            begin = part.common_start or 0
            steps = slice(begin + start, begin + stop)
            which = (
                [part.common_series]
                if part.common_series is not None
                else [slice(n, n + 1) for n in part.series]
            )
            views += [self._plain[:, n, steps] for n in which]
        if self._map.willneed(*views):
            self._found = 0


def _gathering(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The order of the axes (F, B, S) in which to copy a block before it is transposed, and the way
    back.

    Runs of the memory stay innermost, features come next: then the transposition to (S, B, F) stays
    in the cache, with up to five times the speed that it has from a copy in the order of the memory
    (benchmarks/bench_windows.py). None where features run innermost: the block needs no
    transposition.
    """
    if strides[0] <= min(strides[1:]):
        return None
    return SERIES_FIRST if strides[2] <= strides[1] else STEPS_FIRST
