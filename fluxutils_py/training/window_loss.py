"""The loss of a model over one window."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fluxutils_py.nn.losses import Loss, SeqLoss
from fluxutils_py.nn.model_windows import context_steps, needs_context, run_window
from fluxutils_py.parallel.gradients import as_scalar


def window_loss(
    loss: Loss,
    model: nn.Module,
    xs: Any,
    ys: Any,
    ws: Tensor | None,
    n_overlap: int = 0,
    factors: list[float] | None = None,
) -> Tensor:
    """The loss over a window, whose first ``n_overlap`` steps carry none, though gradients flow through them.

    A recurrent model walks through them before the loss is called. A model that needs its context in the same call has
    them put before whatever window the loss gives to it, and cut off from its outputs: a loss of the user's own is
    always given the window alone. ``factors`` multiply the loss: one for each output of a :class:`SeqLoss`, one for any
    other.
    """
    if n_overlap:
        before, xs = _steps(xs, slice(0, n_overlap)), _steps(xs, slice(n_overlap, None))
        steps = (before,) if isinstance(before, Tensor) else before
        if needs_context(model, steps):
            with context_steps(model, steps):
                return window_loss(loss, model, xs, ys, ws, factors=factors)
        run_window(model, before)
    if factors is None:
        return call_loss(loss, model, xs, ys, ws)
    if isinstance(loss, SeqLoss):
        return call_loss(partial(loss, factors=factors), model, xs, ys, ws)
    return call_loss(loss, model, xs, ys, ws) * factors[0]


def call_loss(loss: Loss, model: nn.Module, xs: Any, ys: Any, ws: Tensor | None) -> Tensor:
    """A loss over a window, checked to be a scalar tensor."""
    return as_scalar(loss(model, xs, ys) if ws is None else loss(model, xs, ys, ws))


def _steps(xs: Any, which: slice) -> Any:
    return xs[which] if isinstance(xs, Tensor) else tuple(x[which] for x in xs)
