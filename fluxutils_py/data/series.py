"""One lazy interface for (F, N, T) arrays of any kind; find where their series begin and end."""

from __future__ import annotations

import copy
import resource
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from fluxutils_py.data.arrays import (
    BlockError,
    as_three_axes,
    in_memory,
    is_nonblocking,
    plain_block,
    read_block,
    refuse_source,
)
from fluxutils_py.data.blocks import BLOCK
from fluxutils_py.data.hdf5.h5map import H5Map
from fluxutils_py.data.hdf5.opening import check_dataset
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import Function
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError

FIRST_LOOK = 32  # steps that are read at once where series begin and end; then ever more
QUIET = 64  # windows of a map, after which its pages are taken to be in memory

Axes = tuple[int, int, int]


# orders of axes in which to copy (F, B, S), with those to come back to (F, B, S)
SERIES_FIRST: tuple[Axes, Axes] = (1, 0, 2), (1, 0, 2)
STEPS_FIRST: tuple[Axes, Axes] = (2, 0, 1), (1, 2, 0)


class SeriesArray:
    """One array of shape (F, N, T): features, series, time steps.

    Parameters
    ----------
    array : array of shape (F, N, T)
        A NumPy array or memory map in any memory order, a torch tensor on the CPU, nested lists, or
        anything with ``shape``, ``dtype`` and slicing along three axes, such as an h5py dataset.
        Nothing is read on construction, but for nested lists; never written to.
    name : str
        Name used in error messages.

    Attributes
    ----------
    F, N, T : int
    kind : str
        ``"int"`` or ``"float"`` (which booleans count as).
    in_memory : bool
        Whether scanning all of it is cheap: a NumPy array that is not a memory map.
    nonblocking : bool
        Whether reading a window never waits: the array is in memory, or :meth:`prefetch` has asked
        the disk for it.
    missing_label : int or None
        The label of a step that has none.
    function : callable or None
        Applied to what :meth:`read` returns; set by :meth:`map`.

    Raises
    ------
    ShapeError
        If the array is not three-dimensional or an axis is empty.
    DataError
        If it is not numeric, or holds integers from 2**63 (looked for on reading, if it is not in
        memory).
    """

    def __init__(self, array: Any, name: str) -> None:
        check_source(array, name)
        array = as_three_axes(array, name)
        self.array = array
        self.name = name
        self.F, self.N, self.T = map(int, array.shape)
        self.dtype = _dtype_of_numbers(array, name)
        self.kind = "int" if self.dtype.kind in "iu" else "float"
        self.in_memory = in_memory(array) or bool(getattr(array, "in_memory", False))
        self._may_wrap = self.dtype.kind == "u" and self.dtype.itemsize == 8
        if self._may_wrap and self.in_memory:
            for stored in self.stored_arrays:
                require_int64(stored, self.name)
        self._map = array if isinstance(array, H5Map) else None
        self.nonblocking = self._map is not None or is_nonblocking(array)
        # set by whoever encodes labels, as integers have no NaN
        self.missing_label: int | None = None
        self.feature_names: np.ndarray | None = None  # for messages
        self._n_quiet = 0  # windows since the process last waited for a page
        self._n_faults = 0
        self._plain: np.ndarray | None = None
        self._order: tuple[Axes, Axes] | None = None
        if isinstance(array, np.ndarray):
            # as a plain ndarray, whose slices are made faster than those of a map
            self._plain = array.view(np.ndarray)
            # The orders of axes in which to copy a block before it is transposed, and back. Runs
            # of the memory stay innermost, features come next: then the transposition to (S, B, F)
            # stays in the cache, with up to five times the speed that it has from a copy in the
            # order of the memory (benchmarks/bench_windows.py). Where features run innermost, the
            # block needs no transposition.
            features, series, steps = map(abs, array.strides)
            if features > min(series, steps):
                self._order = SERIES_FIRST if steps <= series else STEPS_FIRST
        self.function: Function | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.F, self.N, self.T

    def map(self, function: Function) -> SeriesArray:
        """Return the same array with a function applied to what :meth:`read` returns; ``array`` is
        unchanged.

        ``function`` takes and returns blocks (F, n, t), and gives floating-point numbers, NaN for
        NaN.
        """
        mapped = copy.copy(self)  # shares the array
        mapped.function = function
        mapped.kind = "float"
        mapped.dtype = function(np.zeros((self.F, 1, 1), self.dtype)).dtype
        return mapped

    @property
    def stored_arrays(self) -> Sequence[Any]:
        """The arrays that hold the values: one, or one per series of a list."""
        return getattr(self.array, "arrays", (self.array,))

    def missing_mask(self, values: np.ndarray) -> np.ndarray | None:
        """Return which of the values read from this array are missing: bool of the same shape, or
        None if none is.
        """
        if self.kind == "float":
            if values.dtype.kind != "f":  # booleans
                return None
            mask = np.isnan(values)
        elif self.missing_label is None:
            return None
        else:
            mask = values == self.missing_label
        return mask if mask.any() else None

    def read(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Return steps ``start`` to ``stop`` of the given rows, time-major.

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
        if self.function is not None:
            block = self.function(block.transpose(2, 1, 0))
            return block.transpose(2, 1, 0)
        if self._may_wrap:
            require_int64(block, self.name)
        return block

    def stored_block(self, series: slice, steps: slice) -> np.ndarray:
        """Return the values of some series and steps, (F, n, t), as the array holds them; not to be
        written to.
        """
        try:
            return plain_block(self.array[:, series, steps])
        except BlockError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _read(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        if hasattr(self.array, "read_segments"):  # computes its values: for all rows in one go
            return np.asarray(self.array.read_segments(rows, start, stop))
        # scattered series of a file come in pieces, which are put into one copy
        is_rectangle = rows.common_series is not None or self._plain is not None
        if rows.common_start is not None and is_rectangle:
            block = self._rectangle(rows, start, stop)
            n_beyond = stop - start - block.shape[2]
            if n_beyond > 0:  # past the end of the array: the caller masks these steps
                padding = np.zeros((*block.shape[:2], n_beyond), block.dtype)
                block = np.concatenate([block, padding], 2)
            return block.transpose(2, 1, 0)
        if self._plain is not None and self._order is None:  # features together in memory
            steps = rows.start + np.arange(start, stop)[:, None]  # (S, B)
            steps = np.minimum(steps, self.T - 1)  # beyond the end: the caller masks these steps
            time_major = self._plain.transpose(2, 1, 0)
            if not time_major.flags.c_contiguous:
                return time_major[steps, rows.series]
            # as rows of a table: this takes a fourth of the time of two indices
            table = time_major.reshape(-1, self.F)
            return table.take(steps * self.N + rows.series, axis=0)
        # those that start together, such as folds, as one rectangle each
        there, back = self._order or SERIES_FIRST
        sizes = self.F, len(rows), stop - start
        out = np.zeros([sizes[axis] for axis in there], self.dtype).transpose(back)
        for which, part in rows.groups_by_start:
            block = self._rectangle(part, start, stop)
            out[:, which, : block.shape[2]] = block
        return out.transpose(2, 1, 0)

    def _rectangle(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Read steps of rows that start together, as far as the array goes: shape (F, B, at most
        S), in its memory order.
        """
        begin = rows.common_start or 0
        first = begin + start
        last = max(first, min(begin + stop, self.T))
        consecutive = rows.common_series
        if self._plain is not None:
            which = rows.series if consecutive is None else consecutive
            return self._plain[:, which, first:last]
        series: Index = rows.series
        if consecutive is not None:
            series = range(consecutive.start, consecutive.stop)
        return read_block(self.array, range(self.F), series, range(first, last))

    def prefetch(
        self,
        rows: Segments,
        start: int,
        stop: int,
    ) -> None:
        """Announce what will be read soon, so that the pages of a map are fetched meanwhile.

        It returns at once.
        """
        if self._map is None or self._plain is None:
            return
        # to ask for pages that are there takes as long as a training step, where a window has a
        # range of them for each of its series and steps
        n_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._n_quiet = self._n_quiet + 1 if n_faults == self._n_faults else 0
        self._n_faults = n_faults
        if self._n_quiet > QUIET:
            return
        groups = [rows]
        if rows.common_start is None:
            groups = [part for _, part in rows.groups_by_start]
        views = []
        for part in groups:
            begin = part.common_start or 0
            steps = slice(begin + start, begin + stop)
            together = part.common_series
            each = [slice(n, n + 1) for n in part.series] if together is None else [together]
            views += [self._plain[:, series, steps] for series in each]
        self._map.willneed(*views)


PLAIN = int | float | str | np.ndarray | np.generic | None


def check_source(value: Any, name: str) -> Any:
    """Check a source of values before it is used as it is, also inside tuples and lists, and return
    what was given; ``name`` is that in messages.

    Raises
    ------
    DataError
        If it cannot be read as an array, or is a dataset of h5py without its file, or without
        files that it takes data from.
    """
    if isinstance(value, h5py.Dataset):
        check_dataset(value, name)
        return value
    refuse_source(value, name)
    if isinstance(value, tuple | list):
        for i, item in enumerate(value):
            if not isinstance(item, PLAIN):  # of nested lists of numbers there may be many
                check_source(item, f"{name}[{i}]")
    return value


def _dtype_of_numbers(array: Any, name: str) -> np.dtype:
    """Return the dtype of an array, after reading one value if it does not say.

    Raises
    ------
    DataError
        If it holds no real numbers.
    """
    declared = getattr(array, "dtype", None)
    if declared is None:
        declared = np.asarray(array[0:1, 0:1, 0:1]).dtype
    dtype = np.dtype(declared)
    if dtype.kind in "fiub":
        return dtype
    remedy = "convert it, as with astype"
    if name.startswith("y") and dtype.kind in "USO":
        remedy = (
            "labels are for SequenceClassifier and EstimatorClassifier; if they are numbers, "
            f"{remedy}"
        )
    raise DataError(f"{name} must hold real numbers, got dtype {dtype}; {remedy}")


def require_int64(values: np.ndarray, name: str) -> None:
    """Raise DataError if an integer is too large for int64."""
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"{name} holds {values.max()}, of type {values.dtype}, which int64 does not reach, and "
            "integers go to the model as int64; convert it to float if these are quantities, "
            "number the values anew if they are categories"
        )


# -- where series begin and end --------------------------------------------------------------------


def find_bounds(arrays: Sequence[SeriesArray], rows: Segments) -> Segments | None:
    """Return the steps of each row with input: without those before and behind, at which all
    features of all arrays are NaN. A row without any input has no steps.

    None if all steps of all rows are within. Reads little more than one step at each end, and the
    padding.
    """
    if any(s.dtype.kind in "iub" for s in arrays):
        return None
    # most often: the first and the last step of each row have some
    if rows.min_length > 0 and all(
        _has_input(arrays, ends, 1).all() for ends in (rows, rows.last_steps())
    ):
        return None
    before = _count_empty(arrays, rows, backwards=False)
    left = Segments(rows.series, rows.start + before, rows.length - before)
    after = _count_empty(arrays, left, backwards=True)
    return Segments(rows.series, left.start, left.length - after)


def _has_input(arrays: Sequence[SeriesArray], rows: Segments, n: int) -> np.ndarray:
    """Return which of the first ``n`` steps of each row have some input: bool (n, B)."""
    has_input = np.zeros((n, len(rows)), bool)
    for s in arrays:
        has_input |= ~np.isnan(s.read(rows, 0, n)).all(-1)
    return has_input


def _count_empty(arrays: Sequence[SeriesArray], rows: Segments, backwards: bool) -> np.ndarray:
    """Return how many steps at the beginning of each row, or at its end, have no input."""
    count = np.zeros(len(rows), int)
    left = np.flatnonzero(rows.length > 0)
    size = 1
    while len(left):
        done, length = count[left], rows.length[left]
        n_steps = np.minimum(size, length - done)
        begin = rows.start[left] + (length - done - n_steps if backwards else done)
        part = Segments(rows.series[left], begin, n_steps)
        has_input = _has_input(arrays, part, int(n_steps.max()))
        has_input &= np.arange(len(has_input))[:, None] < n_steps
        found = has_input.any(0)
        n_empty = has_input.argmax(0)
        if backwards:
            n_empty = n_steps - len(has_input) + has_input[::-1].argmax(0)
        count[left] += np.where(found, n_empty, n_steps)
        left = left[~found & (count[left] < length)]
        # ever more, so that long padding is read in few pieces
        n_values = sum(s.F for s in arrays) * max(1, len(left))
        size = min(2 * max(size, FIRST_LOOK), max(1, BLOCK // n_values))
    return count
