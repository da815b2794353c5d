"""The recurrent state of a whole model: forget, detach, save, restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn.recurrent import Recur, Sensitivity, State, map_state

__all__ = ["loadstates", "reset", "states", "truncate"]

M = TypeVar("M")


def module_of(m: object) -> nn.Module:
    """Return ``m`` if it is a module, else the model of an estimator: the fitted one if there is
    one.

    Raises
    ------
    TypeError
        If ``m`` is neither a module nor an estimator that holds one.
    """
    if isinstance(m, nn.Module):
        return m
    for attribute in ("model_", "model"):  # the fitted model first
        model = getattr(m, attribute, None)
        if isinstance(model, nn.Module):
            return model
    remedy = ": it has no model yet, call fit first" if hasattr(m, "fit") else ""
    raise TypeError(
        f"expected a torch module or an estimator that holds one, got {type(m).__name__}{remedy}"
    )


def recurrent_layers(m: object) -> list[Recur]:
    """Return the :class:`Recur` layers of a model, in module order."""
    modules = module_of(m).modules()
    return [r for r in modules if isinstance(r, Recur)]


def reset(m: M) -> M:
    """Forget the state of every recurrent layer, so that the next call starts from the initial
    state; return ``m``.

    ``m`` is a module or an estimator. Source: ``reset!`` of Flux.jl.
    """
    for r in recurrent_layers(m):
        r.reset()
    return m


def truncate(m: M) -> M:
    """Detach the state of every recurrent layer: values stay, gradients stop here. Return ``m``.

    ``m`` is a module or an estimator. Source: ``truncate!`` of Flux.jl.
    """
    for r in recurrent_layers(m):
        r.truncate()
    return m


def states(m: object) -> list[Tensor]:
    """Return the state of every recurrent layer, as a flat list in module order (``h, c, h, ...``).

    Parameters
    ----------
    m : nn.Module or estimator

    Returns
    -------
    list of Tensor
        Detached copies: ``(L, B, H)`` for LSTM, GRU and RNN layers, ``(B, H)`` for cells. A layer
        without a state (new, or after :func:`reset`) gives tensors for a batch of 0, so the list
        keeps its length and loads back. Only custom modules without ``empty_state`` then
        contribute nothing.

    Notes
    -----
    Source: ``states`` of FluxUtils.jl, which returns live references.

    Examples
    --------
    >>> from torch import nn
    >>> from fluxutils_py.nn import LSTM
    >>> m = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1))
    >>> [tuple(s.shape) for s in states(m)]
    [(1, 0, 5), (1, 0, 5)]
    >>> _ = m(torch.zeros(2, 3))
    >>> [tuple(s.shape) for s in states(m)]
    [(1, 2, 5), (1, 2, 5)]
    """
    return [t for r in recurrent_layers(m) for t in _tensors(r)]


def loadstates(m: M, s: Sequence[Tensor]) -> M:
    """Set the state of every recurrent layer from the list that :func:`states` returned; return
    ``m``.

    Parameters
    ----------
    m : nn.Module or estimator
    s : list or tuple of Tensor
        A result of :func:`states` or ``predict(..., return_state=True)``, for this model or one
        with the same layers, for any batch size; NumPy arrays work too. It is copied, and converted
        to the type and device of each layer. Tensors for a batch of 0 reset their layer.

    Raises
    ------
    ShapeError, DataError
        If the number of tensors, a shape or a type does not fit. The model is left
        unchanged.

    Notes
    -----
    Source: ``loadstates!`` of FluxUtils.jl, which ignores a surplus and writes into the initial
    state.
    """
    for layer, part in match_states(recurrent_layers(m), s, m):
        assign_state(layer, part)
    return m


def assign_state(layer: Recur, part: Sequence[Tensor]) -> None:
    """Copy its tensors into one layer; tensors for a batch of 0 mean the initial state."""
    layer.reset()
    if not part or not all(t.shape[layer.batch_dim] for t in part):
        return
    like = next(layer.parameters(), None)
    copied = tuple(_copy_like(t, like) for t in part)
    # a layer whose state was a tuple wants a tuple again, even of one tensor
    layer.state = copied if len(copied) > 1 or layer.form else copied[0]


def match_states(
    layers: list[Recur], s: Sequence[Tensor], m: object
) -> list[tuple[Recur, list[Tensor]]]:
    """Return each recurrent layer with its tensors from a list of states; errors as in
    :func:`loadstates`.
    """
    tensors = read_states(s)
    matched = []
    empty = [layer.empty_state() for layer in layers]
    counts = [len(e or ()) for e in empty]
    if len(tensors) != sum(counts):  # a custom module had a state
        counts = list(map(_n_tensors, layers))
    n, n_known = len(tensors), sum(counts)
    if n != n_known:
        raise ShapeError(
            f"state has {n} tensor{'s' * (n != 1)}, but the model has {n_known}; a custom "
            "module without empty_state() tells its state once the model has run on one step"
        )
    start = 0
    # all are checked before the first is assigned, so that an error changes nothing
    for layer, expected, n in zip(layers, empty, counts, strict=True):
        part = tensors[start : start + n]
        _check_shapes(layer, expected, part, start, m)
        matched.append((layer, part))
        start += n
    return matched


def read_states(s: object) -> list[Tensor]:
    """Return a list of states as detached tensors, not copied.

    Raises
    ------
    DataError
        If it is not a list, or an entry is neither a tensor nor an array of numbers.
    """
    if not isinstance(s, list | tuple):
        raise DataError(
            "state must be a list of tensors, as states(model) and predict(..., "
            f"return_state=True) return it; got {type(s).__name__}"
        )
    tensors = []
    for i, v in enumerate(s):
        try:
            # torch reads only the byte order of the machine
            if not isinstance(v, Tensor):
                v = torch.tensor(v.astype(v.dtype.newbyteorder("=")))
            tensors.append(v.detach())
        except (AttributeError, TypeError) as error:
            raise DataError(
                f"state[{i}] must be a tensor or an array of numbers, got a {type(v).__name__} of "
                f"dtype {getattr(v, 'dtype', None)}"
            ) from error
    return tensors


def batch_dims(m: object) -> list[int]:
    """Return the batch axis of each tensor of :func:`states`."""
    return [r.batch_dim for r in recurrent_layers(m) for _ in _tensors(r)]


def have_begun(m: object, state: Sequence[Tensor] | None, n_series: int) -> np.ndarray:
    """Return a mask (N,) of the series whose state is not the zero state, and, of a model without
    recurrent state, of those that it has seen inputs of. None is the zero state. All, where it
    cannot be told.
    """
    begun = np.zeros(n_series, bool)
    if state is None:
        return begun
    layers = recurrent_layers(m)
    tensors = read_states(state)
    dims = [1] * len(tensors)
    if layers:
        try:
            dims = [layer.batch_dim for layer, part in match_states(layers, state, m) for _ in part]
        except ShapeError:
            return np.ones(n_series, bool)
    for t, dim in zip(tensors, dims, strict=True):
        if t.dim() > dim and t.shape[dim] == n_series:
            seen = t != 0 if layers else t.isfinite()
            begun |= seen.movedim(dim, 0).flatten(1).any(1).cpu().numpy()
    return begun


def snapshot(m: object) -> list[State | None]:
    """Return the state of each recurrent layer, detached, not copied, for :func:`restore` on the
    same model.
    """
    states = [r.state for r in recurrent_layers(m)]
    return [None if s is None else map_state(Tensor.detach, s) for s in states]


def sensitivities(m: object) -> list[Sensitivity | None]:
    """Return how the state of each recurrent layer depends on its parameters, not copied; None of
    layers that do not carry it. See :func:`carrying_sensitivities`.
    """
    return [r.sensitivity for r in recurrent_layers(m)]


def restore(
    m: object,
    snapshots: Sequence[State | None],
    carried: Sequence[Sensitivity | None] | None = None,
) -> None:
    """Restore states that :func:`snapshot` or :func:`marked` returned, and what
    :func:`sensitivities` did; without that, nothing from before the states is learnt from.
    """
    layers = recurrent_layers(m)
    carried = [None] * len(layers) if carried is None else carried
    for r, state, sensitivity in zip(layers, snapshots, carried, strict=True):
        r.reset()  # also forgets what the layer keeps besides its state, such as a mark
        r.state = state
        r.sensitivity = sensitivity


@contextmanager
def evaluating(m: object) -> Iterator[None]:
    """Inside, a model is in evaluation mode and there are no gradients; then its modes and states
    are as before.

    Examples
    --------
    >>> from torch import nn
    >>> m = nn.Sequential(nn.Dropout(0.5), nn.ReLU().eval())
    >>> with evaluating(m):
    ...     print(m(torch.ones(2)))
    tensor([1., 1.])
    >>> [layer.training for layer in m.modules()]
    [True, True, False]
    """
    model = module_of(m)
    snapshots = snapshot(model)
    carried = sensitivities(model)
    # layer by layer, because some may have been in evaluation mode before
    modes = {layer: layer.training for layer in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
        restore(model, snapshots, carried)


def mark(m: object, steps: int) -> None:
    """Let every recurrent layer note its state after ``steps`` more steps (0: now); :func:`marked`
    returns it.
    """
    for r in recurrent_layers(m):
        r.mark(steps)


def marked(m: object) -> list[State | None]:
    """Return the states noted since :func:`mark`, for :func:`restore`."""
    return [r.marked() for r in recurrent_layers(m)]


def _tensors(r: Recur) -> list[Tensor]:
    if r.state is None:
        return list(r.empty_state() or ())
    tensors = (r.state,) if isinstance(r.state, Tensor) else r.state
    return [t.detach().clone() for t in tensors]


def _n_tensors(r: Recur) -> int:
    """Return how many tensors the state of a layer has; 0 if only a run could tell."""
    if r.state is None and r.empty_state() is None:
        return 0 if r.form is None else max(r.form, 1)
    return len(_tensors(r))


def _copy_like(t: Tensor, like: Tensor | None) -> Tensor:
    """Copy a tensor to the type and device of ``like``; integers, which custom modules may keep,
    stay integers.
    """
    if like is None:
        return t.clone()
    dtype = like.dtype if t.is_floating_point() else t.dtype
    return t.to(like.device, dtype, copy=True)


def _check_shapes(
    r: Recur,
    expected: tuple[Tensor, ...] | None,
    part: list[Tensor],
    start: int,
    m: object,
) -> None:
    """Compare the tensors of a layer, which begin at ``start`` in the list, with those that it
    expects (None: unknown).
    """
    axis = r.batch_dim
    pairs = zip(part, expected or part, strict=True)
    for i, (got, want) in enumerate(pairs, start):
        shape = list(want.shape)
        if got.ndim == want.ndim > axis:
            shape[axis] = got.shape[axis]  # any batch size
        if list(got.shape) != shape:
            sizes = [*map(str, want.shape)]
            sizes[axis] = "B"
            raise ShapeError(
                f"state[{i}], of {_name(r, m)!r}, has shape {tuple(got.shape)}; expected "
                f"({', '.join(sizes)})"
            )
        if want.is_floating_point() and not got.is_floating_point():
            raise DataError(
                f"state[{i}], of {_name(r, m)!r}, has dtype {got.dtype}; expected floating-point "
                "numbers"
            )
    n_series = {t.shape[axis] if t.ndim > axis else None for t in part}
    if None in n_series or len(n_series) > 1:
        shapes = [tuple(t.shape) for t in part]
        raise ShapeError(
            f"state: the tensors of {_name(r, m)!r} differ in their number of series: {shapes}"
        )


def _name(r: Recur, m: object) -> str:
    modules = module_of(m).named_modules()
    path = next(name for name, other in modules if other is r)
    return path or type(r).__name__  # a model that is the layer itself has no path


# -- gradients that reach beyond a window ----------------------------------------------------------


def carries(layer: Recur) -> bool:
    """Return whether a layer is diagonal and has parameters to train."""
    return layer.is_diagonal and _is_trained(layer)


def truncated_layers(m: object) -> list[str]:
    """Return the names and classes of the recurrent layers whose gradients stop at the start of a
    window in any case: those with parameters that are not diagonal.
    """
    names = []
    for name, layer in module_of(m).named_modules():
        if isinstance(layer, Recur) and not layer.is_diagonal and _is_trained(layer):
            inner = type(layer.module).__name__.lstrip("_")
            kind = type(layer).__name__
            names.append(f"{name or 'the model'} ({inner if kind == 'Recur' else kind})")
    return names


def _is_trained(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())


@contextmanager
def carrying_sensitivities(m: object) -> Iterator[None]:
    """Inside, diagonal layers carry the sensitivity of their state to their own parameters, and
    gradients that reach the state at the start of a window go on to the parameters.

    Notes
    -----
    A unit of a diagonal layer computes ``h[t] = a[t] * h[t - 1] + b[t]``, where ``a`` and ``b``
    depend on the input and on the unit's own parameters p alone. So ``dh/dp`` takes as many numbers
    as the unit has parameters, for each series. From window to window it becomes ``P * dh/dp`` plus
    what the window's steps add, where P is the product of the window's ``a``. Backwards, the
    gradient with respect to the state at a window's start times ``dh/dp`` is what the steps before
    the window add to the gradient of p.

    Sources: Williams & Zipser (1989), Neural Computation 1(2), 270-280, for the idea; Zucchet et
    al. (2023), Online learning of long-range dependencies, NeurIPS, for diagonal layers.
    """
    layers = [layer for layer in recurrent_layers(m) if carries(layer)]
    for layer in layers:
        layer.carries_sensitivity = True
    try:
        yield
    finally:
        for layer in layers:
            layer.carries_sensitivity = False
