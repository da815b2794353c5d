"""Run recurrences over a window by the native kernels, with their gradients."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from fluxutils_py.nn.kernels.library import SWITCH, VERSION, Library, n_threads

# bytes of a block; malloc keeps smaller ones well, and returns larger ones
SMALLEST = 1 << 20
LARGEST = 32 << 20
MOST_SPARE = 8  # blocks that wait for use

# A deque, whose methods are atomic: a garbage collection may return a block while another is taken.
_spare: deque[mmap.mmap] = deque(maxlen=MOST_SPARE)
# Windows has no such flags
_private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def empty_saved(n: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor of n values; once nothing refers to it, its memory serves a
    later one.

    These are the largest tensors of a training step. From malloc they come and go between many
    smaller ones, and the gaps that they leave let a process grow to twice what it uses.
    """
    size = n * dtype.itemsize
    if not SMALLEST <= size <= LARGEST:
        return torch.empty(n, dtype=dtype)
    block = _take_spare(size) or mmap.mmap(-1, size, **_private)
    values = np.frombuffer(block, np.uint8, size)
    weakref.finalize(values, _spare.append, block).atexit = False
    return torch.from_numpy(values).view(dtype)


def _take_spare(size: int) -> mmap.mmap | None:
    for _ in range(len(_spare)):
        try:
            block = _spare.popleft()
        except IndexError:  # another thread was faster
            return None
        if size <= len(block) <= 2 * size:
            return block
        _spare.append(block)
    return None


TYPES = {torch.float32: 0, torch.float64: 1}
BFLOAT16 = 4  # tensors of float32, products of bfloat16
# fluxutils_call of csrc/kernels.h: version, cell, type, isa, threads, S, B, F, H; alpha; pointers
_CALL = Struct("9qd21q")
_FORWARD = Struct("9qd11q")  # without the pointers to gradients, which are zero
_POINTERS = (
    *("x", "h0", "c0", "w_x", "w_h", "b_x", "b_h", "y", "h", "c", "saved"),
    *("dy", "dh", "dc", "dx", "dh0", "dc0", "dw_x", "dw_h", "db_x", "db_h"),
)
_NO_GRADIENTS = bytes(_CALL.size - _FORWARD.size)
_ERRORS = {
    1: "a bad argument",
    2: "an instruction set that this processor lacks",
    3: "too little memory",
}

State = Tensor | tuple[Tensor, ...]
Weights = tuple[Any, ...]  # w_x, w_h, b_x and b_h of one layer: tensors, or None
# what the backward pass of a window needs: call, shape of a state, inputs, outputs, what was saved
Recorded = tuple["Call", tuple[int, ...], Sequence[Tensor | None], Tensor, Tensor | None]


class Cell(NamedTuple):
    """A type of layer that the library knows."""

    number: int
    n_states: int
    x_blocks: int  # of H rows, in w_x and b_x
    h_blocks: int  # in w_h and b_h


LSTM = Cell(0, 2, 4, 4)
GRU = Cell(1, 1, 3, 3)
TANH_RNN = Cell(2, 1, 1, 1)
RELU_RNN = Cell(3, 1, 1, 1)


class Call(NamedTuple):
    """Static arguments of a recurrence kernel."""

    library: Library
    cell: Cell
    alpha: float = 0.0
    # whether the last h is a separate output besides y (of a window, or of a layer's step)
    whole: bool = False
    # whether products are of bfloat16, where all tensors are float32 and the library can
    bfloat16: bool = False


def recurrence(
    call: Call,
    state_shape: tuple[int, ...],
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    tape: list[Recorded] | None = None,
) -> tuple[Tensor, ...]:
    """Compute a window through one layer.

    Parameters
    ----------
    call : Call
    state_shape : tuple of int
        Of the states that are returned; the last number is H.
    x : Tensor of shape (S, B, F) or (B, F)
        This and all others float32 or float64, of the CPU, not empty.
    h, c : Tensor of B * H numbers or None
        None is zero.
    weights : tuple of Tensor of shapes (k H, F), (k H, H), (k H,), (k H,)
        Contiguous. Biases may be None, and w_h is if the cell has no recurrent weights.
    tape : list, optional
        Gets what :func:`recurrence_backward` needs; there is then no graph.

    Returns
    -------
    tuple of Tensor
        The outputs (S, B, H) or (B, H); the last h if ``call.whole``; the last c if the cell has
        one.
    """
    if tape is not None:
        before = [None if t is None else t.contiguous() for t in (x, h, c)]
        outputs, kept = _forward(call, state_shape, True, *before, *weights)
        tape.append((call, state_shape, (*before, *weights), outputs[0], kept))
        return outputs
    # the weights first, which need gradients most often: this runs at every step
    if torch.is_grad_enabled() and (
        weights[0].requires_grad
        or x.requires_grad
        or any(t is not None and t.requires_grad for t in (h, c, *weights))
    ):
        return _apply(call, state_shape, x, h, c, *weights)
    return _forward(call, state_shape, False, x, h, c, *weights)[0]


def _head(call: Call, x: Tensor, H: int) -> tuple[int | float, ...]:
    """Return the fields of the structure before its pointers."""
    S, B, F = x.shape if x.dim() == 3 else (1, *x.shape)
    return (
        VERSION,
        call.cell.number,
        BFLOAT16 if call.bfloat16 else TYPES[x.dtype],
        call.library.isa,
        n_threads(),
        S,
        B,
        F,
        H,
        call.alpha,
    )


def _pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _forward(
    call: Call,
    state_shape: tuple[int, ...],
    keep: bool,
    x: Any,
    h: Tensor | None,
    c: Tensor | None,
    *weights: Tensor | None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the outputs, and the values saved for the backward pass."""
    # these names keep the contiguous copies alive until the kernel has read them
    x = x.contiguous()
    h = None if h is None else h.contiguous()
    c = None if c is None else c.contiguous()
    # sizes as separate arguments: torch takes longer to read them from a tuple
    *sizes, _ = x.shape
    y = x.new_empty(*sizes, state_shape[-1])
    outputs: tuple[Tensor, ...] = (y,)
    last_h = last_c = saved = 0
    cell = call.cell
    if call.whole:
        state = x.new_empty(*state_shape)
        last_h = state.data_ptr()
        outputs = y, state
    if cell.n_states == 2:
        state = x.new_empty(*state_shape)
        last_c = state.data_ptr()
        outputs = *outputs, state
    kept = None
    if keep:
        kept = empty_saved(y.numel() * call.library.kept_per_output(cell.number), x.dtype)
        saved = kept.data_ptr()
    head = _head(call, x, state_shape[-1])
    inputs = _pointers((x, h, c, *weights))
    code = call.library.forward(
        _FORWARD.pack(*head, *inputs, y.data_ptr(), last_h, last_c, saved) + _NO_GRADIENTS
    )
    if code:
        raise kernel_error(code)
    return outputs, kept


def last_state_slopes(
    library: Library, cell: int, sums: Tensor, y: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute how the last state of a diagonal cell depends on the sums of each step, unit by unit.

    Parameters
    ----------
    library : Library
    cell : int
        Its number.
    sums : Tensor of shape (S, B, blocks H)
        Of its gates and its candidate; contiguous, and replaced by the result.
    y : Tensor of shape (S, B, H)
        Its outputs, not empty.
    h0 : Tensor of shape (B, H) or None

    Returns
    -------
    tuple of Tensor
        Derivatives of each unit's last state with respect to its sums (S, B, blocks H), and to its
        first state (B, H).
    """
    y = y.contiguous()
    h0 = None if h0 is None else h0.contiguous()
    S, B, H = y.shape
    product = torch.empty_like(y[0])
    head = (VERSION, cell, TYPES[y.dtype], library.isa, n_threads(), S, B, 1, H, 0.0)
    places = {"h0": h0, "y": y, "saved": sums, "dh0": product}
    pointers = _pointers([places.get(name) for name in _POINTERS])
    code = library.slopes(_CALL.pack(*head, *pointers))
    if code:
        raise kernel_error(code)
    return sums, product


def kernel_error(code: int) -> RuntimeError:
    """Return the exception for a code that a kernel returned."""
    return RuntimeError(
        f"a native kernel reports {_ERRORS.get(code, code)}; {SWITCH}=0 runs torch's layers instead"
    )


def require_first_order() -> None:
    """Raise RuntimeError where the gradient of a kernel is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the native kernels differentiate once, not with create_graph=True: call the model "
            "inside native_kernels(False) of fluxutils_py.nn, whose gradients torch computes"
        )


class _Recurrence(Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, state_shape: tuple[int, ...], *inputs: Any
    ) -> tuple[Tensor, ...]:
        outputs, kept = _forward(call, state_shape, True, *inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, outputs[0], kept)
        ctx.call = call
        ctx.state_shape = state_shape
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        require_first_order()
        *inputs, y, kept = ctx.saved_tensors
        tensors = [None if t is None else t.contiguous() for t in inputs]
        grads = [
            torch.empty_like(t) if t is not None and need else None
            for t, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        recorded = ctx.call, ctx.state_shape, tensors, y, kept
        recurrence_backward(recorded, gradients, grads)
        return None, None, *grads


def recurrence_backward(
    recorded: Recorded, gradients: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> None:
    """Compute the gradients of a window through one layer.

    Parameters
    ----------
    recorded : tuple
        Of :func:`recurrence`, with contiguous inputs.
    gradients : sequence of Tensor or None
        Of the outputs; None where the loss does not depend on one.
    grads : sequence of Tensor or None
        Contiguous; get the gradients of ``x, h, c, w_x, w_h, b_x, b_h``, where they are wanted.
    """
    call, state_shape, inputs, y, kept = recorded
    x = inputs[0]
    assert x is not None
    dy, *of_states = [None if t is None else t.contiguous() for t in gradients]
    dh = of_states[0] if call.whole else None
    dc = of_states[-1] if call.cell.n_states == 2 else None
    pointers = _pointers((*inputs, y, None, None, kept, dy, dh, dc, *grads))
    code = call.library.backward(_CALL.pack(*_head(call, x, state_shape[-1]), *pointers))
    if code:
        raise kernel_error(code)


# Without a check for transforms of functorch at every step: modules.py has made sure that there
# are none.
_apply = super(Function, _Recurrence).apply
