"""The loss of a model over one window."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fluxutils_py.nn.losses import Loss, SeqLoss
from fluxutils_py.nn.model_windows import context_steps, needs_context, run_window
from fluxutils_py.training.gradients import as_scalar


def window_loss(
    loss: Loss,
    model: nn.Module,
    xs: Any,
    ys: Any,
    ws: Tensor | None,
    n_overlap: int = 0,
    factors: list[float] | None = None,
) -> Tensor:
    """Return the loss over a window without its first ``n_overlap`` steps, through which gradients still flow.

    A recurrent model runs through these steps before the loss is called. For a model that needs its context in the same
    call, they are put before each window that the loss passes to it, and cut off from its outputs. So a user's loss
    always gets the window without them. ``factors`` multiply the loss: one for each output of a :class:`SeqLoss`, one
    for any other loss.
    """
    if n_overlap:
        before, xs = _slice_steps(xs, slice(0, n_overlap)), _slice_steps(xs, slice(n_overlap, None))
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
    """Return the loss over a window, after checking that it is a scalar tensor."""
    return as_scalar(loss(model, xs, ys) if ws is None else loss(model, xs, ys, ws))


def _slice_steps(xs: Any, which: slice) -> Any:
    return xs[which] if isinstance(xs, Tensor) else tuple(x[which] for x in xs)
