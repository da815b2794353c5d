"""Cut arrays along one axis, without copies: parts of ranks, chunks of a minibatch, minibatches of
a data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fluxutils_py.errors import ShapeError
from fluxutils_py.validation import check_integer

__all__ = ["dividebatch", "indbatch", "minibatch"]

AXES = {"series": -2, "time": -1}  # of (F, N, T), and of (N, T)


def part(x: Any, rank: int, size: int, axis: int | str = "series") -> Any:
    """Return the part of one rank: one of ``size`` contiguous blocks, whose lengths differ by at
    most one.

    The parts of all ranks, in order, make up the whole, as in ``numpy.array_split``. With fewer
    entries than ranks, the last parts are empty.

    Parameters
    ----------
    x : array of shape (F, N, T), or tuple of arrays
        Anything with ``shape`` that can be sliced. All arrays of a tuple are cut alike: inputs,
        targets and weights of shape (F, N, T), (G, N, T) and (1, N, T) or (N, T); with ``"series"``
        also (N,).
    rank, size : int
        Which part, from 0, of how many.
    axis : {"series", "time", "auto"} or int
        ``"auto"`` takes series if there are more than five times as many as time steps, else time,
        as FluxUtils.jl does; if that axis has too few entries for all ranks and the other has
        enough, it takes the other. The first array of a tuple decides. An int is the axis of each
        array, negative from the end.

    Returns
    -------
    array or tuple of arrays
        Views where slicing gives views (NumPy, memory maps, torch). From an HDF5 dataset, only this
        part is read.

    Raises
    ------
    ShapeError
        If an array lacks the axis, or the arrays of a tuple differ in length there.
    ValueError
        If ``rank`` is not from 0 to ``size - 1``, or ``axis`` is an unknown name.

    Notes
    -----
    Source: ``part`` of FluxUtils.jl. Its blocks of equal size leave some ranks without one, its
    default axis is ``"auto"``, and with more ranks than entries it gives everyone the whole.

    Examples
    --------
    >>> x = np.zeros((2, 7, 5))
    >>> [part(x, rank, 3).shape for rank in range(3)]
    [(2, 3, 5), (2, 2, 5), (2, 2, 5)]
    """
    rank, size = check_integer("rank", rank), check_integer("size", size)
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to size - 1, got rank {rank} of size {size}")
    arrays = _arrays(x)
    if isinstance(axis, str) and axis == "auto":
        axis = _longer_axis(arrays[0], size)
    n = _common_length(arrays, axis)
    cut = [_cut(a, axis, array_split_slice(n, size, rank)) for a in arrays]
    return tuple(cut) if isinstance(x, tuple) else cut[0]


def dividebatch(bs: int, *xs: Any, axis: int | str = 0) -> tuple[tuple[Any, ...], ...]:
    """Divide a minibatch into chunks for threads to work on.

    Parameters
    ----------
    bs : int
        Number of chunks; fewer if there are fewer observations, so that none is empty.
    *xs : array
        Inputs, targets, ...: NumPy arrays or torch tensors with equally many observations.
    axis : int or {"series", "time"}
        Axis of the observations: 0 (batch first) by default, 1 for time-major (S, B, F) and for (F,
        N, T), -1 for last, as in PrayTools.

    Returns
    -------
    tuple of tuple of array
        ``min(bs, n)`` chunks ``(x, y, ...)`` of views, in order. Their sizes differ by at most one,
        so the mean over the batch is the mean over the chunks weighted by size.

    Raises
    ------
    ShapeError
        If the arrays differ in the number of observations.
    ValueError
        If ``bs`` is below 1.

    Notes
    -----
    Source: ``dividebatch`` of PrayTools.jl, which makes chunks of ``n ÷ bs``, and so up to twice
    ``bs`` of them, and fails on fewer than ``bs`` observations.

    Examples
    --------
    >>> x, y = np.arange(10).reshape(5, 2), np.arange(5)
    >>> for chunk in dividebatch(2, x, y):
    ...     print(chunk[0].shape, chunk[1])
    (3, 2) [0 1 2]
    (2, 2) [3 4]
    """
    bs = check_integer("bs", bs, 1)
    if not xs:
        raise TypeError("dividebatch needs at least one array after bs")
    arrays = _arrays(xs)
    n = _common_length(arrays, axis)
    chunks = min(bs, n)
    return tuple(
        tuple(_cut(a, axis, array_split_slice(n, chunks, k)) for a in arrays) for k in range(chunks)
    )


def indbatch(x: Any, b: int, offset: int = 0) -> Iterator[slice]:
    """Yield consecutive slices of ``b`` indices; the last may be shorter.

    Parameters
    ----------
    x : int, array or tuple of arrays
        The number of indices, or arrays whose last axis has that length.
    b : int
    offset : int
        Shift each slice forward. The number of slices does not depend on it, so shifted and
        unshifted ones pair up: slices are cut off at the end, and one that would begin past it
        holds only the last index.

    Raises
    ------
    ShapeError
        If arrays of a tuple differ in length.
    ValueError
        If ``b`` is below 1 or ``offset`` below 0.

    Notes
    -----
    Source: ``indbatch`` of FluxUtils.jl.

    Examples
    --------
    >>> list(indbatch(10, 4))
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    n = x if hasattr(x, "__index__") and not hasattr(x, "shape") else None
    n = (
        _common_length(_arrays(x), -1)
        if n is None
        else check_integer("the number of indices", n, 0)
    )
    b, offset = check_integer("b", b, 1), check_integer("offset", offset, 0)
    return (slice(min(i + offset, n - 1), min(i + offset + b, n)) for i in range(0, n, b))


def minibatch(x: Any, *y_and_b: Any) -> list[Any]:
    """Cut arrays into minibatches of ``b`` entries along the last axis: ``minibatch(x, b)`` or
    ``minibatch(x, y, b)``.

    Parameters
    ----------
    x, y : array or tuple of arrays
        With last axes of equal length.
    b : int
        Entries per minibatch; the last may have fewer.

    Returns
    -------
    list
        Views ``x[..., i:i + b]`` (tuples of views for a tuple), or pairs of them with ``y``.

    Raises
    ------
    ShapeError
        If last axes differ in length.
    ValueError
        If ``b`` is below 1.

    Notes
    -----
    Source: ``minibatch`` of FluxUtils.jl.

    Examples
    --------
    >>> x, y = np.arange(10).reshape(2, 5), np.arange(5)
    >>> [(xb.shape, yb.tolist()) for xb, yb in minibatch(x, y, 3)]
    [((2, 3), [0, 1, 2]), ((2, 2), [3, 4])]
    """
    if len(y_and_b) not in (1, 2):
        raise TypeError(
            f"expected minibatch(x, b) or minibatch(x, y, b), got {1 + len(y_and_b)} arguments"
        )
    *y, b = y_and_b
    groups = [_arrays(v) for v in (x, *y)]
    _common_length([a for group in groups for a in group], -1)
    batches = []
    for s in indbatch(groups[0][0], b):
        cut = [tuple(_cut(a, -1, s) for a in group) for group in groups]
        values = tuple(
            c if isinstance(v, tuple) else c[0] for v, c in zip((x, *y), cut, strict=True)
        )
        batches.append(values if y else values[0])
    return batches


def array_split_slice(n: int, blocks: int, k: int) -> slice:
    """Block ``k`` of ``numpy.array_split(range(n), blocks)``."""
    size, longer = divmod(n, blocks)
    start = k * size + min(k, longer)
    return slice(start, start + size + (k < longer))


def _cut(a: Any, axis: int | str, where: slice) -> Any:
    return a[(slice(None),) * _axis_of(a, axis) + (where,)]


def _axis_of(a: Any, axis: int | str) -> int:
    """The axis of this array, from 0."""
    n_axes = len(a.shape)
    if isinstance(axis, str):
        if axis not in AXES:
            raise ValueError(f"axis must be 'series', 'time', 'auto' or an int, got {axis!r}")
        i = 0 if n_axes == 1 and axis == "series" else AXES[axis]  # (N,): one value per series
        lacks = n_axes + i < 0 or (n_axes == 1 and axis == "time")
    else:
        i = check_integer("axis", axis)
        lacks = not -n_axes <= i < n_axes
    if lacks:
        raise ShapeError(f"an array of shape {tuple(a.shape)} has no axis {axis!r}")
    return i % n_axes


def _common_length(arrays: list[Any], axis: int | str) -> int:
    lengths = [int(a.shape[_axis_of(a, axis)]) for a in arrays]
    if len(set(lengths)) > 1:
        shapes = " and ".join(str(tuple(a.shape)) for a in arrays)
        raise ShapeError(
            f"arrays of shapes {shapes} differ along axis {axis!r}: {', '.join(map(str, lengths))}"
        )
    return lengths[0]


def _longer_axis(a: Any, size: int) -> str:
    n_series, n_steps = (int(a.shape[_axis_of(a, name)]) for name in ("series", "time"))
    series = n_series > 5 * n_steps
    if (n_series if series else n_steps) < size <= (n_steps if series else n_series):
        series = not series
    return "series" if series else "time"


def _arrays(x: Any) -> list[Any]:
    if isinstance(x, tuple) and not x:
        raise ShapeError("got an empty tuple; give at least one array")
    return [
        a if hasattr(a, "shape") else np.asarray(a) for a in (x if isinstance(x, tuple) else (x,))
    ]
