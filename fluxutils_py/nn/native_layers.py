"""Which calls of torch's recurrent modules the native kernels take over: all whose result is the same by rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks

from fluxutils_py.nn import kernels
from fluxutils_py.nn.native import GRU, LSTM, RELU_RNN, TANH_RNN, TYPES, Call, recurrence

# By exact class: what inherits from these, parametrized layers among them, may compute something else.
_LAYERS = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: TANH_RNN}
_CELLS = {nn.LSTMCell: LSTM, nn.GRUCell: GRU, nn.RNNCell: TANH_RNN}
_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_PLAIN = (Tensor, nn.Parameter)


def run(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    """Outputs and state of ``module(x, state)`` by the native kernels; None where it is for torch to compute.

    Parameters
    ----------
    module : nn.Module
        Any; time-major and of one direction if it is an ``nn.LSTM`` or its like.
    x : Tensor of shape (S, B, F) or (B, F)
        A window or a step, also for cells.
    state : as the module takes it, or None

    Returns
    -------
    y : Tensor of shape (S, B, H) or (B, H)
    state : as the module returns it
    """
    kind: Any = type(module)
    cell = _LAYERS.get(kind) or _CELLS.get(kind)
    if cell is None:
        return None
    library = kernels.library()
    if library is None or _watched(module):
        return None
    layered = kind in _LAYERS
    content: Any = module.__dict__
    if layered:
        if content["proj_size"] or (content["dropout"] and content["training"] and content["num_layers"] > 1):
            return None
        n_layers, weights = content["num_layers"], content["_flat_weights"]
    else:
        own = content["_parameters"]
        n_layers, weights = 1, [own.get(name) for name in _WEIGHTS]
    if cell is TANH_RNN and content["nonlinearity"] == "relu":
        cell = RELU_RNN
    states = () if state is None else (state,) if isinstance(state, Tensor) else tuple(state)
    if not _fit(x, weights, content) or not _states_fit(states, x, n_layers, content, cell.n_states, layered):
        return None
    call = Call(library, cell, 0.0, layered)
    h, c = (*states, None, None)[:2]
    if n_layers == 1:
        bx, bh = weights[2:4] if content["bias"] else (None, None)
        shape = (1, x.shape[-2], content["hidden_size"]) if layered else (x.shape[-2], content["hidden_size"])
        y, *after = recurrence(call, x, h, c, weights[0], weights[1], bx, bh, shape)
        return y, _state(y, after, layered, cell.n_states)
    return _stack(call, x, h, c, weights, n_layers, content)


def _stack(
    call: Call, x: Tensor, h: Tensor | None, c: Tensor | None, weights: list[Tensor], n_layers: int, content: Any
) -> tuple[Tensor, Any]:
    """Layers above one another."""
    n = len(weights) // n_layers
    shape = (x.shape[-2], content["hidden_size"])
    afters = []
    for k in range(n_layers):
        w_x, w_h, *biases = weights[k * n : (k + 1) * n]
        b_x, b_h = biases or (None, None)
        before = (None if h is None else h[k], None if c is None else c[k])
        x, *after = recurrence(call, x, *before, w_x, w_h, b_x, b_h, shape)
        afters.append(after)
    return x, _state(x, [torch.stack(s) for s in zip(*afters, strict=True)], True, call.cell.n_states)


def _state(y: Tensor, after: list[Tensor], layered: bool, n_states: int) -> Any:
    """The state as torch's module returns it, from the last states; the last h of a cell is its last output."""
    if not layered:
        after = [y[-1] if y.dim() == 3 else y, *after]
    return after[0] if n_states == 1 else tuple(after)


def _fit(x: Tensor, weights: list[Any], content: Any) -> bool:
    """Whether these are plain tensors of one type, as the kernels take them."""
    dtype = x.dtype
    if type(x) is not Tensor or dtype not in TYPES or not x.is_cpu or x.layout is not torch.strided or x.is_neg():
        return False
    if x.shape[-1] != content["input_size"] or not x.numel():
        return False
    if not content["bias"]:
        weights = [w for w in weights if w is not None]
    return all(type(w) in _PLAIN and w.dtype is dtype and w.is_cpu and w.is_contiguous() for w in weights)


def _states_fit(states: tuple[Any, ...], x: Tensor, n_layers: int, content: Any, n: int, layered: bool) -> bool:
    if not states:
        return True
    shape = (n_layers, x.shape[-2], content["hidden_size"])[not layered :]
    return len(states) == n and all(
        type(s) is Tensor and s.shape == shape and s.dtype is x.dtype and s.is_cpu and not s.is_neg() for s in states
    )


def _watched(module: nn.Module) -> bool:
    """Whether someone follows, changes or compiles what torch computes here."""
    content = module.__dict__
    return bool(
        torch.compiler.is_compiling()
        or content["_forward_hooks"]
        or content["_forward_pre_hooks"]
        or content["_backward_hooks"]
        or content["_backward_pre_hooks"]
        or "forward" in content
        or content.get("_compiled_call_impl") is not None
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
    )
