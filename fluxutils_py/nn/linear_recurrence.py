"""Compute ``h[t] = a[t] * h[t - 1] + b[t]``, natively or in chunks of time with torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fluxutils_py.errors import ShapeError
from fluxutils_py.nn.kernels.library import VERSION, Library, library_in_use, n_threads
from fluxutils_py.nn.kernels.modules import PLAIN, is_transformed
from fluxutils_py.nn.kernels.recurrence import kernel_error, require_first_order

TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.complex64: 2,
    torch.complex128: 3,
}
# fluxutils_linear_call of csrc/kernels.h: version, type, isa, threads; S, B, H, a_step, a_series;
# pointers
_CALL = Struct("17q")
CHUNK = 32  # largest number of steps in a chunk


def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """Compute ``h[t] = a[t] * h[t - 1] + b[t]`` elementwise for all steps, starting from ``h[-1] =
    h0``.

    Parameters
    ----------
    a : Tensor of shape (S, B, H), or broadcastable to it
        Factors, real or complex, for instance (H,) for one factor per unit, (B, H), or (S, 1, H).
    b : Tensor of shape (S, B, H)
        Terms to add: S steps of B series, time-major.
    h0 : Tensor of shape (B, H) or None
        State before the first step; None is zero.

    Returns
    -------
    Tensor of shape (S, B, H)
        A new tensor. Pass its last step ``h[-1]`` as ``h0`` to continue with the next steps.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    TypeError
        If the tensors are neither floating-point nor complex.

    Notes
    -----
    Different types are promoted to a common one; real factors of complex states become complex.
    Time and memory are linear in S.

    Native kernels compute float32, float64, complex64 and complex128 on the CPU (see
    :func:`native_kernels`). Then h and its gradients with respect to b and h0 are equal to the last
    bit for any number of threads, other series, cuts of time into calls, and instruction set. The
    gradient with respect to a is equal for any number of threads and instruction set, unless a
    broadcasts over H, where torch sums it. Gradients of kernels cannot be differentiated again;
    those of torch's operations can.

    Examples
    --------
    >>> a, b = torch.tensor([0.5]), torch.ones(4, 1, 1)
    >>> linear_recurrence(a, b).flatten()
    tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    _check_shapes(a, b, h0)
    dtype = torch.promote_types(a.dtype, b.dtype)
    if h0 is not None:
        dtype = torch.promote_types(dtype, h0.dtype)
        h0 = h0.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"linear_recurrence takes floating or complex tensors, got {a.dtype} and {b.dtype}"
        )
    a = a.to(dtype)
    b = b.to(dtype)
    if not b.numel():
        return b.clone()
    missing_axes = (1,) * (3 - a.dim())
    a = a.reshape(missing_axes + a.shape)
    a = a.expand(-1, -1, b.shape[2])
    tensors = (a, b, h0)
    library = None if is_transformed() else library_in_use()
    if library is None or not all(map(_is_plain, tensors)):
        return _chunked(a, b, h0)
    contiguous = (None if t is None else _resolve_lazy(t) for t in tensors)
    result: Tensor = _LinearRecurrence.apply(library, *contiguous)
    return result


def _check_shapes(a: Tensor, b: Tensor, h0: Tensor | None) -> None:
    if b.dim() != 3:
        raise ShapeError(
            f"linear_recurrence takes b of shape (S, B, H), got a tensor of shape {tuple(b.shape)}"
        )
    S, B, H = b.shape
    sizes = zip(reversed(a.shape), (H, B, S), strict=False)  # a may have fewer axes
    if a.dim() > 3 or any(n not in (1, full) for n, full in sizes):
        raise ShapeError(
            f"a of shape {tuple(a.shape)} does not broadcast to b of shape {(S, B, H)}"
        )
    if h0 is not None and h0.shape != (B, H):
        raise ShapeError(f"h0 must have shape (B, H) = {(B, H)}, got shape {tuple(h0.shape)}")


def _is_plain(t: Tensor | None) -> bool:
    if t is None:
        return True
    return type(t) in PLAIN and t.dtype in TYPES and t.is_cpu and t.layout is torch.strided


def _resolve_lazy(t: Tensor) -> Tensor:
    """Return a contiguous tensor without lazy conjugation or negation."""
    return t.resolve_conj().resolve_neg().contiguous()


def _chunked(a: Tensor, b: Tensor, h0: Tensor | None) -> Tensor:
    """Compute the recurrence with torch, first in all chunks of time at once, then from chunk to
    chunk.

    ``a`` is (S or 1, B or 1, H). The first pass starts each chunk from zero. The second adds the
    state before the chunk times the product of the factors so far. Nothing is divided, and a
    product has at most ``CHUNK`` factors, so it overflows only if each is above about 10.
    """
    S = len(b)
    if h0 is None and S == 1:
        # a has a gradient then too: zero, which optimizers tell from none
        h0 = torch.zeros_like(b[0])
    size = min(CHUNK, math.isqrt(S))
    # float16 ends at 65504, where products would overflow
    if b.dtype is torch.float16:
        size = 1
    surplus = -S % size
    if surplus:
        if len(a) > 1 or S == 1:  # one factor for all steps needs no more
            a = append_zeros(a, surplus)
        b = append_zeros(b, surplus)
    if len(a) == 1:
        factors = a.expand(size, -1, -1)[None]  # (1, size, ...)
    else:
        factors = a.unflatten(0, (-1, size))  # (chunks, size, ...)
    # taken apart at once: the gradient of each index would be a tensor of the whole
    first, *others = factors.unbind(1)
    added = b.unflatten(0, (-1, size)).unbind(1)
    products = [first]
    states = [added[0]]
    for factor, term in zip(others, added[1:], strict=True):
        products.append(products[-1] * factor)
        states.append(torch.addcmul(term, factor, states[-1]))
    through = torch.stack(products, 1).unbind()  # (size, ...) of each chunk, or one
    from_zero = torch.stack(states, 1).unbind()  # (size, B, H)
    chunks = []
    before = h0
    for chunk, product in zip(from_zero, itertools.cycle(through), strict=False):
        if before is not None:
            chunk = torch.addcmul(chunk, product, before)
        chunks.append(chunk)
        before = chunk[-1]
    return torch.cat(chunks)[:S]


def append_zeros(t: Tensor, n_steps: int) -> Tensor:
    """Return a window with this many more steps, all zero."""
    zeros = t.new_zeros(n_steps, *t.shape[1:])
    return torch.cat([t, zeros])


class _LinearRecurrence(Function):
    """The recurrence by the native kernels; takes contiguous tensors, a (S or 1, B or 1, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        library: Library,
        a: Tensor,
        b: Tensor,
        h0: Tensor | None,
    ) -> Tensor:
        ctx.library = library
        h = torch.empty_like(b)
        _call(library, library.linear_forward, a, b, h0, h)
        ctx.save_for_backward(a, h0, h)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        require_first_order()
        a, h0, h = ctx.saved_tensors
        _, of_a, _, of_h0 = ctx.needs_input_grad
        da = torch.empty_like(a) if of_a else None
        db = torch.empty_like(h)
        dh0 = torch.empty_like(h[0]) if of_h0 else None
        dh = _resolve_lazy(dh)
        _call(ctx.library, ctx.library.linear_backward, a, None, h0, h, dh, da, db, dh0)
        return None, da, db, dh0


def _call(
    library: Library,
    function: Callable[[bytes], int],
    a: Tensor,
    b: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    dh: Tensor | None = None,
    da: Tensor | None = None,
    db: Tensor | None = None,
    dh0: Tensor | None = None,
) -> None:
    S, B, H = h.shape
    head = (VERSION, TYPES[h.dtype], library.isa, n_threads(), S, B, H)
    # strides of a: 0 where one factor is for all steps, or for all series
    between_steps = a.shape[1] * H if len(a) == S else 0
    between_series = H if a.shape[1] == B else 0
    addresses = [0 if t is None else t.data_ptr() for t in (a, b, h0, h, dh, da, db, dh0)]
    code = function(_CALL.pack(*head, between_steps, between_series, *addresses))
    if code:
        raise kernel_error(code)
