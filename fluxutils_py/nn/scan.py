"""Recurrences over a window in torch with hand-written gradients, which do as much as possible for
all steps at once.

Forwards, the products with the inputs are one for the whole window; a step is a product with the
state and a dozen small operations, which write into their place. Backwards, the factors between the
gradients of a step's output and of its gates are computed for the whole window; a step is then a
product and two to four operations, and the gradient of the weights is one product.
``benchmarks/bench_cells.py`` shows what this gains, and what was tried besides.

The activations of :mod:`fluxutils_py.nn.activations` are computed on scaled values, with the scales
taken into the weights. Of ``u = x / REACH`` in -1..1, the sigmoid is ``u - u|u|/2 + 1/2`` and its
slope ``1 - |u|``. Of ``w = max(knee - |v|, 0)``, both are ``offset + copysign(top - w², v)``, and
the slope is ``2 w``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fluxutils_py.nn.activations import BEND, KNEE, PLATEAU, REACH

HALF = 0.5**0.5
# added to what may be 0, for which ptanh is negative: copysign goes by the sign of the zero
BELOW_ZERO = -1e-30


def scan_lstm(
    x: Tensor, h: Tensor, c: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM with the approximate activations, over a window; gates in the order i, f, g, o.

    Parameters
    ----------
    x : Tensor of shape (S, B, F)
    h, c : Tensor of shape (B, H)
    weight_ih, weight_hh, bias : Tensor of shapes (4H, F), (4H, H), (4H,)

    Returns
    -------
    y, h, c : Tensor of shapes (S, B, H), (B, H), (B, H)
        Differentiable once.
    """

    def per_gate(sigmoid: float, tanh: float) -> Tensor:
        return bias.new_tensor([sigmoid, sigmoid, tanh, sigmoid]).repeat_interleave(h.shape[1])

    scale = per_gate(HALF / REACH, BEND**0.5)
    pre = F.linear(x, weight_ih * scale[:, None], bias * scale + BELOW_ZERO)
    weight = weight_hh * scale[:, None]
    constants = (per_gate(HALF, KNEE * BEND**0.5), per_gate(0.5, PLATEAU), per_gate(0.5, 0.0))
    return _LSTM.apply(pre, h, c, weight, *constants, _recording(pre, h, c, weight))


def scan_gru(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    *,
    exact: bool = False,
    reverse: bool = False,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A relative of the GRU, over a window: ``h' = (1 - z) n + z h`` with ``n = tanh(.. + r * (Whn
    h))``.

    Parameters
    ----------
    x : Tensor of shape (S, B, F)
    h : Tensor of shape (B, H)
    weight_ih : Tensor of shape (kH, F), or (H, F) if the gates do not see the input
    weight_hh, bias : Tensor of shapes (kH, H), (kH,)
        Of r, z and n (k = 3), or of the one gate that is both, and n (k = 2).
    exact : bool
        With the true sigmoid and tanh.
    reverse : bool
        ``h' = z n + (1 - z) h``.
    alpha : float
        Factor of z, where there are three.

    Returns
    -------
    y, h : Tensor of shapes (S, B, H), (B, H)
        Differentiable once.
    """
    n = h.shape[1]
    if not exact:
        k = weight_hh.shape[0] // n
        scale = bias.new_tensor([1 / REACH] * (k - 1) + [BEND**0.5]).repeat_interleave(n)
        weight_ih = weight_ih * scale[-weight_ih.shape[0] :, None]
        weight_hh, bias = weight_hh * scale[:, None], bias * scale + BELOW_ZERO
    pre = F.linear(x, weight_ih, bias[-weight_ih.shape[0] :])
    if weight_ih.shape[0] == n:
        gates, candidate = bias[:-n].expand(*x.shape[:2], -1), pre
    else:
        gates, candidate = pre.split([pre.shape[2] - n, n], 2)
    recording = _recording(gates, candidate, h, weight_hh)
    return _GRU.apply(gates, candidate, h, weight_hh, exact, reverse, alpha, recording)


class _LSTM(Function):
    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        h: Tensor,
        c: Tensor,
        weight: Tensor,
        knee: Tensor,
        top: Tensor,
        offset: Tensor,
        recording: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        S, B, H = len(pre), *h.shape
        n = S if recording else 1
        G, W = pre.new_empty(2, n, B, 4 * H)  # gates, half their slopes
        T, V = pre.new_empty(2, n, B, H)  # of c: ptanh, half its slope
        C = pre.new_empty(n + recording, B, H)
        Y = pre.new_empty(S, B, H)
        C[0] = c
        i, f, g, o = (_steps(a, S) for a in G.view(n, B, 4, H).unbind(2))
        raw, across = pre.new_empty(B, 4 * H), weight.t()
        c_knee, c_top, below = (pre.new_tensor(v) for v in (KNEE, PLATEAU, BELOW_ZERO))
        cs = C.unbind()
        ys = Y.unbind()
        for t, (p, gates, w, squashed, v) in enumerate(
            zip(pre.unbind(), *(_steps(a, S) for a in (G, W, T, V)), strict=True)
        ):
            torch.addmm(p, ys[t - 1] if t else h, across, out=raw)
            torch.sub(knee, torch.abs(raw, out=w), out=w).clamp_min_(0)
            torch.addcmul(top, w, w, value=-1, out=gates).copysign_(raw).add_(offset)
            now = cs[(t + 1) * recording]
            torch.addcmul(below, f[t], cs[t * recording], out=now).addcmul_(i[t], g[t])
            torch.sub(c_knee, torch.abs(now, out=v), out=v).clamp_min_(0)
            torch.addcmul(c_top, v, v, value=-BEND, out=squashed).copysign_(now)
            torch.mul(o[t], squashed, out=ys[t])
        if recording:
            ctx.save_for_backward(h, weight, G, W, T, V, C, Y)
        return Y, Y[-1].clone(), C[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_h: Tensor, d_c: Tensor) -> tuple[Tensor | None, ...]:
        _require_first_order()
        h, weight, G, W, T, V, C, Y = ctx.saved_tensors
        S, B, H = Y.shape
        i, f, g, o = G.view(S, B, 4, H).unbind(2)
        # from the gradients of c (thrice) and of h to those of the gates
        P = (2 * W).view(S, B, 4, H)
        for k, other in enumerate((g, C[:-1], i, T)):
            P[:, :, k] *= other
        through = (o * V).mul_(2 * BEND)  # from the gradient of h to that of c
        D = torch.empty_like(P)
        P_c, P_h, D_c, D_h = (
            a.unbind() for a in (P[:, :, :3], P[:, :, 3], D[:, :, :3], D[:, :, 3])
        )
        fs, throughs, ds, d_ys = (
            f.unbind(),
            through.unbind(),
            D.view(S, B, 4 * H).unbind(),
            d_y.unbind(),
        )
        dh, dc = d_y[-1] + d_h, d_c.clone()
        dc_each = dc[:, None]
        for t in range(S - 1, -1, -1):
            dc.addcmul_(dh, throughs[t])
            torch.mul(P_c[t], dc_each, out=D_c[t])
            torch.mul(P_h[t], dh, out=D_h[t])
            dc.mul_(fs[t])
            dh = torch.addmm(d_ys[t - 1], ds[t], weight, out=dh) if t else ds[t] @ weight
        D = D.view(S, B, 4 * H)
        return D, dh, dc, _weight_gradient(D, h, Y), None, None, None, None


class _GRU(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        candidate: Tensor,
        h: Tensor,
        weight: Tensor,
        exact: bool,
        reverse: bool,
        alpha: float,
        recording: bool,
    ) -> tuple[Tensor, Tensor]:
        S, B, H = candidate.shape
        n, n_gates = S if recording else 1, weight.shape[0] - H
        A = h.new_empty(n, B, n_gates + H)  # products with the state
        G, M = h.new_empty(2, n, B, n_gates)  # gates, 1 less their slopes
        N, W = h.new_empty(2, n, B, H)  # candidates, half their slopes
        Y = h.new_empty(S, B, H)
        a_gates, a_candidate = A.split([n_gates, H], 2)
        across, raw = weight.t(), torch.empty_like(h)
        knee, top = (h.new_tensor(v) for v in (KNEE * BEND**0.5, PLATEAU))
        ys = Y.unbind()
        recorded = (A, a_gates, a_candidate, G, G[..., :H], G[..., -H:], M, N, W)
        for t, (x_gates, x_new, a, a_g, a_n, g, r, z, m, new, w) in enumerate(
            zip(gates.unbind(), candidate.unbind(), *(_steps(r, S) for r in recorded), strict=True)
        ):
            before = ys[t - 1] if t else h
            torch.mm(before, across, out=a)
            torch.add(a_g, x_gates, out=g)
            if exact:
                g.sigmoid_()
                torch.addcmul(x_new, r, a_n, out=new).tanh_()
            else:
                torch.abs(g.clamp_(-1, 1), out=m)
                torch.addcmul(g, g, m, value=-0.5, out=g).add_(0.5)
                torch.addcmul(x_new, r, a_n, out=raw)
                torch.sub(knee, torch.abs(raw, out=w), out=w).clamp_min_(0)
                torch.addcmul(top, w, w, value=-1, out=new).copysign_(raw)
            weighted = z if alpha == 1 else alpha * z
            torch.lerp(before, new, weighted, out=ys[t]) if reverse else torch.lerp(
                new, before, weighted, out=ys[t]
            )
        if recording:
            ctx.save_for_backward(h, weight, A, G, M, N, W, Y)
            ctx.settings = exact, reverse, alpha
        return Y, Y[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_h: Tensor) -> tuple[Tensor | None, ...]:
        _require_first_order()
        h, weight, A, G, M, N, W, Y = ctx.saved_tensors
        exact, reverse, alpha = ctx.settings
        S, B, H = Y.shape
        n_gates, k = G.shape[2], weight.shape[0] // H
        slopes = (G * (1 - G) if exact else 1 - M).view(S, B, k - 1, H)
        r, z = G[..., :H], G[..., -H:] * alpha
        # share of the state, from its gradient to that of the one before
        kept = 1 - z if reverse else z
        # from the gradient of h to those of candidate and gates
        P_n = (1 - N * N if exact else 2 * W).mul_(1 - kept)
        P = torch.empty_like(A).view(S, B, k, H)
        torch.mul(P_n, r, out=P[:, :, -1])
        P_r = P_n * A[..., -H:]
        P_z = torch.cat([h[None], Y[:-1]]).sub_(N).mul_(-alpha if reverse else alpha)
        if k == 2:
            torch.mul(P_r + P_z, slopes[:, :, 0], out=P[:, :, 0])
        else:
            torch.mul(P_r, slopes[:, :, 0], out=P[:, :, 0])
            torch.mul(P_z, slopes[:, :, 1], out=P[:, :, 1])
        D, DH = torch.empty_like(P), torch.empty_like(Y)
        torch.add(d_y[-1], d_h, out=DH[-1])
        ps, d_each, ds, dhs = P.unbind(), D.unbind(), D.view(S, B, k * H).unbind(), DH.unbind()
        dh_each, shares, d_ys = DH[:, :, None].unbind(), kept.unbind(), d_y.unbind()
        for t in range(S - 1, -1, -1):
            torch.mul(ps[t], dh_each[t], out=d_each[t])
            earlier = (
                torch.addmm(d_ys[t - 1], ds[t], weight, out=dhs[t - 1]) if t else ds[t] @ weight
            )
            earlier.addcmul_(dhs[t], shares[t])
        D = D.view(S, B, k * H)
        return (
            D[..., :n_gates],
            DH * P_n,
            earlier,
            _weight_gradient(D, h, Y),
            None,
            None,
            None,
            None,
        )


def _require_first_order() -> None:
    """Refuse to differentiate the backward pass again: it would silently leave out most of the
    gradient.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "windows through these layers can be differentiated once, not with create_graph=True; "
            "steps can be differentiated again: use a cell, as Recur(FLSTMCell(n_in, n_out))"
        )


def _weight_gradient(D: Tensor, h: Tensor, Y: Tensor) -> Tensor:
    """Of the products of a weight with the states before each step: the first is ``h``."""
    first = D[0].t() @ h
    return first.addmm_(D[1:].flatten(0, 1).t(), Y[:-1].flatten(0, 1))


def _steps(a: Tensor, n: int) -> Sequence[Tensor]:
    """The n steps of a tensor; of a tensor of one step, that one again and again: nothing is
    recorded.
    """
    parts = a.unbind()
    return parts if len(parts) == n else parts * n


def _recording(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
