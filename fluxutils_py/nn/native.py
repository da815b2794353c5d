"""Recurrences over a window by the native kernels: the call, its gradient, and its formula in torch."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fluxutils_py.nn.kernels import VERSION, Library, n_threads

TYPES = {torch.float32: 0, torch.float64: 1}
# fluxutils_call of csrc/kernels.h: version, cell, type, isa, threads, S, B, F, H; alpha; pointers
_CALL = Struct("9qd21q")
_ERRORS = {1: "a bad argument", 2: "an instruction set that this processor lacks", 3: "too little memory"}

Formula = Callable[..., tuple[Tensor, ...]]


class Cell(NamedTuple):
    """A kind of layer that the library knows.

    ``formula(x, state, w_x, w_h, b_x, b_h, alpha)`` is one step of it in torch: the new state, whose first tensor is
    the output. It serves where a gradient is to be differentiated again.
    """

    number: int
    n_states: int
    formula: Formula


def _lstm(x: Tensor, state: Any, w_x: Tensor, w_h: Tensor, b_x: Any, b_h: Any, alpha: float) -> tuple[Tensor, ...]:
    return torch.lstm_cell(x, state, w_x, w_h, b_x, b_h)


def _one_state(step: Callable[..., Tensor]) -> Formula:
    return lambda x, state, w_x, w_h, b_x, b_h, alpha: (step(x, state[0], w_x, w_h, b_x, b_h),)


LSTM = Cell(0, 2, _lstm)
GRU = Cell(1, 1, _one_state(torch.gru_cell))
TANH_RNN = Cell(2, 1, _one_state(torch.rnn_tanh_cell))
RELU_RNN = Cell(3, 1, _one_state(torch.rnn_relu_cell))


class Call(NamedTuple):
    """What a recurrence is besides its tensors."""

    library: Library
    cell: Cell
    alpha: float = 0.0
    whole: bool = False  # whether the last h is an output of its own, beside y (of a window, or of a layer's step)


def recurrence(
    call: Call,
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    state_shape: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """A window through one layer.

    Parameters
    ----------
    call : Call
    x : Tensor of shape (S, B, F) or (B, F)
        This and all others float32 or float64, of the CPU, not empty.
    h, c : Tensor of B * H numbers or None
        None is zero.
    w_x, w_h, b_x, b_h : Tensor of shapes (k H, F), (k H, H), (k H,), (k H,); biases may be None
    state_shape : tuple of int
        Of the states that are returned.

    Returns
    -------
    tuple of Tensor
        The outputs (S, B, H) or (B, H); the last h if ``call.whole``; the last c if the cell has one.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, h, c, w_x, w_h, b_x, b_h)):
        return _Recurrence.apply(call, state_shape, x, h, c, w_x, w_h, b_x, b_h)
    return _forward(call, state_shape, x, h, c, w_x, w_h, b_x, b_h, keep=False)[0]


def _head(call: Call, x: Tensor, w_h: Tensor) -> tuple[int | float, ...]:
    """The fields of the structure before its pointers."""
    S = x.shape[0] if x.dim() == 3 else 1
    B, F = x.shape[-2:]
    return VERSION, call.cell.number, TYPES[x.dtype], call.library.isa, n_threads(), S, B, F, w_h.shape[1], call.alpha


def _forward(
    call: Call, state_shape: tuple[int, ...], *inputs: Tensor | None, keep: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The outputs, and what is kept for the backward pass."""
    tensors: Any = [None if t is None else t.contiguous() for t in inputs]
    x, w_h = tensors[0], tensors[4]
    head = _head(call, x, w_h)
    y = x.new_empty((*x.shape[:-1], w_h.shape[1]))
    h = x.new_empty(state_shape) if call.whole else None
    c = x.new_empty(state_shape) if call.cell.n_states == 2 else None
    pointers = [0 if t is None else t.data_ptr() for t in (*tensors, y, h, c)]
    saved = None
    if keep:
        n_bytes = call.library.saved_bytes(_CALL.pack(*head, *pointers, *(0,) * 11))
        saved = x.new_empty(n_bytes // x.element_size())
        pointers.append(saved.data_ptr())
    else:
        pointers.append(0)
    _check(call.library.forward(_CALL.pack(*head, *pointers, *(0,) * 10)))
    return tuple(t for t in (y, h, c) if t is not None), saved


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"a native kernel reports {_ERRORS.get(code, code)}; FLUXUTILS_KERNELS=0 does without")


class _Recurrence(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, state_shape: tuple[int, ...], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        outputs, saved = _forward(call, state_shape, *inputs, keep=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, outputs[0], saved)
        ctx.call, ctx.state_shape = call, state_shape
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        *inputs, y, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_differentiable(call, ctx.state_shape, inputs, needed, gradients)
        tensors: Any = [None if t is None else t.contiguous() for t in inputs]
        found = [torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=True)]
        dy = gradients[0]
        dh = gradients[1] if call.whole else None
        dc = gradients[-1] if call.cell.n_states == 2 else None
        given = [None if t is None else t.contiguous() for t in (dy, dh, dc)]
        pointers = [0 if t is None else t.data_ptr() for t in (*tensors, y, None, None, saved, *given, *found)]
        _check(call.library.backward(_CALL.pack(*_head(call, tensors[0], tensors[4]), *pointers)))
        return None, None, *found


def _differentiable(
    call: Call,
    state_shape: tuple[int, ...],
    inputs: list[Any],
    needed: tuple[bool, ...],
    gradients: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients once more, by the formula, as functions of all that they depend on."""
    x, h, c, w_x, w_h, b_x, b_h = inputs
    B, H = x.shape[-2], w_h.shape[1]
    states = (h, c)[: call.cell.n_states]
    state = tuple(x.new_zeros(B, H) if s is None else s.reshape(B, H) for s in states)
    ys = []
    for step in x.unbind() if x.dim() == 3 else (x,):
        state = call.cell.formula(step, state, w_x, w_h, b_x, b_h, call.alpha)
        ys.append(state[0])
    outputs = [torch.stack(ys) if x.dim() == 3 else ys[0]]
    outputs += [s.reshape(state_shape) for s in (state if call.whole else state[1:])]
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
    used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in used], wanted, [g for _, g in used], create_graph=True, materialize_grads=True
        )
    )
    return [next(found) if need else None for need in needed]
