"""Gradients that reach beyond a window: layers that carry how their state depends on their own
parameters.

A unit of a diagonal layer computes ``h[t] = a[t] * h[t - 1] + b[t]``, where ``a`` and ``b`` depend
on the input and on the unit's own parameters p alone. So ``dh/dp`` takes as many numbers as the
unit has parameters, for each series. From window to window it becomes ``P * dh/dp`` plus what the
window's steps add, where P is the product of the window's ``a``. Backwards, the gradient with
respect to the state at a window's start times ``dh/dp`` is what the steps before the window add to
the gradient of p.

Sources: Williams & Zipser (1989), Neural Computation 1(2), 270-280, for the idea; Zucchet et al.
(2023), Online learning of long-range dependencies, NeurIPS, for diagonal layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fluxutils_py.nn.parameters import module_of
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.states import recurrent_layers


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
    """
    layers = [layer for layer in recurrent_layers(m) if carries(layer)]
    for layer in layers:
        layer.carries_sensitivity = True
    try:
        yield
    finally:
        for layer in layers:
            layer.carries_sensitivity = False
