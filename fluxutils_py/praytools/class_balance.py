"""Minibatches with equally many samples of each class."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fluxutils_py.data.arrays import is_tensor, read_block
from fluxutils_py.errors import DataError, ShapeError

__all__ = ["balanced_sample", "classindexes", "initbatchprovider"]

RandomSource: TypeAlias = np.random.Generator | np.random.RandomState | int | None


def classindexes(t: object) -> dict[Any, np.ndarray]:
    """Return the indices of each class.

    Parameters
    ----------
    t : array of shape (N,)
        Class labels that can be sorted: numbers, strings, booleans. Samples labelled NaN are left
        out, like targets of NaN elsewhere.

    Returns
    -------
    dict
        Increasing indices by label; the labels are sorted, plain Python values.

    Raises
    ------
    ShapeError, DataError
        If ``t`` is not one-dimensional, or its labels cannot be sorted.

    Notes
    -----
    Source: ``classindexes`` of PrayTools.jl.

    Examples
    --------
    >>> classindexes(["b", "a", "b"])
    {'a': array([1]), 'b': array([0, 2])}
    """
    samples = np.asarray(t)
    if samples.ndim != 1:
        raise ShapeError(f"class labels must have shape (N,), got {samples.shape}")
    try:
        classes, which = np.unique(samples, return_inverse=True)
    except TypeError as error:
        raise DataError(f"class labels must be of one kind that can be sorted: {error}") from None
    order = np.argsort(which, kind="stable")
    sizes = np.bincount(which, minlength=len(classes))
    ends = np.cumsum(sizes)
    indices = np.split(order, ends[:-1])
    # without classes, split still returns one empty part; NaN, no class, differs from itself
    labels = classes.tolist()
    pairs = zip(labels, indices, strict=bool(labels))
    return {label: i for label, i in pairs if label == label}


def balanced_sample(
    ci: Mapping[Any, Any],
    n: int,
    rng: RandomSource = None,
) -> np.ndarray:
    """Draw equally many samples of each class, without replacement; return their indices.

    Parameters
    ----------
    ci : mapping
        Indices by class, as :func:`classindexes` returns them.
    n : int
        Samples in all, at most: ``n // k`` of each of the ``k`` classes, or as many as the smallest
        class has.
    rng : numpy.random.Generator, RandomState, int or None
        The source of randomness, a seed, or None for a fresh generator. A given generator advances.

    Returns
    -------
    ndarray of int
        The indices of one class after another, in the order of ``ci``.

    Raises
    ------
    DataError
        If there are no classes, or one has no samples.
    ValueError
        If ``n`` is below the number of classes.

    Notes
    -----
    Source: ``sample`` of PrayTools.jl, which returns no samples in these cases.

    Examples
    --------
    >>> balanced_sample({"a": [3], "b": [0, 1, 2]}, n=6, rng=0).size
    2
    """
    per_class = _per_class(ci, n)
    rng = _generator(rng)
    drawn = []
    for indices in ci.values():
        indices = np.asarray(indices)
        drawn.append(rng.choice(indices, per_class, replace=False))
    return np.concatenate(drawn)


def initbatchprovider(
    data: Any,
    targets: Any,
    *indices_and_n: Any,
    axis: int = -1,
    random_state: RandomSource = None,
) -> Callable[[], tuple[Any, Any]]:
    """Return a function that draws another class-balanced minibatch at each call.

    Call it as ``initbatchprovider(data, targets, n)`` or ``initbatchprovider(data, targets,
    train_indices, n)``.

    Parameters
    ----------
    data : array, or tuple of arrays
        Samples along ``axis``: (d, N) by default, (N, d) with ``axis=0``, (F, N, T) with
        ``axis=1``. NumPy arrays, memory maps and torch tensors, or anything else that can be sliced
        (read sample by sample). Not copied.
    targets : array of shape (N,)
        Class labels, see :func:`classindexes`.
    train_indices : array of int, or of bool of shape (N,)
        The samples to draw from, all by default. The classes are always those of all ``targets``.
    n : int
        Samples per minibatch, at most: see :func:`balanced_sample`.
    axis : int
    random_state : int, numpy.random.Generator, RandomState or None
        The source of randomness; a given generator is used directly and advances.

    Returns
    -------
    callable without arguments
        Returns copies ``(x, y)`` of the samples and their one-hot classes, in sorted order. ``y``
        has shape (k, m), or (m, k) if samples come first in ``data``. It has the floating dtype of
        ``data``, else float32, and is a tensor on its device if ``data`` is one. Several threads
        may call it, as :class:`BackgroundDataLoader` does.

    Raises
    ------
    ShapeError
        If ``data`` and ``targets`` differ in the number of samples.
    DataError
        If a class is empty, even only among ``train_indices``, or if one of these is not a sample.
    ValueError
        If ``n`` is below the number of classes. All errors are raised here, not when the provider
        is called.

    Notes
    -----
    Source: ``initbatchprovider`` of PrayTools.jl.

    Examples
    --------
    >>> x, t = np.arange(10.0).reshape(2, 5), ["no", "yes", "no", "no", "yes"]
    >>> provider = initbatchprovider(x, t, 4, random_state=0)
    >>> xb, yb = provider()
    >>> xb.shape, yb
    ((2, 4), array([[1., 1., 0., 0.],
           [0., 0., 1., 1.]]))
    """
    if len(indices_and_n) not in (1, 2):
        raise TypeError(
            "expected initbatchprovider(data, targets, n) or (data, targets, train_indices, n)"
        )
    *indices, n = indices_and_n
    is_tuple = isinstance(data, tuple)
    arrays = _as_arrays(data if is_tuple else (data,))
    ci = classindexes(targets)
    n_samples = len(targets)
    for a in arrays:
        _require_samples(a, n_samples, axis)
    if indices:
        keep = _chosen_mask(indices[0], n_samples)
        ci = {label: i[keep[i]] for label, i in ci.items()}
    per_class = _per_class(ci, n)

    # a minibatch has its classes in order, so all have the same targets
    each_class = np.eye(len(ci), dtype=np.float32)
    onehot = np.repeat(each_class, per_class, axis=1)  # (k, m)
    n_axes = len(arrays[0].shape)
    if axis == 0 or (n_axes > 1 and axis == -n_axes):  # -1 of a vector keeps PrayTools' (k, m)
        onehot = onehot.T
    rng = _generator(random_state)
    lock = threading.Lock()

    def provider() -> tuple[Any, Any]:
        with lock:  # the draws of one minibatch follow each other
            ii = balanced_sample(ci, n, rng)
        x = tuple(_take_along(a, ii, axis) for a in arrays)
        y = _like_input(arrays[0], onehot)
        return x if is_tuple else x[0], y

    return provider


def _as_arrays(data: Sequence[Any]) -> list[Any]:
    # what has a shape is kept: reading a file would load it whole
    return [a if hasattr(a, "shape") else np.asarray(a) for a in data]


def _require_samples(
    a: Any,
    n_samples: int,
    axis: int,
) -> None:
    shape = tuple(a.shape)
    n_axes = len(shape)
    if not -n_axes <= axis < n_axes or shape[axis] != n_samples:
        raise ShapeError(
            f"data of shape {shape} must have the {n_samples} samples of targets along axis {axis}"
        )


def _per_class(ci: Mapping[Any, Any], n: int) -> int:
    if not ci:
        raise DataError("there are no classes to sample from")
    empty = [repr(c) for c, i in ci.items() if len(i) == 0]
    if empty:
        raise DataError(f"no samples of class {', '.join(empty)} to draw from")
    k = len(ci)
    if n < k:
        raise ValueError(f"{n} samples cannot be balanced over {k} classes; n must be at least {k}")
    smallest = min(map(len, ci.values()))
    return min(n // k, smallest)


def _chosen_mask(indices: object, n: int) -> np.ndarray:
    """Return a mask of the chosen ones among ``n`` samples."""
    chosen = np.asarray(indices)
    if chosen.dtype.kind == "b" and chosen.shape == (n,):
        return chosen
    # an empty list has no integer type; negative indices would hide a mistake
    if chosen.size:
        integers = chosen.dtype.kind in "iu"
        if not integers or chosen.min() < 0 or chosen.max() >= n:
            raise DataError(f"train_indices must be integers from 0 to {n - 1}, or {n} booleans")
    mask = np.zeros(n, bool)
    places = chosen.astype(int)
    mask[places] = True
    return mask


def _take_along(a: Any, ii: np.ndarray, axis: int) -> Any:
    axis %= len(a.shape)
    if isinstance(a, np.ndarray) or is_tensor(a):
        before = (slice(None),) * axis
        return a[(*before, ii)]
    places: list[Any] = [range(n) for n in a.shape]
    places[axis] = ii
    return read_block(a, *places)


def _like_input(a: Any, onehot: np.ndarray) -> Any:
    """Copy ``onehot`` to the kind, dtype and device of ``a``."""
    if is_tensor(a):
        copy = a.new_tensor(onehot)
        return copy if a.dtype.is_floating_point else copy.float()
    dtype = np.dtype(a.dtype)
    if dtype.kind != "f":
        dtype = onehot.dtype
    return onehot.astype(dtype)  # a copy: the caller may change its minibatch


def _generator(rng: RandomSource) -> np.random.Generator:
    if isinstance(rng, np.random.RandomState):  # advances it, so that each call draws others
        largest = np.iinfo(np.int32).max
        rng = rng.randint(largest)
    return np.random.default_rng(rng)
