"""Fold few long series into more and shorter ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fluxutils_py.data.arrays import in_memory, is_tensor, read_block, with_shape
from fluxutils_py.data.indexing import Index
from fluxutils_py.data.lazy import LazyArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.series import SeriesArray
from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.validation import check_integer


def rebatch(x: Any, batchsize: int, fill: float | None = None) -> Any:
    """Fold the time of few long series so that a minibatch is full.

    If ``batchsize`` is at least twice the number ``N`` of series, and ``T > n = batchsize // N``,
    this cuts each series in time into ``n`` folds; row ``b * n + k`` of the result holds fold ``k``
    of series ``b``. Otherwise it returns ``x``. Nothing is dropped: if ``n`` does not divide ``T``,
    folds have the lengths of ``numpy.array_split``, and the shorter ones end in one step that does
    not count, filled with NaN.

    A model trained on folds remembers nothing from before a fold's first step. Estimators fold
    automatically in ``fit``, without copying anything, and by default only into long folds
    (``Spec.rebatch``). Use this function on arrays for a custom loop.

    Parameters
    ----------
    x : array of shape (F, N, T) or (N, T), or tuple of such arrays
        All arrays of a tuple are folded the same way; they have equal ``N`` and ``T``.
    batchsize : int
    fill : float, optional
        Used instead of NaN: 0 for weights. Integers need it if ``n`` does not divide ``T``.

    Returns
    -------
    array of shape (F, N * n, ceil(T / n)) or (N * n, ceil(T / n)), or tuple of arrays
        For a NumPy array or torch tensor in memory, a view if ``n`` divides ``T`` and the memory
        order allows (C order, or one series), else a copy. For memory maps, HDF5 datasets and the
        like, which must be (F, N, T), a lazy array.

    Raises
    ------
    ShapeError
        If an array does not have two or three axes, or arrays of a tuple differ in ``N`` or ``T``.
    DataError
        If integers need a ``fill``, and none is given.

    Notes
    -----
    Source: ``rebatch`` of FluxUtils.jl, which drops the last ``T mod n`` steps.

    Examples
    --------
    >>> rebatch(np.arange(10.0).reshape(1, 2, 5), batchsize=4)
    array([[[ 0.,  1.,  2.],
            [ 3.,  4., nan],
            [ 5.,  6.,  7.],
            [ 8.,  9., nan]]])
    """
    batchsize = check_integer("batchsize", batchsize, 1)
    arrays = [with_shape(a) for a in (x if isinstance(x, tuple) else (x,))]
    # each alone could be folded, into rows that do not match
    if len({tuple(a.shape[-2:]) for a in arrays}) > 1:
        shapes = " and ".join(str(tuple(a.shape)) for a in arrays)
        raise ShapeError(
            f"arrays of shapes {shapes} cannot be folded together: they must be (F, N, T) with "
            "equal N and T"
        )
    folded = tuple(_fold_array(a, batchsize, fill) for a in arrays)
    return folded if isinstance(x, tuple) else folded[0]


def _read_folds(
    folds: Segments, fill: np.generic, x: Any, series: Index, steps: range
) -> np.ndarray:
    """Read some folds of an array (F, N, T), with ``fill`` as the last value of shorter ones."""
    rows = folds[np.asarray(series)]
    n_features, _, n_steps = x.shape
    out = np.full((n_features, len(rows), len(steps)), fill, fill.dtype)
    for which, part in rows.groups_by_start:
        begin = int(part.start[0])
        these = range(begin + steps.start, min(begin + steps.stop, n_steps))
        out[:, which, : len(these)] = read_block(x, range(n_features), part.series, these)
    live = rows.step_mask(steps.start, steps.stop)
    return out if live is None else np.where(live.T, out, fill)


def _fold_array(
    x: Any,
    batchsize: int,
    fill: float | None,
) -> Any:
    shape = tuple(map(int, x.shape))
    if len(shape) not in (2, 3):
        raise ShapeError(f"rebatch takes arrays of shape (F, N, T) or (N, T), got {shape}")
    *features, n_series, n_steps = shape
    n = batchsize // n_series if n_series else 0
    if n < 2 or n_steps <= n:  # as Segments.fold decides
        return x
    size, n_longer = divmod(n_steps, n)
    if n_longer and fill is None:
        if "float" not in str(x.dtype):  # of NumPy or of torch
            raise DataError(
                f"{n_steps} steps do not divide into {n} folds, and {x.dtype} has no NaN to fill "
                "up the shorter ones; give fill=, or a batchsize for which batchsize // N divides T"
            )
        fill = np.nan
    if not (is_tensor(x) or in_memory(x)):
        return _fold_lazily(x, batchsize, fill)
    if n_longer == 0:
        return x.reshape(*features, n_series * n, size)
    rows = (*features, n_series)
    full = (*rows, n, size + 1)
    # one step more than the shorter folds need, which stays filled
    out = x.new_full(full, fill) if is_tensor(x) else np.full(full, fill, x.dtype)
    # the longer folds come first, as in numpy.array_split
    split = n_longer * (size + 1)
    out[..., :n_longer, :] = x[..., :split].reshape(*rows, n_longer, size + 1)
    out[..., n_longer:, :size] = x[..., split:].reshape(*rows, n - n_longer, size)
    return out.reshape(*features, n_series * n, size + 1)


def _fold_lazily(x: Any, batchsize: int, fill: float | None) -> LazyArray:
    """Return a lazy array of the folds of an array (F, N, T) that is not in memory."""
    array = SeriesArray(x, "x")
    folds = Segments.from_lengths(array.N, array.T).fold(batchsize)
    filling = array.dtype.type(fill or 0)  # None: all folds have one length
    return LazyArray(
        array.array,
        reader=partial(_read_folds, folds, filling),
        shape=(array.F, len(folds), folds.max_length),
        dtype=array.dtype,
    )
