"""Run torch's recurrent modules with the native kernels, where results agree up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks

from fluxutils_py.nn.kernels.library import Library, library_in_use
from fluxutils_py.nn.kernels.recurrence import (
    GRU,
    LSTM,
    RELU_RNN,
    TANH_RNN,
    TYPES,
    Call,
    Cell,
    Recorded,
    State,
    Weights,
    recurrence,
)
from fluxutils_py.nn.precision import as_float32, kernel_gains
from fluxutils_py.tree import tree_map

PLAIN = (Tensor, nn.Parameter)
_CELL_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def run_module(
    module: nn.Module, x: Tensor, state: State | None, tape: list[Recorded] | None = None
) -> tuple[Tensor, State] | None:
    """Return outputs and state of ``module(x, state)`` from the native kernels; None if torch has
    to compute them.

    Parameters
    ----------
    module : nn.Module
        Any module. An ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` must be time-major and unidirectional.
    x : Tensor of shape (S, B, F) or (B, F)
        A window or a step; cells accept windows too.
    state : as the module takes it, or None
    tape : list, optional
        Gets what :func:`recurrence_backward` needs of each layer, in place of a graph. Only of
        torch's modules.

    Returns
    -------
    y : Tensor of shape (S, B, H) or (B, H)
    state : as the module returns it
    """
    kind = type(module)
    cell = _CELLS.get(kind)
    if cell is None:
        by_kernel = getattr(kind, "by_kernel", None)  # a cell of FluxUtils.jl
        return None if by_kernel is None or tape is not None else by_kernel(module, x, state)
    library = library_in_use()
    # a hook or a transform would not see what the kernels compute
    if library is None or is_intercepted(module):
        return None
    # straight from the dict: nn.Module takes a microsecond to look up a parameter
    settings = module.__dict__
    is_stack = kind in _STACKS
    layers = _weights_of_layers(settings, is_stack)
    if layers is None:
        return None
    bfloat16 = False
    if torch.is_autocast_enabled("cpu"):
        bfloat16 = kernel_gains(library, settings["hidden_size"], x.dtype)
        x = as_float32(x)
        state = tree_map(as_float32, state)
    if cell is TANH_RNN and settings["nonlinearity"] == "relu":
        cell = RELU_RNN
    n_out = settings["hidden_size"]
    return _compute(library, cell, 0.0, n_out, is_stack, layers, x, state, bfloat16, tape)


# Exact classes only: subclasses, such as parametrized layers, may compute something else.
_CELLS: dict[type, Cell] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: TANH_RNN,
    nn.LSTMCell: LSTM,
    nn.GRUCell: GRU,
    nn.RNNCell: TANH_RNN,
}
_STACKS = (nn.LSTM, nn.GRU, nn.RNN)  # of a layer or more


def _weights_of_layers(settings: dict[str, Any], is_stack: bool) -> list[Weights] | None:
    """Return the weights of each layer of a module with these attributes; None if the kernels do
    not compute such a module.
    """
    names = _CELL_WEIGHTS
    n_layers = 1
    if is_stack:
        names = settings["_flat_weights_names"]
        n_layers = settings["num_layers"]
        drops = n_layers > 1 and settings["dropout"] and settings["training"]
        if settings["proj_size"] or drops:
            return None
    parameters = settings["_parameters"]
    try:
        # by name, as torch's functional calls replace them; never from a list of the module
        weights = [parameters[name] for name in names]
    except KeyError:  # a weight that is computed, such as under torch's parametrizations
        return None
    if settings["bias"]:
        if n_layers == 1:  # most often: this runs at every step
            return [tuple(weights)]
        return [tuple(weights[k : k + 4]) for k in range(0, 4 * n_layers, 4)]
    return [(*weights[k : k + 2], None, None) for k in range(0, 2 * n_layers, 2)]


def _compute(
    library: Library,
    cell: Cell,
    form: float,
    n_out: int,
    is_stack: bool,
    layers: list[Weights],
    x: Tensor,
    state: State | None,
    bfloat16: bool,
    tape: list[Recorded] | None = None,
) -> tuple[Tensor, State] | None:
    """Check the tensors and compute; return None if the kernels do not accept them."""
    if not is_plain(x) or not x.numel():
        return None
    *_, n_series, n_in = x.shape
    for weights in layers:
        if not weights_fit(x.dtype, cell, n_in, n_out, weights):
            return None
        n_in = n_out  # of the next layer
    shape = (n_series, n_out)  # of one state
    state_shape = (len(layers), *shape) if is_stack else shape
    h, c = split_state(state)
    if not states_fit(x, h, c, state_shape):
        return None
    whole = is_stack or x.dim() == 3
    call = Call(library, cell, form, whole, bfloat16)
    if len(layers) > 1:
        return _run_stack(call, shape, x, h, c, layers, tape)
    y, *after = recurrence(call, state_shape, x, h, c, layers[0], tape)
    if not whole:  # the output is the state, too
        after.insert(0, y)
    return y, _joined(after)


def _run_stack(
    call: Call,
    state_shape: tuple[int, ...],
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    layers: list[Weights],
    tape: list[Recorded] | None,
) -> tuple[Tensor, State]:
    """Run stacked layers, each on the outputs of the one before."""
    afters = []
    for k, weights in enumerate(layers):
        h_k = None if h is None else h[k]
        c_k = None if c is None else c[k]
        x, *after = recurrence(call, state_shape, x, h_k, c_k, weights, tape)
        afters.append(after)
    return x, _joined([torch.stack(states) for states in zip(*afters, strict=True)])


def split_state(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the two states of an LSTM; other layers have only the first."""
    if state is None:
        return None, None
    if isinstance(state, Tensor):
        return state, None
    h, c = state
    return h, c


def _joined(states: Sequence[Tensor]) -> State:
    """Return states as a module returns them: the tensor itself if there is one."""
    return states[0] if len(states) == 1 else tuple(states)


def is_plain(t: Tensor) -> bool:
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


def states_fit(x: Tensor, h: Tensor | None, c: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether the states are None, or plain tensors of this shape and of the type of ``x``."""
    return (h is None or _state_fits(x, h, shape)) and (c is None or _state_fits(x, c, shape))


def _state_fits(x: Tensor, s: Tensor, shape: tuple[int, ...]) -> bool:
    return (
        s.shape == shape
        and s.dtype is x.dtype
        and type(s) in PLAIN
        and s.is_cpu
        and s.layout is torch.strided
        and not s.is_neg()
    )


def weights_fit(dtype: torch.dtype, cell: Cell, n_in: int, n_out: int, weights: Weights) -> bool:
    """Whether the weights are plain, contiguous, on the CPU, and have the type and shapes of a
    layer.
    """
    w_x, w_h, b_x, b_h = weights
    x_rows = cell.x_blocks * n_out
    h_rows = cell.h_blocks * n_out
    return (
        _weight_fits(w_x, dtype, (x_rows, n_in))
        and (_weight_fits(w_h, dtype, (h_rows, n_out)) if h_rows else w_h is None)
        and (b_x is None or _weight_fits(b_x, dtype, (x_rows,)))
        and (b_h is None or _weight_fits(b_h, dtype, (h_rows,)))
    )


def _weight_fits(w: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return (
        w is not None
        and w.shape == shape
        and type(w) in PLAIN
        and w.dtype is dtype
        and w.is_cpu
        and w.is_contiguous()
    )


def is_intercepted(module: nn.Module) -> bool:
    """Whether hooks, compilation or a torch transform intercept the module's computation."""
    content = module.__dict__
    return bool(
        content["_forward_hooks"]
        or content["_forward_pre_hooks"]
        or content["_backward_hooks"]
        or content["_backward_pre_hooks"]
        or "forward" in content  # set on the instance
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
        or _C._get_tracing_state() is not None
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or forward_ad._current_level >= 0
    )


def run_cell(
    cell: Any,
    kernel: Cell,
    x: Tensor,
    state: State | None,
    weights: Weights,
    form: float | Tensor = 0.0,
) -> tuple[Tensor, State] | None:
    """Return outputs and state of a cell, as :func:`run_module` does; None if torch has to
    compute them.

    Parameters
    ----------
    cell : nn.Module
        Its class, not a base class, defines ``kernel``: a subclass may compute something else.
    kernel : Cell
    x : Tensor of shape (S, B, F) or (B, F)
    state : as the cell takes it, or None
    weights : (w_x, w_h, b_x, b_h)
        As :func:`recurrence` takes them.
    form : float
        The number that the formula depends on, besides its tensors.
    """
    library = library_in_use()
    if library is None or "kernel" not in vars(type(cell)) or is_intercepted(cell):
        return None
    bfloat16 = False
    if torch.is_autocast_enabled("cpu"):
        x = as_float32(x)
        state = tree_map(as_float32, state)
        bfloat16 = kernel_gains(library, cell.n_out, x.dtype)
    # a tensor in place of the number may need a gradient, which the kernels do not compute
    if isinstance(form, Tensor):
        return None
    return _compute(library, kernel, form, cell.n_out, False, [weights], x, state, bfloat16)
