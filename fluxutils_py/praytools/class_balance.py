"""Minibatches with equally many samples of each class."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from fluxutils_py.data.arrays import is_tensor, read_block, with_shape
from fluxutils_py.errors import DataError, ShapeError

RandomSource: TypeAlias = np.random.Generator | int | None


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
    ShapeError
        If ``t`` is not one-dimensional.

    Notes
    -----
    Source: ``classindexes`` of PrayTools.jl.

    Examples
    --------
    >>> classindexes(["b", "a", "b"])
    {'a': array([1]), 'b': array([0, 2])}
    """
    labels = np.asarray(t)
    if labels.ndim != 1:
        raise ShapeError(f"class labels must have shape (N,), got {labels.shape}")
    # NaN, no class, differs from itself
    classes = [label for label in np.unique(labels).tolist() if label == label]
    return {label: np.flatnonzero(labels == label) for label in classes}


def balanced_sample(ci: Mapping[Any, Any], n: int, rng: RandomSource = None) -> np.ndarray:
    """Draw equally many samples of each class, without replacement; return their indices.

    Parameters
    ----------
    ci : mapping
        Indices by class, as :func:`classindexes` returns them.
    n : int
        Samples in all, at most: ``n // k`` of each of the ``k`` classes, or as many as the smallest
        class has.
    rng : numpy.random.Generator, int or None
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
    rng = np.random.default_rng(rng)
    return np.concatenate([rng.choice(i, per_class, replace=False) for i in ci.values()])


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
    data : array
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
    random_state : int, numpy.random.Generator or None
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
        If a class is empty, even only among ``train_indices``.
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
        raise TypeError("give initbatchprovider(data, targets, n) or (..., train_indices, n)")
    *indices, n = indices_and_n
    data = with_shape(data)
    n_axes = len(data.shape)
    if not -n_axes <= axis < n_axes or data.shape[axis] != len(targets):
        raise ShapeError(
            f"data of shape {tuple(data.shape)} must have the {len(targets)} samples of targets "
            f"along axis {axis}; several arrays are drawn by their common indices: give "
            "np.arange(len(targets))"
        )
    ci = classindexes(targets)
    if indices:
        ci = _only(ci, np.asarray(indices[0]), len(targets))
    # a minibatch has its classes in order, so all have the same targets
    onehot = np.repeat(np.eye(len(ci), dtype=np.float32), _per_class(ci, n), axis=1)  # (k, m)
    if axis == 0 or (n_axes > 1 and axis == -n_axes):  # -1 of a vector keeps PrayTools' (k, m)
        onehot = onehot.T
    rng = np.random.default_rng(random_state)
    lock = threading.Lock()

    def provider() -> tuple[Any, Any]:
        with lock:  # the draws of one minibatch follow each other
            ii = balanced_sample(ci, n, rng)
        x = _take(data, ii, axis)
        return x, _copy_like(x, onehot)

    return provider


def _only(ci: Mapping[Any, Any], chosen: np.ndarray, n: int) -> dict[Any, np.ndarray]:
    """Return the indices by class that are chosen, by index or by a mask, among ``n``."""
    keep = np.zeros(n, bool)
    keep[chosen if chosen.dtype == bool else chosen.astype(int)] = True
    return {label: i[keep[i]] for label, i in ci.items()}


def _copy_like(x: Any, onehot: np.ndarray) -> Any:
    """Return a copy as a tensor or array, in the floating type of ``x``, if it has one."""
    if is_tensor(x):
        return x.new_tensor(onehot, dtype=x.dtype if x.is_floating_point() else torch.float32)
    return onehot.astype(x.dtype if x.dtype.kind == "f" else onehot.dtype)


def _per_class(ci: Mapping[Any, Any], n: int) -> int:
    """Return the number of samples of each class among ``n``."""
    empty = [repr(label) for label, i in ci.items() if not len(i)]
    if empty or not ci:
        raise DataError(f"no samples of class {', '.join(empty)} to draw from")
    if n < len(ci):
        raise ValueError(f"{n} samples cannot be balanced over {len(ci)} classes; raise n")
    return min(n // len(ci), *map(len, ci.values()))


def _take(a: Any, ii: np.ndarray, axis: int) -> Any:
    axis %= len(a.shape)
    if is_tensor(a):
        return a.index_select(axis, torch.from_numpy(ii).to(a.device))
    places: list[Any] = [range(n) for n in a.shape]
    places[axis] = ii
    return read_block(a, *places)
