"""Run the package's own cells with the native kernels where they apply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxutils_py.nn import kernels
from fluxutils_py.nn.native import Call, Cell, recurrence
from fluxutils_py.nn.native_layers import fit, is_intercepted, is_plain
from fluxutils_py.nn.precision import as_float32
from fluxutils_py.tree import tree_map


def run_cell(
    cell: Any, kernel: Cell, x: Tensor, state: Any, weights: tuple[Any, Any, Any, Any], form: Any = 0.0
) -> tuple[Tensor, Any] | None:
    """Return outputs and state of a cell, as :func:`native_layers.run` does; None if torch has to compute them.

    Parameters
    ----------
    cell : nn.Module
        Its class, not a base class, defines ``kernel``: a subclass may compute something else.
    kernel : Cell
    x : Tensor of shape (S, B, F) or (B, F)
    state : as the cell takes it, or None
    weights : (w_x, w_h, b_x, b_h)
        As :func:`native.recurrence` takes them.
    form : float
        The number that the formula depends on, besides its tensors.
    """
    library = kernels.library()
    if library is None or "kernel" not in vars(type(cell)) or is_intercepted(cell):
        return None
    if torch.is_autocast_enabled("cpu"):
        x, state = as_float32(x), tree_map(as_float32, state)
    if not is_plain(x) or not x.numel() or isinstance(form, Tensor):
        return None
    state_shape = x.shape[-2], cell.n_out
    if not fit(x.dtype, kernel, x.shape[-1], cell.n_out, *weights):
        return None
    h, c = (None, None) if state is None else (state, None) if isinstance(state, Tensor) else state
    for s in (h, c):
        if s is not None and (not is_plain(s) or s.dtype is not x.dtype or s.shape != state_shape):
            return None
    window = x.dim() == 3
    y, *after = recurrence(Call(library, kernel, form, window), state_shape, x, h, c, *weights)
    if not window:
        after.insert(0, y)
    return y, after[0] if kernel.n_states == 1 else tuple(after)
