"""(F, N, T) arrays that scikit-learn sees as matrices: one row per series, or one row per time
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Self

import h5py
import numpy as np

from fluxutils_py.data.arrays import (
    DuckArray,
    Names,
    as_three_axes,
    get_feature_names,
    is_list_of_series,
    require_list_of_series,
)
from fluxutils_py.data.hdf5.h5lazy import H5Lazy
from fluxutils_py.data.indexing import Index, compose_index, contiguous_runs, parse_index
from fluxutils_py.data.lazy import (
    Function,
    LazyArray,
    as_picklable,
    select,
)
from fluxutils_py.data.series import check_source
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.validation import check_integer


class SequenceView(DuckArray):
    """A matrix to scikit-learn, an (F, N, T) array to an estimator; made by :func:`samples` and
    :func:`timesteps`.

    It has ``shape``, ``dtype`` and ``len``. Indexing rows gives views again, without reading
    anything; ``np.asarray`` reads everything. A view can be pickled; data in a file travel as the
    file's name.

    Attributes
    ----------
    shape : (rows, columns)
    feature_names : tuple of str or None
        Names of the F features, not of the columns.
    native : array of shape (F, N, T)
        The data of the rows: a NumPy view, or an array that reads lazily.
    """

    axis: int  # of the native array, along which there are rows
    device = "cpu"  # what scikit-learn's array API dispatch asks for

    def __init__(
        self,
        array: Any,
        index: Index | None = None,
        names: Names | None = None,
        context: int = 0,
    ) -> None:
        self.array = array
        self.context = context
        self.index: Index = range(array.shape[self.axis]) if index is None else index
        self.dtype: np.dtype = array.dtype
        self._names = names

    @property
    def feature_names(self) -> Names | None:
        return get_feature_names(self.array) if self._names is None else self._names

    @property
    def native(self) -> Any:
        return self._native(self.index)

    @property
    def n_features(self) -> int:
        """F, the features of a series at one step."""
        return self.array.shape[0]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # as the index now is
        n_others = self.array.shape[3 - self.axis]
        return len(self.index), self.n_features * n_others

    def __repr__(self) -> str:
        fnt = tuple(self.array.shape)
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, of (F, N, T)={fnt})"

    def __getitem__(self, key: Any) -> Any:
        which, columns = parse_index(key, self.shape)
        is_all = isinstance(columns, range) and columns == range(self.shape[1])
        if not isinstance(columns, int):
            columns = np.asarray(columns, dtype=np.intp)
        if isinstance(which, int):
            row = self._with_index(self.index[which : which + 1])
            return np.asarray(row)[0, columns]
        rows = self._with_index(compose_index(self.index, which))
        return rows if is_all else np.asarray(rows)[:, columns]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("cannot return a view of sequences as a matrix without copying it")
        return np.array(self.to_rows(np.asarray(self.native)), dtype)

    def __array_namespace__(self, api_version: str | None = None) -> ModuleType:
        return np

    def take(
        self,
        indices: Any,
        axis: int | None = None,
        out: object = None,
        mode: str = "raise",
    ) -> Any:
        """Return rows by their numbers, as a view, or read columns (``axis=1``)."""
        if axis in (None, 0):
            return self[np.asarray(indices)]
        return self[:, indices]

    def copy(self) -> np.ndarray:
        """Read everything into a matrix that may be written to."""
        return np.array(self)

    def __reduce__(self) -> Any:
        return type(self), (
            as_picklable(self.array),
            self.index,
            self.feature_names,
            self.context,
        )

    def map(self, function: Function) -> Self:
        """Return the same view of a function of the array; the function is applied when data are
        read.

        ``function`` takes and returns blocks (F, n, t) of any number of series and steps; F may
        change. Names of features stay if it is a ufunc of NumPy, or has an attribute
        ``keeps_features = True``. For several processes it must be picklable.
        """
        return self.replace(lambda array: LazyArray(array, functions=(function,)))

    def replace(self, make: Callable[[Any], LazyArray]) -> Self:
        """Return the same rows of another array of the same series and steps, computed by ``make``.

        Use it for functions of earlier steps, which :meth:`map` does not see: ``make`` takes the
        whole array (F, N, T) of the view.
        """
        array = make(self.array)
        names = self._names if array.keeps_features else None
        return type(self)(array, self.index, names, self.context)

    def _with_index(self, index: Index) -> Self:
        return type(self)(self.array, index, self._names, self.context)

    def _native(self, index: Index) -> Any:
        chosen = (index, None) if self.axis == 1 else (None, index)
        return select(self.array, *chosen)

    def contiguous_runs(self) -> list[slice]:
        """Return slices of steps that follow each other in time; between them the state is
        forgotten.
        """
        return [slice(0, self.array.shape[2])]

    def with_context(self, run: slice) -> tuple[Any, int]:
        """Return a run as (F, N, n), lazily, with earlier steps before it that warm up the state,
        and their number.
        """
        return self.native, 0

    @classmethod
    def to_rows(cls, array: np.ndarray) -> np.ndarray:
        """Return the rows of an (F, N, T) array, as a view if its memory order allows."""
        rows = np.moveaxis(array, cls.axis, 0)
        _, n_features, n_others = rows.shape  # not -1, which an empty array does not allow
        return rows.reshape(len(rows), n_features * n_others)

    @classmethod
    def from_rows(cls, rows: np.ndarray, n_features: int) -> np.ndarray:
        """Return the (F, N, T) array of some rows: the inverse of :meth:`to_rows`."""
        n_rows, n_columns = rows.shape
        blocks = rows.reshape(n_rows, n_features, n_columns // n_features)
        return np.moveaxis(blocks, 0, cls.axis)


class SamplesView(SequenceView):
    """One row per series: (N, F * T), column ``f * T + t``."""

    axis = 1


class TimestepsView(SequenceView):
    """One row per time step: (T, F * N), column ``f * N + n``."""

    axis = 2

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if not (np.diff(np.asarray(self.index)) > 0).all():
            raise ValueError(
                "time steps must stay in their order: a state that runs forward cannot be carried "
                "through steps that are shuffled, reversed or repeated; split with TimeSeriesSplit "
                "or KFold(shuffle=False), or use samples(x) to split between series"
            )

    def contiguous_runs(self) -> list[slice]:
        return contiguous_runs(self.index)

    def with_context(self, run: slice) -> tuple[Any, int]:
        start = int(self.index[run.start])
        stop = int(self.index[run.stop - 1]) + 1
        n_context = min(self.context, start)
        return self._native(range(start - n_context, stop)), n_context


def samples(x: Any, *, feature_names: Sequence[str] | None = None) -> SamplesView:
    """View an (F, N, T) array as a matrix with one row per series, for tools that split, shuffle or
    count samples.

    scikit-learn sees ``(N, F * T)`` (column ``f * T + t``); estimators of this package see ``(F, N,
    T)`` again. Indexing rows gives a view and reads nothing. Never hand a three-dimensional array
    itself to a splitter, a search or a pipeline that splits: scikit-learn splits along the first
    axis, which holds the features.

    Parameters
    ----------
    x : array of shape (F, N, T)
        NumPy array or memory map, h5py dataset, torch tensor, or a result of ``h5mmap``. Not
        copied.
    feature_names : sequence of F str, optional
        Estimators and transformers fitted on the view store them as ``feature_names_in_`` and later
        refuse other names. None uses the array's attribute ``feature_names``, if it has one.

    Returns
    -------
    SamplesView
        Predictions for it are matrices with the same rows, as are targets ``samples(y)``. Targets
        of one value per series may be a plain array of shape (N,) or (N, G).

    Raises
    ------
    ShapeError, DataError
        If ``x`` is no array of numbers, or of labels, with three axes.

    Examples
    --------
    >>> x = np.arange(24.0).reshape(2, 3, 4)  # F, N, T
    >>> v = samples(x)
    >>> v.shape, v[1:].native.shape
    ((3, 8), (2, 2, 4))
    >>> np.asarray(v)[0]
    array([ 0.,  1.,  2.,  3., 12., 13., 14., 15.])
    """
    array = _three_axes(x, "samples")
    return SamplesView(array, names=_checked_names(feature_names, array))


def timesteps(
    x: Any,
    context: int = 0,
    *,
    feature_names: Sequence[str] | None = None,
) -> TimestepsView:
    """View an (F, N, T) array as a matrix with one row per time step, for splitting in time.

    scikit-learn sees ``(T, F * N)`` (column ``f * N + n``); estimators of this package see ``(F, N,
    T)`` again. Where a split leaves a gap, the state starts from zero. Rows must stay in order.

    Parameters
    ----------
    x : array of shape (F, N, T)
        As in :func:`samples`.
    context : int
        Warm up the state on up to this many earlier steps of ``x`` before predicting a stretch,
        including steps that a split has put elsewhere. Only inputs are used, so no target leaks.
        With 0, every stretch starts from the zero state; training always does.
    feature_names : sequence of F str, optional
        As in :func:`samples`.

    Returns
    -------
    TimestepsView
        Its targets are ``timesteps(y)``, or, for one series, a plain array of shape (T,) or (T, G).

    Raises
    ------
    ShapeError, DataError
        If ``x`` is no array of numbers, or of labels, with three axes.
    ValueError
        If ``context`` is negative; on indexing, if steps would be out of order.

    Examples
    --------
    >>> from sklearn.model_selection import TimeSeriesSplit
    >>> v = timesteps(np.zeros((2, 3, 10)), context=4)
    >>> [(v[a].shape, v[b].native.shape) for a, b in TimeSeriesSplit(2).split(v)]
    [((4, 6), (2, 3, 3)), ((7, 6), (2, 3, 3))]
    """
    context = check_integer("context", context, 0, error=ValueError)
    array = _three_axes(x, "timesteps")
    return TimestepsView(array, names=_checked_names(feature_names, array), context=context)


def _checked_names(names: Sequence[str] | None, array: Any) -> Names | None:
    if names is None:
        return None
    n_features = array.shape[0]
    checked = () if isinstance(names, str) else tuple(names)
    if len(checked) != n_features or not all(isinstance(n, str) for n in checked):
        raise DataError(
            f"feature_names must be {n_features} strings, one per feature; got {names!r}"
        )
    return tuple(map(str, checked))  # of NumPy's strings, plain ones


def _three_axes(x: Any, name: str) -> Any:
    if isinstance(x, SequenceView):
        raise DataError(
            f"{name} takes an array of shape (F, N, T), got a view of one; its array is x.native"
        )
    check_source(x, "x")
    if isinstance(x, tuple) or is_list_of_series(x):
        raise ShapeError(
            f"{name} takes one array of shape (F, N, T), got a {type(x).__name__} of {len(x)} "
            "series or arrays; stack features. fit and predict take a list of series as it is, "
            "and so do searches and cross-validation of scikit-learn: search.fit(list, y). Where a "
            "view is needed and there is a target at each step, pad x and y with NaN to arrays "
            "(F, N, T), and give the lengths: search.fit(samples(x), samples(y), lengths=[...])"
        )
    require_list_of_series(x, "x")
    array = as_three_axes(x, "x")
    dtype = np.dtype(getattr(array, "dtype", float))
    if dtype.kind in "cMmV":
        raise DataError(
            f"x must hold real numbers, or labels, got dtype {array.dtype}; convert it, as with "
            "astype"
        )
    # other sources may lack what a view needs, such as indexing by arrays or pickling by name
    is_known = isinstance(array, np.ndarray | H5Lazy | LazyArray | h5py.Dataset)
    return array if is_known else LazyArray(array)
