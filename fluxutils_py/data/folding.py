"""Arrays of few long series as arrays of more and shorter ones."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from fluxutils_py.data.segments import Segments
from fluxutils_py.data.series import SeriesArray
from fluxutils_py.errors import DataError, ShapeError


@overload
def rebatch(x: Segments, batchsize: int) -> Segments: ...
@overload
def rebatch(x: Any, batchsize: int, fill: float | None = None) -> Any: ...
def rebatch(x: Any, batchsize: int, fill: float | None = None) -> Any:
    """Fold the time of few long series so that a minibatch is full.

    If ``batchsize`` is at least twice the number ``N`` of series, and ``T > n = batchsize // N``, each series is cut in
    time into ``n`` folds; row ``b * n + k`` of the result holds fold ``k`` of series ``b``. Otherwise ``x`` comes back
    as it is. Nothing is dropped: if ``n`` does not divide ``T``, fold lengths are those of ``numpy.array_split``, and
    the shorter folds end in one step that does not count, filled with NaN.

    A model that is trained on folds remembers nothing from before a fold's first step. An estimator folds by itself
    while fitting, without a copy of anything, and by default only into long folds (``Spec.rebatch``); on arrays this is
    for loops of one's own.

    Parameters
    ----------
    x : array of shape (F, N, T) or (N, T), tuple of such arrays, or Segments
        A tuple is folded alike all through (equal ``N`` and ``T``).
    batchsize : int
    fill : float, optional
        Instead of NaN: 0 for weights; needed for integers, where ``n`` does not divide ``T``.

    Returns
    -------
    array of shape (F, N * n, ceil(T / n)) or (N * n, ceil(T / n)), tuple of arrays, or Segments
        Of a NumPy array or torch tensor in memory: a view where ``n`` divides ``T`` and the memory order allows (C
        order, or one series), else a copy. Of memory maps, HDF5 datasets and the like: a view in the same cases, else
        a :class:`FoldedArray`, which reads what is sliced from it.

    Raises
    ------
    ShapeError
        If an array has another number of axes, or arrays of a tuple differ in ``N`` or ``T``.
    DataError
        If integers would have to be filled up, and ``fill`` is not given.

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
    if isinstance(x, Segments):
        return x.fold(batchsize)
    if batchsize < 1:
        raise ValueError(f"batchsize must be at least 1, got {batchsize}")
    if not isinstance(x, tuple):
        return _fold(x, batchsize, fill)
    arrays = [a if hasattr(a, "shape") else np.asarray(a) for a in x]
    if len({tuple(a.shape[-2:]) for a in arrays}) > 1:
        shapes = " and ".join(str(tuple(a.shape)) for a in arrays)
        raise ShapeError(f"arrays of shapes {shapes} cannot be folded alike: they must be (F, N, T) of equal N and T")
    return tuple(_fold(a, batchsize, fill) for a in arrays)


class FoldedArray:
    """The folds of an array too large to be copied, read when sliced; made by :func:`rebatch`.

    It takes three slices, as ``folds[:, :8, 0:64]``, or ints, or an array of row numbers in the middle, and returns
    NumPy arrays, which may be views and are not to be written to. ``np.asarray`` reads it all.

    Parameters
    ----------
    x : array of shape (F, N, T)
    batchsize : int
    fill : float or None
        What the shorter folds end in; None only if there are none.

    Attributes
    ----------
    shape : (F, N * n, ceil(T / n))
    dtype : numpy.dtype
        That of ``x``.
    """

    ndim = 3

    def __init__(self, x: Any, batchsize: int, fill: float | None) -> None:
        self._series = SeriesArray(x, "x")
        self._rows = Segments.from_lengths(self._series.N, self._series.T).fold(batchsize)
        self._fill = fill
        self.shape = (self._series.F, len(self._rows), self._rows.max_length)
        self.dtype = self._series.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        which_f, which_b, which_t = _three(key)
        b = np.arange(self.shape[1])[which_b]
        t = np.arange(self.shape[2])[which_t]
        start, stop = (int(t.min()), int(t.max()) + 1) if t.size else (0, 0)
        rows = self._rows[b.reshape(-1)]
        if b.size:
            block = self._series.read(rows, start, stop).transpose(2, 1, 0)  # (F, B, S)
            live = rows.step_mask(start, stop)
            if live is not None:
                block = np.where(live.T, block, self.dtype.type(self._fill))
        else:
            block = np.empty((self.shape[0], 0, stop - start), self.dtype)
        if t.shape != (stop - start,) or (t.size and t[0] > start):
            block = block[:, :, t - start]  # one step, a stride, or backwards
        return (block if b.ndim else block[:, 0])[which_f]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("folds are read from their source: an array of them is always a copy")
        return np.array(self[:], dtype)


def _three(key: Any) -> tuple[Any, Any, Any]:
    """A key completed to features, rows and steps."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for i, k in enumerate(keys):
        if k is Ellipsis:
            keys[i : i + 1] = [slice(None)] * (4 - len(keys))
            break
    keys += [slice(None)] * (3 - len(keys))
    if len(keys) > 3:
        raise IndexError(f"folds have three axes (F, N, T), got {len(keys)} indices")
    for k, what in ((keys[0], "features"), (keys[2], "steps")):
        if not isinstance(k, slice) and not hasattr(k, "__index__"):
            raise IndexError(f"{what} of folds are chosen by a slice or an int, got {type(k).__name__}")
    return keys[0], keys[1], keys[2]


def _fold(x: Any, batchsize: int, fill: float | None) -> Any:
    x = x if hasattr(x, "shape") else np.asarray(x)
    shape = tuple(int(n) for n in x.shape)
    if len(shape) not in (2, 3):
        raise ShapeError(f"rebatch takes arrays of shape (F, N, T) or (N, T), got {shape}")
    *features, n_series, n_steps = shape
    n = batchsize // n_series if n_series else 0
    if n < 2 or n_steps <= n:
        return x
    size, longer = divmod(n_steps, n)
    if longer and fill is None:
        fill = _nan(x, n_steps, n)
    tensor = hasattr(x, "new_full")
    mergeable = isinstance(x, np.ndarray) and (n_series == 1 or x.strides[-2] == n_steps * x.strides[-1])
    in_memory = tensor or (isinstance(x, np.ndarray) and SeriesArray(x if x.ndim == 3 else x[None], "x").in_memory)
    if longer == 0 and (in_memory or mergeable):
        return x.reshape(*features, n_series * n, size)
    if not in_memory:
        if len(shape) == 2:
            raise ShapeError(f"rebatch takes arrays that are not in memory as (F, N, T), got shape {shape}")
        return FoldedArray(x, batchsize, fill)
    full = (*features, n_series, n, size + 1)
    out = x.new_full(full, fill) if tensor else np.full(full, fill, x.dtype)
    split = longer * (size + 1)
    out[..., :longer, :] = x[..., :split].reshape(*features, n_series, longer, size + 1)
    out[..., longer:, :size] = x[..., split:].reshape(*features, n_series, n - longer, size)
    return out.reshape(*features, n_series * n, size + 1)


def _nan(x: Any, n_steps: int, n: int) -> float:
    floating = x.dtype.is_floating_point if hasattr(x, "new_full") else np.dtype(x.dtype).kind == "f"
    if not floating:
        raise DataError(
            f"{n_steps} steps do not divide into {n} folds, and {x.dtype} has no NaN to fill up the shorter ones; "
            "give fill=, or a batchsize for which batchsize // N divides T"
        )
    return np.nan
