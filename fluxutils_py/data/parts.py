"""Cut arrays along one axis, without copies: parts of ranks, chunks of a minibatch, minibatches of
a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fluxutils_py.data.arrays import with_shape
from fluxutils_py.errors import ShapeError
from fluxutils_py.validation import check_integer

__all__ = ["dividebatch", "indbatch", "minibatch"]

AXES = {"series": -2, "time": -1}  # of (F, N, T), and of (N, T)


def part(
    x: Any,
    rank: int,
    size: int,
    axis: int | str = "series",
) -> Any:
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
    axis : {"series", "time"} or int
        An int is the axis of each array, negative from the end.

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
    Source: ``part`` of FluxUtils.jl. Its blocks of equal size leave some ranks without one, it
    cuts time unless there are five times as many series, and with more ranks than entries it gives
    every rank the whole.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((2, 7, 5))
    >>> [part(x, rank, 3).shape for rank in range(3)]
    [(2, 3, 5), (2, 2, 5), (2, 2, 5)]
    """
    rank = check_integer("rank", rank)
    size = check_integer("size", size)
    # a negative rank would give a slice that counts from the end
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to size - 1, got rank {rank} of size {size}")
    n = _common_length(_arrays(x), axis)
    return _cut(x, axis, array_split_slice(n, size, rank))


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
    >>> import numpy as np
    >>> x, y = np.arange(10).reshape(5, 2), np.arange(5)
    >>> for chunk in dividebatch(2, x, y):
    ...     print(chunk[0].shape, chunk[1])
    (3, 2) [0 1 2]
    (2, 2) [3 4]
    """
    bs = check_integer("bs", bs, 1)
    if not xs:
        raise TypeError("dividebatch needs at least one array after bs")
    arrays = tuple(_arrays(xs))
    n = _common_length(arrays, axis)
    n_chunks = min(bs, n)
    blocks = [array_split_slice(n, n_chunks, k) for k in range(n_chunks)]
    return tuple(_cut(arrays, axis, block) for block in blocks)


def indbatch(
    x: Any,
    b: int,
    offset: int = 0,
) -> Iterator[slice]:
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
    if hasattr(x, "__index__") and not hasattr(x, "shape"):  # a NumPy integer may have both
        n = check_integer("the number of indices", x, 0)
    else:
        n = _common_length(_arrays(x), -1)
    b = check_integer("b", b, 1)
    offset = check_integer("offset", offset, 0)
    # as many as without the offset: those past the end hold the last index
    starts = range(offset, n + offset, b)
    return (slice(min(start, n - 1), min(start + b, n)) for start in starts)


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
    >>> import numpy as np
    >>> x, y = np.arange(10).reshape(2, 5), np.arange(5)
    >>> [(xb.shape, yb.tolist()) for xb, yb in minibatch(x, y, 3)]
    [((2, 3), [0, 1, 2]), ((2, 2), [3, 4])]
    """
    if len(y_and_b) not in (1, 2):
        raise TypeError(
            f"expected minibatch(x, b) or minibatch(x, y, b), got {1 + len(y_and_b)} arguments"
        )
    *y, b = y_and_b
    values = (x, *y)
    arrays = [array for value in values for array in _arrays(value)]
    n = _common_length(arrays, -1)
    batches = []
    for block in indbatch(n, b):
        batch = tuple(_cut(value, -1, block) for value in values)
        batches.append(batch if y else batch[0])
    return batches


def array_split_slice(
    n: int,
    blocks: int,
    k: int,
) -> slice:
    """Return block ``k`` of ``numpy.array_split(range(n), blocks)``."""
    size, n_longer = divmod(n, blocks)
    # the longer ones come first
    start = k * size + min(k, n_longer)
    return slice(start, start + size + (k < n_longer))


def _cut(
    x: Any,
    axis: int | str,
    block: slice,
) -> Any:
    """Return a block of an array, or of each array of a tuple."""
    blocks = []
    for array in _arrays(x):
        before = (slice(None),) * _axis_of(array, axis)
        blocks.append(array[(*before, block)])
    return tuple(blocks) if isinstance(x, tuple) else blocks[0]


def _axis_of(a: Any, axis: int | str) -> int:
    """Return which axis of this array is meant, from 0."""
    n_axes = len(a.shape)
    if isinstance(axis, str):
        if axis not in AXES:
            raise ValueError(f"axis must be 'series', 'time' or an int, got {axis!r}")
        i = AXES[axis]
        if n_axes == 1:  # (N,): one value per series, and no axis of time
            i = 0 if axis == "series" else -2
    else:
        i = check_integer("axis", axis)
    if not -n_axes <= i < n_axes:
        raise ShapeError(f"an array of shape {tuple(a.shape)} has no axis {axis!r}")
    return i % n_axes


def _common_length(arrays: Sequence[Any], axis: int | str) -> int:
    lengths = [int(a.shape[_axis_of(a, axis)]) for a in arrays]
    if len(set(lengths)) > 1:
        shapes = " and ".join(str(tuple(a.shape)) for a in arrays)
        listed = ", ".join(map(str, lengths))
        raise ShapeError(f"arrays of shapes {shapes} differ along axis {axis!r}: {listed}")
    return lengths[0]


def _arrays(x: object) -> list[Any]:
    if not isinstance(x, tuple):
        return [with_shape(x)]
    if not x:
        raise ShapeError("got an empty tuple; give at least one array")
    return [with_shape(a) for a in x]
