"""Run torch's recurrent modules with the native kernels, where results agree up to rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks

from fluxutils_py.nn import kernels
from fluxutils_py.nn.native import GRU, LSTM, RELU_RNN, TANH_RNN, TYPES, Call, Cell, recurrence
from fluxutils_py.nn.precision import as_float32, lstm_gains
from fluxutils_py.tree import tree_map

# Exact classes only: subclasses, such as parametrized layers, may compute something else.
_LAYERS = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: TANH_RNN}
_CELLS = {nn.LSTMCell: LSTM, nn.GRUCell: GRU, nn.RNNCell: TANH_RNN}
_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
PLAIN = (Tensor, nn.Parameter)


def run(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    """Return outputs and state of ``module(x, state)`` from the native kernels; None if torch has
    to compute them.

    Parameters
    ----------
    module : nn.Module
        Any module. An ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` must be time-major and unidirectional.
    x : Tensor of shape (S, B, F) or (B, F)
        A window or a step; cells take windows too.
    state : as the module takes it, or None

    Returns
    -------
    y : Tensor of shape (S, B, H) or (B, H)
    state : as the module returns it
    """
    kind: Any = type(module)
    layered = kind in _LAYERS
    if not layered and kind not in _CELLS:
        by_kernel = getattr(kind, "by_kernel", None)  # a cell of FluxUtils.jl
        return None if by_kernel is None else by_kernel(module, x, state)
    library = kernels.library()
    if library is None or is_intercepted(module):
        return None
    content: Any = module.__dict__
    if layered:
        cell, n_layers, names = _LAYERS[kind], content["num_layers"], content["_flat_weights_names"]
        if content["proj_size"] or (content["dropout"] and content["training"] and n_layers > 1):
            return None
    else:
        cell, n_layers, names = _CELLS[kind], 1, _WEIGHTS
    # by name, as torch's functional calls replace them; never from a list that the module keeps
    parameters = content["_parameters"]
    if not all(name in parameters for name in names):
        return None
    weights = [parameters[name] for name in names]
    if cell is TANH_RNN and content["nonlinearity"] == "relu":
        cell = RELU_RNN
    H = content["hidden_size"]
    if torch.is_autocast_enabled("cpu"):
        if layered and cell is LSTM and lstm_gains(H):
            return None
        x, state = as_float32(x), tree_map(as_float32, state)
    h, c = (None, None) if state is None else (state, None) if isinstance(state, Tensor) else state
    if not is_plain(x) or x.shape[-1] != content["input_size"] or not x.numel():
        return None
    shape = (n_layers, x.shape[-2], H) if layered else (x.shape[-2], H)
    for s in (h, c):
        if s is not None and (not is_plain(s) or s.dtype is not x.dtype or s.shape != shape):
            return None
    if not content["bias"]:
        weights = [w for k in range(n_layers) for w in (*weights[2 * k : 2 * k + 2], None, None)]
    n_in = content["input_size"]
    for k in range(0, 4 * n_layers, 4):
        if not fit(x.dtype, cell, H if k else n_in, H, *weights[k : k + 4]):
            return None
    call = Call(library, cell, 0.0, layered)
    if n_layers > 1:
        return _stack(call, x, h, c, weights, shape[1:])
    y, *after = recurrence(call, shape, x, h, c, *weights)
    if not layered:
        after.insert(0, y[-1] if y.dim() == 3 else y)
    return y, after[0] if cell.n_states == 1 else tuple(after)


def _stack(
    call: Call, x: Tensor, h: Any, c: Any, weights: list[Any], shape: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Run stacked layers, with four weights per layer."""
    afters = []
    for k in range(len(weights) // 4):
        h_k, c_k = None if h is None else h[k], None if c is None else c[k]
        x, *after = recurrence(call, shape, x, h_k, c_k, *weights[4 * k : 4 * k + 4])
        afters.append(after)
    joined = tuple(torch.stack(s) for s in zip(*afters, strict=True))
    return x, joined[0] if call.cell.n_states == 1 else joined


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a plain strided tensor that the kernels accept: float32 or float64, on the
    CPU, not negated.
    """
    return (
        type(t) in PLAIN
        and t.dtype in TYPES
        and t.is_cpu
        and t.layout is torch.strided
        and not t.is_neg()
    )


def fit(
    dtype: torch.dtype, cell: Cell, n_in: int, H: int, w_x: Any, w_h: Any, b_x: Any, b_h: Any
) -> bool:
    """Whether the weights are plain, contiguous, on the CPU, and have the type and shapes of a
    layer.
    """
    n = cell.x_blocks * H, cell.h_blocks * H
    for w, shape in ((w_x, (n[0], n_in)), (w_h, (n[1], H)), (b_x, n[:1]), (b_h, n[1:])):
        if w is None:
            if len(shape) == 2 and shape[0]:
                return False
        elif not (
            w.shape == shape
            and type(w) in PLAIN
            and w.dtype is dtype
            and w.is_cpu
            and w.is_contiguous()
        ):
            return False
    return True


def is_intercepted(module: nn.Module) -> bool:
    """Whether hooks, compilation or a torch transform intercept the module's computation."""
    content = module.__dict__
    return bool(
        content["_forward_hooks"]
        or content["_forward_pre_hooks"]
        or content["_backward_hooks"]
        or content["_backward_pre_hooks"]
        or "forward" in content
        or content.get("_compiled_call_impl") is not None
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
        or is_transformed()
    )


def is_transformed() -> bool:
    """Whether torch compiles, traces, maps or replaces operations here."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
    )


def run_cell(
    cell: Any,
    kernel: Cell,
    x: Tensor,
    state: Any,
    weights: tuple[Any, Any, Any, Any],
    form: Any = 0.0,
) -> tuple[Tensor, Any] | None:
    """Return outputs and state of a cell, as :func:`native_layers.run` does; None if torch has to
    compute them.

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
